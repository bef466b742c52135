"""A host that looks at the same memory again and again waits for it to change, as a kernel does that polls a flag.

It is known to wait once it has looked at the same bytes from the same line for some seconds, in which no rank has
changed anything, and it has done nothing else. Whether anybody can go on then, `Liveness` knows.
"""

import threading
import time
from collections import Counter
from types import CodeType
from typing import Any

from iris.heap.mapping import describe_address
from iris.sanitizer.deadlock import ENOUGH, Liveness
from iris.sanitizer.events import Place, Spans, Waiting
from iris.sanitizer.notes import Notes
from iris.sanitizer.threads import Threads
from iris.simulator import lines

# Seconds after which it counts as waiting: programs that merely read the same memory often do other things meanwhile.
POLLING_S = 5.0

# So many looks are remembered; who looks at more different things reads data.
MOST_LOOKS = 1 << 12


class HostPolls:
    """Of one rank's host, as long as its memory stays as it is."""

    def __init__(self, liveness: Liveness, notes: Notes, threads: Threads) -> None:
        self._liveness, self._notes, self._threads = liveness, notes, threads
        self._looks: Counter[Any] = Counter()
        self._changes, self._since, self._reported = -1, 0.0, False

    def looked(self, address: int, spans: Spans, line: tuple[CodeType, int] | None) -> None:
        """The host has read ``spans``, which begin at ``address``, in a ``line``."""
        what = line, spans.space, int(spans.begins[0]), int(spans.ends[-1])
        changes = self._liveness.changes()
        if changes != self._changes or len(self._looks) > MOST_LOOKS:
            self._changes, self._since = changes, time.monotonic()
            self._looks.clear()
        self._looks[what] += 1
        if self._reported or self._looks[what] < ENOUGH or time.monotonic() - self._since < POLLING_S:
            return
        if self._threads.may_help({threading.current_thread()}):
            return
        if self._liveness.polls(changes):
            self._reported = True
            place = Place(None, lines.as_line(line))
            flag = describe_address(address) or f"address {address:#x}"
            self._notes.add(Waiting(None, "the host", "polls what nobody will change any more", place, flag))
