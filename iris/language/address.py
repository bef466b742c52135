"""Translates a pointer into one rank's heap to the same object in another rank's heap.

An object lies at the same offset in every heap, so the two addresses differ by the distance between the two heaps. The
addition is written so that the compiler sees what it needs for 16-byte accesses, without a hint from the caller:

* The distance is added as ``(distance >> 4) * (16 // itemsize)`` elements. The multiplication by a constant is what
  Triton's axis analysis reads the divisibility from; hints attached to values get lost when an operation is folded.
  It is exact because the heap bases of all ranks are congruent modulo 16, which `iris.heap.mapping` guarantees.
* The addition happens on a pointer to *another* type of the same width. The bitcast keeps alignment and contiguity,
  and it hides the addition from AMD's buffer-operation pass, which would truncate a 64-bit distance to 32 bits for a
  tensor of less than 2 GiB (its ``tt.pointer_range`` speaks of the local tensor, and the peer's lies elsewhere).
"""

import triton
import triton.language as tl

from iris import simulator
from iris.language.jit import jit

_OTHER_TYPE_OF_WIDTH = {
    "floating": {8: tl.int8, 16: tl.int16, 32: tl.int32, 64: tl.int64},
    "integer": {8: tl.float8e5, 16: tl.float16, 32: tl.float32, 64: tl.float64},
}


@triton.constexpr_function
def bytes_of(element):
    return max(8, element.primitive_bitwidth) // 8


@triton.constexpr_function
def elements_per_16_bytes(element):
    return 16 // bytes_of(element)


@triton.constexpr_function
def other_type_of_width(element):
    """A pointee type as wide as ``element`` and different from it, so that the bitcast is not folded away."""
    kind = "floating" if element.is_floating() else "integer"
    return _OTHER_TYPE_OF_WIDTH[kind][max(8, element.primitive_bitwidth)]


@triton.constexpr_function
def element_of(ptr):
    """The type that a pointer, or a block of pointers, points to. Raises if it is something else."""
    # Imported here: Triton follows the global names of a constexpr_function, and does not know these.
    from iris.errors import InvalidArgumentError

    kind = ptr.dtype.scalar if isinstance(ptr, tl.tensor) else None
    if kind is None or not kind.is_ptr():
        given = repr(ptr) if kind is None else f"numbers of {kind}"
        raise InvalidArgumentError(
            f"An operation on a peer takes a pointer into the heap of the caller, or a block of these, and got {given}."
        )
    return kind.element_ty


@triton.constexpr_function
def check_rank_type(rank):
    """Raise unless these are whole numbers, as ranks are."""
    from iris.errors import InvalidArgumentError

    kind = rank.dtype.scalar if isinstance(rank, tl.tensor) else None
    whole = isinstance(rank, int) if kind is None else kind.is_int()
    if not whole:
        given = repr(rank) if kind is None else f"{kind}"
        raise InvalidArgumentError(f"A rank is a whole number, or a block of these, and got {given}.")


@triton.constexpr_function
def in_simulator():
    return simulator.ACTIVE


@triton.constexpr_function
def stored(*values):
    """In the simulator: the numbers of a kernel's values, an array for each tensor, and constants as they are."""
    return [value.handle.data if isinstance(value, tl.tensor) else value for value in values]


@triton.constexpr_function
def check_reach(ptr, mask, base, rank):
    """In the simulator: raise unless ``ptr``, under ``mask``, is in the heap at ``base`` and that heap has ``rank``."""
    # Imported here: Triton follows the global names of a constexpr_function, and does not know these.
    from iris.heap import reach

    element_of(ptr)
    check_rank_type(rank)
    reach.check_reach(*stored(ptr, mask, base, rank))


@triton.constexpr_function
def check_caller(rank, first):
    """In the simulator: raise unless a table of heap bases that begins with ``first`` has the caller's ``rank``."""
    from iris.heap import reach

    check_rank_type(rank)
    reach.check_caller(*stored(rank, first))


@triton.constexpr_function
def check_copy(from_rank, to_rank, caller):
    """In the simulator: raise unless a copy's caller is one of its two ranks."""
    from iris.heap import reach

    for rank in (from_rank, to_rank):
        check_rank_type(rank)
    reach.check_copy(*stored(from_rank, to_rank, caller))


@jit
def translate(ptr, from_base, to_base, hint: tl.constexpr = None):
    """The address in the heap at ``to_base`` of what ``ptr`` points to in the heap at ``from_base``.

    ``ptr`` may be a scalar or a block of pointers; the bases are int64, scalars or blocks that broadcast with it.
    ``hint``: what the address is a multiple of, in bytes, as for ``multiple_of``.
    """
    element: tl.constexpr = element_of(ptr)
    other: tl.constexpr = other_type_of_width(element)
    per_16_bytes: tl.constexpr = elements_per_16_bytes(element)
    moved = tl.cast(ptr, tl.pointer_type(other), bitcast=True) + ((to_base - from_base) >> 4) * per_16_bytes
    if hint is not None:
        # Said of the sum itself: of what a function returns, Triton 3.6 forgets it.
        moved = tl.multiple_of(moved, hint)
    return tl.cast(moved, tl.pointer_type(element), bitcast=True)
