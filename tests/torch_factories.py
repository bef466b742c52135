"""The factories that Iris' are compared with."""

import torch


class Torch:
    """torch, with the names that Iris adds to it."""

    def __getattr__(self, name):
        return getattr(torch, name)

    def allocate(self, count, dtype):
        return torch.empty(count, dtype=dtype)

    def uniform(self, size, low=0.0, high=1.0, dtype=torch.float):
        return torch.empty(size, dtype=dtype).uniform_(low, high)
