"""Dimensions of decoders, and what of them each rank has."""

from typing import NamedTuple

import torch


class Dimensions(NamedTuple):
    """Of a decoder with grouped-query attention, RMSNorm, rotary positions and SwiGLU, as Llama is.

    ``hidden``: elements of a token's row. ``heads``, ``kv_heads``: of queries, and of keys and values, each of
    ``head_dim`` elements. ``intermediate``: elements between the two products of the MLP. ``rope_base``: of the wave
    lengths of rotary positions.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    rope_base: float = 500_000.0
    eps: float = 1e-5

    def problem(self, num_ranks: int) -> str:
        """Why so many ranks cannot share it, in words; empty if they can."""
        for name in ("heads", "kv_heads", "intermediate", "vocabulary"):
            if getattr(self, name) % num_ranks:
                return f"{num_ranks} ranks cannot share its {name}, {getattr(self, name)}"
        return ""


# Llama 3.1's, from the config.json of its checkpoints; and one for the simulator, which 1, 2, 3 or 6 ranks can share.
MODELS = {
    "llama-8b": Dimensions(32, 4096, 32, 8, 128, 14336, 128256),
    "llama-70b": Dimensions(80, 8192, 64, 8, 128, 28672, 128256),
    "tiny": Dimensions(2, 32, 12, 6, 8, 48, 96),
}


class Share(NamedTuple):
    """Whose part of a model it is: that of one rank. Without arguments, all of it."""

    rank: int = 0
    num_ranks: int = 1

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part along a dimension, which the number of ranks divides."""
        return tensor.chunk(self.num_ranks, dim)[self.rank]
