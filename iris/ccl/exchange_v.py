"""all_to_all_v: pieces of different lengths between every two ranks, as tokens go to experts.

Lengths and places are read from device memory, so whoever computes them there needs no host. Over the link: each piece
once, in one step, through the queues of `iris.ccl.queue`. A pair takes as many rounds as its piece has blocks, the two
directions of a pair are independent. Each program first sends each other rank the number of bytes that follow. That
rank compares them with what it receives before it takes a block; where they differ nothing is received, and the other
pairs go on (`iris.ccl.sizes`).
"""

import triton
import triton.language as tl

from iris.ccl.call import Algorithm, Call
from iris.ccl.communicator import Launch
from iris.ccl.kernel_launch import INTEGERS, kernel_launch
from iris.ccl.pieces import word_bytes
from iris.ccl.queue import (
    AHEAD,
    COUNTS,
    MESSAGES_FROM,
    MESSAGES_TO,
    SIZES,
    WORDS,
    among,
    lane_value,
    load_counters,
    next_slot,
    pointer_at,
    publish_counters,
    queue_address,
    slot_of,
    store_counters,
    store_to_peer,
    wait_blocks,
    wait_credits,
)
from iris.ccl.sizes import count_messages, record_unequal, recv_message_words, send_message_word
from iris.errors import InvalidConfigError
from iris.language.address import bytes_of
from iris.language.barrier import lanes
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.flat import flat


@triton.jit
def rounds_of(counts, BLOCK: tl.constexpr):
    """How many rounds this program takes for pieces of so many words."""
    blocks = (counts + BLOCK - 1) // BLOCK
    return (blocks - tl.program_id(0) + tl.num_programs(0) - 1) // tl.num_programs(0)


@triton.jit
def exchange_v(
    queues,
    input,
    output,
    send_counts,
    send_displs,
    recv_counts,
    recv_displs,
    factor,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    QUEUES: tl.constexpr,
):
    """Elements for, and from, each rank, and where they begin: int64, one a rank. ``factor``: words of an element.

    ``QUEUES``: that there are.
    """
    gdc_wait()
    ctx = DeviceContext.initialize(queues.context, num_ranks=W)
    rank = ctx.cur_rank
    p = tl.program_id(0)
    slots = queues.slots
    row, own_words = queues.counts + p * COUNTS, queues.words + p * WORDS
    others = among(0, W, rank)
    sent, got = load_counters(row, others)
    begins = queue_address(ctx, slots, W, BLOCK, to=others)
    everyone = lanes() < W
    send_words = tl.load(send_counts + lanes(), mask=everyone, other=0) * factor
    recv_words = tl.load(recv_counts + lanes(), mask=everyone, other=0) * factor
    send_rounds = rounds_of(send_words, BLOCK)
    recv_rounds = tl.where(others, rounds_of(recv_words, BLOCK), 0)
    word_bytes: tl.constexpr = bytes_of(input.dtype.element_ty)
    messages_to = tl.load(row + MESSAGES_TO + lanes(), mask=others, other=0) + 1
    messages_from = tl.load(row + MESSAGES_FROM + lanes(), mask=others, other=0) + 1
    send_message_word(ctx, own_words, send_words * word_bytes, messages_to, peers=others, ROW=SIZES)
    own_words_sent = tl.minimum(lane_value(send_words, rank), lane_value(recv_words, rank))
    i = flat(BLOCK, input.dtype.element_ty)
    last = tl.maximum(tl.maximum(tl.max(send_rounds, axis=0), tl.max(recv_rounds, axis=0) + AHEAD), AHEAD + 1)
    for step in range(0, last):
        sends = others & (step < send_rounds)
        wait_credits(ctx, own_words, sent, sends, W=W)
        k = (p + step * tl.num_programs(0)).to(tl.int64) * BLOCK + i
        for distance in range(0, W):
            d = (rank + distance) % W
            if step < lane_value(send_rounds, d):
                mask = k < lane_value(send_words, d)
                data = tl.load(input + tl.load(send_displs + d) * factor + k, mask=mask)
                if d == rank:
                    kept = k < own_words_sent
                    tl.store(output + tl.load(recv_displs + d) * factor + k, data, mask=kept)
                else:
                    slot = next_slot(pointer_at(slots, lane_value(begins, d)), sent, d, BLOCK)
                    store_to_peer(ctx, slot + i, data, d, mask=mask)
        sent = tl.where(sends, sent + 1, sent)
        if step == AHEAD:
            theirs = recv_message_words(ctx, own_words, messages_from, others, ROW=SIZES)
            wrong = (others & (theirs != recv_words * word_bytes)) | ((lanes() == rank) & (send_words != recv_words))
            if tl.max(wrong.to(tl.int32), axis=0) > 0:
                # As if what they send had been taken.
                theirs = tl.where(others, theirs, send_words * word_bytes)
                refused = others & wrong
                got = tl.where(refused, got + rounds_of(theirs // word_bytes, BLOCK).to(tl.int32), got)
                recv_rounds = tl.where(refused, 0, recv_rounds)
                publish_counters(ctx, own_words, sent, got, peers=refused)
                record_unequal(ctx, own_words, theirs, recv_words * word_bytes, wrong=wrong)
        receives = others & (step >= AHEAD) & (step - AHEAD < recv_rounds)
        wait_blocks(ctx, own_words, got, receives, W=W)
        k = (p + (step - AHEAD) * tl.num_programs(0)).to(tl.int64) * BLOCK + i
        for distance in range(1, W):
            s = (rank + distance) % W
            if lane_value(receives.to(tl.int32), s) > 0:
                mask = k < lane_value(recv_words, s)
                slot = slot_of(p, s, got, W)
                data = tl.load(slots + slot * BLOCK + i, mask=mask)
                tl.store(output + tl.load(recv_displs + s) * factor + k, data, mask=mask)
        got = tl.where(receives, got + 1, got)
        publish_counters(ctx, own_words, sent, got, peers=sends | receives)
    store_counters(row, sent, others, got, sources=others)
    count_messages(queues.counts, messages_to, others, messages_from, sources=others, QUEUES=QUEUES)


def launch(call: Call, max_programs: int | None) -> Launch:
    """A launch of all_to_all_v, of at most ``max_programs`` programs.

    It takes counts and displacements after the tensors.
    """
    comm, config, itemsize = call.comm, call.config, call.input.itemsize
    if config.use_gluon:
        raise InvalidConfigError("Config(use_gluon=True): all_to_all_v has no Gluon form; leave use_gluon out.")
    word = word_bytes(call, itemsize)
    # What lies in the pieces is known to the device alone, so all programs come.
    programs = comm.programs(max_programs)
    queues = comm.queues(call.line, programs, config.few_sms)
    return kernel_launch(
        call,
        exchange_v,
        programs=programs,
        num_warps=config.warps(queues.slot_bytes // word, word),
        dtype=INTEGERS[word],
        queues=queues.memory(INTEGERS[word]),
        factor=itemsize // word,
        W=comm.size,
        BLOCK=queues.slot_bytes // word,
        QUEUES=queues.counts.numel() // COUNTS.value,
    )


ALGORITHMS = (Algorithm("exchange_v", ("all_to_all_v",), launch),)
