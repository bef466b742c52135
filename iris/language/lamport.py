"""Lamport-style messages: each element is its own flag. One hop, no extra bytes, and no fence between data and flag.

The receiver's memory is cleared to zero before. Zero is the *sentinel*: it says that the element has not come yet. An
element of a floating-point type is sent with its bits inverted, so 0.0 is not taken for the sentinel. Only a NaN of all
ones would become zero: it is sent as another NaN, so NaNs do not keep their bits. The reader of an element clears it
before the memory is used again.

Why this needs no fence: each word is written by one access of 4 or 8 bytes, naturally aligned, and is never seen in
part (what the manual says and what the hardware does: `iris.language.ll`). It depends on no other memory: the reader
takes the value from the very load that showed that it is there. What has to be ordered is the clearing before the next
use, and each user argues that: see `iris.ccl.one_shot`.

Elements of less than 4 bytes travel in words of 4, and these in vectors of 16, of which each word is an access of its
own (PTX ISA, "Vector Data-types"). A word is tested for all of its elements at once. Element by element the test took
so many instructions and predicates that the loads of several ranks' parts waited for each other: on 4 GPUs, 0.4 us of
each sum.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from iris.language.address import in_simulator
from iris.language.barrier import LANES
from iris.language.failures import POLLS_WITHOUT_CLOCK, WAIT_LIMIT_NS, exceeded, untimed
from iris.language.flat import flat, flat_vectors
from iris.language.jit import gluon_version_of, jit
from iris.language.lamport_poll import poll_once, polls_by_warp, wait_by_warp
from iris.language.ll import record_missing, write_through
from iris.language.ordering import signed_type


@triton.constexpr_function
def word_type(element):
    """The integer type of the words in which elements are stored and polled."""
    return tl.int64 if element.primitive_bitwidth == 64 else tl.int32


@triton.constexpr_function
def elements_per_word(element):
    return max(1, 32 // element.primitive_bitwidth)


@triton.constexpr_function
def words_per_vector(element):
    """How many words a vector of 16 bytes has."""
    return 2 if element.primitive_bitwidth == 64 else 4


@triton.constexpr_function
def lowest_bits(element):
    """A word in which the lowest bit of each element is set."""
    return sum(1 << (place * element.primitive_bitwidth) for place in range(elements_per_word(element)))


@triton.constexpr_function
def highest_bit(element, place):
    """A word in which the highest bit of the element at this place is set, as a signed number."""
    bit = (place + 1) * element.primitive_bitwidth - 1
    return -(1 << bit) if bit in (31, 63) else 1 << bit


@triton.constexpr_function
def check_cleared(ptrs, mask):
    """In the simulator: raise unless what is at ``ptrs``, under ``mask``, is cleared."""
    # Imported here: Triton follows the global names of a constexpr_function, and does not know these.
    from iris.simulator import lamport

    lamport.check_cleared(ptrs.handle, mask.handle.data)


@triton.constexpr_function
def bits_below(element):
    """A word in which all bits of each element but the highest are set, as a signed number."""
    bits = element.primitive_bitwidth
    return sum(((1 << (bits - 1)) - 1) << (place * bits) for place in range(elements_per_word(element)))


@triton.jit
def laid_out(values, like):
    """``values``, in Gluon with the layout of ``like``. Every element is in its thread already."""
    return values


@gluon_version_of(laid_out)
def _gluon_laid_out(values, like):
    return gl.convert_layout(values, like.type.layout, assert_trivial=True)


@jit
def lamport_send(begin, values, count):
    """Send the first ``count`` of the floating-point ``values`` to ``begin``, a peer's, in whole vectors of 16 bytes.

    ``begin`` points to integers of the elements' width, and is divisible by 16. The rest of the last vector is
    overwritten, too. The memory is zero before, as new memory is: the reader clears it after each use.
    """
    element: tl.constexpr = values.dtype
    k = flat(values.shape[0] // elements_per_word(element), word_type(element))
    ptrs, sent = words_at(begin, element) + k, in_vectors(k, count, element)
    if in_simulator():
        check_cleared(ptrs, sent)
    write_through(ptrs, laid_out(encode(values), k), sent)


@jit
def words_at(begin, element: tl.constexpr):
    """The pointer ``begin`` as one to the words in which elements are stored."""
    return tl.cast(begin, tl.pointer_type(word_type(element)), bitcast=True)


@jit
def sentinel_mask(k, count, element: tl.constexpr):
    """For each word, by its number ``k``: the highest bit of each element that is among the first ``count``."""
    E: tl.constexpr = elements_per_word(element)
    bits = tl.cast(k * 0, word_type(element))
    for place in tl.static_range(E):
        bits = bits | tl.where(k * E + place < count, highest_bit(element, place), 0)
    return bits


@jit
def missing_elements(words, bits, element: tl.constexpr):
    """The bits of ``bits`` (`sentinel_mask`) whose elements are zero: 0 if all have come.

    If there is such an element, one above it in its word may be reported, too (S. E. Anderson, "Bit Twiddling Hacks":
    determine if a word has a zero byte).
    """
    return (words - lowest_bits(element)) & (words ^ -1) & bits


@jit
def in_vectors(k, count, element: tl.constexpr):
    """Which words, by their numbers ``k``, are in a vector of 16 bytes with one of the first ``count`` elements."""
    VECTOR: tl.constexpr = words_per_vector(element)
    return k // VECTOR * VECTOR * elements_per_word(element) < count


@jit
def encode(values):
    """The words in which ``values`` are sent: with inverted bits, and no element zero."""
    element: tl.constexpr = values.dtype
    E: tl.constexpr = elements_per_word(element)
    word: tl.constexpr = word_type(element)
    bits = tl.cast(values, signed_type(element), bitcast=True)
    if E == 1:
        words = bits
    elif E == 2:
        low, high = bits.reshape([bits.shape[0] // 2, 2]).split()
        words = (tl.cast(low, word) & 0xFFFF) | (tl.cast(high, word) << 16)
    else:
        even, odd = bits.reshape([bits.shape[0] // 4, 2, 2]).split()
        first, third = even.split()
        second, fourth = odd.split()
        low = (tl.cast(first, word) & 0xFF) | ((tl.cast(second, word) & 0xFF) << 8)
        words = low | ((tl.cast(third, word) & 0xFF) << 16) | (tl.cast(fourth, word) << 24)
    words = words ^ -1
    # Set the highest bit of each element that is zero. The sum carries into that bit if any bit below it is set, and no
    # carry leaves an element. So either the sum or the word has that bit set, unless the element is zero.
    below: tl.constexpr = bits_below(element)
    return words | ((((words & below) + below) | words | below) ^ -1)


@jit
def decode(words, like, element: tl.constexpr):
    """The elements that arrived in ``words``, in the order of memory, with the layout of ``like``."""
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
def wanted_bits(k, own, count, STRIDE: tl.constexpr, element: tl.constexpr):
    """`sentinel_mask` without the elements of rank ``own``, where each rank has ``STRIDE`` words in a row."""
    return tl.where(k // STRIDE == own, 0, sentinel_mask(k, count, element))


@jit
def lamport_recv(
    begin,
    own,
    count,
    WORDS: tl.constexpr,
    PARTS: tl.constexpr,
    STRIDE: tl.constexpr,
    element: tl.constexpr,
    record,
    source=None,
):
    """Wait until the first ``count`` elements of each of ``PARTS`` parts have arrived; returns the words of each.

    Part s comes from rank s, and begins at word ``s * STRIDE`` of the caller's own ``begin``. ``WORDS`` words of each
    part are returned, a power of two. With ``PARTS`` 1 that one part holds data from every rank, ``STRIDE`` words from
    each in a row. Nothing is awaited from rank ``own``, and what is returned for it is undefined. ``source``: the rank
    that all parts come from, if they come from one; ``own`` is -1 then.

    Where the whole block polls together (`polls_by_warp` is false), there must be a word for each thread. If two
    threads polled the same word, the test might see the value of one, and the result be the other's, which is older.
    """
    begins = words_at(begin, element)
    LOWEST: tl.constexpr = lowest_bits(element)
    within, own = (own, -1) if PARTS == 1 else (-1, own)
    if polls_by_warp(element):
        v = flat_vectors(WORDS // 4)
        wanted = ()
        for word in tl.static_range(4):
            wanted += (wanted_bits(4 * v + word, within, count, STRIDE=STRIDE, element=element),)
    if polls_by_warp(element) and WAIT_LIMIT_NS == 0:
        return wait_by_warp(begins, own, wanted, PARTS=PARTS, STRIDE=STRIDE, LOWEST=LOWEST, POLLS=0)
    else:
        k = flat(WORDS, word_type(element))
        bits, mask = wanted_bits(k, within, count, STRIDE=STRIDE, element=element), in_vectors(k, count, element)
        if WAIT_LIMIT_NS > 0:
            since = untimed(1 if polls_by_warp(element) else POLLS_WITHOUT_CLOCK)
        words = (bits * 0,) * PARTS
        missing = 1
        while missing > 0:
            if polls_by_warp(element):
                found = wait_by_warp(
                    begins, own, wanted, PARTS=PARTS, STRIDE=STRIDE, LOWEST=LOWEST, POLLS=POLLS_WITHOUT_CLOCK
                )
                words = ()
                for part in tl.static_range(PARTS):
                    words += (laid_out(found[part], k),)
            else:
                words = poll_once(begins, own, k, mask, PARTS=PARTS, STRIDE=STRIDE)
            late = bits * 0
            for part in tl.static_range(PARTS):
                late = late | tl.where(own == part, 0, missing_elements(words[part], bits, element))
            missing = tl.max(tl.cast(late != 0, tl.int32), axis=0)
            if WAIT_LIMIT_NS > 0:
                if missing > 0:
                    over, since = exceeded(record, since)
                    if over:
                        ranks = tl.cast(0, tl.int64)
                        for rank in range(0, LANES):
                            none = k < 0
                            for part in tl.static_range(PARTS):
                                empty = missing_elements(words[part], bits, element) != 0
                                if source is None:
                                    none = none | ((own != part) & (part + k // STRIDE == rank) & empty)
                                else:
                                    sender = source + 0 * k
                                    none = none | ((own != part) & (sender == rank) & empty)
                            ranks = ranks | (tl.cast(tl.max(tl.cast(none, tl.int32), axis=0), tl.int64) << rank)
                        record_missing(begins + k, late != 0, wanted=0, late=ranks, record=record)
                        missing = missing * 0
        return words


@jit
def lamport_clear(ptrs, mask):
    """Clear the caller's own ``ptrs`` for the next use. The caller orders that use after the end of this kernel."""
    tl.store(ptrs, tl.zeros_like(tl.cast(ptrs, tl.int64)).to(ptrs.dtype.element_ty), mask=mask)
