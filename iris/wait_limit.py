"""The time limit of waits in kernels: where it comes from, and what the host says when one is exceeded.

``IRIS_WAIT_TIMEOUT_S`` (seconds, read when Iris is imported; unset or 0: no limit) bounds every wait of the library
on a GPU. A wait that exceeds it fills in a record in device memory and returns; the host looks at the record whenever
it has drained a stream anyway. In the simulator the scheduler sees every wait itself (`iris.simulator.grid`).
"""

import os
from collections.abc import Callable

import torch

from iris.errors import InvalidSettingError, IrisTimeoutError

VARIABLE = "IRIS_WAIT_TIMEOUT_S"

# Words of the record. Of a barrier, SEEN is a bit for each rank from FIRST on that has arrived, of RANKS ranks.
CLAIMED, CLOCK, PROGRAM, FLAG, WANTED, SEEN, COMPARISON, FIRST, RANKS = range(9)
WORDS = 9
BARRIER_LANES = 32

COMPARISONS = ("eq", "ne", "gt", "ge", "lt", "le", "barrier")
_SYMBOLS = {"eq": "==", "ne": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def _nanoseconds() -> int:
    text = os.environ.get(VARIABLE, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidSettingError(VARIABLE, text, "a number of seconds, 0 for no limit")
    return int(seconds * 1e9)


NANOSECONDS: int = _nanoseconds()
"""The limit; 0 for none."""


class WaitRecord:
    """Where kernels on this rank's device note the first wait that exceeded its limit."""

    def __init__(self, device: torch.device) -> None:
        self._words = torch.zeros(WORDS, dtype=torch.int64, device=device)
        self.address = self._words.data_ptr()

    def raise_if_expired(self, rank: int, describe: Callable[[int], str | None]) -> None:
        """Raise what a drained stream's kernels have recorded, and forget it.

        Copies from the device if there is a limit. ``describe`` turns an address into words, or returns None.
        """
        if NANOSECONDS == 0:
            return
        words = self._words.tolist()
        if not words[CLAIMED]:
            return
        self._words.zero_()
        flag, wanted, seen = words[FLAG], words[WANTED], words[SEEN]
        comparison = COMPARISONS[words[COMPARISON]]
        if comparison == "barrier":
            expected = range(words[FIRST], min(words[FIRST] + BARRIER_LANES, words[RANKS]))
            late = [peer for peer in expected if not seen >> (peer - words[FIRST]) & 1]
            what = f"in a barrier for epoch {wanted}; ranks {late} of its group had not arrived"
        else:
            place = describe(flag) or f"address {flag:#x}"
            what = f"for a flag to be {_SYMBOLS[comparison]} {wanted}; it held {seen} ({place})"
        raise IrisTimeoutError(
            f"Rank {rank}: program {words[PROGRAM]} of a kernel waited for more than {NANOSECONDS / 1e9:g} s {what}. "
            f"The kernel went on without it, so its results are not valid. Look at who should have signalled; "
            f"{VARIABLE} sets the limit."
        )
