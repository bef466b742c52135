"""The context tensor: what the host's context passes to kernels, and how kernels read it."""

from collections.abc import Sequence

import torch
import triton.language as tl

from iris.cuda_graphs.kept import keep
from iris.language.jit import jit

# The words of the context tensor: rank, num_ranks, the heap base of each rank, the address of the device record, and
# the heap's size in bytes. Device functions call the part from BASES on the *table*.
RANK = tl.constexpr(0)
NUM_RANKS = tl.constexpr(1)
BASES = tl.constexpr(2)


def context_tensor(rank: int, bases: Sequence[int], size: int, record: int, device: torch.device) -> torch.Tensor:
    """What a kernel initialises its context from: ``[num_ranks + 4]`` on ``device``, of type `table_type`; opaque."""
    words = [rank, len(bases), *bases, record, size]
    return keep(lambda: torch.tensor(words, device=device).view(table_type(bases, device)), device)


def heap_bases_tensor(bases: Sequence[int], size: int, record: int, device: torch.device) -> torch.Tensor:
    """What functional operations take: ``[num_ranks]`` of type `table_type`. Two words stand before it in memory: the
    address of the device record, and the heap's size.
    """
    words = [record, size, *bases]
    return keep(lambda: torch.tensor(words, device=device).view(table_type(bases, device)), device)[2:]


def table_type(bases: Sequence[int], device: torch.device) -> torch.dtype:
    """The type of a table of heap bases: int64; on a GPU uint64 if some ranks have no address here.

    A kernel is compiled for the types of its arguments. So accesses are guarded (`iris.language.locality`) in kernels
    that get a uint64 table, and in no others. The simulator checks every access anyway.
    """
    return torch.uint64 if device.type == "cuda" and 0 in bases else torch.int64


@jit
def word_after_bases(table, word):
    # The number of ranks is read from the tensor: the kernel may have initialised its context with another one.
    return tl.load(table + tl.load(table - BASES + NUM_RANKS) + word)


@jit
def record_of(table):
    return tl.cast(word_after_bases(table, 0), tl.pointer_type(tl.int64))


@jit
def rank_of(context_tensor):
    return tl.cast(tl.load(context_tensor + RANK), tl.int32)


@jit
def num_ranks_of(context_tensor):
    return tl.cast(tl.load(context_tensor + NUM_RANKS), tl.int32)
