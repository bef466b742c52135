"""How the programs of a fused operation tell their peers what is done: counts in symmetric memory, one set a kind.

A call's number on a rank, its epoch, is one more than that of the last call with the same counts; each program keeps
it for itself. Counts only rise, by the same in every call, so that a count of ``epoch`` times that means that
everything of this call, and of all before it, is there. A program without a tile adds to ``done`` at once, maybe before
another one's add of the call before is here, so the total may be reached without that one. What it stands for is here
even then: the early program's rank has left that call, so it has acquired all of the adds to its own ``done``, which
come behind the stores to all ranks, and its own add releases what it has acquired. Nothing is reset; comparisons wrap.

* ``ready[r]``, set by program 0 of rank r on every rank when r's kernel begins: r's stream is past its last call, of
  any kind, so what that one left in r's memory has been used and may be written over (`iris.ops.arena`). Every program
  reads it before it first stores to r. It is not set again before all of them have: r's kernel does not end without
  what they store.
* ``done``, to which every program of every rank adds 1 behind all of its stores to this rank, with release. Program 0
  waits for all with acquire, and the kernel does not end before it. For results that peers store; what travels in parts
  is waited for part by part.
* ``arrived[t]``, to which whoever sends of part t adds 1 behind its stores, with release; who uses part t waits for it.
* Tickets, behind these: a program adds 1, on its own rank alone, and takes what has that number. They order nothing. In
  a call all programs together add the same as in every other, and its launch comes behind that of the call before.

Over the link: a word for each but tickets, in one step.
"""

import triton.language as tl

from iris.language.barrier import LANES, lanes
from iris.language.jit import jit
from iris.language.ordering import store_after_sync

# Words of an operation's counts: epochs by program; `ready` by rank; `done` on a line of its own; `arrived` by part.
MOST_PROGRAMS, MOST_RANKS = 1024, 128
READY = tl.constexpr(MOST_PROGRAMS)
DONE = tl.constexpr(MOST_PROGRAMS + MOST_RANKS)
ARRIVED = tl.constexpr(MOST_PROGRAMS + MOST_RANKS + 32)


@jit
def signal_ready(ctx, counts, epoch):
    """That this rank's memory may be written, or read, in the call of this epoch."""
    for first in range(0, ctx.num_ranks, LANES):
        to = first + lanes()
        ctx._signal_ranks(counts + READY + ctx.cur_rank, epoch + 0 * to, to, to < ctx.num_ranks)


@jit
def begin(ctx, counts):
    """This call's epoch. Program 0 tells the peers that this rank's memory may be written."""
    epoch = tl.load(counts + tl.program_id(0)) + 1
    if tl.program_id(0) == 0:
        signal_ready(ctx, counts, epoch)
    return epoch


@jit
def await_ready(ctx, counts, epoch):
    """Until the memory of every rank may be written."""
    for first in range(0, ctx.num_ranks, LANES):
        peer = first + lanes()
        ctx._wait_ranks(
            flag_ptrs=counts + READY + peer,
            wanted=epoch + 0 * peer,
            here=peer < ctx.num_ranks,
            first=first,
            num_ranks=ctx.num_ranks,
        )


@jit
def signal_arrived(ctx, counts, part):
    """Behind this program's stores of a part to all peers."""
    for first in range(0, ctx.num_ranks, LANES):
        to = first + lanes()
        here = (to < ctx.num_ranks) & (to != ctx.cur_rank)
        ctx._signal_ranks(counts + ARRIVED + part, 1 + 0 * to, to, here=here, op="add")


@jit
def await_done(ctx, counts, epoch):
    """Behind this program's last store to peers: the kernel ends when everybody's stores to this rank are there."""
    for first in range(0, ctx.num_ranks, LANES):
        to = first + lanes()
        ctx._signal_ranks(flag_ptr=counts + DONE, values=1 + 0 * to, peers=to, here=to < ctx.num_ranks, op="add")
    if tl.program_id(0) == 0:
        ctx.wait(counts + DONE, epoch * tl.num_programs(0) * ctx.num_ranks, cmp="reached")


@jit
def end(counts, epoch):
    """Last of all: the next call is another one."""
    store_after_sync(counts + tl.program_id(0), epoch)
