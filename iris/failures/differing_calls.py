"""What a process with a GPU does when the ranks of a rail have made differing calls (`iris.world.rail_calls`).

They wait for each other in kernels, for as long as torch lets them. So the process says at once which calls differ, and
ends with `MismatchedCollectiveError` after a grace, unless it has closed the rail (`iris.failures.process_end`).
"""

import threading
import time

from iris.errors import MismatchedCollectiveError
from iris.failures.process_end import ABORTS, GRACE_S, VARIABLE, end_by, place, say
from iris.world import rail_calls
from iris.world.rail_calls import RailCalls


def _attend(calls: RailCalls, error: MismatchedCollectiveError) -> None:
    """Called by the thread that looks at the rails, which goes on at once."""
    say(f"{type(error).__name__}: {error} This rank is {place()}. {_outlook()}")
    if ABORTS:
        threading.Thread(target=_await_end, args=(calls, error), name="iris-differing-calls", daemon=True).start()


rail_calls.listeners.append(_attend)


def _outlook() -> str:
    debug = "IRIS_DEBUG=1 on all ranks raises the error in the call."
    if ABORTS:
        return f"This process ends in {GRACE_S:g} s, unless it closes the context; {VARIABLE}=report keeps it. {debug}"
    return f"This process goes on, as {VARIABLE}=report says. {debug}"


def _await_end(calls: RailCalls, error: MismatchedCollectiveError) -> None:
    time.sleep(GRACE_S)
    if not calls.closed:
        end_by(error)
