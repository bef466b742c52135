"""Ends a process with a GPU when ranks of a rail have made differing calls, which `iris.world.rail_calls` finds out.

Such ranks wait for each other in NCCL's kernels until torch's time limit. So a thread prints at once which calls
differ. After a grace period it ends the process with `MismatchedCollectiveError` (`iris.failures.process_end`), unless
the program has closed the rail.
"""

import threading
import time

from iris.errors import MismatchedCollectiveError
from iris.failures.process_end import ABORTS, GRACE_S, VARIABLE, end_by, place, say
from iris.world import rail_calls
from iris.world.rail_calls import RailCalls


def _on_differing_calls(calls: RailCalls, error: MismatchedCollectiveError) -> None:
    """A listener of `rail_calls`. Its thread must not wait here."""
    say(f"{type(error).__name__}: {error} This rank is {place()}. {_outlook()}")
    if ABORTS:
        threading.Thread(target=_end_after_grace, args=(calls, error), name="iris-differing-calls", daemon=True).start()


rail_calls.listeners.append(_on_differing_calls)


def _outlook() -> str:
    debug = "IRIS_DEBUG=1 on all ranks raises the error in the call."
    if ABORTS:
        return f"This process ends in {GRACE_S:g} s, unless it closes the context; {VARIABLE}=report keeps it. {debug}"
    return f"This process goes on, as {VARIABLE}=report says. {debug}"


def _end_after_grace(calls: RailCalls, error: MismatchedCollectiveError) -> None:
    time.sleep(GRACE_S)
    if not calls.closed:
        end_by(error)
