"""The queues between ranks: how blocks of any size, from anywhere, get from one rank's program to another's.

Program p of each rank has a queue to program p of every other: `SLOTS` slots of staging memory at the receiver, and
counts of what went through, which only ever rise:

    ready[p, s]    at the receiver: blocks that rank s has put into its queue here     written by s, release
    taken[p, d]    at the sender: blocks that rank d has taken out of the queue there     written by d, release
    sent, got      what this rank has put in and taken out, for its own use

A sender may write block n (from 0) once n - SLOTS blocks are taken: ``taken >= n + 1 - SLOTS``. A receiver may read it
once ``ready >= n + 1``. Both are waits for a count to be *reached*, so a count that is already further loses nothing,
and none is ever reset. Since counts live in device memory and belong to a pair, any sequence of collectives with any
roots, sizes and grids may follow each other on a queue, in a CUDA graph too: all that must agree is how many blocks
the two ends of a pair move, and these follow from the call's arguments.

Large results that lie on the symmetric heap need no slots. The receiver tells each sender where its result is, in a
*place*: a word of 64 bits with the offset in the heap, plus one, and the count of such calls in the upper 16 bits,
or zero offset for "use the queue". Nobody overruns it: the next call's word comes after the receiver has seen this
call's data, which the sender wrote after it had read this call's word. Saying the place is also the permission to
write: the word is stored by a kernel that runs behind everything earlier on the receiver's stream. When all is
written, the sender sets ``done`` to its count of these calls, with release.
"""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from iris.device_record import BARRIER_LANES
from iris.language.address import gluon_translate, triton_translate
from iris.language.ordering import gluon_ordering, triton_ordering
from iris.language.stamped import gluon_stamped, triton_stamped
from iris.language.target import threads_per_warp

# Ranks that a block of lanes holds: the largest group.
MAX_RANKS = BARRIER_LANES
SLOTS = 4
# Blocks that a program sends ahead of what it receives, so that a block's trip and its fence are behind the next ones.
AHEAD = tl.constexpr(1)

# Rows of a program's counts, each of MAX_RANKS int32.
READY, TAKEN, DONE, SENT, GOT, CALLS_TO, CALLS_FROM = (tl.constexpr(i * MAX_RANKS) for i in range(7))
COUNTS = tl.constexpr(8 * MAX_RANKS)

LANES = tl.constexpr(MAX_RANKS)
NUM_SLOTS = tl.constexpr(SLOTS)


def region_bytes(programs: int, size: int, slot_bytes: int) -> int:
    """Bytes of the queues of ``programs`` programs of a group of ``size`` ranks."""
    return programs * (COUNTS.value * 4 + MAX_RANKS * 8 + size * SLOTS * slot_bytes)



@triton.constexpr_function
def flat_layout(block, itemsize, num_warps):
    """A 1-D layout in which every thread moves 16 bytes at a time, or as much as there is for it."""
    per_thread = max(1, min(16 // itemsize, block // (threads_per_warp() * num_warps)))
    return gl.BlockedLayout([per_thread], [threads_per_warp()], [num_warps], [0])


@triton.constexpr_function
def bytes_of(element):
    return max(8, element.primitive_bitwidth) // 8


@triton.jit
def _triton_flat(block: tl.constexpr, element: tl.constexpr):
    return tl.arange(0, block)


@gluon.jit
def _gluon_flat(block: tl.constexpr, element: tl.constexpr):
    return gl.arange(0, block, layout=flat_layout(block, bytes_of(element), gl.num_warps()))


def make_queue(
    jit: Callable, lang: ModuleType, move: Callable, order: SimpleNamespace, stamped: SimpleNamespace
) -> SimpleNamespace:
    """The device functions of the queues in the language that ``(jit, lang)`` stand for."""
    signal_ranks, wait_ranks, lanes = order.signal_ranks, order.wait_ranks, order.lanes
    send_place, receive_places = stamped.send_place, stamped.receive_places

    @jit
    def pick(values, rank):
        """The value of one lane."""
        return lang.sum(lang.where(lanes() == rank, values, 0), axis=0)

    @jit
    def among(first, last, rank):
        """Lanes of the ranks from ``first`` to before ``last``, without the caller."""
        peer = lanes()
        return (peer >= first) & (peer < last) & (peer != rank)

    @jit
    def queue_address(ctx, slots, W: tl.constexpr, BLOCK: tl.constexpr, to):
        """Where the caller's queues begin at each of the ranks ``to``; int64 lanes."""
        mine = slots + (lang.cast(lang.program_id(0), lang.int64) * W + ctx.cur_rank) * (NUM_SLOTS * BLOCK)
        return lang.load(ctx.table + lanes(), mask=to, other=0) + (lang.cast(mine, lang.int64) - ctx.base)

    @jit
    def pointer_at(like, address):
        """A pointer of the type and the alignment of ``like``, which is a multiple of 16 bytes away from ``address``."""
        return move(like, lang.cast(like, lang.int64), address)

    @jit
    def offer(ctx, row, place_row, heap_table, output, length, W: tl.constexpr, sources):
        """Tell the ranks ``sources`` where their data go; returns the count of these calls, and whether it is direct."""
        offset = lang.cast(output, lang.int64) - lang.load(heap_table + ctx.cur_rank)
        # Aligned as the sender's pointers assume; what is not takes the queue.
        direct = (offset >= 0) & (offset + length <= lang.load(heap_table + W)) & (offset % 16 == 0)
        calls = lang.load(row + CALLS_FROM + lanes(), mask=sources, other=0) + 1
        words = move(place_row + ctx.cur_rank, ctx.base, lang.load(ctx.table + lanes(), mask=sources, other=0))
        send_place(words, lang.where(direct, offset + 1, 0), calls, sources)
        lang.store(row + CALLS_FROM + lanes(), calls, mask=sources)
        return calls, direct

    @jit
    def find(ctx, row, place_row, heap_table, to):
        """Where the ranks ``to`` want their data: the count of these calls, and an address for each, 0 for the queue."""
        calls = lang.load(row + CALLS_TO + lanes(), mask=to, other=0) + 1
        offset = receive_places(place_row + lanes(), calls, to, ctx._record())
        lang.store(row + CALLS_TO + lanes(), calls, mask=to)
        base = lang.load(heap_table + lanes(), mask=to, other=0)
        return calls, lang.where(to & (offset > 0), base + offset - 1, 0)

    @jit
    def await_room(ctx, row, sent, to, W: tl.constexpr):
        wait_ranks(row + TAKEN + lanes(), sent + 1 - NUM_SLOTS, to, 0, W, ctx._record())

    @jit
    def publish(ctx, row, sent, to):
        signal_ranks(row + READY + ctx.cur_rank, sent, lanes(), to, ctx.table, ctx.base)

    @jit
    def await_blocks(ctx, row, got, sources, W: tl.constexpr):
        wait_ranks(row + READY + lanes(), got + 1, sources, 0, W, ctx._record())

    @jit
    def give_back(ctx, row, got, sources):
        signal_ranks(row + TAKEN + ctx.cur_rank, got, lanes(), sources, ctx.table, ctx.base)

    @jit
    def finish(ctx, row, calls_to, to, calls_from, sources, W: tl.constexpr):
        """Say "all written" to the ranks ``to`` that were written directly, and hear it from ``sources``."""
        signal_ranks(row + DONE + ctx.cur_rank, calls_to, lanes(), to, ctx.table, ctx.base)
        wait_ranks(row + DONE + lanes(), calls_from, sources, 0, W, ctx._record())

    return SimpleNamespace(
        **{name: value for name, value in locals().items() if name in QUEUE_FUNCTIONS},
        lanes=lanes,
        flat=_triton_flat if lang is tl else _gluon_flat,
    )


QUEUE_FUNCTIONS = {
    "pick", "among", "queue_address", "pointer_at", "offer", "find",
    "await_room", "publish", "await_blocks", "give_back", "finish",
}  # fmt: skip

triton_queue = make_queue(triton.jit, tl, triton_translate, triton_ordering, triton_stamped)
gluon_queue = make_queue(gluon.jit, gl, gluon_translate, gluon_ordering, gluon_stamped)
