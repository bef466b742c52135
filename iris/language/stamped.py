"""Words that carry their own arrival: one hop, with no flag and no fence behind the data.

A flag that follows data costs a fence, and a reader that sees it then goes for the data. Where each word says by itself
whether it has arrived, a message takes one trip over the link. Two forms:

* *Stamped*: 8 bytes, of which 4 are data and 4 an epoch. Any data, at twice the bytes. A reader waits until the epoch
  is the one it expects. Used in rounds over the same memory, the epoch tells this round's word from an older one's.
* *Marked*: an element of a floating-point type, its bits inverted, so that zero means "nothing yet". The pattern of all
  ones, a NaN, would look like that: it is sent as another NaN. No extra bytes, but the reader has to clear what it
  has read before the memory is used again, and NaNs do not keep their bits.

Why this is in order without a fence: each element is written by one access of at most 8 bytes, which is never seen in
part (PTX ISA, "Memory Consistency Model": scalar accesses; a vector is one access for each element, in no order), and
it depends on nothing but itself. The reader takes the value from the very load that showed the mark.

Marked elements of less than 4 bytes are polled by words of 4 and tested all at once. (The compiler stores them in words
too, where they are aligned; an aligned word is read at once, so an element is there or not.) Element by element the
test took so many instructions and predicates that the loads of several ranks' parts waited for each other: on 4 GPUs,
0.4 us of each sum.
"""

import triton
import triton.language as tl
from triton.experimental.gluon import language as gl

from iris.language.address import in_simulator
from iris.language.failures import WAIT_LIMIT_NS, expired, kind_code, nanoseconds
from iris.language.jit import gluon_version_of, jit
from iris.language.ordering import LANES, give_up, inspect, lanes, reread, signed_type
from iris.language.target import on_amd


@triton.constexpr_function
def word_type(element):
    """What marked elements are polled by."""
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
    from iris.simulator import marked

    marked.check_cleared(ptrs.handle, mask.handle.data)


# Beyond every address.
HIGHEST = tl.constexpr((1 << 63) - 1)


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
def write_through(ptrs, values, mask):
    # On AMD a plain store may stay in the writer's L2 until the kernel ends.
    if on_amd():
        tl.store(ptrs, values, mask=mask, cache_modifier=".wt")
    else:
        tl.store(ptrs, values, mask=mask)


@jit
def given_up(ptrs, without, since, wanted, source, record):
    """Whether a wait for data has exceeded its limit; notes it if so, and which of ``ptrs`` are ``without``.

    ``source``: the rank that the data come from, or for each of ``ptrs`` its own; -1 if it cannot be said.
    """
    over = expired(record, since)
    if over:
        late = tl.cast(0, tl.int64)
        for rank in range(0, LANES):
            missing = tl.max(tl.cast(without & (rank == source), tl.int32), axis=0)
            late = late | (tl.cast(missing, tl.int64) << rank)
        note_absent(ptrs, without, wanted, late, record)
    return over


@jit
def note_absent(ptrs, without, wanted, late, record):
    """Record the first of ``ptrs`` that is ``without``, and a bit for each rank that is ``late`` with its data."""
    first = tl.min(tl.where(without, tl.cast(ptrs, tl.int64), HIGHEST), axis=0)
    give_up(record, first, wanted, late, kind_code("data"), 0, 0)


@jit
def send_stamped(ptrs, words, stamp, mask):
    """Store int32 ``words``, each with the int32 ``stamp``, to the int64 ``ptrs``, a peer's."""
    low = tl.cast(words, tl.int64) & 0xFFFFFFFF
    write_through(ptrs, low | (tl.cast(stamp, tl.int64) << 32), mask)


@jit
def receive_stamped(ptrs, stamp, mask, source, record):
    """Wait until all of the caller's own ``ptrs`` carry ``stamp``; returns the int32 words.

    There must be a word for each thread. Of two threads that poll the same one, either may say for both that it is
    there, and one of them stores what it has read: maybe the older.
    """
    if WAIT_LIMIT_NS > 0:
        since = nanoseconds(record)
    words = reread(ptrs, mask)
    missing = tl.max(tl.cast(mask & (tl.cast(words >> 32, tl.int32) != stamp), tl.int32), axis=0)
    while missing > 0:
        words = reread(ptrs, mask)
        missing = tl.max(tl.cast(mask & (tl.cast(words >> 32, tl.int32) != stamp), tl.int32), axis=0)
        if WAIT_LIMIT_NS > 0:
            if missing > 0:
                without = mask & (tl.cast(words >> 32, tl.int32) != stamp)
                if given_up(ptrs, without, since, stamp, source, record):
                    missing = missing * 0
    return tl.cast(words, tl.int32)


@jit
def send_marked(ptrs, values, mask):
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
    """A pointer to marked elements as one to words of them."""
    return tl.cast(begin, tl.pointer_type(word_type(element)), bitcast=True)


@jit
def awaited(k, count, element: tl.constexpr):
    """The highest bit of each element in the words of numbers ``k`` that is among the first ``count`` elements."""
    E: tl.constexpr = elements_per_word(element)
    bits = tl.cast(k * 0, word_type(element))
    for place in tl.static_range(E):
        bits = bits | tl.where(k * E + place < count, highest_bit(element, place), 0)
    return bits


@jit
def absent(words, bits, element: tl.constexpr):
    """Those of the `awaited` ``bits`` whose elements are zero. Above such a one there may be one too many.

    S. E. Anderson, "Bit Twiddling Hacks": determine if a word has a zero byte.
    """
    return (words - lowest_bits(element)) & (words ^ -1) & bits


@jit
def unmark(words, element: tl.constexpr, like):
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
def receive_marked(ptrs, mask, bits, element: tl.constexpr, like, source, record):
    """Wait until all that is `awaited` in the words at the caller's own ``ptrs`` has arrived; returns the elements.

    ``mask``: the words to read; ``like``: see `unmark`. As for `receive_stamped`, there must be a word for each
    thread.
    """
    if WAIT_LIMIT_NS > 0:
        since = nanoseconds(record)
    words = reread(ptrs, mask)
    missing = tl.max(tl.cast(absent(words, bits, element) != 0, tl.int32), axis=0)
    while missing > 0:
        words = reread(ptrs, mask)
        missing = tl.max(tl.cast(absent(words, bits, element) != 0, tl.int32), axis=0)
        if WAIT_LIMIT_NS > 0:
            if missing > 0:
                if given_up(ptrs, absent(words, bits, element) != 0, since, 0, source, record):
                    missing = missing * 0
    return unmark(words, element, like)


@jit
def clear_marked(ptrs, mask):
    """Make the caller's own ``ptrs`` ready for what comes next; the kernel's end makes it visible to peers."""
    tl.store(ptrs, tl.zeros_like(tl.cast(ptrs, tl.int64)).to(ptrs.dtype.element_ty), mask=mask)


@jit
def send_place(ptrs, place, count, mask):
    """Store ``place``, int64 below 2^48, stamped with the low 16 bits of ``count``, to the int64 ``ptrs``.

    By an exchange, since `receive_places` polls by read-modify-writes, which are atomic among their own kind (PTX
    ISA, "Memory Consistency Model": atomicity).
    """
    word = place | (tl.cast(count & 0xFFFF, tl.int64) << 48)
    tl.atomic_xchg(ptrs, word, mask=mask, sem="relaxed", scope="sys")


@jit
def unplaced(words, counts, mask):
    stamps = tl.cast(words >> 48, tl.int32) & 0xFFFF
    return mask & (stamps != (counts & 0xFFFF))


@jit
def receive_places(ptrs, counts, mask, record):
    """Wait until all of the caller's own ``ptrs``, one a rank, carry their ``counts``; returns the places."""
    if WAIT_LIMIT_NS > 0:
        since = nanoseconds(record)
    words = inspect(ptrs, mask)
    missing = tl.max(tl.cast(unplaced(words, counts, mask), tl.int32), axis=0)
    while missing > 0:
        words = inspect(ptrs, mask)
        missing = tl.max(tl.cast(unplaced(words, counts, mask), tl.int32), axis=0)
        if WAIT_LIMIT_NS > 0:
            if missing > 0:
                if given_up(ptrs, unplaced(words, counts, mask), since, 0, lanes(), record):
                    missing = missing * 0
    return words & 0xFFFFFFFFFFFF
