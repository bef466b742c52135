"""Finds hosts that poll: that read the same memory again and again until it changes.

A host counts as polling if for some seconds it has read the same bytes in the same line, while no rank has changed any
memory. `Liveness` then says whether that is a deadlock.
"""

import threading
import time
from collections import Counter
from types import CodeType
from typing import Any

from iris.heap.mapping import describe_address
from iris.sanitizer.deadlock import ENOUGH, Liveness
from iris.sanitizer.event_log import EventLog
from iris.sanitizer.events import Place, Spans, Waiting
from iris.sanitizer.threads import Threads
from iris.simulator import lines

# Seconds after which it counts as polling. A program that merely reads the same memory often changes some meanwhile.
POLLING_S = 5.0

# So many reads are remembered. A host that reads more different things reads data, and no flags.
MOST_LOOKS = 1 << 12


class HostPolls:
    """What one rank's host has read since any rank last changed memory."""

    def __init__(self, liveness: Liveness, log: EventLog, threads: Threads) -> None:
        self._liveness, self._log, self._threads = liveness, log, threads
        self._looks: Counter[Any] = Counter()
        self._changes, self._since, self._reported = -1, 0.0, False

    def looked(self, address: int, spans: Spans, line: tuple[CodeType, int] | None) -> None:
        """The host has read ``spans``, which begin at ``address``, in this line. Reports a deadlock if it is one."""
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
        if self._liveness.host_polls(changes):
            self._reported = True
            place = Place(None, lines.as_line(line))
            flag = describe_address(address) or f"address {address:#x}"
            self._log.add(Waiting(None, "the host", "polls what nobody will change any more", place, flag))
