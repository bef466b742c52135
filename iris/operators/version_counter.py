"""Version counters of tensors, by which autograd knows whether values that it has saved were written over."""

import torch

from iris.compat.autograd import increment_version


def bump_version(tensor: torch.Tensor) -> None:
    """As torch does where it writes itself: a graph that has saved the tensor for its gradients raises, and uses no
    other values. Tensors of inference mode have no version counter."""
    increment_version((tensor,))
