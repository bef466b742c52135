"""How the programs of a fused operation tell their peers what is done: counts in symmetric memory, a set for each kind
of operation.

A call's number on a rank, its *epoch*, is one more than that of the last call with the same counts; each program keeps
it for itself. Nothing is reset. Every count rises by the same amount in every call, so a count of ``epoch`` times that
amount means that all of this call, and of the calls before it, is there. Comparisons allow for wrap-around.

* ``ready[r]``: program 0 of rank r sets it on every rank when r's kernel begins. r's stream is past its last call, of
  any kind, so what that call left in r's memory has been used and may be overwritten (`iris.ops.arena`). Every program
  reads it before it first stores to r. It is not set again before all of them have read it: r's kernel does not end
  without what they store.
* ``done``: every program of every rank adds 1, with release, after all of its stores to this rank. Program 0 waits for
  all of them with acquire, and the kernel does not end before it. This is for results that peers store; data that
  travel in parts are awaited part by part.
* ``arrived[t]``: who sends some of part t adds 1 after its stores, with release. Who uses part t waits for it.
* Tickets, in memory after these: a program adds 1, on its own rank alone, and takes the work item with that number.
  They order nothing. In each call the programs together add the same number, and launches run one after another.

Why ``done`` may be trusted. A program without a tile adds to ``done`` at once. Its add may come before another
program's add of the call before, and then the total is reached without that one. The stores of that other program are
there even so:

1. The other program has added to the ``done`` of every rank, after all of its stores to all ranks.
2. The early program's rank has left the call before. So it has acquired that add to its own ``done``, and with it these
   stores.
3. The early program's add, with release, hands on what its rank has acquired.

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
    """Tell all ranks that this rank's memory may be written, or read, in the call of this epoch."""
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
    """Wait until the memory of every rank may be written."""
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
    """Tell all peers, after this program's stores to them, that some of a part is there."""
    for first in range(0, ctx.num_ranks, LANES):
        to = first + lanes()
        here = (to < ctx.num_ranks) & (to != ctx.cur_rank)
        ctx._signal_ranks(counts + ARRIVED + part, 1 + 0 * to, to, here=here, op="add")


@jit
def await_done(ctx, counts, epoch):
    """After this program's last store to peers: signal that, and let program 0 wait for everybody's stores to here."""
    for first in range(0, ctx.num_ranks, LANES):
        to = first + lanes()
        ctx._signal_ranks(flag_ptr=counts + DONE, values=1 + 0 * to, peers=to, here=to < ctx.num_ranks, op="add")
    if tl.program_id(0) == 0:
        ctx.wait(counts + DONE, epoch * tl.num_programs(0) * ctx.num_ranks, cmp="reached")


@jit
def end(counts, epoch):
    """Last of all: store this call's epoch, from which the next one counts."""
    store_after_sync(counts + tl.program_id(0), epoch)
