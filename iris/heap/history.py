"""The allocations that a rank has made, described in few words, so that ranks can compare them.

Offsets agree because every rank makes the same allocations. Whether they do is checked wherever the ranks meet: each
brings the number of its allocations and a digest of their sizes and offsets. In debug mode (``IRIS_DEBUG=1``) each
also remembers its calls since the last meeting, and the first that differs is named.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from iris import observer
from iris.errors import AsymmetricHeapError, names
from iris.switches import switched_on
from iris.world import Group

VARIABLE = "IRIS_DEBUG"

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def debugging() -> bool:
    """Whether ``IRIS_DEBUG`` is set."""
    return switched_on(VARIABLE)


class Call(NamedTuple):
    """One allocation, as the user wrote it: ``function`` of this package, in a ``line`` of ``caller``."""

    size: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    function: str
    file: str
    line: int
    caller: str

    @property
    def place(self) -> str:
        return f"{shown(self.file)}:{self.line}"

    def __str__(self) -> str:
        return f"{self.function}() of {tensor_text(self.shape, self.dtype)} at {self.place}"


class Summary(NamedTuple):
    """What a rank brings to a meeting: ``point``, where it is, in words; how many allocations it has made so far, and
    the digest of their sizes and offsets; whether it remembers its calls."""

    point: str
    count: int  # type: ignore[assignment]  # of the tuple, the method of the same name
    digest: int
    debug: bool


@dataclass
class History:
    """The allocations of this rank, in order. ``calls``: in debug mode, those since the last meeting."""

    debug: bool = field(default_factory=debugging)
    count: int = 0
    digest: int = 0
    calls: list[Call] = field(default_factory=list)

    def add(self, size: int, shape: tuple[int, ...], dtype: torch.dtype) -> Call | None:
        """Remember an allocation of ``size`` bytes; in debug mode, return the call that asked for it."""
        self.count += 1
        # The hash of a tuple of integers depends on nothing but their values.
        self.digest = hash((self.digest, size))
        if not self.debug:
            return None
        call = Call(size, shape, dtype, *_user_call())
        self.calls.append(call)
        return call

    def add_offset(self, offset: int) -> None:
        """Remember where the allocation just added went: ranks that took back different blocks differ in that alone."""
        self.digest = hash((self.digest, offset))

    def summary(self, point: str) -> Summary:
        """What to bring to a meeting. ``point`` says in words where in its program the rank is."""
        return Summary(point, self.count, self.digest, self.debug)

    def compare(self, group: Group, summaries: Sequence[Summary]) -> None:
        """Raise `AsymmetricHeapError`, on all ranks, unless all have come from the same allocations to the same point.

        Collective if they have not: in debug mode the ranks then exchange their calls.
        """
        states = [(each.point, each.count, each.digest) for each in summaries]
        if len(set(states)) == 1:
            self.calls.clear()
            return
        lines = [
            f"{names(ranks)} made {count} allocation{'s' * (count != 1)} and "
            f"{'are' if len(ranks) > 1 else 'is'} in {point}"
            for (point, count, _), ranks in _alike(group, states)
        ]
        message = f"The ranks' programs differ in what they allocate on the heap: {'; '.join(lines)}."
        if len({each.count for each in summaries}) == 1 and len({each.digest for each in summaries}) > 1:
            message += " The sizes or the offsets differ."
        calls: dict[int, tuple[str, int, str]] = {}
        if all(each.debug for each in summaries):
            text, calls = self._first_difference(group)
            message += text
        else:
            message += f" Set {VARIABLE}=1 on all ranks to name the call."
        if observer.recorder is not None:
            observer.recorder.asymmetric(message, calls)
        raise AsymmetricHeapError(message + " Every rank must make the same allocations in the same order.")

    def _first_difference(self, group: Group) -> tuple[str, dict[int, tuple[str, int, str]]]:
        """In words; and by rank the file, line and function of the call that differs, if there is one."""
        mine = [(call.size, str(call), (call.file, call.line, call.caller)) for call in self.calls]
        histories = group.all_gather(mine, "a comparison of the heaps' allocations")
        for index in range(max(map(len, histories))):
            calls = [history[index] if index < len(history) else None for history in histories]
            if len({call and call[0] for call in calls}) > 1:
                alike = _alike(group, [call[1] if call else "no further allocation" for call in calls])
                number = self.count - len(self.calls) + index + 1
                texts = "; ".join(f"{text} on {names(ranks)}" for text, ranks in alike)
                lines = {rank: call[2] for rank, call in zip(group.ranks, calls, strict=True) if call}
                return f" Allocation {number} is the first that differs: {texts}.", lines
        return "", {}


def _alike(group: Group, values: Sequence) -> list[tuple]:
    """Each distinct value with the ranks that have it, those of most ranks first."""
    ranks = defaultdict(list)
    for rank, value in zip(group.ranks, values, strict=True):
        ranks[value].append(rank)
    return sorted(ranks.items(), key=lambda item: -len(item[1]))


def tensor_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    """``float32[4, 8]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def shown(file: str) -> str:
    """Its path from the working directory, if it lies in there, or else as it is."""
    try:
        relative = os.path.relpath(file)
    except OSError:  # the working directory is gone, or not to be read
        return file
    return file if relative.startswith("..") else relative


def _user_call() -> tuple[str, str, int, str]:
    """The function of this package that the user called, and the user's file, line and function."""
    frame = sys._getframe(1)
    function = frame.f_code.co_name
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        function = frame.f_code.co_name
        frame = frame.f_back
    return function, frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
