"""A watchdog of NCCL rails: a thread that finds out whether the ranks of a rail make the same calls.

Ranks that make differing calls on one NCCL communicator wait for each other on the GPU for ever. Comparing each call
before it begins makes the host wait, so only debug mode does (`iris.world.rail.Rail._compare`). Here a thread compares
later, beside the program:

1. A rail notes every call that it begins: its number, what it is part of, and its bytes. It keeps the last ones.
2. The thread looks at the numbers. If that of a rail has not changed for a while, the rail *stands still*: the program
   waits, or does something else. A program that has enqueued a transfer that never ends soon gets there, as a stream
   has room for a limited number of launches, and the host then waits to enqueue more.
3. The thread writes the calls of that rail into the store of the group, and reads there what other ranks have written.
4. If two ranks have made differing calls under one number, that is an error, whatever has become of the transfers. If a
   rank has not come to a number yet, that is no error: the thread looks again, less and less often.

A rail on which calls go on is compared now and then, with the next rank only: if any ranks differ, two neighbours do.

Captured calls have no number, and replays of graphs add none. So all ranks number their calls alike, as a call must be
captured on all of them or on none (NCCL User Guide, "Using NCCL with CUDA Graphs").

The thread does not ask the GPU whether a transfer has ended. cudaEventQuery may wait for a lock of the driver while
another thread waits for the GPU (torch, ProcessGroupNCCL.cpp, `finishedGPUExecutionInternal`), and torch's
``Event.query`` holds the GIL meanwhile, so no thread could report anything. Nor does it keep torch's ``Work``, which
would keep the outputs alive.
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

# In seconds: how often the thread looks at the rails; how long one stands still before it is compared; and how often a
# rail is compared on which calls go on.
INTERVAL_S, STILL_S, BUSY_S = 2.0, 10.0, 60.0
# While ranks have not come to a number yet: the pause between two looks is this share of the time since this rank has
# written its calls, and at most so many seconds.
SHARE, LONGEST_PAUSE_S = 1 / 8, 60.0
# How many calls of a rail are kept: more than a stream has room for (1024 launches in CUDA, as far as is known).
REMEMBERED = 2048
# How long the end of the program waits for a look that is under way.
STOP_LIMIT_S = 5.0


def differing(calls: Iterable[tuple[str, str]]) -> MismatchedCollectiveError:
    """The error that ranks make differing calls. ``calls``: pairs of a rank ("rank 1 on host1") and its call."""
    texts = "; ".join(f"{who} calls {call}" for who, call in calls)
    return MismatchedCollectiveError(f"The hosts do not make the same call: {texts}.")


class RailCalls:
    """The calls that this rank has begun on one rail. Local.

    Parameters
    ----------
    group
        Its store holds the ranks' calls. It is broken if they differ.
    name
        The name of the rail, unique in the group and the same on all ranks of the rail.
    place
        The index of this rank among those of the rail.
    who
        What messages call these ranks, by index: "rank 1 on host1".

    Attributes
    ----------
    closed : bool
        Whether the rail is closed.
    """

    def __init__(self, group: Group, name: str, place: int, who: Sequence[str]) -> None:
        self._group, self._name, self._place, self._who = group, name, place, who
        self._keys = [f"calls/{name}/{each}" for each in range(len(who))]
        # The indices of the other ranks, from the next one on, in a ring.
        self._others = [(place + step) % len(who) for step in range(1, len(who))]
        self._noted: deque[tuple[int, str, int]] = deque(maxlen=REMEMBERED)
        self._number = 0
        self.closed = False
        # What follows only the thread uses. The latest number that it has seen, and since when it is the latest.
        self._seen, self._since = 0, time.monotonic()
        # The calls that it has written into the store, by number; the last of these numbers; and when that was.
        self._mine: dict[int, str] = {}
        self._published, self._published_at = 0, self._since
        # The calls of other ranks that it has read there; and the ranks from which it waits for more.
        self._theirs: dict[int, dict[int, str]] = {}
        self._asked: list[int] = []
        self._asks_all, self._next_look = False, 0.0

    def note(self, what: str, nbytes: int) -> None:
        """Note a call that begins and is not captured. For one thread at a time."""
        self._number = number = self._number + 1
        self._noted.append((number, what, nbytes))

    def close(self) -> None:
        """End the comparison of these calls."""
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
        """Write the noted calls into the store."""
        # A copy in one call of C: the thread that makes the calls does not run meanwhile.
        noted = list(self._noted)
        self._mine = {number: f"{what} of {nbytes} bytes" for number, what, nbytes in noted}
        self._published, self._published_at, self._theirs = noted[-1][0], now, {}
        put(self._group.store, self._keys[self._place], _encode(self._mine))

    def _compare(self) -> MismatchedCollectiveError | None:
        """Read the calls of the ranks in ``_asked``, and compare them with those that this rank has published."""
        store, mine = self._group.store, self._mine
        for other in self._asked:
            if store.check([self._keys[other]]):
                # What cannot be read is of another version of Iris. Meetings report that.
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
                # All agree, so only the latest call of each rank is kept, for `describe`: with many hosts all calls
                # would be megabytes.
                self._theirs = {other: {max(calls): calls[max(calls)]} for other, calls in self._theirs.items()}
            return None
        first, everyone = min(numbers), {self._place: mine, **self._theirs}
        known = [each for each in sorted(everyone) if first in everyone[each]]
        return differing((self._who[each], everyone[each][first]) for each in known)

    def report(self, error: MismatchedCollectiveError) -> None:
        """Break the group, as its ranks are out of step, and call the listeners; unless it is broken already."""
        try:
            self._group.check()
        except GroupAbortedError:
            return
        self._group.break_off(str(error).rstrip("."))
        for listener in listeners:
            listener(self, error)


def _encode(calls: dict[int, str]) -> bytes:
    """Encode calls of consecutive numbers. Each text is written once, as most calls repeat earlier ones."""
    indices: dict[str, int] = {}
    order = [indices.setdefault(call, len(indices)) for call in calls.values()]
    return wire.encode((min(calls), list(indices), order))


def _decode(text: bytes) -> dict[int, str]:
    """The calls that `_encode` has encoded. Raises `TypeError` or `ValueError` if ``text`` is not of its making."""
    first, calls, order = wire.decode(text)
    try:
        decoded = {first + position: calls[index] for position, index in enumerate(order)}
    except LookupError as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    if not decoded:
        raise ValueError("no call")
    return decoded


listeners: list[Callable[[RailCalls, MismatchedCollectiveError], None]] = []
"""Called when ranks have made differing calls. The thread of this file calls them, and looks at no rail meanwhile."""

_lock = threading.Lock()
_watched: "weakref.WeakSet[RailCalls]" = weakref.WeakSet()
_stop: threading.Event | None = None


def watch(calls: RailCalls) -> None:
    """Compare these calls from now on, until they are closed. Local."""
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
    """One round of the thread: `RailCalls.look` at all rails, and `RailCalls.report` what is found."""
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
            # The context is just being closed, and its abort flag's memory is gone.
            if not calls.closed:
                raise


def _leave(calls: RailCalls) -> None:
    with _lock:
        _watched.discard(calls)


def _reports() -> Iterator[dict[str, Any]]:
    """One of the `iris.world.inspection.memory_reports`."""
    with _lock:
        those = list(_watched)
    for calls in those:
        group = calls._group
        rank, lines = group.ranks[group.rank], calls.describe()
        yield {"kind": "rail", "rank": rank, "ranks": list(group.ranks), "device": "network", "lines": lines}


inspection.memory_reports.append(_reports)


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    """Stop the thread: if it returned from the store's C++ code while the interpreter ends, the process would abort."""
    stop.set()
    thread.join(STOP_LIMIT_S)


def _forget() -> None:
    """In a forked child: start anew, as it has no such thread, and makes none of its parent's calls."""
    global _stop, _lock, _watched
    _stop, _lock, _watched = None, threading.Lock(), weakref.WeakSet()


os.register_at_fork(after_in_child=_forget)
