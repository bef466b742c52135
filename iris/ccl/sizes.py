"""Messages of unequal size: how both ends learn of it, so that neither waits for ever nor writes where it must not.

Each program of a sender tells the program of the receiver with the same number how many bytes its rank sends, before
the first block: a word of 8 bytes, which carries its own arrival (`iris.language.stamped`). The receiver compares it
with its own size before it takes a block. The word is on its way before the data, so it costs no step. The slots of a
queue are the library's own memory, so a sender needs no answer before it fills them. Where a sender writes to the
receiver's tensor itself, the receiver's size comes with the place of it (`iris.ccl.queue`), and the sender compares as
well.

    sizes[p, n % 8, s]    at the receiver: the bytes that s sends in message n; written by s alone
    asked[p, n % 2, d]    at the sender: the bytes that d receives in the n-th that asks for a place; written by d alone
    messages_to, messages_from    how many messages program p has sent and received: the stamps of sizes

What is asked for has the stamp of the place: of 16 bits, it would come round between two messages that ask for one,
did it count the others too.

A size is not written over before it is read. A sender is ahead of its receiver by no more messages than a queue has
slots, 4, since each puts in a block, be it an empty one; by one more, whose size it has told while it waits for room;
and by one that it has written to its place. In an exchange of all with all nobody is ahead by more than one call, since
each hears the others' sizes. A receiver that has refused a message may ask for the next one before the sender has seen
that, but not for the one behind it: it must hear the size of the next one first, which the sender tells in a later
launch.

If the sizes differ the receiver takes nothing, and no program of the sender may wait. Nor may one in messages of the
same sizes that follow, enqueued before the host knew: as where all are of another type at the other end. Behind them,
messages of other sizes may wait until their limit, if they were enqueued so early.

* Each program of the receiver that runs gives its sender credit for all blocks that this will put into its queue, as if
  it had taken them, and counts the message as the sender does. How many these are follows from the size, as it does
  whether the sender asks for a place; it then sees that it is to put in nothing.
* A smaller message has fewer programs. Program 0 does the same for the queues of programs that run at the sender alone;
  and to programs that run at the receiver alone it hands the size, which nobody else tells them.
* The receiver records it, which breaks the group (`iris.abort`): so the sender's rank knows.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris.ccl.queue import (
    ASKED,
    CALLS_FROM,
    COUNTS,
    GOT,
    LONGEST_QUEUED,
    MAX_RANKS,
    MESSAGES,
    MESSAGES_FROM,
    PLACES,
    SENT,
    SIZES,
    WORDS,
    gluon_queue,
    triton_queue,
)
from iris.language.address import gluon_translate, triton_translate
from iris.language.failures import kind_code
from iris.language.ordering import gluon_ordering, triton_ordering
from iris.language.stamped import gluon_stamped, triton_stamped

NUM_MESSAGES, ROW_RANKS = tl.constexpr(MESSAGES), tl.constexpr(MAX_RANKS)


def make_sizes(
    jit: Callable, lang: ModuleType, move: Callable, order: SimpleNamespace, stamped: SimpleNamespace,
    queues: SimpleNamespace,
) -> SimpleNamespace:  # fmt: skip
    """The device functions of this file in the language that ``(jit, lang)`` stand for."""
    send_place, receive_places = stamped.send_place, stamped.receive_places
    lanes, give_up, keep, pick, post = order.lanes, order.give_up, order.keep, queues.pick, queues.post

    @jit
    def row_of(words, calls, ROW: tl.constexpr):
        """Where in the ``words`` of a program the sizes of the messages of these numbers lie, that of rank 0.

        ``calls``: counts of messages for `SIZES`, and for `ASKED` of those that ask for a place.
        """
        if ROW == SIZES:
            return words + SIZES + (calls & (NUM_MESSAGES - 1)) * ROW_RANKS
        else:
            return words + ROW + (calls & 1) * ROW_RANKS

    @jit
    def tell_size(ctx, words, nbytes, calls, peers, ROW: tl.constexpr):
        """Tell ``peers`` how many bytes their messages have, of these numbers, in the row `SIZES` or `ASKED`."""
        there = lang.load(ctx.table + lanes(), mask=peers, other=0)
        theirs = move(row_of(words, calls, ROW) + ctx.cur_rank, ctx.base, there)
        send_place(theirs, nbytes + lang.cast(lanes() * 0, lang.int64), calls, peers)

    @jit
    def hear_sizes(ctx, words, calls, peers, ROW: tl.constexpr):
        """What ``peers`` say of the messages of these numbers; int64 lanes."""
        return receive_places(row_of(words, calls, ROW) + lanes(), calls, peers, ctx._record())

    @jit
    def record_unequal(ctx, words, theirs, own, wrong):
        """That what the ranks ``wrong`` send, ``theirs``, is not what this rank receives, ``own``; int64 lanes."""
        source = lang.max(lang.where(wrong, lanes(), -1), axis=0)
        flag = words + SIZES + source
        give_up(ctx._record(), flag, pick(own, source), pick(theirs, source), kind_code("size"), source, 0)

    @jit
    def programs_of(theirs, block_bytes, PROGRAMS: tl.constexpr):
        """Blocks of messages of so many bytes, and the programs that send them; int64 lanes."""
        blocks = lang.maximum((theirs + block_bytes - 1) // block_bytes, 1)
        return blocks, lang.minimum(blocks, PROGRAMS)

    @jit
    def pass_over(ctx, row, words, p, theirs, calls, puts, block_bytes, sources, PROGRAMS: tl.constexpr):
        """Let the senders' program ``p`` put in all that it has, and count the message as that counts it.

        ``calls``: `CALLS_FROM` before the message. ``puts``: the senders that do not see from the size that is asked
        for, or from the place, that they are to put nothing into the queue.
        """
        blocks, programs = programs_of(theirs, block_bytes, PROGRAMS)
        runs = sources & (p < programs)
        steps = lang.where(runs & puts, (blocks - p + programs - 1) // programs, 0)
        sent = lang.load(row + SENT + lanes(), mask=sources, other=0)
        got = lang.load(row + GOT + lanes(), mask=sources, other=0) + lang.cast(steps, lang.int32)
        messages = lang.load(row + MESSAGES_FROM + lanes(), mask=sources, other=0)
        post(ctx, words, sent, got, sources)
        keep(row + GOT + lanes(), got, sources)
        keep(row + MESSAGES_FROM + lanes(), messages + 1, runs)
        keep(row + CALLS_FROM + lanes(), calls + lang.cast(runs & (theirs > LONGEST_QUEUED), lang.int32), sources)

    @jit
    def refuse(
        ctx, counts, words, theirs, own, calls, puts, sources, block_bytes,
        PROGRAMS: tl.constexpr, QUEUES: tl.constexpr, DIRECT: tl.constexpr,
    ):  # fmt: skip
        """Take nothing of messages of ``theirs`` bytes, where ``own`` were to come, and let nobody wait.

        ``calls``, ``puts``: see `pass_over`. ``PROGRAMS``: that a message has at most; ``QUEUES``: that there are.
        ``DIRECT``: senders have been told size and place already.
        """
        p = lang.program_id(0)
        row, own_words = counts + p * COUNTS, words + p * WORDS
        _, programs = programs_of(theirs, block_bytes, PROGRAMS)
        asks = sources & (theirs > LONGEST_QUEUED)
        if DIRECT:
            # Who does not ask does not count it, so the next place has the same number: it is not to be taken for that.
            unread = sources & ((p >= programs) | (theirs <= LONGEST_QUEUED))
            heaps = lang.load(ctx.table + lanes(), mask=unread, other=0)
            asked, place = row_of(own_words, calls + 1, ASKED), own_words + PLACES
            send_place(move(asked + ctx.cur_rank, ctx.base, heaps), lang.cast(lanes() * 0, lang.int64), calls, unread)
            send_place(move(place + ctx.cur_rank, ctx.base, heaps), lang.cast(lanes() * 0, lang.int64), calls, unread)
        else:
            tell_size(ctx, own_words, own, calls + 1, asks & (p < programs), ASKED)
        if p == 0:
            for q in range(1, lang.num_programs(0)):
                alone = sources & (q >= programs)
                number = lang.load(counts + q * COUNTS + MESSAGES_FROM + lanes(), mask=alone, other=0) + 1
                send_place(row_of(words + q * WORDS, number, SIZES) + lanes(), theirs, number, alone)
            for q in range(lang.num_programs(0), QUEUES):
                there, own_row = words + q * WORDS, counts + q * COUNTS
                before = lang.load(own_row + CALLS_FROM + lanes(), mask=sources, other=0)
                tell_size(ctx, there, own, before + 1, asks & (q < programs), ASKED)
                pass_over(ctx, own_row, there, q, theirs, before, puts, block_bytes, sources, PROGRAMS)
        pass_over(ctx, row, own_words, p, theirs, calls, puts, block_bytes, sources, PROGRAMS)

    return SimpleNamespace(
        tell_size=tell_size, hear_sizes=hear_sizes, record_unequal=record_unequal, refuse=refuse
    )  # fmt: skip


triton_sizes = make_sizes(triton.jit, tl, triton_translate, triton_ordering, triton_stamped, triton_queue)
gluon_sizes = make_sizes(gluon.jit, gl, gluon_translate, gluon_ordering, gluon_stamped, gluon_queue)
