"""Lamport-style messages: each element is its own flag. One hop, no flag and no fence behind the data, no extra bytes.

An element of a floating-point type is sent with its bits inverted, and memory is cleared to zero before: zero is the
*sentinel*, which says that nothing is here yet. The pattern of all ones, a NaN, would be zero on the way: it is sent as
another NaN, so NaNs do not keep their bits. Who has read an element clears it before the memory is used again.

Why this needs no fence: each element is written by one access of at most 8 bytes, naturally aligned, and is never seen
in part (what the manual says and what the hardware does: `iris.language.ll`). It depends on no other memory: the reader
takes the value from the very load that showed that it is there. What has to be ordered is the clearing before the next
use, and each user argues that: see `iris.ccl.lamport_all_reduce`.

Elements of less than 4 bytes are polled by words of 4 and tested all at once. The compiler may store them in words, or
at a tensor's end one by one. The model of PTX says nothing about loads and stores of different sizes; an aligned word
is read at once from the cache, so that each of its elements is there or not. Element by element the test took so many
instructions and predicates that the loads of several ranks' parts waited for each other: on 4 GPUs, 0.4 us of each sum.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from iris.language.address import in_simulator
from iris.language.failures import WAIT_LIMIT_NS, untimed
from iris.language.jit import gluon_version_of, jit
from iris.language.ll import timed_out, write_through
from iris.language.ordering import load_relaxed, signed_type


@triton.constexpr_function
def word_type(element):
    """What elements are polled by."""
    return tl.int64 if element.primitive_bitwidth == 64 else tl.int32


@triton.constexpr_function
def elements_per_word(element):
    return max(1, 32 // element.primitive_bitwidth)


@triton.constexpr_function
def lowest_bits(element):
    """Of a word's elements, as one number."""
    return sum(1 << (place * element.primitive_bitwidth) for place in range(elements_per_word(element)))


@triton.constexpr_function
def highest_bit(element, place):
    """Of the element at this place of a word, as a signed number."""
    bit = (place + 1) * element.primitive_bitwidth - 1
    return -(1 << bit) if bit in (31, 63) else 1 << bit


@triton.constexpr_function
def check_cleared(ptrs, mask):
    """In the simulator: raise unless what is at ``ptrs``, under ``mask``, is cleared."""
    # Imported here: Triton follows the global names of a constexpr_function, and does not know these.
    from iris.simulator import lamport

    lamport.check_cleared(ptrs.handle, mask.handle.data)


@triton.constexpr_function
def lowest(element):
    return -(1 << (element.primitive_bitwidth - 1))


@triton.jit
def laid_out(values, like):
    return values


@gluon_version_of(laid_out)
def _gluon_laid_out(values, like):
    return gl.convert_layout(values, like.type.layout, assert_trivial=True)


@jit
def lamport_send(ptrs, values, mask):
    """Store the floating-point ``values`` to ``ptrs``, a peer's, which point to integers of their width.

    They are cleared: by whoever reads them, or as new memory is.
    """
    if in_simulator():
        check_cleared(ptrs, mask)
    bits: tl.constexpr = signed_type(values.dtype)
    wire = tl.cast(values, bits, bitcast=True) ^ -1
    write_through(ptrs, tl.where(wire == 0, tl.cast(lowest(bits), bits), wire), mask)


@jit
def words_at(begin, element: tl.constexpr):
    """A pointer to elements as one to words of them."""
    return tl.cast(begin, tl.pointer_type(word_type(element)), bitcast=True)


@jit
def sentinel_mask(k, count, element: tl.constexpr):
    """The highest bit of each element in the words of numbers ``k`` that is among the first ``count`` elements."""
    E: tl.constexpr = elements_per_word(element)
    bits = tl.cast(k * 0, word_type(element))
    for place in tl.static_range(E):
        bits = bits | tl.where(k * E + place < count, highest_bit(element, place), 0)
    return bits


@jit
def missing_elements(words, bits, element: tl.constexpr):
    """Those of the `sentinel_mask` ``bits`` whose elements are zero. Above such a one there may be one too many.

    S. E. Anderson, "Bit Twiddling Hacks": determine if a word has a zero byte.
    """
    return (words - lowest_bits(element)) & (words ^ -1) & bits


@jit
def decode(words, element: tl.constexpr, like):
    """What arrived in ``words``, as elements in the order in which they lie in memory, laid out as ``like``."""
    E: tl.constexpr = elements_per_word(element)
    bits: tl.constexpr = signed_type(element)
    words = words ^ -1
    if E == 1:
        values = words
    elif E == 2:
        values = tl.join(tl.cast(words, bits), tl.cast(words >> 16, bits)).reshape([2 * words.shape[0]])
    else:
        even = tl.join(tl.cast(words, bits), tl.cast(words >> 16, bits))
        odd = tl.join(tl.cast(words >> 8, bits), tl.cast(words >> 24, bits))
        values = tl.join(even, odd).reshape([4 * words.shape[0]])
    return laid_out(tl.cast(values, element, bitcast=True), like)


@jit
def lamport_recv(ptrs, mask, bits, element: tl.constexpr, like, source, record):
    """Wait until all elements of `sentinel_mask` have arrived at the caller's own ``ptrs``; returns the elements.

    ``mask``: the words to read; ``like``: see `decode`. As for `ll_recv`, there must be a word for each
    thread.
    """
    if WAIT_LIMIT_NS > 0:
        since = untimed()
    words = load_relaxed(ptrs, mask)
    missing = tl.max(tl.cast(missing_elements(words, bits, element) != 0, tl.int32), axis=0)
    while missing > 0:
        words = load_relaxed(ptrs, mask)
        missing = tl.max(tl.cast(missing_elements(words, bits, element) != 0, tl.int32), axis=0)
        if WAIT_LIMIT_NS > 0:
            if missing > 0:
                late = missing_elements(words, bits, element) != 0
                over, since = timed_out(ptrs, late, since, wanted=0, source=source, record=record)
                if over:
                    missing = missing * 0
    return decode(words, element, like)


@jit
def lamport_clear(ptrs, mask):
    """Clear the caller's own ``ptrs`` for the next use, which must be ordered after the end of this kernel."""
    tl.store(ptrs, tl.zeros_like(tl.cast(ptrs, tl.int64)).to(ptrs.dtype.element_ty), mask=mask)
