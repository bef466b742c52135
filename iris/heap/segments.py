"""Symmetric memory of the library's own, shared by all groups of the same ranks: segments, of which groups take blocks.

As in torch's caching allocator, a segment is what the driver hands out, a mapping here, and a block is the part of it
that one user has. Blocks are zero when they are taken.

Where a block lies must be the same on all ranks, and threads of a rank may use two groups of the same ranks at once, in
another order on each. So the first rank decides for all, in its own order, and sends it to the others at the meeting in
which a group takes the block. A block that was given back is reused when every rank has given it back: until then a
peer may still have a kernel in it.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from iris.cuda_graphs.capture import outside_captures
from iris.heap import mapping
from iris.world import Group

# Bytes. The driver maps whole pages ("CUDA Driver API", cuMemGetAllocationGranularity). A segment is less than whole
# pages by as much as torch and `iris.heap.gpu` may add to it, so that what they ask the driver for is no page more.
PAGE, ADDED = 2 << 20, 64 << 10
# Bytes of a segment, at least. Memory of the host takes no room until it is used.
SMALLEST = {"cpu": 64 << 20, "cuda": 4 << 20}


class Block:
    """Bytes of a segment, the same ones on every rank.

    Attributes
    ----------
    mapping : Mapping
        The segment's.
    begin, size : int
        Where in the segment.
    memory : torch.Tensor
        This rank's bytes, uint8.
    """

    def __init__(self, segment: "_Segment", serial: int, begin: int, size: int, user: Any) -> None:
        """``user`` has ``name_in(block, offset)`` and ``progress_in(block)``. ``serial``: see `Segments._choose`."""
        self._segment, self.serial, self.begin, self.size = segment, serial, begin, size
        self.mapping = segment.mapping
        self.memory = self.mapping.buffer[begin : begin + size]
        self.user = weakref.ref(user)
        segment.blocks.add(self)

    def leave(self) -> None:
        """Its memory is not this user's any more, so errors do not name that."""
        self._segment.blocks.discard(self)


class _Segment:
    """One mapping, and the blocks of it that are in use."""

    def __init__(self, shared: mapping.Mapping) -> None:
        self.mapping = shared
        shared.owner = weakref.ref(self)
        self.blocks: weakref.WeakSet[Block] = weakref.WeakSet()

    def user_at(self, offset: int) -> tuple[Any, Block] | None:
        """Who has the block that is there."""
        for block in list(self.blocks):
            user = block.user()
            if user is not None and block.begin <= offset < block.begin + block.size:
                return user, block
        return None

    def name_at(self, offset: int) -> tuple[str, str]:
        """What uses the memory there, and which of its bytes that is, in words."""
        found = self.user_at(offset)
        if found is not None:
            user, block = found
            return user.name_in(block, offset - block.begin)
        return f"memory of the library at offset {offset:#x}", "which nothing uses"

    def describe_offset(self, offset: int) -> str:
        """The same for messages about waits."""
        return ", ".join(self.name_at(offset))

    def uses(self) -> list[str]:
        """What has blocks of it, each in words. Local; any thread; asks no device."""
        users = ((block, block.user()) for block in list(self.blocks))
        return [user.name_in(block, 0)[0] for block, user in users if user is not None]

    def progress(self) -> list[str]:
        """What its blocks' users have done, on this rank. Local; any thread; waits for no kernel."""
        users = ((block, block.user()) for block in sorted(self.blocks, key=lambda each: each.begin))
        return [line for block, user in users if user is not None for line in user.progress_in(block)]


class Segments:
    """The segments that groups of the same ranks share, and how their blocks are found: first fit, on the first rank.

    Made by `join`. It lives as long as one of these groups.

    Attributes
    ----------
    name : str
        That of the group that made it: unique, and the same on all ranks.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self.name, self._device = group.name, device
        self._smallest = SMALLEST[device.type] if group.size > 1 else 0
        self._segments: dict[int, _Segment] = {}
        # Serial numbers of the blocks that this rank has given back, and not all have.
        self._returned: set[int] = set()
        # What follows only the first rank uses. By segment: its bytes, and the end of what has ever been used of them.
        self._sizes: dict[int, int] = {}
        self._touched: dict[int, int] = {}
        # By serial number of a block: its segment, and the bytes of that where it begins and ends.
        self._taken: dict[int, tuple[int, int, int]] = {}
        self._segments_made = self._blocks_made = 0
        self._lock = threading.Lock()

    def take(self, group: Group, size: int, user: Any, what: str) -> Block:
        """``size`` bytes of every rank, zeros. Collective over ``group``; blocks the host; also in a graph's capture.

        Undone on all ranks if it fails on one; ``what`` it is for completes "could not …".
        """
        leads = group.rank == 0
        gathered = group.all_gather(sorted(self._returned), f"a meeting to {what}, about what was given back")
        returned = set.intersection(*map(set, gathered))
        with self._lock:
            self._returned -= returned
            choice = self._choose(returned, size) if leads else None
        serial, number, begin, new, is_zero = group.all_gather(choice, f"a meeting to {what}, about where")[0]
        with outside_captures(self._device):
            try:
                if new:
                    self._segments[number] = _Segment(mapping.create(group, new, self._device))
                block = Block(self._segments[number], serial, begin, size, user)
                group.agree(lambda: self._clear(block, is_zero), what)
            except BaseException:
                with self._lock:
                    self._taken.pop(serial, None)
                if new:
                    # `_sizes` has no entry for it yet, so no other thread has taken a block of it.
                    self._segments.pop(number, None)
                raise
        if leads and new:
            with self._lock:
                # Only now that all ranks have the segment may another thread take blocks of it.
                self._sizes[number] = new
        return block

    def give_back(self, blocks: Iterable[Block]) -> None:
        """Let groups of the same ranks have these blocks. Local. No kernel of this rank may use them any more."""
        for block in blocks:
            block.leave()
            with self._lock:
                self._returned.add(block.serial)

    def _choose(self, returned: set[int], size: int) -> tuple[int, int, int, int, bool]:
        """Free blocks that all ranks have returned, and find a new one of ``size`` bytes. On the first rank alone.

        Returns the block's serial number, which names it on all ranks, its segment's number, the byte of the segment at
        which it begins, the bytes of the segment if that is to be made (else 0), and whether the block is known to be
        zeros.
        """
        for serial in returned:
            self._taken.pop(serial, None)
        serial, self._blocks_made = self._blocks_made, self._blocks_made + 1
        for number, there in self._sizes.items():
            # The lowest gap between taken blocks that is large enough, or what comes after the last.
            begin = 0
            for _, first, end in sorted(each for each in self._taken.values() if each[0] == number):
                if first - begin >= size:
                    break
                begin = end
            if there - begin >= size:
                return self._note(serial, number, begin, size, 0)
        number, self._segments_made = self._segments_made, self._segments_made + 1
        # One rank alone has memory from torch's allocator (`iris.heap.gpu`), which knows no pages.
        new = size
        if self._smallest:
            pages = -(-(max(size, self._smallest - ADDED) + ADDED) // PAGE)
            new = pages * PAGE - ADDED
        return self._note(serial, number, 0, size, new)

    def _note(self, serial: int, number: int, begin: int, size: int, new: int) -> tuple[int, int, int, int, bool]:
        """Note that a block is taken. Returns what `_choose` does."""
        self._taken[serial] = (number, begin, begin + size)
        # Memory of the host is zero at first, that of a GPU is not.
        is_zero = self._device.type == "cpu" and begin >= self._touched.get(number, 0)
        self._touched[number] = max(begin + size, self._touched.get(number, 0))
        return serial, number, begin, new, is_zero

    def _clear(self, block: Block, is_zero: bool) -> None:
        """Fill the block with zeros. Blocks the host until that is done: peers may store to it right after."""
        if not is_zero:
            block.memory.zero_()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


# By their ranks and device: they live as long as a group holds them.
_shared: "weakref.WeakValueDictionary[tuple[tuple[int, ...], torch.device], Segments]" = weakref.WeakValueDictionary()


def join(group: Group, device: torch.device) -> Segments:
    """The segments of the group's ranks. Collective; blocks the host. A group of one rank has its own."""
    if group.size == 1:
        return Segments(group, device)
    key = (group.ranks, device)
    there = _shared.get(key)
    # A rank may have let go of segments that others still hold, whose garbage collectors run at other times.
    names = group.all_gather(there and there.name, "the first operation of a group (whose memory it shares)")
    if there is None or set(names) != {there.name}:
        there = _shared[key] = Segments(group, device)
    return there
