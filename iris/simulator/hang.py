"""The error message of a launch whose programs all wait while nothing changes: which program waits where, and for what.

The scheduler (`iris.simulator.grid`) decides that a launch hangs, and asks here for the error.
"""

import os
import sys
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
from iris.simulator.folders import IRIS, SIMULATOR, TRITON
from iris.simulator.tasks import Condition, Poll, Task
from iris.switches import switched_on

# Of waits that the message shows.
MOST_LINES = 8

_LIBRARIES = (IRIS, TRITON)
# The code of collectives. With IRIS_DEBUG=1 their calls are compared between ranks.
_COLLECTIVE = tuple(IRIS + name + os.sep for name in ("ccl", "ops"))
# In the name of the memory of point-to-point messages (`iris.ccl.communicator`), which are not compared.
_MESSAGES = " for messages "
_SYMBOLS = {"eq": "==", "ne": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<=", "reached": "at or past"}

Location = tuple[str, int, str]
"""File, line and function."""


def _rank_of_environment() -> int | None:
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else None


rank: Callable[[], int | None] = _rank_of_environment
"""Returns this process's rank, or None if it has none. Replaced once the process has joined a group."""


def _learn_rank(group: Any) -> None:
    global rank

    def rank_in_group() -> int:
        return group.ranks[group.rank]

    rank = rank_in_group


observer.on_join.append(_learn_rank)


class Wait(NamedTuple):
    """Programs that wait at the same place for the same thing: one line of the message.

    ``programs``, ``what`` and ``flag`` are in words. ``addresses``: those of the flags. ``caller``: the kernel's own
    line, if the place is in a function that the kernel has called.
    """

    programs: str
    place: Location
    what: str
    flag: str | None
    addresses: tuple[int, ...]
    caller: Location | None = None

    def __str__(self) -> str:
        where = ", called by ".join(
            f"{file}:{line} in {function}" for file, line, function in filter(None, (self.place, self.caller))
        )
        flag = f"; flag: {self.flag}" if self.flag else ""
        return f"{self.programs} at {where}: {self.what}{flag}"


def waits(waiting: Iterable[Task], bottom: CodeType) -> list[Wait]:
    """Where these tasks wait, for which flag and value, and what the flag holds. Equal ones are one `Wait`.

    ``bottom``: the code of the scheduler's function that runs a task. Its frame lies below those of the kernel.
    """
    frames = sys._current_frames()
    groups: dict[tuple, list[tuple[int, int, int]]] = defaultdict(list)
    for task in waiting:
        if task.poll is not None:
            what = (task.partition, *_describe(task.poll, task.condition, frames.get(task.thread), bottom))
            groups[what].append(task.index)
    return [Wait(_programs(indices, partition), *what) for (partition, *what), indices in groups.items()]


def gone_peers(waiting: Iterable[Task], ended_well: bool) -> list[str]:
    """The ranks that have died and for which one of these tasks may wait, each in words.

    ``ended_well``: also the ranks whose program has ended without an error.
    """
    try:
        from iris.heap.mapping import lost_at
    except ImportError:  # the simulator also runs kernels that have no heap
        return []
    return lost_at((int(task.poll.pointers.flat[0]) for task in waiting if task.poll is not None), ended_well)


def peer_lost_error(kernel: str, waits: list[Wait], gone: list[str]) -> PeerLostError:
    """The error of a launch that may wait for ranks that are gone. ``gone``: see `gone_peers`."""
    return PeerLostError(f"{_rank_prefix()}kernel {kernel!r} waits, and {'; '.join(gone)}.\n{_lines(waits)}")


def timeout_error(kernel: str, limit_s: float | None, waits: list[Wait], gone: list[str]) -> IrisTimeoutError:
    """The error of a launch that has waited for ``limit_s`` seconds; if that is None, in a deadlock of all ranks.

    ``gone``: see `gone_peers`.
    """
    who, text = _rank_prefix(), _lines(waits)
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


def _rank_prefix() -> str:
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


def _places(stack: list[FrameType]) -> tuple[Location, Location | None]:
    """Where the innermost frame outside the libraries is; and where the kernel is, if that is another function.

    If all frames are the libraries', the kernel is one of theirs, and it is named.
    """
    # Frames inside the simulator's first one are those of functions that it calls itself.
    first = next(i for i, frame in enumerate(stack) if frame.f_code.co_filename.startswith(SIMULATOR))
    stack = stack[first:]
    users = [frame for frame in stack if not frame.f_code.co_filename.startswith(_LIBRARIES)]
    kernels = [frame for frame in stack if not frame.f_code.co_filename.startswith(SIMULATOR)]
    inner, outer = (users[0], users[-1]) if users else (kernels[-1], kernels[-1])
    place, caller = ((each.f_code.co_filename, each.f_lineno, each.f_code.co_name) for each in (inner, outer))
    return place, None if inner is outer else caller


def _wanted(poll: Poll, condition: Condition | None) -> str:
    """What the program waits for, as far as that is known, and what it finds instead."""
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
