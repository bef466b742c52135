"""Rows as messages: what dispatch and combine for few tokens send, wait for and clear.

Memory is given in words of 4 bytes, int32. A row begins at a multiple of 16 bytes and has as many up to the next.
"""

import triton
import triton.language as tl

from iris.language.address import bytes_of, translate
from iris.language.flat import flat
from iris.language.lamport import (
    decode,
    elements_per_word,
    lamport_clear,
    lamport_recv,
    lamport_send,
)

VECTOR = 16  # bytes
# Vectors of a row that a thread waits for together, at most: 4 registers each.
MOST_PARTS = 16


@triton.constexpr_function
def pitch_of(number, element):
    """Words from one row of so many elements to the next."""
    return -(-number * bytes_of(element) // VECTOR) * (VECTOR // 4)


@triton.constexpr_function
def parts_of(number, element, threads):
    """How many equal parts a row of so many elements has, for the loads of a thread to be under way together.

    Each part is whole vectors of 16 bytes, for each thread one at most. If there is no such number: 1.
    """
    nbytes = number * bytes_of(element)
    vectors = nbytes // VECTOR
    possible = range(max(1, -(-vectors // threads)), MOST_PARTS + 1)
    return next((parts for parts in possible if nbytes % (VECTOR * parts) == 0), 1)


@triton.constexpr_function
def room_of(number, element, threads):
    """Elements of the block of a part of so many: a power of two, and a word for each thread."""
    return max(1 << (number - 1).bit_length(), threads * elements_per_word(element), VECTOR // bytes_of(element))


@triton.jit
def peers(ctx, W: tl.constexpr):
    """Where the memory of each rank begins, this one's first, then its right neighbour's."""
    bases = ()
    for distance in tl.static_range(W):
        bases += (tl.load(ctx.table + (ctx.cur_rank + distance) % W),)
    return bases


@triton.jit
def send(ctx, begin, values, count, peer, base):
    """Send the first ``count`` of the values to ``begin`` in the memory of rank ``peer``, which is at ``base``."""
    event = ctx.tracing.begin_move("store", begin + tl.arange(0, 1), peer, count > 0)
    lamport_send(translate(begin, ctx.base, base), values, count)
    ctx.tracing.record_event_end(event)


@triton.jit
def receive(
    ctx, begin, count, source, PARTS: tl.constexpr, NUMBER: tl.constexpr, ROOM: tl.constexpr, element: tl.constexpr
):
    """Wait for ``PARTS`` parts of ``NUMBER`` elements, of which rank ``source`` sends the first ``count`` of each.

    They are one after the other from ``begin`` on; a tuple of blocks of ``ROOM`` elements. With a ``count`` of 0
    nothing is awaited, and they are anything.
    """
    E: tl.constexpr = elements_per_word(element)
    event = ctx.tracing.begin_wait_for_data(begin, ctx.cur_rank)
    found = lamport_recv(
        begin,
        -1,
        count,
        WORDS=ROOM // E,
        PARTS=PARTS,
        STRIDE=ROOM // E if PARTS == 1 else NUMBER // E,
        element=element,
        record=ctx._record(),
        source=source,
    )
    ctx.tracing.record_event_end(event)
    parts = ()
    for part in tl.static_range(PARTS):
        parts += (decode(found[part], None, element),)
    return parts


@triton.jit
def clear(begin, WORDS: tl.constexpr, ROOM: tl.constexpr):
    """Clear so many words from ``begin`` on, whole vectors; when all of the block's threads have read them."""
    for first in tl.static_range(0, WORDS, ROOM):
        k = first + flat(ROOM, tl.int32)
        lamport_clear(begin + k, k < WORDS)
