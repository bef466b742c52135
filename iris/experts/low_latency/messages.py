"""Blocks of rows as messages: what dispatch and combine for few tokens send, wait for and clear.

Memory is given in words of 4 bytes, int32. A row begins at a multiple of 16 bytes and has as many up to the next.
"""

import triton
import triton.language as tl

from iris.language.address import bytes_of, translate
from iris.language.fences import cta_sync
from iris.language.flat import flat
from iris.language.lamport import (
    decode,
    elements_per_word,
    in_vectors,
    lamport_clear,
    lamport_recv,
    lamport_send,
)


@triton.constexpr_function
def pitch_of(number, element):
    """Words from one row of so many elements to the next."""
    return -(-number * bytes_of(element) // 16) * 4


@triton.jit
def base_of(ctx, rank):
    """Where a rank's memory begins: hidden behind other loads, if it is read before what is to be sent."""
    return tl.load(ctx.table + rank)


@triton.jit
def send(ctx, begin, values, count, peer, base):
    """Send the first ``count`` of the values to ``begin`` in the memory of rank ``peer``, which is at ``base``."""
    event = ctx.tracing.begin_move("store", begin + tl.arange(0, 1), peer, count > 0)
    lamport_send(translate(begin, ctx.base, base), values, count)
    ctx.tracing.record_event_end(event)


@triton.jit
def receive(ctx, begin, count, source, NUMBER: tl.constexpr, element: tl.constexpr):
    """Wait for the first ``count`` of ``NUMBER`` elements, which rank ``source`` sends to ``begin`` here."""
    WORDS: tl.constexpr = NUMBER // elements_per_word(element)
    event = ctx.tracing.begin_wait_for_data(begin, ctx.cur_rank)
    (words,) = lamport_recv(
        begin,
        -1,
        count,
        WORDS=WORDS,
        PARTS=1,
        STRIDE=WORDS,
        element=element,
        record=ctx._record(),
        first=source,
    )
    ctx.tracing.record_event_end(event)
    return decode(words, None, element)


@triton.jit
def clear(begin, count, NUMBER: tl.constexpr, element: tl.constexpr):
    """Clear what `receive` has read, when all of the block's threads have."""
    k = flat(NUMBER // elements_per_word(element), tl.int32)
    cta_sync()
    lamport_clear(begin + k, in_vectors(k, count, element))
