"""Which ranks a kernel's loads, stores and atomics reach: those of its host, whose heaps have an address here."""

import triton
import triton.language as tl

from iris.language.address import in_simulator
from iris.language.jit import jit


@triton.constexpr_function
def check_local(ranks, mask, base):
    """In the simulator: raise if one of these ranks, under ``mask``, is on another host than the heap at ``base``."""
    # Imported here: Triton follows the global names of a constexpr_function, and does not know these.
    from iris.heap import reach

    stored = [value.handle.data if isinstance(value, tl.tensor) else value for value in (ranks, mask, base)]
    reach.check_local(*stored)


@triton.constexpr_function
def check_rank(ranks, base):
    """In the simulator: raise unless the heap at ``base`` has these ranks."""
    from iris.heap import reach

    stored = [value.handle.data if isinstance(value, tl.tensor) else value for value in (ranks, base)]
    reach.check_rank(*stored)


@jit
def is_local(self, rank):
    """Whether ``rank`` is on the caller's host: then loads, stores and atomics reach its heap.

    A scalar or a block, as ``rank`` is. It costs one 8-byte load from a table in the caller's memory.
    """
    if in_simulator():
        check_rank(rank, self.base)
    # The table of heap bases has 0 for ranks that have no address here.
    return tl.load(self.table + rank) != 0
