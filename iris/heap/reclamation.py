"""Reclamation: how the memory of tensors that have died comes back, on all ranks of a heap alike."""

import gc
import time
from array import array
from collections import deque
from typing import NamedTuple

import torch

from iris.errors import HeapOutOfMemoryError, IrisTimeoutError, names, readable
from iris.heap.allocator import Allocator
from iris.heap.history import Call, History, Summary, tensor_text
from iris.heap.lifetime import Lifetimes
from iris.world import Group

# Blocks that have been taken back and whose names are still known.
REMEMBERED = 1000


class Block(NamedTuple):
    """A block in use: what was asked for, and in debug mode by which call."""

    offset: int
    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    call: Call | None

    @property
    def text(self) -> str:
        return tensor_text(self.shape, self.dtype)

    @property
    def origin(self) -> str:
        """The text, and in debug mode by which call it was made."""
        return self.text if self.call is None else f"{self.text} made by {self.call.function}() at {self.call.place}"


class Report(NamedTuple):
    """What a rank brings to a meeting of the heap.

    ``ready``: the numbers of the blocks that it no longer uses since the last meeting, uint64 each. ``waiting``: how
    many dead blocks unfinished work, or a capture, on its streams may still use. ``late``: whether its time limit has
    passed.
    """

    summary: Summary
    ready: bytes
    waiting: int
    late: bool


class Reclamation:
    """Takes back the blocks that no rank of a heap uses any more.

    Attributes
    ----------
    reclaimed : deque
        The last blocks that were taken back, for messages about what was there.
    done : dict
        The blocks that some but not all ranks no longer use, by number: a bit for each of these ranks.
    """

    def __init__(
        self,
        group: Group,
        size: int,
        blocks: dict[int, Block],
        allocator: Allocator,
        lifetimes: Lifetimes,
        history: History,
    ) -> None:
        self._group, self._size, self._blocks = group, size, blocks
        self._allocator, self._lifetimes, self._history = allocator, lifetimes, history
        self.reclaimed: deque[Block] = deque(maxlen=REMEMBERED)
        self.done: dict[int, int] = {}

    def make_room(self, size: int) -> None:
        """Return once ``size`` bytes fit. Collective: a full heap is full on all ranks."""
        if self._lifetimes.capturing():
            raise HeapOutOfMemoryError(
                f"{self._shortage(size)} Memory cannot be taken back during the capture of a CUDA graph: "
                "allocate before the capture, or make the heap larger."
            )
        point = f"an allocation of {readable(size)} for which the heap is full"
        deadline = time.monotonic() + self._group.timeout
        self.reclaim(point)
        if not self._allocator.fits(size):
            gc.collect()
        pause = 1e-4
        while not self._allocator.fits(size):
            reports = self.reclaim(point, late=time.monotonic() > deadline)
            # Every rank decides from the same reports, so all leave this loop together.
            if self._allocator.fits(size):
                break
            holders = [rank for rank, report in zip(self._group.ranks, reports, strict=True) if report.waiting]
            if not holders:
                raise HeapOutOfMemoryError(
                    f"{self._shortage(size)} Free tensors, or make the heap larger: iris.iris(heap_size=…)."
                )
            if any(report.late for report in reports):
                raise IrisTimeoutError(
                    f"{self._shortage(size)} Kernels on {names(holders)}, or captures of CUDA graphs by other threads, "
                    f"have kept freed memory in use for {self._group.timeout:g} s."
                )
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)

    def reclaim(self, point: str, late: bool = False) -> list[Report]:
        """Take back what no rank uses any more. Collective; what each rank brought is returned."""
        ready = array("Q", self._lifetimes.collect())
        report = Report(self._history.summary(point), ready.tobytes(), self._lifetimes.waiting(), late)
        brought = self._group.all_gather(report, "a barrier or allocation of the context")
        reports = [Report(Summary(*summary), *rest) for summary, *rest in brought]
        self._history.compare(self._group, [each.summary for each in reports])
        everyone = (1 << self._group.size) - 1
        for rank, each in enumerate(reports):
            # In order of age, so that neighbours join as they come.
            for number in sorted(array("Q", each.ready)):
                done = self.done.get(number, 0) | 1 << rank
                if done == everyone:
                    self.done.pop(number, None)
                    block = self._blocks.pop(number)
                    self._allocator.free(block.offset)
                    self.reclaimed.append(block)
                else:
                    self.done[number] = done
        return reports

    def _shortage(self, size: int) -> str:
        stats = self._allocator.stats()
        text = (
            f"Heap out of memory: {readable(size)} asked for, {readable(self._allocator.capacity - stats.reserved)} "
            f"free, the largest free block is {readable(stats.largest_free_block)}, of a heap of "
            f"{readable(self._size)}."
        )
        if self.done:
            held = sum(self._blocks[number].size for number in self.done)
            holders = [
                rank
                for bit, rank in enumerate(self._group.ranks)
                if any(not done >> bit & 1 for done in self.done.values())
            ]
            verb = "holds" if len(holders) == 1 else "hold"
            text += f" {readable(held)} are dead on other ranks, and {names(holders)} still {verb} on to them."
        if self._lifetimes.pinned:
            pinned = sum(self._blocks[number].size for number in self._lifetimes.pinned)
            text += f" {readable(pinned)} are kept for CUDA graphs."
        return text
