"""Random delays of the simulator's rails, for tests: a network may be late, and that of one machine seldom is.

A transfer begins some time after the rank has asked for it, another time on each rank. So what is sent is read late,
and what comes from one host is there before or after what comes from another. The transfers of a rail still begin in
their order. Programs may rely on nothing else: between the call that begins a transfer and the wait for it, its tensors
are read and written at any time.
"""

import queue
import random
import threading
import time
from collections.abc import Callable
from typing import Any

chance: random.Random | None = None
"""Where rails that are made from now on get their delays; None: no delays. All ranks set it, or none."""

# The share of transfers that are late, and by how many seconds at most: about as long as a step within a host takes.
SHARE, LONGEST_S = 0.5, 5e-3


class DelayedTransfer:
    """A transfer that a `DelayQueue` begins, with the methods of torch's ``Work`` that rails use."""

    def __init__(self, start: Callable[[], Any], delay_s: float) -> None:
        self._start, self._delay_s = start, delay_s
        self._begun = threading.Event()
        self._work: Any = None
        self._error: Exception | None = None

    def begin(self) -> None:
        time.sleep(self._delay_s)
        try:
            self._work = self._start()
        except Exception as error:
            self._error = error
        self._begun.set()

    def is_completed(self) -> bool:
        return self._begun.is_set() and (self._work is None or self._work.is_completed())

    def wait(self) -> None:
        """Wait for the transfer. Raises what torch raised when it began or moved data."""
        self._begun.wait()
        if self._error is not None:
            raise self._error
        self._work.wait()


class DelayQueue:
    """Begins the transfers of one rail late, in their order, in a thread of its own."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = random.Random(chance.random())
        self._asked: queue.SimpleQueue[DelayedTransfer | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="iris-late-rail", daemon=True).start()

    def submit(self, start: Callable[[], Any]) -> DelayedTransfer:
        """Have ``start``, which returns torch's work, begin a transfer, now or a little later."""
        late = self._chance.random() < SHARE
        transfer = DelayedTransfer(start, self._chance.uniform(0, LONGEST_S) if late else 0)
        self._asked.put(transfer)
        return transfer

    def close(self) -> None:
        self._asked.put(None)

    def _run(self) -> None:
        while (transfer := self._asked.get()) is not None:
            transfer.begin()
