"""Which program computes which unit: where they send, who is done takes the next one.

Programs that send do not keep pace: the link takes more of some multiprocessors' stores than of others', by a tenth or
two (docs/performance-lessons.md, "Who is done takes the next"). So only its first unit is a program's own from the
start. Its loader, which is ahead of the other roles, draws a ticket for each further one (`iris.ops.counts`) after the
loads of the one before, where the ring of stages is full, and tells the others through a ring of numbers in shared
memory. A program draws one after each of its units, so all draw as many as there are units, in every call.

Programs that send nothing keep pace, and the L2 cache has for one what another has loaded. Their units are their own
from the start, as many apart as there are programs.

Two kinds of mbarrier hand the numbers on, with phases as in `iris.ops.hopper.pipeline`:

* ``work_full[s]``: a number is in slot s; the loader's store comes before its barrier, and that before the arrival.
  Awaited by both multipliers and the writer.
* ``work_empty[s]``: these three have read slot s; their loads have their values at their barriers. Awaited by the
  loader.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from iris.language.fences import block_barrier
from iris.language.jit import gluon_jit

# Numbers in the ring: the writer is two units behind the loader, or more where these are short; then the loader waits.
SLOTS = gl.constexpr(4)
READERS = gl.constexpr(3)


@gluon.constexpr_function
def one_element(warps):
    """The layout of a number that a partition of so many warps loads or stores."""
    return gl.BlockedLayout([1], [32], [warps], [0])


@gluon_jit
def take(ticket, count, epoch):
    """Of ``count`` numbers the next that no program has in the call of this epoch: at first each has its own. Or one of
    ``count`` or more, if there is none."""
    earlier = (epoch - 1) * count
    return gl.num_programs(0) + gl.atomic_add(ticket, 1, sem="relaxed", scope="gpu") - earlier


@gluon_jit
def publish_next(pipeline, units, number, nth):
    """The loader, after the ``nth`` unit of this program, ``number``: takes the next, and tells the other roles."""
    if not pipeline.BY_TICKETS:
        return number + gl.num_programs(0)
    number = take(units.ticket, units.count(), units.epoch)
    slot = nth % SLOTS
    mbarrier.wait(pipeline.work_empty.index(slot), nth // SLOTS & 1 ^ 1)
    pipeline.numbers.index(slot).store(gl.full([1], 0, gl.int32, one_element(gl.num_warps())) + number)
    block_barrier()
    mbarrier.arrive(pipeline.work_full.index(slot), count=1)
    return number


@gluon_jit
def await_next(pipeline, units, number, nth):
    """Another role: which unit comes after the ``nth`` of this program, ``number``."""
    if not pipeline.BY_TICKETS:
        return number + gl.num_programs(0)
    slot = nth % SLOTS
    mbarrier.wait(pipeline.work_full.index(slot), nth // SLOTS & 1)
    number = gl.sum(pipeline.numbers.index(slot).load(one_element(gl.num_warps())), axis=0)
    block_barrier()
    mbarrier.arrive(pipeline.work_empty.index(slot), count=1)
    return number
