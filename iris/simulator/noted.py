"""Hints for the simulator that an operation alone does not show: fences, waits, results that nobody uses.

Device functions of the library report them by `iris.language.note`. For loops and statements, those of users too, calls
that `iris.simulator.rewriting` inserts report them.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl

from iris import observer
from iris.simulator import tasks
from iris.simulator.shapes import unwrapped
from iris.simulator.tasks import Condition

# By device functions -------------------------------------------------------------------------------------------------


def fenced() -> None:
    """All that the program did comes before all that it will do."""
    tasks.fenced()
    if observer.recorder is not None:
        observer.recorder.fenced()


def proxy_fenced() -> None:
    """What the program did comes before the copies by TMA that it will issue."""
    if observer.recorder is not None:
        observer.recorder.proxy_fenced()


def message() -> None:
    """What is accessed next carries its own arrival: `iris.language.ll` and `iris.language.lamport`."""
    tasks.current().message = observer.recorder is not None


def waits_for(wanted: tl.tensor, cmp: str) -> None:
    """The program waits until its flag compares so to ``wanted``. The caller may use the flag's final value."""
    tasks.current().condition = Condition(cmp, _number(wanted), wanted.dtype.primitive_bitwidth, returned=True)


def waits_for_ranks(reached: tl.tensor, num_ranks: Any) -> None:
    """The program waits in a barrier until the flags of so many ranks have reached this epoch."""
    bits = reached.dtype.primitive_bitwidth
    tasks.current().condition = Condition("reached", _number(reached), bits, ranks=_number(num_ranks))


def waited() -> None:
    """The program waits no more."""
    tasks.current().condition = None


def loads_for_caller() -> None:
    """What this function loads, its caller has asked for: it may be what a loop of the caller's waits for."""
    tasks.current().library_loads = False


def _number(value: Any) -> int:
    value = unwrapped(value)
    return int(value.handle.data.item()) if isinstance(value, tl.tensor) else value


# By rewritten code ---------------------------------------------------------------------------------------------------


def dropped(function: Callable, /, *args: Any, **kwargs: Any) -> None:
    """A call that is a statement: nobody uses what it returns, such as the former value of a flag."""
    task = tasks.current()
    before, task.dropped = task.dropped, True
    try:
        function(*args, **kwargs)
    finally:
        task.dropped = before


def used(function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that is not the library's. Its own calls count as used, even if its result is dropped."""
    task = tasks.current()
    before, task.dropped = task.dropped, False
    try:
        return function(*args, **kwargs)
    finally:
        task.dropped = before


def looked(cmp: str, wanted: Callable[[], Any], function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """A call that looks at memory in the condition of a loop, which ends when the value compares so to ``wanted``."""
    task = tasks.current()
    before, task.condition = task.condition, _of_loop(cmp, wanted)
    try:
        return function(*args, **kwargs)
    finally:
        task.condition = before


@contextlib.contextmanager
def spinning() -> Iterator[None]:
    """Around a loop that nothing ends but memory: who loads the same again there makes no progress."""
    task = tasks.current()
    before, task.spinning = task.spinning, True
    try:
        yield
    finally:
        task.spinning = before


# By calls of device functions ----------------------------------------------------------------------------------------


def by_library(function: Callable, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function of `iris.language`. It loads for itself, unless it says `loads_for_caller`."""
    task = tasks.current()
    before, task.library_loads = task.library_loads, True
    try:
        return function(*args, **kwargs)
    finally:
        task.library_loads = before


def _of_loop(cmp: str, wanted: Callable[[], Any]) -> Condition | None:
    try:
        value = unwrapped(wanted())
    except Exception:  # the program will raise it, too
        return None
    if isinstance(value, tl.tensor) and not value.type.is_block() and value.dtype.is_int():
        value = _number(value)
    return Condition(cmp, value, 64) if isinstance(value, int) else None
