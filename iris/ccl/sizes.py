"""Messages of unequal size: how both ends learn of it, so that neither waits for ever nor writes where it must not.

Each program of a sender sends the program of the receiver with the same number how many bytes come, before
the first block: a word of 8 bytes, which carries its own arrival (`iris.language.ll`). The receiver compares it
with its own size before it takes a block. The word is on its way before the data, so it costs no step. The slots of a
queue are the library's own memory, so a sender needs no answer before it fills them. Where a sender writes to the
receiver's tensor itself, the receiver's size comes with the place of it, and the sender compares as well.

    sizes[p, n % 8, s]      at the receiver: the bytes that s sends in message n; written by s alone
    asked[p, n % 2, d]      at the sender: the bytes that d receives in message n; written by d alone
    targets[p, n % 2, d]    at the sender: where d wants them, an offset in the heap, plus one; or 0, in the queue
    written[p, s]           at the receiver: the last message that s has written to its place
    messages_to, messages_from    how many messages there have been, the same number for all programs of both ends

A small message has fewer programs than a large one. Program 0 runs in every message, and updates the counters of the
programs that do not run. Each word of message n carries n as its flag, even where the ends disagree on the size. So it
is never taken for another message's. The flag has 16 bits and wraps, so the reader clears each word.

A word is not written over before it is read. A sender is ahead of its receiver by no more messages than the queue of
program 0 has slots, 4, since each puts in a block there, be it an empty one; by one more, whose size it has sent while
it waits for room; and by one that it has written to its place. In an exchange of all with all nobody is ahead by more
than one call, since each gets the others' sizes. A receiver that has refused a message may ask for the next one before
the sender has seen that, but not for the one after it: it must get the size of the next one first, which the sender
sends in a later launch.

If the sizes differ the receiver takes nothing, and no program of the sender may wait; nor may one in the messages that
follow, of whatever sizes, enqueued before the host knew.

* Each program of the receiver that runs gives its sender credit for all blocks that this will put into its queue, as if
  it had taken them. How many these are follows from the size, as it does whether the sender asks for a place; it then
  sees that it is to put in nothing.
* Program 0 does the same for the queues of programs that run at the sender alone; and to programs that run at the
  receiver alone it hands the size, which nobody else sends them.
* The receiver records it, which breaks the group (`iris.runtime.abort`): so the sender's rank knows.
"""

import triton.language as tl

from iris.ccl.queue import (
    ASKED,
    COUNTS,
    HEAD,
    LONGEST_QUEUED,
    MAX_RANKS,
    MESSAGES,
    MESSAGES_FROM,
    MESSAGES_TO,
    SIZES,
    TAIL,
    TARGETS,
    WORDS,
    address_at,
    lane_value,
    place_of,
    publish_counters,
)
from iris.language.address import translate
from iris.language.barrier import lanes
from iris.language.failures import kind_code
from iris.language.jit import jit
from iris.language.ll import ll_recv_places, ll_send_place
from iris.language.ordering import give_up, store_after_sync

NUM_MESSAGES, ROW_RANKS = tl.constexpr(MESSAGES), tl.constexpr(MAX_RANKS)


@jit
def row_of(words, messages, ROW: tl.constexpr):
    """Where in the ``words`` of a program those of the messages of these numbers lie, that of rank 0."""
    if ROW == SIZES:
        return words + SIZES + (messages & (NUM_MESSAGES - 1)) * ROW_RANKS
    else:
        return words + ROW + (messages & 1) * ROW_RANKS


@jit
def stamp_of(messages):
    """Of the words of a message: 1 to 2^15. A cleared word has 0."""
    return (messages & 0x7FFF) + 1


@jit
def send_message_word(ctx, words, value, messages, peers, ROW: tl.constexpr):
    """Send ``peers`` a value below 2^48 of the messages of these numbers: `SIZES`, `ASKED` or `TARGETS`."""
    there = tl.load(ctx.table + lanes(), mask=peers, other=0)
    theirs = translate(row_of(words, messages, ROW) + ctx.cur_rank, ctx.base, there)
    ll_send_place(theirs, value + tl.cast(lanes() * 0, tl.int64), stamp_of(messages), peers)


@jit
def recv_message_words(ctx, words, messages, peers, ROW: tl.constexpr):
    """What ``peers`` send by `send_message_word` of the messages of these numbers; int64 lanes."""
    here = row_of(words, messages, ROW) + lanes()
    received = ll_recv_places(here, stamp_of(messages), peers, ctx._record())
    ll_send_place(here, tl.cast(lanes() * 0, tl.int64), lanes() * 0, peers)
    return received


@jit
def ask(ctx, queues, words, output, length, nbytes, messages, sources, W: tl.constexpr):
    """Ask ``sources`` for ``nbytes`` each, and send them the place for these; returns whether that is on the heap.

    What used the memory before was an earlier kernel, which is over: there is nothing to release.
    """
    offset, direct = place_of(ctx, queues, output, length, W=W)
    send_message_word(ctx, words, tl.where(direct, offset + 1, 0), messages, peers=sources, ROW=TARGETS)
    send_message_word(ctx, words, nbytes, messages, peers=sources, ROW=ASKED)
    return direct


@jit
def find_target(ctx, queues, words, nbytes, messages, receivers, W: tl.constexpr):
    """Which ``receivers`` `ask` for as many bytes as they are sent, and an address each, 0 for the queue."""
    asked = recv_message_words(ctx, words, messages, receivers, ROW=ASKED)
    to = receivers & (asked == nbytes)
    offset = recv_message_words(ctx, words, messages, to, ROW=TARGETS)
    return to, address_at(ctx, queues, offset, ranks=to, W=W)


@jit
def count_messages(counts, messages_to, receivers, messages_from, sources, QUEUES: tl.constexpr):
    """That these messages are over: each program for itself, and program 0 for all that do not run."""
    p = tl.program_id(0)
    store_after_sync(counts + p * COUNTS + MESSAGES_TO + lanes(), messages_to, receivers)
    store_after_sync(counts + p * COUNTS + MESSAGES_FROM + lanes(), messages_from, sources)
    if p == 0:
        # After the barriers of `store_after_sync`, and nobody has loaded them.
        for q in range(tl.num_programs(0), QUEUES):
            idle = counts + q * COUNTS
            tl.store(idle + MESSAGES_TO + lanes(), messages_to, mask=receivers)
            tl.store(idle + MESSAGES_FROM + lanes(), messages_from, mask=sources)


@jit
def record_unequal(ctx, words, theirs, own, wrong):
    """That what the ranks ``wrong`` send, ``theirs``, is not what this rank receives, ``own``; int64 lanes."""
    source = tl.max(tl.where(wrong, lanes(), -1), axis=0)
    flag, record = words + SIZES + source, ctx._record()
    expected, seen = lane_value(own, source), lane_value(theirs, source)
    give_up(record, flag, expected, seen, kind=kind_code("size"), first=source, num_ranks=0)


@jit
def programs_of(theirs, block_bytes, PROGRAMS: tl.constexpr):
    """Blocks of messages of so many bytes, and the programs that send them; int64 lanes."""
    blocks = tl.maximum((theirs + block_bytes - 1) // block_bytes, 1)
    return blocks, tl.minimum(blocks, PROGRAMS)


@jit
def pass_over(ctx, queues, p, theirs, puts, block_bytes, sources, PROGRAMS: tl.constexpr):
    """Let the senders' program ``p`` put in all that it has.

    ``puts``: the senders that do not see from the size that is asked for, or from the place, that they are to put
    nothing into the queue.
    """
    row, words = queues.counts + p * COUNTS, queues.words + p * WORDS
    blocks, programs = programs_of(theirs, block_bytes, PROGRAMS)
    steps = tl.where(sources & puts & (p < programs), (blocks - p + programs - 1) // programs, 0)
    sent = tl.load(row + TAIL + lanes(), mask=sources, other=0)
    got = tl.load(row + HEAD + lanes(), mask=sources, other=0) + tl.cast(steps, tl.int32)
    publish_counters(ctx, words, sent, got, peers=sources)
    store_after_sync(row + HEAD + lanes(), got, sources)


@jit
def refuse(ctx, queues, theirs, own, messages, puts, sources, block_bytes, FORM: tl.constexpr):
    """Take nothing of these messages of ``theirs`` bytes, where ``own`` were to come, and let nobody wait.

    ``puts``: see `pass_over`. ``FORM``: if it is direct, all programs that run have asked for their parts already.
    """
    p = tl.program_id(0)
    PROGRAMS: tl.constexpr = FORM.PROGRAMS
    own_words = queues.words + p * WORDS
    _, programs = programs_of(theirs, block_bytes, PROGRAMS)
    asks = sources & (theirs > LONGEST_QUEUED)
    if not FORM.DIRECT:
        send_message_word(ctx, own_words, own, messages, peers=asks & (p < programs), ROW=ASKED)
    if p == 0:
        for q in range(1, tl.num_programs(0)):
            here = row_of(queues.words + q * WORDS, messages, SIZES) + lanes()
            ll_send_place(here, theirs, stamp_of(messages), sources & (q >= programs))
        for q in range(tl.num_programs(0), FORM.QUEUES):
            there = queues.words + q * WORDS
            send_message_word(ctx, there, own, messages, peers=asks & (q < programs), ROW=ASKED)
            pass_over(ctx, queues, q, theirs, puts=puts, block_bytes=block_bytes, sources=sources, PROGRAMS=PROGRAMS)
    pass_over(ctx, queues, p, theirs, puts=puts, block_bytes=block_bytes, sources=sources, PROGRAMS=PROGRAMS)
