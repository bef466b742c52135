"""Dimensions of decoders, and what of them each rank has."""

from typing import NamedTuple

import torch


class Dimensions(NamedTuple):
    """Of a decoder with grouped-query attention, RMSNorm, rotary positions and SwiGLU, as Llama is.

    ``hidden``: elements of a token's row. ``heads``, ``kv_heads``: of queries, and of keys and values, each of
    ``head_dim`` elements. ``intermediate``: elements between the two products of the MLP. ``rope_base``: of the wave
    lengths of rotary positions.

    With ``experts`` each layer has a mixture of so many, of which a token goes to ``top_k``. ``expert_intermediate`` is
    theirs. The MLP is then an expert that all tokens share, or there is none: ``intermediate`` is 0.
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
    experts: int = 0
    top_k: int = 0
    expert_intermediate: int = 0

    def problem(self, num_ranks: int) -> str:
        """Why so many ranks cannot share it, in words; empty if they can."""
        for name in ("heads", "kv_heads", "intermediate", "vocabulary", "experts"):
            if getattr(self, name) % num_ranks:
                return f"{num_ranks} ranks cannot share its {name}, {getattr(self, name)}"
        return ""


# From the config.json of checkpoints: Llama 3.1; Qwen3-30B-A3B, but for its norms of queries and keys; DeepSeek-V3, but
# with grouped-query attention, and 4 of its 58 layers with experts: two GPUs have room for no more, and for what they
# are compared with. And two for the simulator, which 1, 2, 3 or 6 ranks can share.
MODELS = {
    "llama-8b": Dimensions(32, 4096, 32, 8, 128, 14336, 128256),
    "llama-70b": Dimensions(80, 8192, 64, 8, 128, 28672, 128256),
    "qwen3-moe": Dimensions(48, 2048, 32, 4, 128, 0, 151936, 1e6, 1e-6, experts=128, top_k=8, expert_intermediate=768),
    "deepseek-like": Dimensions(
        4, 7168, 128, 8, 128, 2048, 129280, 1e4, 1e-6, experts=256, top_k=8, expert_intermediate=2048
    ),
    "tiny": Dimensions(2, 32, 12, 6, 8, 48, 96),
    "tiny-moe": Dimensions(2, 32, 12, 6, 8, 48, 96, experts=12, top_k=3, expert_intermediate=16),
}


class Share(NamedTuple):
    """Whose part of a model it is: that of one rank. Without arguments, all of it."""

    rank: int = 0
    num_ranks: int = 1

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part along a dimension, which the number of ranks divides."""
        return tensor.chunk(self.num_ranks, dim)[self.rank]
