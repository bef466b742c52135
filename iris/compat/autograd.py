"""Raises the version counter of tensors, by which autograd finds out that a value it has kept was overwritten.

`torch._C._increment_version` (torch 2.9 to 2.13) takes half the host's time of the public function that calls it. Where
it is gone, `increment_version` is that public function.
"""

from collections.abc import Callable, Sequence

import torch

from iris.compat.parts import optional

increment_version: Callable[[Sequence[torch.Tensor]], None] = (
    optional("torch._C:_increment_version") or torch.autograd.graph.increment_version
)
"""Counts one write to each of these tensors."""
