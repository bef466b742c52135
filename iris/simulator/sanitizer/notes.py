"""Takes down what this process does."""

import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import pickle
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch
import triton

from iris.errors import NotSymmetricError, NotTheCallerError, RankOutOfRangeError
from iris.heap import mapping, symmetric
from iris.simulator import grid
from iris.simulator.sanitizer import bounds, lines
from iris.simulator.sanitizer.deadlock import Liveness
from iris.simulator.sanitizer.events import (
    HOST,
    PRIVATE,
    READ,
    WRITE,
    Accessed,
    Allocated,
    Awaiting,
    Came,
    Fenced,
    Finished,
    Forked,
    Gathered,
    Heard,
    Joined,
    Known,
    Launched,
    Line,
    Met,
    Place,
    ProxyFenced,
    Spans,
    Synchronised,
    Told,
    Waiting,
    Wrong,
)
from iris.simulator.sanitizer.host import HostAccesses
from iris.simulator.sanitizer.waits import Wait, wait_of

# Memory of nobody's yet: no program means to write it, and a float of it is a large number.
UNDEFINED = 0xCB

# Larger tensors are not filled with it: memory that is not touched takes no room.
MOST_UNDEFINED = 1 << 26

# From this version on a release is one of the whole block; before it, of the thread that does it and what that has
# met in a barrier.
_GATHERS = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)

# The device functions that send and receive words which carry their own arrival (`iris.language.stamped`).
_MESSAGES = frozenset({"write_through", "reread", "inspect", "send_place", "receive_places"})


class Recorder:
    """The notes of one rank, in ``folder``, which all ranks share."""

    def __init__(self, folder: Path, rank: int, num_ranks: int) -> None:
        self.rank = rank
        # Launches of several threads of Python take turns, but what the host does in one goes on beside another's.
        self._one_thread = threading.RLock()
        self._file = open(folder / f"rank{rank}.events", "ab")
        self._places: dict[tuple, int] = {}
        self._mapped = -1
        self._starts = self._ends = np.empty(0, dtype=np.int64)
        self._spaces: list[tuple[str, int]] = []
        self._launches: dict[int, int] = {}
        self._launching: dict[int, threading.Thread] = {}
        self._callers: dict[int, tuple[CodeType, int] | None] = {}
        self._numbers = itertools.count(1)
        self._stored_since_meeting: set[tuple[int, int]] = set()
        self._polled: dict[tuple, tuple[int, bytes, Wait | None]] = {}
        self.bounds = bounds.Bounds()
        # The counters of all ranks: a file that is locked while one of them takes a number.
        self._lock = os.open(folder / "counter", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._lock, 16)
        self._counter = mmap.mmap(self._lock, 16)
        self.liveness = Liveness(folder, rank, num_ranks)
        self._host = HostAccesses(self)
        self._host.__enter__()
        for heap in symmetric.live_heaps():
            for block, _ in heap.allocations():
                address = heap.bases[heap.group.rank] + block.offset
                self.allocated(address, block.size, block.text, undefined=False)
        # Also in processes that multiprocessing has started, which run no function of atexit's.
        self._at_exit = Finalize(None, self.close, exitpriority=20)

    # Notes ----------------------------------------------------------------------------------------------------------

    def note(self, event: Any) -> None:
        """Written at once: a race makes one rank fail, and whoever has started the others ends them on the spot. If a
        release were lost with a rank, what others have acquired would look like a race, too.
        """
        with self._one_thread:
            pickle.dump(event, self._file, protocol=pickle.HIGHEST_PROTOCOL)
            self._file.flush()

    def close(self) -> None:
        if self._file.closed:
            return
        self._at_exit.cancel()
        self._host.__exit__(None, None, None)
        self.liveness.leave()
        self._file.close()
        self._counter.close()
        os.close(self._lock)

    @contextlib.contextmanager
    def numbered(self) -> Iterator[int]:
        """While this lasts no other rank does anything that orders ranks."""
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            (number,) = struct.unpack_from("q", self._counter)
            struct.pack_into("q", self._counter, 0, number + 1)
            yield number
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)

    def _changes(self) -> int:
        """How often a rank has written to what others may poll."""
        return struct.unpack_from("q", self._counter, 8)[0]

    # What the simulator does ----------------------------------------------------------------------------------------

    def launched(self, launch: Any) -> None:
        self.liveness.runs()
        self._launches[id(launch)] = next(self._numbers)
        self._launching[id(launch)] = threading.current_thread()
        self._callers[id(launch)] = lines.line_of(sys._getframe(1))
        self.note(Launched(self._launches[id(launch)]))

    def finished(self, launch: Any) -> None:
        self.note(Finished(self._launches.pop(id(launch))))
        del self._launching[id(launch)], self._callers[id(launch)]
        numbers = set(self._launches.values())
        self._stored_since_meeting = {who for who in self._stored_since_meeting if who[0] in numbers}
        self._polled = {key: seen for key, seen in self._polled.items() if key[0] in numbers}
        self.liveness.on_host()

    def is_over(self, repeats: int) -> bool:
        """All programs of a launch have polled in vain, each ``repeats`` times in a row: can anybody go on?"""
        busy = set(self._launching.values())
        # What another thread of Python will do, nobody knows.
        if any(not thread.daemon and thread not in busy for thread in threading.enumerate()):
            return self.liveness.over()
        return self.liveness.is_over(repeats)

    def reaches(self, pointers: np.ndarray, kind: int) -> None:
        """The program that runs is about to access memory. There is some, or it ends here, and not in a fault."""
        addresses = np.ravel(pointers).astype(np.int64)
        outside = addresses[self._space_of(addresses) < 0]
        if outside.size and not (bounds.is_mapped(int(outside.min())) and bounds.is_mapped(int(outside.max()))):
            verb = "reads" if kind == READ else "writes"
            raise NotSymmetricError(f"It {verb} address {int(outside.min()):#x}, where this process has no memory.")

    def accessed(
        self, pointers: np.ndarray, size: int, kind: int, values: np.ndarray | None = None, number: int | None = None
    ) -> None:
        """The program that runs has loaded or stored elements of ``size`` bytes."""
        who = self._who()
        if who is None or not pointers.size:
            return
        place = self._place()
        undefined = values is not None and _undefined(values)
        for spans in self.spans(pointers, size):
            self.bounds.check(self, spans, kind, place)
            self.note(Accessed(*who, place, spans, kind, undefined, False, number, grid.current().async_proxy))
        if kind == WRITE:
            self._stored_since_meeting.add(who)

    def synchronised(
        self, number: int, pointers: np.ndarray, values: np.ndarray, kind: int, sem: str, scope: str,
        message: bool = False, compares: bool = False, changed: bool = True, after: np.ndarray | None = None,
    ) -> None:  # fmt: skip
        """The program that runs has done this while it held ``number``. ``values``: what was there before.

        ``changed``: it is not what is there now; ``after``: what is.
        """
        who = self._who()
        if who is None or not pointers.size:
            return
        if scope == "cta" and grid.current().partitioned:
            scope = "gpu"  # what partitions are to each other is more than programs, which have the scopes
        releases, acquires = sem in ("release", "acq_rel") or message, sem in ("acquire", "acq_rel") or message
        word = values.size == 1 and values.dtype.kind in "iu" and not message
        wait = wait_of(sys._getframe(1)) if word and acquires and kind == READ else None
        place = self._place()
        if kind == READ:
            # Who polls again for the same when no flag has been written since learns nothing.
            key, found = (*who, place, sem, scope, pointers.tobytes()), (self._changes(), values.tobytes(), wait)
            if self._polled.get(key) == found:
                return
            self._polled[key] = found
        elif changed:
            struct.pack_into("q", self._counter, 8, self._changes() + 1)
            self.liveness.changed()
        gathered = message or _GATHERS or who not in self._stored_since_meeting
        looks = acquires or not releases or compares
        undefined = kind != WRITE and _undefined(values)
        before = int(values.flat[0]) if word else None
        after = int(np.ravel(values if after is None else after)[0]) if word else None
        for spans in self.spans(pointers, values.itemsize):
            self.bounds.check(self, spans, kind, place)
            self.note(
                Synchronised(
                    number, *who, place, spans, kind, releases, acquires, scope, message, gathered, undefined, looks,
                    before, after, wait, grid.current().async_proxy,
                )
            )  # fmt: skip

    def failed(self, error: BaseException) -> None:
        """A program has raised this: a mistake of the kinds that have a name, or something else."""
        kind = next((kind for type, kind in _KINDS.items() if isinstance(error, type)), None)
        if kind is not None:
            self.wrong(kind, f"stops: {error}", self._place_of(error) if error.__traceback__ else self._place())

    def waits(self, launch: Any, wait: Any) -> None:
        """These programs wait, and nobody can go on."""
        caller = self._callers.get(id(launch)) if wait.place[0].startswith(lines.IRIS) else None
        place = Place(launch.name, Line(*wait.place), caller and lines.known(caller))
        self.note(Waiting(launch.name, wait.programs, wait.what, place, wait.flag or ""))

    def out_of_step(self, text: str) -> None:
        """The host waits for other ranks, for what ``text`` says, and they wait for something else."""
        place = Place(None, lines.known(lines.line_of(sys._getframe(1))))
        self.note(Waiting(None, "the host", f"waits in {text}", place, ""))

    def fenced(self) -> None:
        """The program that runs orders what it did before what it will do, for everyone."""
        who = self._who()
        if who is not None:
            self.note(Fenced(*who))

    def proxy_fenced(self) -> None:
        """The program that runs orders what comes before this before the copies by TMA that it will issue."""
        who = self._who()
        if who is not None:
            self.note(ProxyFenced(*who))

    def gathered(self) -> None:
        """The threads of the program that runs meet."""
        who = self._who()
        if who in self._stored_since_meeting:
            self._stored_since_meeting.discard(who)
            self.note(Gathered(*who))

    def forked(self, parent: Any, partitions: int) -> None:
        """A program goes on beside so many partitions of it."""
        self._of_partitions(Forked, parent, partitions)

    def joined(self, parent: Any, partitions: int) -> None:
        """They are done."""
        self._of_partitions(Joined, parent, partitions)

    def _of_partitions(self, event: type, parent: Any, partitions: int) -> None:
        who = self._number_of(parent, 0)
        if who is not None:
            numbers = (self._number_of(parent, partition)[1] for partition in range(1, partitions + 1))
            self.note(event(*who, tuple(numbers)))

    def told(self, address: int, ends: bool) -> None:
        """A partition signals the mbarrier there, or a copy does that it has issued; whether that ends its phase."""
        who = self._who()
        if who is not None:
            self.note(Told(*who, self._of_program(address), ends))

    def heard(self, address: int) -> None:
        """A partition has waited for the mbarrier there."""
        who = self._who()
        if who is not None:
            self.note(Heard(*who, self._of_program(address)))

    @staticmethod
    def _of_program(address: int) -> tuple:
        return grid.current().index, address

    def is_message(self) -> bool:
        """Whether what accesses memory now is the library's function for words that carry their own arrival."""
        frame = sys._getframe(2)
        while frame is not None and lines.owner(frame.f_code) == lines.OTHER:
            if frame.f_code.co_name in _MESSAGES and frame.f_code.co_filename.startswith(lines.LANGUAGE):
                return True
            frame = frame.f_back
        return False

    def from_here(self, operation: Callable[[], None]) -> Callable[[], None]:
        place, who = self._place(), self._who()

        def carry_out() -> None:
            task = grid.current()
            before, task.issued_at = task.issued_at, (place, who)
            try:
                operation()
            finally:
                task.issued_at = before

        return carry_out

    # What the host does ---------------------------------------------------------------------------------------------

    def host_accessed(self, addresses: np.ndarray, size: int, element: int, kind: int, blank: bool = False) -> None:
        """With torch, ``size`` bytes at each of ``addresses``: elements of ``element`` bytes, or 0 if their values
        are not used. Memory that is no mapping's is this rank's alone.
        """
        place = self._place()
        for spans in self.spans(addresses, size):
            if spans.space[0] != PRIVATE:
                self.bounds.check(self, spans, kind, place)
                undefined = element and any(_undefined(_memory(address, size, element)) for address in addresses)
                self.note(Accessed(0, HOST, place, spans, kind, bool(undefined), blank))
        if kind != READ:
            self.liveness.changed()

    def came(self, key: tuple) -> None:
        """The host comes to a meeting, or sends a message, for which it does not wait here."""
        self.note(Came(key, self.liveness.over()))

    @contextlib.contextmanager
    def meeting(self, key: tuple, ranks: tuple[int, ...], text: str) -> Iterator[None]:
        """While this lasts the host is in a meeting of ``ranks``, for what ``text`` says."""
        self.came(key)
        with self.awaiting(key, ranks, text):
            yield
        self.met(key, ranks)

    def met(self, key: tuple, ranks: tuple[int, ...]) -> None:
        """The host knows that ``ranks`` have come, or sent, and so what they did before."""
        self.note(Met(key, ranks))

    @contextlib.contextmanager
    def awaiting(self, key: tuple, ranks: tuple[int, ...], text: str) -> Iterator[None]:
        """While this lasts the host waits until ``ranks`` have come, or sent; any, if there are none."""
        self.note(Awaiting(key, ranks, self._place(), text, self.liveness.over()))
        self.liveness.meets()
        try:
            yield
        finally:
            self.liveness.on_host()

    def allocated(self, address: int, size: int, text: str, undefined: bool) -> None:
        if not size:
            return
        undefined = undefined and size <= MOST_UNDEFINED
        if undefined:
            ctypes.memset(address, UNDEFINED, size)
        (spans,) = self.spans(np.array([address], dtype=np.int64), size)
        self.bounds.learn(spans)
        self.note(Allocated(spans, text, self._place(), undefined))

    def given(self, name: str, tensor: torch.Tensor) -> None:
        """A launch begins that has this argument. Of memory that is this rank's alone, that is all that one knows."""
        if tensor.numel() and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            (spans,) = self.spans(np.array([storage.data_ptr()], dtype=np.int64), storage.nbytes())
            if spans.space[0] == PRIVATE:
                text = f"{symmetric.tensor_text(tensor.shape, tensor.dtype)}, the argument {name!r},"
                self.note(Allocated(spans, text, self._place(), False))

    def wrong(self, kind: str, text: str, place: int | None = None) -> None:
        self.note(Wrong(kind, text, place))

    # Where ----------------------------------------------------------------------------------------------------------

    def spans(self, pointers: np.ndarray, size: int) -> list[Spans]:
        """The bytes of elements of ``size``, by the spaces that they are in."""
        addresses = np.ravel(pointers).astype(np.int64)
        result = []
        with self._one_thread:
            index = self._space_of(addresses)
            for space in np.unique(index):
                there = addresses[index == space]
                origin = 0 if space < 0 else int(self._starts[space])
                name = (PRIVATE, self.rank) if space < 0 else self._spaces[space]
                result.append(Spans(name, *_merged(there - origin, size)))
        return result

    def _space_of(self, addresses: np.ndarray) -> np.ndarray:
        with self._one_thread:
            if mapping.count_made() != self._mapped:
                self._see_mappings()
            if not len(self._starts):
                return np.full(addresses.shape, -1)
            index = np.searchsorted(self._starts, addresses, side="right") - 1
            return np.where((index >= 0) & (addresses < self._ends[index]), index, -1)

    def _see_mappings(self) -> None:
        self._mapped = mapping.count_made()
        found = sorted(
            (base, base + each.size, (each.name, rank))
            for each in mapping.mappings()
            for rank, base in zip(each.ranks, each.bases, strict=True)
        )
        self._starts = np.array([start for start, _, _ in found], dtype=np.int64)
        self._ends = np.array([end for _, end, _ in found], dtype=np.int64)
        self._spaces = [space for _, _, space in found]

    def _who(self) -> tuple[int, int] | None:
        if not grid.in_kernel():
            return None
        task = grid.current()
        if task.issued_at is not None:
            return task.issued_at[1]
        return self._number_of(task, task.partition or 0)

    def _number_of(self, task: Any, partition: int) -> tuple[int, int] | None:
        """That of its launch and its own, which is the program's for the first partition."""
        number = self._launches.get(id(task.launch))
        if number is None:  # of a launch that began before anybody wanted to know
            return None
        (x, y, z), (columns, rows, layers) = task.index, task.launch.dims
        return number, 1 + ((partition * layers + z) * rows + y) * columns + x

    def _place(self) -> int:
        """The number of the user's line that is being done; in the library's own kernels, of the kernel's.

        Of what a GPU does beside the program, the line that has asked for it.
        """
        if grid.in_kernel() and (issued_at := grid.current().issued_at) is not None:
            return issued_at[0]
        return self._number(lines.line_of(sys._getframe(2)))

    def _place_of(self, error: BaseException) -> int:
        """The same, of what has raised ``error``."""
        return self._number(lines.line_of_error(error))

    def _number(self, line: tuple[CodeType, int] | None) -> int:
        kernel, caller = None, None
        if grid.in_kernel():
            kernel = grid.current().launch.name
            if line is not None and lines.owner(line[0]) == lines.LIBRARY:
                caller = self._callers.get(id(grid.current().launch))
        key = (kernel, line, caller)
        with self._one_thread:
            if key not in self._places:
                self._places[key] = len(self._places)
                self.note(Known(self._places[key], Place(kernel, lines.known(line), caller and lines.known(caller))))
            return self._places[key]


_KINDS = {RankOutOfRangeError: "rank", NotSymmetricError: "bounds", NotTheCallerError: "rank"}


def _merged(addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Where the bytes of elements at ``addresses`` begin and end, neighbours as one."""
    steps = np.diff(addresses)
    if (steps <= 0).any():
        addresses = np.unique(addresses)
        steps = np.diff(addresses)
    cuts = np.flatnonzero(steps > size)
    return addresses[np.append(0, cuts + 1)], addresses[np.append(cuts, -1)] + size


def _memory(address: int, size: int, element: int) -> np.ndarray:
    """The bytes there, an element a row."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(int(address)), dtype=np.dtype(("V", element)))


def _undefined(values: np.ndarray) -> bool:
    """Whether some of ``values``, four bytes in a row or all that there are, are as `Recorder.allocated` left them."""
    found = np.ascontiguousarray(values).view(np.uint8).reshape(-1, values.itemsize)
    whole = (found == UNDEFINED).all(axis=1)
    row = min(max(1, 4 // values.itemsize), whole.size)
    return bool(np.lib.stride_tricks.sliding_window_view(whole, row).all(axis=1).any())
