"""Takes down what this process does: each access, and what orders accesses, as the simulator and the host report it.

Each becomes an event of whoever did it (a program, one of its partitions or the host), with the user's line that it was
done in and the bytes of a space that it was done to; `Notes` writes the events.
"""

import itertools
import sys
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import triton

from iris.errors import NotSymmetricError, NotTheCallerError, RankOutOfRangeError
from iris.heap import symmetric
from iris.observer import READ, WRITE
from iris.sanitizer import bounds, uninitialised, waits
from iris.sanitizer.calls import Call
from iris.sanitizer.deadlock import Liveness
from iris.sanitizer.events import (
    Accessed,
    Awaited,
    CtaSynced,
    Diagnostic,
    Fenced,
    Finished,
    Forked,
    Issued,
    Joined,
    Launched,
    MbarrierArrive,
    MbarrierWait,
    Place,
    ProxyFenced,
    SharedRace,
    Synchronised,
    Wait,
    Waiting,
)
from iris.sanitizer.host import HostAccesses
from iris.sanitizer.host_recorder import HostRecorder
from iris.sanitizer.notes import Notes
from iris.sanitizer.polls import HostPolls
from iris.sanitizer.spaces import Spaces
from iris.sanitizer.threads import Threads
from iris.simulator import lines, tasks
from iris.simulator.folders import IRIS
from iris.simulator.lines import Line

# From this version on a release is one of the whole block; before it, of the thread that does it and what that has
# met in a barrier.
_RELEASES_WHOLE_CTA = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


class Recorder(HostRecorder):
    """Of one rank. Its notes are in ``folder``, which all ranks share."""

    def __init__(self, folder: Path, rank: int, num_ranks: int) -> None:
        self.notes = Notes(folder, rank)
        self._spaces = Spaces(rank)
        self._launches: dict[int, int] = {}
        self._launching: dict[int, tuple[threading.Thread, int]] = {}
        self._callers: dict[int, tuple[CodeType, int] | None] = {}
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._stored_since_cta_sync: set[tuple[int, int]] = set()
        self._polled: dict[tuple, tuple[int, bytes, Wait | None]] = {}
        # What loops of a launch have looked at that is in no tensor.
        self._strays: set[tuple[int, int]] = set()
        self.bounds = bounds.Bounds()
        self.liveness = Liveness(folder, rank, num_ranks)
        self.threads = Threads(self.notes, lambda: self._host.in_thread(), self.settled)
        self._polls = HostPolls(self.liveness, self.notes, self.threads)
        self._host = HostAccesses(self)
        self._host.__enter__()
        for heap in symmetric.live_heaps():
            for block, _ in heap.allocations():
                address = heap.bases[heap.group.rank] + block.offset
                self.allocated(address, block.size, block.text, undefined=False)
        # Also in processes that multiprocessing has started, which run no function of atexit's.
        self._at_exit = Finalize(None, self.close, exitpriority=20)

    def close(self) -> None:
        if self.notes.closed:
            return
        self._at_exit.cancel()
        self.threads.close()
        self._host.__exit__(None, None, None)
        self.liveness.leave()
        self.notes.close()

    # What the simulator does ----------------------------------------------------------------------------------------

    def launched(self, launch: Any) -> None:
        self.liveness.runs()
        self._launches[id(launch)] = next(self._numbers)
        self._launching[id(launch)] = threading.current_thread(), self.threads.current()
        self._callers[id(launch)] = lines.user_line(sys._getframe(1))
        if (call := self.threads.call()) is not None:
            self._calls[id(launch)] = call
        self.notes.add(Launched(self._launches[id(launch)], launch.dims, self.threads.current()))

    def finished(self, launch: Any) -> None:
        _, thread = self._launching.pop(id(launch))
        self.notes.add(Finished(self._launches.pop(id(launch)), thread))
        del self._callers[id(launch)]
        self._calls.pop(id(launch), None)
        numbers = set(self._launches.values())
        self._stored_since_cta_sync = {who for who in self._stored_since_cta_sync if who[0] in numbers}
        self._polled = {key: seen for key, seen in self._polled.items() if key[0] in numbers}
        self._strays = {stray for stray in self._strays if stray[0] in numbers}
        self.liveness.on_host()

    def is_deadlocked(self, repeats: int) -> bool:
        """All programs of a launch have polled in vain, each ``repeats`` times in a row: can anybody go on?"""
        # What another thread of Python will do, nobody knows.
        if self.threads.may_help({thread for thread, _ in self._launching.values()}):
            return self.liveness.deadlock_found()
        return self.liveness.is_deadlocked(repeats)

    def check_mapped(self, pointers: np.ndarray, kind: int) -> None:
        """The program that runs is about to access memory. There is some, or it ends here, and not in a fault."""
        outside = self._spaces.private(pointers)
        if outside.size and not (bounds.is_mapped(int(outside.min())) and bounds.is_mapped(int(outside.max()))):
            verb = "reads" if kind == READ else "writes"
            raise NotSymmetricError(f"It {verb} address {int(outside.min()):#x}, where this process has no memory.")

    def spins_on(self, pointers: np.ndarray) -> bool:
        """Whether the program that runs spins on what it has loaded here. That there is a tensor is looked at, too."""
        who, task = self._who(), tasks.current()
        if who is None or not task.spinning or task.library_loads:
            return False
        private = self._spaces.private(pointers).tolist()
        # To look for tensors takes a while.
        new = [address for address in private if (who[0], address) not in self._strays]
        outside = self.bounds.outside_of_tensors(new)
        if outside:
            self.diagnose("bounds", f"reads address {outside[0]:#x}, where no tensor is", self._place())
            self._strays |= {(who[0], address) for address in outside}
        return True

    def accessed(
        self, pointers: np.ndarray, size: int, kind: int, values: np.ndarray | None = None, number: int | None = None
    ) -> None:
        """The program that runs has loaded or stored elements of ``size`` bytes."""
        who = self._who()
        if who is None or not pointers.size:
            return
        place = self._place()
        undefined = values is not None and uninitialised.seen_in(values)
        for spans in self._spaces.spans(pointers, size):
            self.bounds.check(self.diagnose, spans, kind, place)
            self.notes.add(Accessed(*who, place, spans, kind, undefined, False, number, tasks.current().async_proxy))
        if kind == WRITE:
            self._stored_since_cta_sync.add(who)

    def synchronised(
        self,
        number: int,
        pointers: np.ndarray,
        values: np.ndarray,
        kind: int,
        sem: str,
        scope: str,
        message: bool = False,
        compares: bool = False,
        changed: bool = True,
        after: np.ndarray | None = None,
        adds: bool = False,
    ) -> None:
        """The program that runs has done this while it held ``number``. ``values``: what was there before.

        ``changed``: it is not what is there now; ``after``: what is; ``adds``: the difference depends on no value.
        """
        who = self._who()
        if who is None or not pointers.size:
            return
        if scope == "cta" and tasks.current().partitioned:
            scope = "gpu"  # what partitions are to each other is more than programs, which have the scopes
        releases, acquires = sem in ("release", "acq_rel") or message, sem in ("acquire", "acq_rel") or message
        word = values.size == 1 and values.dtype.kind in "iu" and not message
        # Of a relaxed look, too: a fence may follow it.
        wait = waits.wait_of_program() if word and kind == READ else None
        place = self._place()
        if kind == READ:
            # Who polls again for the same when no flag has been written since learns nothing.
            key, found = (*who, place, sem, scope, pointers.tobytes()), (self.notes.changes(), values.tobytes(), wait)
            if self._polled.get(key) == found:
                return
            self._polled[key] = found
        elif changed:
            self.notes.count_change()
            self.liveness.changed()
        whole_cta = message or _RELEASES_WHOLE_CTA or who not in self._stored_since_cta_sync
        dropped = kind != READ and not compares and tasks.current().dropped
        looks = acquires or not releases or compares
        undefined = kind != WRITE and uninitialised.seen_in(values)
        before = int(values.flat[0]) if word else None
        held = int(np.ravel(values if after is None else after)[0]) if word else None
        order = (releases, acquires, scope, message, whole_cta)
        look = (undefined, looks, before, held, wait)
        write = (tasks.current().async_proxy, adds, dropped)
        for spans in self._spaces.spans(pointers, values.itemsize):
            self.bounds.check(self.diagnose, spans, kind, place)
            event = Synchronised(number, who[0], who[1], place, spans, kind, *order, *look, *write)
            self.notes.add(event)

    def failed(self, error: BaseException) -> None:
        """A program has raised this: a mistake of the kinds that have a name, or something else."""
        kinds = (kind for type, kind in _KINDS.items() if isinstance(error, type))
        kind = getattr(error, "iris_finding", None) or next(kinds, None)
        if kind is not None:
            raised = self._number(*lines.lines_of_error(error)) if error.__traceback__ else self._place()
            self.diagnose(kind, f"stops: {error}", raised)

    def waits(self, launch: Any, wait: Any) -> None:
        """These programs wait, and nobody can go on."""
        caller = wait.caller and Line(*wait.caller)
        if wait.place[0].startswith(IRIS):
            called = self._callers.get(id(launch))
            caller = called and lines.as_line(called)
        place = Place(launch.name, Line(*wait.place), caller)
        outside = self._is_outside(wait, place)
        self.notes.add(Waiting(launch.name, wait.programs, wait.what, place, wait.flag or "", outside))

    def _is_outside(self, wait: Any, place: Place) -> bool:
        """Whether these programs wait for what is in no tensor. If that is in no heap, nobody may have noted it yet."""
        addresses = np.array(wait.addresses, dtype=np.int64)
        unknown = self.bounds.outside_of_tensors(self._spaces.private(addresses).tolist())
        if unknown:
            text = f"reads address {unknown[0]:#x}, where no tensor is"
            self.notes.add(Diagnostic("bounds", text, self.notes.number_of(place), wait.programs))
        return bool(unknown) or any(map(self.bounds.is_outside, self._spaces.spans(addresses, 1)))

    def out_of_step(self, text: str) -> None:
        """The host waits for other ranks, for what ``text`` says, and they wait for something else."""
        place = Place(None, lines.as_line(lines.user_line(sys._getframe(1))))
        self.notes.add(Waiting(None, "the host", f"waits in {text}", place, ""))

    def fenced(self) -> None:
        """The program that runs orders what it did before what it will do, for everyone."""
        who = self._who()
        if who is not None:
            self.notes.add(Fenced(*who))

    def proxy_fenced(self) -> None:
        """The program that runs orders what comes before this before the copies by TMA that it will issue."""
        who = self._who()
        if who is not None:
            self.notes.add(ProxyFenced(*who))

    def cta_synced(self) -> None:
        """The threads of the program that runs meet."""
        who = self._who()
        if who in self._stored_since_cta_sync:
            self._stored_since_cta_sync.discard(who)
            self.notes.add(CtaSynced(*who))

    def forked(self, parent: Any, partitions: int) -> None:
        """A program goes on beside so many partitions of it."""
        self._of_partitions(Forked, parent, partitions)

    def joined(self, parent: Any, partitions: int) -> None:
        """They are done."""
        self._of_partitions(Joined, parent, partitions)

    def _of_partitions(self, event: type, parent: Any, partitions: int) -> None:
        who = self._number_of(parent, 0)
        if who is not None:
            numbers = (self._number_of(parent, partition) for partition in range(1, partitions + 1))
            self.notes.add(event(*who, tuple(number for _, number in filter(None, numbers))))

    def mbarrier_arrived(self, address: int, ends: bool) -> None:
        """The program that runs, or a copy of its, arrives at the mbarrier there. ``ends``: that ends a phase.

        Also of a word of shared memory that may be a flag: whoever loads it next has waited for what it releases.
        """
        who = self._who()
        if who is not None:
            self.notes.add(MbarrierArrive(*who, self._of_program(address), ends))

    def mbarrier_waited(self, address: int) -> None:
        """The program that runs has waited for the mbarrier there."""
        who = self._who()
        if who is not None:
            self.notes.add(MbarrierWait(*who, self._of_program(address)))

    @staticmethod
    def _of_program(address: int) -> tuple:
        return tasks.current().index, address

    def from_here(self, operation: Callable[[], None], mbarrier: int | None) -> Callable[[], None]:
        """See `iris.observer.from_here`."""
        place, who = self._place(), self._who()
        if who is None:
            return operation
        launch, program = who
        # Programs have numbers above 0.
        beside = launch, -next(self._numbers)
        self.notes.add(Issued(launch, program, beside[1], mbarrier))

        def carry_out() -> None:
            task = tasks.current()
            before, task.operation = task.operation, (place, beside)
            try:
                operation()
            finally:
                task.operation = before
            by = self._who()
            if mbarrier is None and by is not None:
                self.notes.add(Awaited(*by, beside[1]))

        return carry_out

    def place(self) -> int:
        """Where the program that runs is now."""
        return self._place()

    def shared_race(
        self, kind: str, first: tuple[int | None, str, int], second: tuple[int | None, str, int], missing: str
    ) -> None:
        """Two accesses to shared memory, each by a partition, if there are several, with its verb and place."""
        self.notes.add(SharedRace(kind, tasks.current().text, first, second, missing))

    # What is wrong at once, who, and where -------------------------------------------------------------------------

    def diagnose(self, kind: str, text: str, place: int | None = None) -> None:
        """The program that runs, or the host, has made this mistake."""
        self.notes.add(Diagnostic(kind, text, place, tasks.current().text if tasks.in_kernel() else ""))

    def asymmetric(self, text: str, calls: dict[int, tuple[str, int, str]]) -> None:
        """The ranks allocate differently. ``calls``: file, line and function of the first that differ, by rank."""
        self.notes.add(
            Diagnostic("asymmetric", text, self._place(), "", tuple((r, Line(*c)) for r, c in calls.items()))
        )

    def _who(self) -> tuple[int, int] | None:
        if not tasks.in_kernel():
            return None
        task = tasks.current()
        if task.operation is not None:
            return task.operation[1]
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

        Of what goes on beside the program, on a GPU or as a call, the line that has asked for it.
        """
        call = self._calls.get(id(tasks.current().launch)) if tasks.in_kernel() else self.threads.call()
        if call is not None and call.place is not None:
            return call.place
        if tasks.in_kernel() and (issued_at := tasks.current().operation) is not None:
            return issued_at[0]
        frame = sys._getframe(2)
        return self._number(lines.user_line(frame), lines.kernel_line(frame) if tasks.in_kernel() else None)

    def _number(self, line: tuple[CodeType, int] | None, outermost: tuple[CodeType, int] | None) -> int:
        kernel, caller = None, None
        if tasks.in_kernel():
            kernel = tasks.current().launch.name
            if line is not None and lines.owner(line[0]) == lines.LIBRARY:
                caller = self._callers.get(id(tasks.current().launch))
            elif outermost is not None and line is not None and outermost[0] is not line[0]:
                caller = outermost
        return self.notes.number_of(Place(kernel, lines.as_line(line), caller and lines.as_line(caller)))


_KINDS = {RankOutOfRangeError: "rank", NotSymmetricError: "bounds", NotTheCallerError: "rank"}
