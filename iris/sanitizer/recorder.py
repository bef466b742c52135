"""Records what this process does: each access, and what orders accesses. It is what `iris.observer.recorder` is.

The simulator calls the methods here; those for the host are in `HostRecorder`. Each call becomes an event
(`iris.sanitizer.events`), which `EventLog` writes. An event says who did it (a program, one of its partitions, or the
host), in which line of the user's, and to which bytes of which space (`iris.sanitizer.spaces`).
"""

import itertools
import sys
import threading
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import numpy as np
import triton

from iris.errors import NotSymmetricError, NotTheCallerError, RankOutOfRangeError
from iris.heap import symmetric
from iris.observer import READ, WRITE
from iris.sanitizer import bounds, events, uninitialised, waits
from iris.sanitizer.calls import Call
from iris.sanitizer.deadlock import Liveness
from iris.sanitizer.event_log import EventLog
from iris.sanitizer.host import HostAccesses
from iris.sanitizer.host_recorder import HostRecorder
from iris.sanitizer.polls import HostPolls
from iris.sanitizer.spaces import Spaces
from iris.sanitizer.threads import Threads
from iris.simulator import lines, tasks
from iris.simulator.folders import IRIS
from iris.simulator.lines import Line

# Whether a release covers what all threads of the block did before, as from Triton 3.9 on. In older ones it covers what
# its own thread did, and what the others did before the block's last barrier.
_RELEASES_WHOLE_CTA = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)


class Recorder(HostRecorder):
    """Records what one rank does, in ``folder``, which all ranks share."""

    def __init__(self, folder: Path, rank: int, num_ranks: int) -> None:
        self.log = EventLog(folder, rank)
        self._spaces = Spaces(rank)
        # Launches that run, by their id: the number; the host's thread that launches, with its number; the line; and
        # the asynchronous call that launches, if one does.
        self._launches: dict[int, int] = {}
        self._launching: dict[int, tuple[threading.Thread, int]] = {}
        self._callers: dict[int, lines.CodeLine | None] = {}
        self._calls: dict[int, Call] = {}
        # Numbers of launches and asynchronous operations.
        self._numbers = itertools.count(1)
        # Programs that have stored something since their threads last met in a barrier.
        self._stored_since_cta_sync: set[tuple[int, int]] = set()
        # What a program has found by a poll, so that polls that find the same again need no event.
        self._polled: dict[tuple, tuple[int, bytes, events.Wait | None]] = {}
        # Addresses, each with its launch, at which loops poll but no tensor is. They have been reported.
        self._strays: set[tuple[int, int]] = set()
        self.bounds = bounds.Bounds()
        self.liveness = Liveness(folder, rank, num_ranks)
        self.threads = Threads(self.log, lambda: self._host.in_thread(), self.settled)
        self._polls = HostPolls(self.liveness, self.log, self.threads)
        self._host = HostAccesses(self)
        self._host.__enter__()
        for heap in symmetric.live_heaps():
            for block, _ in heap.allocations():
                address = heap.bases[heap.group.rank] + block.offset
                self.allocated(address, block.size, block.text, undefined=False)
        # Not by atexit, whose functions do not run in processes that multiprocessing has started.
        self._at_exit = Finalize(None, self.close, exitpriority=20)

    def close(self) -> None:
        """Record no more."""
        if self.log.closed:
            return
        self._at_exit.cancel()
        self.threads.close()
        self._host.__exit__(None, None, None)
        self.liveness.leave()
        self.log.close()

    # What the simulator does ----------------------------------------------------------------------------------------

    def launched(self, launch: Any) -> None:
        """A launch begins. ``launch``: an `iris.simulator.grid.Launch`."""
        self.liveness.runs()
        self._launches[id(launch)] = next(self._numbers)
        self._launching[id(launch)] = threading.current_thread(), self.threads.current()
        self._callers[id(launch)] = lines.user_line(sys._getframe(1))
        if (call := self.threads.call()) is not None:
            self._calls[id(launch)] = call
        self.log.add(events.Launched(self._launches[id(launch)], launch.dims, self.threads.current()))

    def finished(self, launch: Any) -> None:
        """It has ended: all of its programs have."""
        _, thread = self._launching.pop(id(launch))
        self.log.add(events.Finished(self._launches.pop(id(launch)), thread))
        del self._callers[id(launch)]
        self._calls.pop(id(launch), None)
        numbers = set(self._launches.values())
        self._stored_since_cta_sync = {who for who in self._stored_since_cta_sync if who[0] in numbers}
        self._polled = {key: seen for key, seen in self._polled.items() if key[0] in numbers}
        self._strays = {stray for stray in self._strays if stray[0] in numbers}
        self.liveness.on_host()

    def is_deadlocked(self, repeats: int) -> bool:
        """All programs of a launch have polled in vain, each ``repeats`` times in a row. Is it a deadlock?"""
        # Another thread of this process may still do what they wait for.
        if self.threads.may_help({thread for thread, _ in self._launching.values()}):
            return self.liveness.deadlock_found()
        return self.liveness.is_deadlocked(repeats)

    def check_mapped(self, pointers: np.ndarray, kind: int) -> None:
        """The program that runs is about to access these addresses. Raise if there is no memory, which would fault."""
        outside = self._spaces.private(pointers)
        if outside.size and not (bounds.is_mapped(int(outside.min())) and bounds.is_mapped(int(outside.max()))):
            verb = "reads" if kind == READ else "writes"
            raise NotSymmetricError(f"It {verb} address {int(outside.min()):#x}, where this process has no memory.")

    def spins_on(self, pointers: np.ndarray) -> bool:
        """Whether the program that runs polls what it has loaded here, in a loop that only memory can end.

        If it does, it is also reported if there is no tensor at these addresses.
        """
        who, task = self._current_program(), tasks.current()
        if who is None or not task.spinning or task.library_loads:
            return False
        private = self._spaces.private(pointers).tolist()
        # To look for tensors takes long.
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
        who = self._current_program()
        if who is None or not pointers.size:
            return
        place = self._place()
        undefined = values is not None and uninitialised.seen_in(values)
        for spans in self._spaces.spans(pointers, size):
            self.bounds.check(self.diagnose, spans, kind, place)
            async_proxy = tasks.current().async_proxy
            self.log.add(
                events.Accessed(*who, place, spans, kind, undefined=undefined, number=number, async_proxy=async_proxy)
            )
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
        """The program that runs has done an atomic operation, or the like, while it held ``number``.

        ``values``: what was there before; ``after``: what is there now, if the operation says so. ``changed``: whether
        these differ. ``adds``: it adds, so that the difference does not depend on the value. Others: as of
        `iris.sanitizer.events.Synchronised`.
        """
        who = self._current_program()
        if who is None or not pointers.size:
            return
        if scope == "cta" and tasks.current().partitioned:
            scope = "gpu"  # partitions share a block, but are as different programs in the event log
        releases, acquires = sem in ("release", "acq_rel") or message, sem in ("acquire", "acq_rel") or message
        word = values.size == 1 and values.dtype.kind in "iu" and not message
        # Also of a relaxed read: a fence may follow it.
        wait = waits.wait_of_program() if word and kind == READ else None
        place = self._place()
        if kind == READ:
            # A poll that finds the same again, with no flag written meanwhile, needs no event.
            key, found = (*who, place, sem, scope, pointers.tobytes()), (self.log.changes(), values.tobytes(), wait)
            if self._polled.get(key) == found:
                return
            self._polled[key] = found
        elif changed:
            self.log.count_change()
            self.liveness.changed()
        undefined = kind != WRITE and uninitialised.seen_in(values)
        for spans in self._spaces.spans(pointers, values.itemsize):
            self.bounds.check(self.diagnose, spans, kind, place)
            event = events.Synchronised(
                number,
                *who,
                place,
                spans,
                kind,
                releases=releases,
                acquires=acquires,
                scope=scope,
                message=message,
                whole_cta=message or _RELEASES_WHOLE_CTA or who not in self._stored_since_cta_sync,
                undefined=undefined,
                may_wait=acquires or not releases or compares,
                before=int(values.flat[0]) if word else None,
                after=int(np.ravel(values if after is None else after)[0]) if word else None,
                wait=wait,
                async_proxy=tasks.current().async_proxy,
                adds=adds,
                dropped=kind != READ and not compares and tasks.current().dropped,
            )
            self.log.add(event)

    def failed(self, error: BaseException) -> None:
        """A program has raised this. It is a finding if the error's type, or the error itself, has a kind."""
        kinds = (kind for type, kind in _KINDS.items() if isinstance(error, type))
        kind = getattr(error, "iris_finding", None) or next(kinds, None)
        if kind is not None:
            raised = self._place_number(*lines.lines_of_error(error)) if error.__traceback__ else self._place()
            self.diagnose(kind, f"stops: {error}", raised)

    def waits(self, launch: Any, wait: Any) -> None:
        """These programs wait, in a deadlock. ``wait``: an `iris.simulator.hang.Wait`."""
        caller = wait.caller and Line(*wait.caller)
        if wait.place[0].startswith(IRIS):
            called = self._callers.get(id(launch))
            caller = called and lines.as_line(called)
        place = events.Place(launch.name, Line(*wait.place), caller)
        outside = self._is_outside(wait, place)
        self.log.add(events.Waiting(launch.name, wait.programs, wait.what, place, wait.flag or "", outside))

    def _is_outside(self, wait: Any, place: events.Place) -> bool:
        """Whether these programs wait for a flag that is in no tensor. If it is in no heap either, report that here."""
        addresses = np.array(wait.addresses, dtype=np.int64)
        unknown = self.bounds.outside_of_tensors(self._spaces.private(addresses).tolist())
        if unknown:
            text = f"reads address {unknown[0]:#x}, where no tensor is"
            self.log.add(events.Diagnostic("bounds", text, self.log.number_of(place), wait.programs))
        return bool(unknown) or any(map(self.bounds.is_outside, self._spaces.spans(addresses, 1)))

    def out_of_step(self, text: str) -> None:
        """The host waits for other ranks, for what ``text`` says, and they wait for something else."""
        place = events.Place(None, lines.as_line(lines.user_line(sys._getframe(1))))
        self.log.add(events.Waiting(None, "the host", f"waits in {text}", place, ""))

    def fenced(self) -> None:
        """A memory fence of the program that runs."""
        who = self._current_program()
        if who is not None:
            self.log.add(events.Fenced(*who))

    def proxy_fenced(self) -> None:
        """A proxy fence of the program that runs, before copies by TMA."""
        who = self._current_program()
        if who is not None:
            self.log.add(events.ProxyFenced(*who))

    def cta_synced(self) -> None:
        """The threads of the program that runs meet in a barrier."""
        who = self._current_program()
        if who in self._stored_since_cta_sync:
            self._stored_since_cta_sync.discard(who)
            self.log.add(events.CtaSynced(*who))

    def forked(self, parent: Any, partitions: int) -> None:
        """So many partitions of a program begin, besides its default one."""
        self._of_partitions(events.Forked, parent, partitions)

    def joined(self, parent: Any, partitions: int) -> None:
        """They have ended."""
        self._of_partitions(events.Joined, parent, partitions)

    def _of_partitions(self, event: type, parent: Any, partitions: int) -> None:
        who = self._program_number(parent, 0)
        if who is not None:
            numbers = (self._program_number(parent, partition) for partition in range(1, partitions + 1))
            self.log.add(event(*who, tuple(number for _, number in filter(None, numbers))))

    def mbarrier_arrived(self, address: int, ends: bool) -> None:
        """The program that runs, or a copy that it has issued, arrives at the mbarrier there. ``ends``: the phase ends.

        A store to a word of shared memory that may be a flag counts as an arrival, too, and a load of it as a wait.
        """
        who = self._current_program()
        if who is not None:
            self.log.add(events.MbarrierArrive(*who, self._mbarrier_key(address), ends))

    def mbarrier_waited(self, address: int) -> None:
        """The program that runs has waited for the mbarrier there."""
        who = self._current_program()
        if who is not None:
            self.log.add(events.MbarrierWait(*who, self._mbarrier_key(address)))

    @staticmethod
    def _mbarrier_key(address: int) -> tuple:
        return tasks.current().index, address

    def from_here(self, operation: Callable[[], None], mbarrier: int | None) -> Callable[[], None]:
        """See `iris.observer.from_here`."""
        place, who = self._place(), self._current_program()
        if who is None:
            return operation
        launch, program = who
        number = -next(self._numbers)  # below 0, unlike those of programs
        self.log.add(events.Issued(launch, program, number, mbarrier))

        def carry_out() -> None:
            task = tasks.current()
            before, task.operation = task.operation, (place, (launch, number))
            try:
                operation()
            finally:
                task.operation = before
            waiter = self._current_program()
            if mbarrier is None and waiter is not None:
                self.log.add(events.Awaited(*waiter, number))

        return carry_out

    def place(self) -> int:
        """Where the program that runs is now."""
        return self._place()

    def shared_race(
        self, kind: str, first: tuple[int | None, str, int], second: tuple[int | None, str, int], missing: str
    ) -> None:
        """A race in shared memory: see `iris.sanitizer.events.SharedRace`."""
        self.log.add(events.SharedRace(kind, tasks.current().text, first, second, missing))

    # Mistakes, and who and where ------------------------------------------------------------------------------------

    def diagnose(self, kind: str, text: str, place: int | None = None) -> None:
        """The program that runs, or the host, has made this mistake."""
        self.log.add(events.Diagnostic(kind, text, place, tasks.current().text if tasks.in_kernel() else ""))

    def asymmetric(self, text: str, calls: dict[int, tuple[str, int, str]]) -> None:
        """The ranks allocate differently. ``calls``: file, line and function of the first that differ, by rank."""
        self.log.add(
            events.Diagnostic("asymmetric", text, self._place(), "", tuple((r, Line(*c)) for r, c in calls.items()))
        )

    def _current_program(self) -> tuple[int, int] | None:
        """The numbers of the launch and of the program, partition or asynchronous operation that runs now."""
        if not tasks.in_kernel():
            return None
        task = tasks.current()
        if task.operation is not None:
            return task.operation[1]
        return self._program_number(task, task.partition or 0)

    def _program_number(self, task: Any, partition: int) -> tuple[int, int] | None:
        """The number of a task's launch, and that of one of its partitions; partition 0 has the program's number."""
        number = self._launches.get(id(task.launch))
        if number is None:  # the launch began before the recording
            return None
        (x, y, z), (columns, rows, layers) = task.index, task.launch.dims
        return number, 1 + ((partition * layers + z) * rows + y) * columns + x

    def _place(self) -> int:
        """The number of the place that is being done: the user's line or, in the library's own kernels, theirs.

        For an asynchronous operation or call, it is the line that issued it.
        """
        call = self._calls.get(id(tasks.current().launch)) if tasks.in_kernel() else self.threads.call()
        if call is not None and call.place is not None:
            return call.place
        if tasks.in_kernel() and (operation := tasks.current().operation) is not None:
            return operation[0]
        frame = sys._getframe(2)
        return self._place_number(lines.user_line(frame), lines.kernel_line(frame) if tasks.in_kernel() else None)

    def _place_number(self, line: lines.CodeLine | None, outermost: lines.CodeLine | None) -> int:
        """``line``: the innermost of the user's. ``outermost``: that of the kernel."""
        kernel, caller = None, None
        if tasks.in_kernel():
            kernel = tasks.current().launch.name
            if line is not None and lines.owner(line[0]) == lines.LIBRARY:
                caller = self._callers.get(id(tasks.current().launch))
            elif outermost is not None and line is not None and outermost[0] is not line[0]:
                caller = outermost
        return self.log.number_of(events.Place(kernel, lines.as_line(line), caller and lines.as_line(caller)))


# The kinds of findings, by the type of an error that a program raises.
_KINDS = {RankOutOfRangeError: "rank", NotSymmetricError: "bounds", NotTheCallerError: "rank"}
