"""Messages of unequal size: how both ends learn of it, so that neither waits for ever nor writes where it must not.

Each program of a sender tells the program of the receiver with the same number how many bytes its rank sends, before
the first block: a word of 8 bytes, which carries its own arrival (`iris.language.stamped`). The receiver compares it
with its own size before it takes a block. The word is on its way before the data, so it costs no step. The slots of a
queue are the library's own memory, so a sender needs no answer before it fills them. Where a sender writes to the
receiver's tensor itself, the receiver's size comes with the place of it (`iris.ccl.queue`), and the sender compares as
well.

    sizes[p, n % 8, s]    at the receiver: the bytes that s sends in message n; written by s alone
    asked[p, d]           at the sender: the bytes that d receives; written by d alone
    messages_to, messages_from    how many messages program p has sent and received: the stamps

A size is not written over before it is read. A sender is ahead of its receiver by no more messages than a queue has
slots, 4, since each puts in a block, be it an empty one; by one more, whose size it has told while it waits for room;
and by one that it has written to its place. In an exchange of all with all nobody is ahead by more than one call, since
each hears the others' sizes. A receiver says what it asks for once the sender has seen what it asked for before: its
own message is over only then.

If the sizes differ the receiver takes nothing, and no program of the sender may wait:

* Each program of the receiver that runs gives its sender credit for all blocks that this will put into its queue, as if
  it had taken them. How many these are follows from the size.
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
    COUNTS,
    GOT,
    MAX_RANKS,
    MESSAGES,
    MESSAGES_FROM,
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
    lanes, give_up, pick, post = order.lanes, order.give_up, queues.pick, queues.post

    @jit
    def row_of(words, calls, ROW: tl.constexpr):
        """Where in the ``words`` of a program the sizes of the messages of these numbers lie, that of rank 0."""
        if ROW == SIZES:
            return words + SIZES + (calls & (NUM_MESSAGES - 1)) * ROW_RANKS
        else:
            return words + ROW + calls * 0

    @jit
    def tell_size(ctx, words, nbytes, calls, peers, ROW: tl.constexpr):
        """Tell ``peers`` how many bytes their messages have, of these numbers: `SIZES` or `ASKED`."""
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
    def credit(ctx, row, words, p, theirs, block_bytes, sources, PROGRAMS: tl.constexpr):
        """Let the senders' program ``p`` put in all that it has."""
        blocks, programs = programs_of(theirs, block_bytes, PROGRAMS)
        steps = lang.where(p < programs, (blocks - p + programs - 1) // programs, 0)
        sent = lang.load(row + SENT + lanes(), mask=sources, other=0)
        got = lang.load(row + GOT + lanes(), mask=sources, other=0)
        post(ctx, words, sent, got + lang.cast(steps, lang.int32), sources)

    @jit
    def refuse(
        ctx, counts, words, theirs, own, calls, sources, block_bytes,
        PROGRAMS: tl.constexpr, QUEUES: tl.constexpr, DIRECT: tl.constexpr,
    ):  # fmt: skip
        """Take nothing of messages of ``theirs`` bytes, where ``own`` were to come, and let nobody wait.

        ``calls``: the number of this message from each of the ``sources``. ``PROGRAMS``: that a message has at most;
        ``QUEUES``: that there are. ``DIRECT``: senders have been told the size already.
        """
        p = lang.program_id(0)
        row, own_words = counts + p * COUNTS, words + p * WORDS
        if not DIRECT:
            tell_size(ctx, own_words, own, calls, sources, ASKED)
        credit(ctx, row, own_words, p, theirs, block_bytes, sources, PROGRAMS)
        if p == 0:
            _, programs = programs_of(theirs, block_bytes, PROGRAMS)
            for q in range(1, lang.num_programs(0)):
                alone = sources & (q >= programs)
                number = lang.load(counts + q * COUNTS + MESSAGES_FROM + lanes(), mask=alone, other=0) + 1
                send_place(row_of(words + q * WORDS, number, SIZES) + lanes(), theirs, number, alone)
            for q in range(lang.num_programs(0), QUEUES):
                number = lang.load(counts + q * COUNTS + MESSAGES_FROM + lanes(), mask=sources, other=0) + 1
                tell_size(ctx, words + q * WORDS, own, number, sources, ASKED)
                credit(ctx, counts + q * COUNTS, words + q * WORDS, q, theirs, block_bytes, sources, PROGRAMS)

    return SimpleNamespace(
        tell_size=tell_size, hear_sizes=hear_sizes, record_unequal=record_unequal, refuse=refuse
    )  # fmt: skip


triton_sizes = make_sizes(triton.jit, tl, triton_translate, triton_ordering, triton_stamped, triton_queue)
gluon_sizes = make_sizes(gluon.jit, gl, gluon_translate, gluon_ordering, gluon_stamped, gluon_queue)
