"""What to say when every program of a launch waits and nothing changes any more."""

import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl

from iris import observer
from iris.compat.interpreter import TensorHandle
from iris.errors import IrisTimeoutError, PeerLostError
from iris.simulator import dtypes
from iris.simulator.folders import IRIS, LIBRARIES, SIMULATOR
from iris.simulator.tasks import Condition, Poll, Task
from iris.switches import switched_on

MOST_LINES = 8

# Their calls are compared between ranks in debug mode.
_COLLECTIVE = tuple(IRIS + name + os.sep for name in ("ccl", "ops"))
# In the name of their memory (`iris.ccl.communicator`); no other rank knows of them, with which to compare.
_MESSAGES = " for messages "
_SYMBOLS = {"eq": "==", "ne": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<=", "reached": "at or past"}


def _rank_of_environment() -> int | None:
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else None


rank: Callable[[], int | None] = _rank_of_environment
"""This process's rank, or None if it has none; `iris.observer.joined` knows better than the environment."""


def _learn_rank(group: Any) -> None:
    global rank

    def rank_in_group() -> int:
        return group.ranks[group.rank]

    rank = rank_in_group


observer.on_join.append(_learn_rank)


class Wait(NamedTuple):
    """Programs that wait at one place for one thing. ``place``: file, line and function; ``addresses``: of flags.

    ``caller``: the kernel's own place, where it has called a function of the user's that waits.
    """

    programs: str
    place: tuple[str, int, str]
    what: str
    flag: str | None
    addresses: tuple[int, ...]
    caller: tuple[str, int, str] | None = None

    def __str__(self) -> str:
        where = ", called by ".join(
            f"{file}:{line} in {function}" for file, line, function in filter(None, (self.place, self.caller))
        )
        flag = f"; flag: {self.flag}" if self.flag else ""
        return f"{self.programs} at {where}: {self.what}{flag}"


def waits(waiting: Iterable[Task], bottom: CodeType) -> list[Wait]:
    """Who waits where, for which flag and value, and what the flag holds.

    ``bottom`` is the code whose frame lies below a program's on its thread's stack.
    """
    frames = sys._current_frames()
    groups: dict[tuple, list[tuple[int, int, int]]] = defaultdict(list)
    for task in waiting:
        if task.poll is not None:
            what = (task.partition, *_describe(task.poll, task.condition, frames.get(task.thread), bottom))
            groups[what].append(task.index)
    return [Wait(_programs(indices, partition), *what) for (partition, *what), indices in groups.items()]


def lost(waiting: Iterable[Task], well: bool) -> list[str]:
    """Which ranks have ended for which one of these may wait, and how, in words. ``well``: also those that did well."""
    try:
        from iris.heap.mapping import lost_at
    except ImportError:  # the simulator also runs kernels that have no heap
        return []
    return lost_at((int(task.poll.pointers.flat[0]) for task in waiting if task.poll is not None), well)


def lost_error(kernel: str, waits: list[Wait], gone: list[str]) -> PeerLostError:
    """The error that says who waits for what, which may be one of the ranks that are ``gone``."""
    return PeerLostError(f"{_who()}kernel {kernel!r} waits, and {'; '.join(gone)}.\n{_lines(waits)}")


def error(kernel: str, limit_s: float | None, waits: list[Wait], gone: list[str]) -> IrisTimeoutError:
    """The error that says who waits for what. ``limit_s``: for so long; None: no rank can go on any more.

    ``gone``: which ranks have ended, and how.
    """
    who, text = _who(), _lines(waits)
    advice = "Look at who should have written these flags."
    if gone:
        advice = f"{'; '.join(gone)}."
    elif any(_MESSAGES in (wait.flag or "") for wait in waits):
        advice = (
            "Look at whether each recv() has a send() on the other rank, and each send() a recv(), of as many bytes "
            "and in the same order."
        )
    elif any(wait.place[0].startswith(_COLLECTIVE) for wait in waits) and not switched_on("IRIS_DEBUG"):
        advice = "Look at whether all ranks make this call, and alike: IRIS_DEBUG=1 on all ranks compares them."
    return IrisTimeoutError(
        f"{who}kernel {kernel!r} waits, and no rank can go on any more:\n{text}\n{advice}"
        if limit_s is None
        else f"{who}kernel {kernel!r} has waited for {limit_s:g} s, and nothing has changed:\n{text}\n"
        f"{advice} IRIS_WAIT_TIMEOUT_S sets the limit (0: none)."
    )


def _who() -> str:
    number = rank()
    return "" if number is None else f"Rank {number}: "


def _lines(waits: list[Wait]) -> str:
    lines = list(map(str, waits))
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], f"... and {len(lines) - MOST_LINES} more places"]
    return "\n".join(f"  {line}" for line in lines)


def _programs(indices: list[tuple[int, int, int]], partition: int | None) -> str:
    indices = sorted(set(indices))
    shown = ", ".join(str(index) for index in indices[:4])
    more = f", ... ({len(indices)} in all)" if len(indices) > 4 else ""
    of = "" if partition is None else f"partition {partition} of "
    return f"{of}program{'s' if len(indices) > 1 else ''} {shown}{more}"


def _describe(poll: Poll, condition: Condition | None, frame: FrameType | None, bottom: CodeType) -> tuple:
    """The fields of a `Wait` after the first."""
    stack = []
    while frame is not None and frame.f_code is not bottom:
        stack.append(frame)
        frame = frame.f_back
    place, caller = _places(stack)
    if poll.waits_for is not None:
        return place, f"waits for {poll.waits_for}", None, (), caller
    address = int(poll.pointers.flat[0])
    return place, _wanted(poll, condition), _flag(address, poll.pointers.size), tuple(poll.pointers.flat), caller


def _places(stack: list[FrameType]) -> tuple[tuple[str, int, str], tuple[str, int, str] | None]:
    """The user's line, in the innermost frame outside the libraries, or else the kernel itself; and the kernel's own,
    if that is another function's.
    """
    first = next(i for i, frame in enumerate(stack) if frame.f_code.co_filename.startswith(SIMULATOR))
    stack = stack[first:]  # what the simulator itself calls is nobody's line
    users = [frame for frame in stack if not frame.f_code.co_filename.startswith(LIBRARIES)]
    kernels = [frame for frame in stack if not frame.f_code.co_filename.startswith(SIMULATOR)]
    inner, outer = (users[0], users[-1]) if users else (kernels[-1], kernels[-1])
    place, caller = ((each.f_code.co_filename, each.f_lineno, each.f_code.co_name) for each in (inner, outer))
    return place, None if inner is outer else caller


def users_line(error: BaseException) -> str:
    """Which line of the user's has raised ``error``, below which there may be many of the simulator's."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [f", at {file}:{line}" for file, line in frames if not file.startswith(LIBRARIES)]
    return users[-1] if users else ""


def _wanted(poll: Poll, condition: Condition | None) -> str:
    """What a poll is to see, which the library's own waits know, and what it sees."""
    held = _value(poll.values, poll.element)
    if condition is not None and condition.ranks is not None:
        flags = np.reshape(poll.values, -1)[: condition.ranks]
        epochs = ", ".join(_value(each, poll.element) for each in flags)
        return f"waits in a barrier for epoch {condition.wanted}, the ranks are at [{epochs}]"
    if condition is not None and condition.returned:
        return f"waits for {_SYMBOLS[condition.cmp]} {condition.wanted}, holds {held}"
    if poll.expected is not None:
        return f"waits with {poll.operation} for {_value(poll.expected, poll.element)}, holds {held}"
    until = "" if condition is None else f" until {_SYMBOLS[condition.cmp]} {condition.wanted}"
    return f"polls with {poll.operation}{until}, holds {held}"


def _value(stored: np.ndarray, element: tl.dtype) -> str:
    return str(dtypes.widen(TensorHandle(np.reshape(stored, -1)[:1], element))[0])


def _flag(address: int, lanes: int) -> str:
    try:
        from iris.heap.mapping import describe_address
    except ImportError:  # the simulator also runs kernels that have no heap
        described = None
    else:
        described = describe_address(address)
    more = f" (the first of {lanes})" if lanes > 1 else ""
    return (described or f"address {address:#x}") + more
