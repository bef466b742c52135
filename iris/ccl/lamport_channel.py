"""The memory through which `iris.ccl.one_shot` and `two_shot_push` send: how tensors are cut into blocks, and how much
memory these need.

A *part* is what one rank sends to another of a block. In one step (`one_shot`) a block of the tensor is one part. In
two steps it has W parts, and each rank sums one of them.
"""

from typing import NamedTuple

import triton.language as tl

from iris.ccl.call import Call
from iris.ccl.communicator import Communicator, power_of_two
from iris.language.target import threads_per_warp

# Bytes that a program receives for a block at most: the parts of all W ranks. Each part is a power of two. Between two
# ranks it may be twice as large: see `part_bytes`.
BLOCK_BYTES = 8192
# What a warp moves at once, 16 bytes a thread: parts have this size as long as every block gets a program of its own.
# And warps of a program at most.
WARP_BYTES, MOST_WARPS = 512, 8
# Slots of a channel: see `iris.ccl.one_shot`.
SLOTS = tl.constexpr(3)
# A channel is several times as large as the tensor, and each stream has one. So it may take this fraction (1/16) of the
# group's memory in any case.
SHARE_OF_WORKSPACE = 16
# In two steps it may take a fifth, as long as a quarter stays free for others then: an H200, whose groups have 1.1 GiB,
# has room for tensors of up to 32 MiB, and its table pushes those of up to 10 MiB, in 96 MiB.
SHARE_WITH_ROOM, ROOM_LEFT = 5, 4


def part_bytes(size: int, steps: int, share: int, programs: int) -> int:
    """Bytes of a part, where each of ``size`` ranks adds up ``share`` bytes with so many ``programs``.

    Between two ranks it is twice as much where no program has more to do for it. In two steps a program still has two
    blocks then, of which one goes on while the other waits. Among more ranks that was not measured.
    """
    # At least 16 bytes for each thread of a warp: no two threads may poll the same word (`lamport_recv`).
    largest = max(16 * threads_per_warp(), BLOCK_BYTES // (1 << (size - 1).bit_length()))
    part = min(WARP_BYTES, largest)
    while part < largest and part * programs < share:
        part *= 2

    def rounds(part: int) -> int:
        return -(-share // (part * programs))

    return 2 * part if size == 2 and steps <= rounds(2 * part) <= rounds(part) / 2 else part


class ChannelLayout(NamedTuple):
    """The memory of calls of similar size, which share it: the number of blocks is rounded up to a power of two.

    ``part``: bytes of a part. ``max_blocks``: blocks that a slot has room for. ``nbytes``: of the whole channel. The
    slots come first, so that they are aligned, and after them the epochs, int32 ``[max_blocks]``.
    """

    part: int
    max_blocks: int
    nbytes: int

    @property
    def epochs(self) -> slice:
        """Where they are in the channel."""
        return slice(self.nbytes - 4 * self.max_blocks, self.nbytes)


def channel_layout(size: int, steps: int, nbytes: int, programs: int) -> ChannelLayout:
    """For a sum of ``nbytes`` among ``size`` ranks in so many steps, with ``programs`` programs."""
    part = part_bytes(size, steps, nbytes // (1 if steps == 1 else size), programs)
    max_blocks = power_of_two(max(1, -(-nbytes // (part if steps == 1 else part * size))))
    return ChannelLayout(part, max_blocks, max_blocks * (4 + SLOTS.value * steps * size * part))


def fits(comm: Communicator, collective: str, nbytes: int, steps: int) -> bool:
    """Whether a call does not take more than its share of the group's memory."""
    nbytes = nbytes // comm.size if collective == "reduce_scatter" else nbytes
    needed = channel_layout(comm.size, steps, nbytes, 2 * comm.num_sms).nbytes
    return needed <= comm.workspace.limit // (SHARE_OF_WORKSPACE if steps == 1 else SHARE_WITH_ROOM)


class CallChannel(NamedTuple):
    """The memory of one call, and of others of similar size. ``name``: of it in `iris.runtime.workspace`."""

    name: str
    layout: ChannelLayout


def call_channel(call: Call, max_programs: int | None, steps: int) -> CallChannel:
    """Of a sum in so many steps, by at most ``max_programs`` programs (None: two on a multiprocessor)."""
    # Bytes of what each rank gets: in all_reduce the whole sum, in reduce_scatter a W-th of it.
    nbytes = call.elements.number_in(call.output) * call.elements.dtype.itemsize
    layout = channel_layout(call.comm.size, steps, nbytes, max_programs or 2 * call.comm.num_sms)
    name = f"push of {layout.max_blocks} blocks of {layout.part} bytes in {steps} steps of all_reduce or reduce_scatter"
    return CallChannel(name, layout)


def has_room(call: Call, max_programs: int | None, steps: int) -> bool:
    """Whether there is memory for a call that `fits`. The first call of each channel decides for those that follow."""
    name, layout = call_channel(call, max_programs, steps)
    return admits(call, name, layout.nbytes)


def admits(call: Call, name: str, nbytes: int) -> bool:
    """Whether a call may have a channel of this name: of a sixteenth in any case, or while a quarter stays free."""
    workspace = call.comm.workspace
    if nbytes <= workspace.limit // SHARE_OF_WORKSPACE:
        return True
    return workspace.admits(name, call.line, nbytes, left=workspace.limit // ROOM_LEFT)
