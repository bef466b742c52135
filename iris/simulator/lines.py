"""Which line of whose program is being done: what a finding names."""

import functools
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from iris.simulator import grid
from iris.simulator.folders import IRIS, SANITIZER, SIMULATOR, TRITON

USER, LIBRARY, INSTALLED, OTHER = "user", "library", "installed", "other"

LANGUAGE = IRIS + "language" + os.sep

_INSTALLED = tuple(os.sep + name + os.sep for name in ("site-packages", "dist-packages"))
_OTHER = (
    IRIS + "observer.py",
    SIMULATOR,
    SANITIZER,
    LANGUAGE,
    TRITON,
    str(Path(torch.__file__).parent) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    "<",
)


class Line(NamedTuple):
    """One of a program's, and the function that it is in."""

    file: str
    number: int
    function: str


# Below a program's frames lies this one.
BOTTOM = grid.Launch._execute.__code__


def line_of(frame: FrameType | None) -> tuple[CodeType, int] | None:
    """The innermost line of the user's, from ``frame`` on; in the library's own kernels, or if there is none but in
    packages that are installed, the innermost of theirs.
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


def kernel_line_of(frame: FrameType | None) -> tuple[CodeType, int] | None:
    """The outermost line of the user's in the program that runs, from ``frame`` on: that of the kernel itself."""
    line = None
    while frame is not None and frame.f_code is not BOTTOM:
        if owner(frame.f_code) == USER:
            line = frame.f_code, frame.f_lineno
        frame = frame.f_back
    return line


def users_lines(frame: FrameType | None) -> Iterator[tuple[CodeType, int]]:
    """The lines of the user's, from ``frame`` outwards."""
    while frame is not None and frame.f_code is not BOTTOM:
        if owner(frame.f_code) == USER:
            yield frame.f_code, frame.f_lineno
        frame = frame.f_back


def package_of(frame: FrameType) -> str:
    """The package whose code runs in ``frame``: "torch" of what is in `torch.distributed`."""
    return frame.f_globals.get("__name__", "").partition(".")[0]


def lines_of_error(error: BaseException) -> tuple[tuple[CodeType, int] | None, tuple[CodeType, int] | None]:
    """The lines of `line_of` and of `kernel_line_of`, of what has raised ``error``."""
    line, outermost, trace = None, None, error.__traceback__
    while trace is not None:
        whose = owner(trace.tb_frame.f_code)
        if whose == USER or (line is None and whose in (LIBRARY, INSTALLED)):
            line = trace.tb_frame.f_code, trace.tb_lineno
        if whose == USER and outermost is None:
            outermost = line
        trace = trace.tb_next
    return line, outermost


def known(line: tuple[CodeType, int] | None) -> Line:
    return Line("?", 0, "?") if line is None else Line(line[0].co_filename, line[1], line[0].co_name)


@functools.cache
def owner(code: CodeType) -> str:
    """Whose line a frame with this code shows."""
    return owner_of(code.co_filename)


def owner_of(file: str) -> str:
    """Whose lines those of a file are: the user's, one of this library's kernels', a package's, or nobody's."""
    if file.startswith(_OTHER):
        return OTHER
    if file.startswith(IRIS):
        return LIBRARY
    return INSTALLED if any(folder in file for folder in _INSTALLED) else USER
