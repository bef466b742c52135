"""Versions of tensors, by which autograd knows whether values that it has kept were written over."""

import torch


def note_written(tensor: torch.Tensor) -> None:
    """As torch does where it writes itself: a graph that has kept the tensor for its gradients says so, and uses no
    other values. Tensors of inference mode have no version."""
    # What `torch.autograd.graph.increment_version` calls, in half the host's time.
    torch._C._increment_version((tensor,))
