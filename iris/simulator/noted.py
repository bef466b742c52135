"""What the simulator knows of an operation besides the operation itself: fences, waits, results that nobody uses.

The scheduler, the error message of a hang and the sanitizer use it. It comes from three sources:

* device functions of the library, which report it by `iris.language.note`: it calls a function here by its name
* rewritten kernels: `iris.simulator.rewriting` replaces statements and loops by calls of functions here
* `iris.simulator.kernels`, which calls device functions by functions here

What is known is kept in the current `iris.simulator.tasks.Task`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl

from iris import observer
from iris.simulator import tasks
from iris.simulator.shapes import unwrapped
from iris.simulator.tasks import Condition

# Reported by device functions of the library -------------------------------------------------------------------------


def fenced() -> None:
    """A memory fence: all that the program did before happens before all that it does from here on."""
    tasks.fenced()
    if observer.recorder is not None:
        observer.recorder.fenced()


def proxy_fenced() -> None:
    """A proxy fence: what the program did before happens before the copies by TMA that it issues from here on."""
    if observer.recorder is not None:
        observer.recorder.proxy_fenced()


def message() -> None:
    """The next access is of data that contain their own flag: `iris.language.ll` and `iris.language.lamport`."""
    tasks.current().message = observer.recorder is not None


def waits_for(wanted: tl.tensor, cmp: str) -> None:
    """The program waits until a flag compares as ``cmp`` to ``wanted``. The wait returns the flag's final value."""
    tasks.current().condition = Condition(cmp, _number(wanted), wanted.dtype.primitive_bitwidth, returned=True)


def waits_for_ranks(reached: tl.tensor, num_ranks: Any) -> None:
    """The program waits in a barrier until the flags of so many ranks have reached this epoch."""
    bits = reached.dtype.primitive_bitwidth
    tasks.current().condition = Condition("reached", _number(reached), bits, ranks=_number(num_ranks))


def waited() -> None:
    """The wait is over."""
    tasks.current().condition = None


def loads_for_caller() -> None:
    """What this function loads, its caller has asked for: so the load may be the poll of a loop of the caller's."""
    tasks.current().library_loads = False


def _number(value: Any) -> int:
    value = unwrapped(value)
    return int(value.handle.data.item()) if isinstance(value, tl.tensor) else value


# Called by rewritten kernels -----------------------------------------------------------------------------------------


def call_dropped(function: Callable, /, *args: Any, **kwargs: Any) -> None:
    """Make a call that is a statement: nobody uses what it returns, such as the former value of a flag."""
    task = tasks.current()
    before, task.dropped = task.dropped, True
    try:
        function(*args, **kwargs)
    finally:
        task.dropped = before


def look_of_loop(cmp: str, wanted: Callable[[], Any], function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Make the call by which a loop looks at memory. The loop ends when the value compares as ``cmp`` to ``wanted``."""
    task = tasks.current()
    before, task.condition = task.condition, _condition_of_loop(cmp, wanted)
    try:
        return function(*args, **kwargs)
    finally:
        task.condition = before


@contextlib.contextmanager
def spinning() -> Iterator[None]:
    """Around a loop that only a change of memory can end. If it loads the same again, the program makes no progress."""
    task = tasks.current()
    before, task.spinning = task.spinning, True
    try:
        yield
    finally:
        task.spinning = before


def _condition_of_loop(cmp: str, wanted: Callable[[], Any]) -> Condition | None:
    try:
        value = unwrapped(wanted())
    except Exception:  # the loop's own comparison will raise it, too
        return None
    if isinstance(value, tl.tensor) and not value.type.is_block() and value.dtype.is_int():
        value = _number(value)
    return Condition(cmp, value, 64) if isinstance(value, int) else None


# Called by `iris.simulator.kernels` ----------------------------------------------------------------------------------


def call_used(function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Call a device function of the user's. It uses the results of its own calls, even if its result is dropped."""
    task = tasks.current()
    before, task.dropped = task.dropped, False
    try:
        return function(*args, **kwargs)
    finally:
        task.dropped = before


def call_library(function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Call a device function of `iris.language`. It loads for itself, unless it reports `loads_for_caller`."""
    task = tasks.current()
    before, task.library_loads = task.library_loads, True
    try:
        return function(*args, **kwargs)
    finally:
        task.library_loads = before
