"""Whether the ranks of a rail make the same calls, compared beside the program, where a rail stands still.

Ranks that make differing calls of one NCCL communicator wait for each other on the GPU. To compare each call before it
begins has the host wait, so that is for debug mode (`iris.world.rail.Rail._compare`). Here a thread compares later:

1. A rail notes every call that it begins: its number, what it is part of, and its bytes. It keeps the last ones.
2. One thread of the process looks at the numbers. A rail of which none has changed for a while stands still: the
   program waits, or is busy with something else. A program that has enqueued what can never end comes to that soon,
   since a stream holds so many launches only, and then the host waits to enqueue more.
3. The thread puts the calls of that rail into the store of the group, and reads there what the other ranks have put.
4. At the first number at which two ranks have made differing calls they are wrong, whatever has become of the
   transfers. Who has not come to a number yet is not: the thread looks again, less and less often.

A rail on which calls go on is compared now and then, with the next rank only: if ranks differ, two neighbours do.

Calls in a capture have no number, and replays of graphs make none. So they are numbered alike on all ranks: whether a
call is captured must be the same on all of them (NCCL User Guide, "Using NCCL with CUDA Graphs").

Nobody asks the GPU whether a transfer has ended. cudaEventQuery may wait for a lock of the driver while another thread
waits for the GPU (torch, ProcessGroupNCCL.cpp, `finishedGPUExecutionInternal`), and torch's ``Event.query`` keeps all
other threads of Python from running meanwhile, so nobody could report anything. torch's ``Work`` keeps the outputs.
"""

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from iris.errors import GroupAbortedError, MismatchedCollectiveError
from iris.world import inspection, wire
from iris.world.group import Group
from iris.world.store import put

# How often the thread looks at the rails, in seconds; how long one stands still before it is compared; and after how
# long a rail is compared on which calls go on.
INTERVAL_S, STILL_S, BUSY_S = 2.0, 10.0, 60.0
# Whoever waits for ranks that have not come looks again after this share of the time since, and at the latest then.
SHARE, LONGEST_PAUSE_S = 1 / 8, 60.0
# Calls of a rail that are kept: more than a stream has room for (of CUDA 1024 launches, as far as is known).
REMEMBERED = 2048
# What the end of the program waits for a look that is under way.
STOP_LIMIT_S = 5.0


def differing(calls: Iterable[tuple[str, str]]) -> MismatchedCollectiveError:
    """That ranks make differing calls: who, as in "rank 1 on host1", and which call."""
    texts = "; ".join(f"{who} calls {call}" for who, call in calls)
    return MismatchedCollectiveError(f"The hosts do not make the same call: {texts}.")


class RailCalls:
    """The calls that this rank has begun on one rail. Local.

    Parameters
    ----------
    group
        In whose store ranks find each other's calls, and which is broken where these differ.
    name
        The rail's: unique among those of the group, and the same on all of its ranks.
    place
        This rank's, among those of the rail.
    who
        What messages call these, by place: "rank 1 on host1".

    Attributes
    ----------
    closed : bool
        Whether the rail is.
    """

    def __init__(self, group: Group, name: str, place: int, who: Sequence[str]) -> None:
        self._group, self._name, self._place, self._who = group, name, place, who
        self._keys = [f"calls/{name}/{each}" for each in range(len(who))]
        # In a ring, from the next one on.
        self._others = [(place + step) % len(who) for step in range(1, len(who))]
        self._noted: deque[tuple[int, str, int]] = deque(maxlen=REMEMBERED)
        self._number = 0
        self.closed = False
        # The thread's own: the number that it has seen, and since when; what it has put into the store, up to which
        # number, and when; whose calls it has read, and of whom it waits for more.
        self._seen, self._since = 0, time.monotonic()
        self._mine: dict[int, str] = {}
        self._published, self._published_at = 0, self._since
        self._theirs: dict[int, dict[int, str]] = {}
        self._asked: list[int] = []
        self._asks_all, self._next_look = False, 0.0

    def note(self, what: str, nbytes: int) -> None:
        """A call begins that is not captured. For one thread at a time."""
        self._number = number = self._number + 1
        self._noted.append((number, what, nbytes))

    def close(self) -> None:
        """Nobody looks at these calls any more."""
        self.closed = True
        _leave(self)

    def look(self, now: float) -> MismatchedCollectiveError | None:
        """Compare the calls, if that is due. Returns the error if ranks have made differing ones.

        For one thread at a time, which need not be that of the calls. It never waits for other ranks. ``now``: the
        time, in seconds. Raises `torch.distributed.DistError` where the store is gone.
        """
        latest = self._number
        if latest != self._seen:
            self._seen, self._since = latest, now
        still = now - self._since >= STILL_S
        due = latest > self._published and (still or now - self._published_at >= BUSY_S)
        if due or (still and latest and not self._asks_all):
            self._publish(now)
            self._asks_all, self._asked = still, self._others if still else self._others[:1]
        elif not self._asked or now < self._next_look:
            return None
        self._next_look = now + min(max(INTERVAL_S, SHARE * (now - self._published_at)), LONGEST_PAUSE_S)
        return self._compare()

    def describe(self) -> list[str]:
        """Where this rank is, and where others were when they were last asked. Any thread."""
        noted = list(self._noted)
        if not noted:
            return []
        number, what, nbytes = noted[-1]
        lines = [f"{self._name} has begun {number} calls, the last one {what} of {nbytes} bytes"]
        for other, calls in sorted(self._theirs.items()):
            lines.append(f"  {self._who[other]} had begun {max(calls)}, the last one {calls[max(calls)]}")
        return lines

    def _publish(self, now: float) -> None:
        # One call of C, in which the thread of the calls does not run.
        noted = list(self._noted)
        self._mine = {number: f"{what} of {nbytes} bytes" for number, what, nbytes in noted}
        self._published, self._published_at, self._theirs = noted[-1][0], now, {}
        put(self._group.store, self._keys[self._place], _encode(self._mine))

    def _compare(self) -> MismatchedCollectiveError | None:
        store, mine = self._group.store, self._mine
        for other in self._asked:
            if store.check([self._keys[other]]):
                # What is of another version of Iris, meetings report.
                with contextlib.suppress(TypeError, ValueError):
                    self._theirs[other] = _decode(store.get(self._keys[other]))
        self._asked = [each for each in self._asked if max(self._theirs.get(each, {0: ""})) < self._published]
        numbers = [
            number
            for calls in self._theirs.values()
            for number in mine.keys() & calls.keys()
            if mine[number] != calls[number]
        ]
        if not numbers:
            if not self._asked:
                # Of many hosts these would be megabytes. Nobody compares them again.
                self._theirs = {other: {max(calls): calls[max(calls)]} for other, calls in self._theirs.items()}
            return None
        first, everyone = min(numbers), {self._place: mine, **self._theirs}
        known = [each for each in sorted(everyone) if first in everyone[each]]
        return differing((self._who[each], everyone[each][first]) for each in known)

    def report(self, error: MismatchedCollectiveError) -> None:
        """Break the group, as its ranks are out of step, and let the listeners know; unless it is broken already."""
        try:
            self._group.check()
        except GroupAbortedError:
            return
        self._group.break_off(str(error).rstrip("."))
        for listener in listeners:
            listener(self, error)


def _encode(calls: dict[int, str]) -> bytes:
    """The calls of numbers that follow each other. Few are all different."""
    places: dict[str, int] = {}
    order = [places.setdefault(call, len(places)) for call in calls.values()]
    return wire.encode((min(calls), list(places), order))


def _decode(text: bytes) -> dict[int, str]:
    """What was encoded. Raises `TypeError` or `ValueError` if nothing was."""
    first, calls, order = wire.decode(text)
    try:
        decoded = {first + place: calls[each] for place, each in enumerate(order)}
    except LookupError as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not decoded:
        raise ValueError("no call")
    return decoded


listeners: list[Callable[[RailCalls, MismatchedCollectiveError], None]] = []
"""Called where ranks have made differing calls, in the thread that looks, which waits."""

_lock = threading.Lock()
_watched: "weakref.WeakSet[RailCalls]" = weakref.WeakSet()
_stop: threading.Event | None = None


def watch(calls: RailCalls) -> None:
    """Compare these from now on, until they are closed. Local."""
    global _stop
    with _lock:
        _watched.add(calls)
        if _stop is None:
            _stop = threading.Event()
            thread = threading.Thread(target=_watch, args=(_stop,), name="iris-rail-calls", daemon=True)
            thread.start()
            atexit.register(_end, _stop, thread)


def _watch(stop: threading.Event) -> None:
    while not stop.wait(INTERVAL_S):
        _look_at_all()


def _look_at_all() -> None:
    with _lock:
        those = list(_watched)
    for calls in those:
        try:
            error = calls.look(time.monotonic())
            if error is not None:
                _leave(calls)
                calls.report(error)
        except dist.DistError:
            pass  # the store is gone: the next meeting says so
        except ValueError:
            # A context that is just being closed has let go of what says whether its group is broken.
            if not calls.closed:
                raise


def _leave(calls: RailCalls) -> None:
    with _lock:
        _watched.discard(calls)


def _reports() -> Iterator[dict[str, Any]]:
    """For who asks this process."""
    with _lock:
        those = list(_watched)
    for calls in those:
        group = calls._group
        rank, lines = group.ranks[group.rank], calls.describe()
        yield {"kind": "rail", "rank": rank, "ranks": list(group.ranks), "device": "network", "lines": lines}


inspection.memory_reports.append(_reports)


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    """A thread that comes back from a store's C++ while the interpreter ends would end the process by an abort."""
    stop.set()
    thread.join(STOP_LIMIT_S)


def _forget() -> None:
    """In a forked child, which has no such thread, and makes none of its parent's calls."""
    global _stop, _lock, _watched
    _stop, _lock, _watched = None, threading.Lock(), weakref.WeakSet()


os.register_at_fork(after_in_child=_forget)
