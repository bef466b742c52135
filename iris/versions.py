"""Versions of tensors, by which autograd knows whether values that it has kept were written over."""

import torch

from iris.compat.autograd import increment_version


def note_written(tensor: torch.Tensor) -> None:
    """As torch does where it writes itself: a graph that has kept the tensor for its gradients says so, and uses no
    other values. Tensors of inference mode have no version."""
    increment_version((tensor,))
