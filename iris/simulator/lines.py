"""Which line of the user's program is being done: what findings and errors name.

Stacks are searched for it, frame by frame. The files that a frame's code may come from are told apart here by who owns
them: the user, the library's kernels, an installed package, or internals that no report names.
"""

import functools
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from iris.simulator.folders import IRIS, SANITIZER, SIMULATOR, TRITON
from iris.simulator.tasks import Task

USER, LIBRARY, INSTALLED, INTERNAL = "user", "library", "installed", "internal"
"""Who owns a file:

* USER: the program
* LIBRARY: Iris, but for its internals
* INSTALLED: a package in ``site-packages``
* INTERNAL: simulator, sanitizer and language of Iris, Triton, torch, the standard library, and code of no file
"""

LANGUAGE = IRIS + "language" + os.sep

_INSTALLED = tuple(os.sep + name + os.sep for name in ("site-packages", "dist-packages"))
_INTERNAL = (
    IRIS + "observer.py",
    SIMULATOR,
    SANITIZER,
    LANGUAGE,
    TRITON,
    str(Path(torch.__file__).parent) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    "<",
)

CodeLine = tuple[CodeType, int]
"""A line of a frame: its code, and the number of the line in the code's file."""


class Line(NamedTuple):
    """A line as a report names it."""

    file: str
    number: int
    function: str


BOTTOM = Task.run.__code__
"""The code whose frame lies below those of a kernel: stacks are searched down to it."""


def user_line(frame: FrameType | None) -> CodeLine | None:
    """The innermost line of the user's, from ``frame`` outwards.

    If there is none, the innermost line of the library's kernels or of an installed package.
    """
    line = None
    while frame is not None and frame.f_code is not BOTTOM:
        whose = owner(frame.f_code)
        if whose == USER:
            return frame.f_code, frame.f_lineno
        if whose in (LIBRARY, INSTALLED) and line is None:
            line = frame.f_code, frame.f_lineno
        frame = frame.f_back
    return line


def kernel_line(frame: FrameType | None) -> CodeLine | None:
    """The outermost line of the user's, from ``frame`` outwards: that of the kernel itself."""
    lines = list(user_lines(frame))
    return lines[-1] if lines else None


def user_lines(frame: FrameType | None) -> Iterator[CodeLine]:
    """All lines of the user's, from ``frame`` outwards."""
    while frame is not None and frame.f_code is not BOTTOM:
        if owner(frame.f_code) == USER:
            yield frame.f_code, frame.f_lineno
        frame = frame.f_back


def package_of(frame: FrameType) -> str:
    """The package whose code runs in ``frame``: "torch" for `torch.distributed`."""
    return frame.f_globals.get("__name__", "").partition(".")[0]


def lines_of_error(error: BaseException) -> tuple[CodeLine | None, CodeLine | None]:
    """What `user_line` and `kernel_line` would have given where ``error`` was raised."""
    line, outermost, trace = None, None, error.__traceback__
    while trace is not None:
        whose = owner(trace.tb_frame.f_code)
        if whose == USER or (line is None and whose in (LIBRARY, INSTALLED)):
            line = trace.tb_frame.f_code, trace.tb_lineno
        if whose == USER and outermost is None:
            outermost = line
        trace = trace.tb_next
    return line, outermost


def place_of_error(error: BaseException) -> str:
    """The user's line where ``error`` was raised, to end a sentence with; nothing if there is none."""
    line, _ = lines_of_error(error)
    if line is None or owner(line[0]) != USER:
        return ""
    return f", at {line[0].co_filename}:{line[1]}"


def as_line(line: CodeLine | None) -> Line:
    """``line`` for a report; with question marks if it is None."""
    return Line("?", 0, "?") if line is None else Line(line[0].co_filename, line[1], line[0].co_name)


@functools.cache
def owner(code: CodeType) -> str:
    """Who owns the file of this code."""
    return owner_of(code.co_filename)


def owner_of(file: str) -> str:
    """Who owns a file: USER, LIBRARY, INSTALLED or INTERNAL."""
    if file.startswith(_INTERNAL):
        return INTERNAL
    if file.startswith(IRIS):
        return LIBRARY
    return INSTALLED if any(folder in file for folder in _INSTALLED) else USER
