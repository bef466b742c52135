"""All-reduces of other projects, for those who have installed them: what makes them peers of a benchmark.

A peer has memory that its ranks share. It is made once for all calls of a run, by all ranks together, and given back at
the end. A library that is not installed, does not build or refuses a call is no error of the benchmark: its rows have
the reason instead of a time.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import NamedTuple, Protocol

import torch

from iris.bench.ranks import failure, on_any_rank
from iris.context import Iris

# Libraries by name, and the package of each. One that has the package's name chooses its algorithm itself.
PACKAGES = {
    "flashinfer": "flashinfer",
    "flashinfer one shot": "flashinfer",
    "flashinfer two shot": "flashinfer",
    "sglang": "sglang",
}
NAMES = tuple(PACKAGES)
_PROJECTS = {"flashinfer": "flashinfer-python", "sglang": "sglang"}


class UnavailableError(Exception):
    """The library does not do this call; the message is the reason in its row."""


class Calls(NamedTuple):
    """A call as it is timed, and as it is checked: with the result in the ``out`` that was given."""

    timed: Callable[[], object]
    checked: Callable[[], object]


class Largest(NamedTuple):
    """For what calls the memory must do: elements of one all-reduce, and of one with RMSNorm after it."""

    summed: int
    normalised: int
    dtype: torch.dtype


class Peer(Protocol):
    """A library with its memory. Its calls raise `UnavailableError`, or what the library raises, when they are made."""

    def all_reduce(self, library: str, out: torch.Tensor, x: torch.Tensor) -> Calls:
        """The sum of all ranks' ``x``."""

    def all_reduce_rms_norm(
        self, library: str, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor
    ) -> Calls:
        """The sum and the residual, which takes it in, normalised by rows."""

    def capturing(self) -> contextlib.AbstractContextManager[object]:
        """Where calls are captured in CUDA graphs. Collective at its end."""

    def close(self) -> None:
        """Give the memory back. Collective."""


class Missing:
    """Stands for a library that cannot be used: its calls raise `UnavailableError` with the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def _refuse(self) -> None:
        raise UnavailableError(self._reason)

    def all_reduce(self, library: str, out: torch.Tensor, x: torch.Tensor) -> Calls:
        return Calls(self._refuse, self._refuse)

    def all_reduce_rms_norm(
        self, library: str, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor
    ) -> Calls:
        return Calls(self._refuse, self._refuse)

    def capturing(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def close(self) -> None:
        pass


def by_default(libraries: Sequence[str]) -> list[str]:
    """Those that are measured if none is asked for: of these peers the installed ones, at their own choice."""
    return [
        library
        for library in libraries
        if library not in PACKAGES or (library in PACKAGES.values() and find_spec(library) is not None)
    ]


@contextlib.contextmanager
def opened(ctx: Iris, libraries: Sequence[str], largest: Largest) -> Iterator[dict[str, Peer]]:
    """The peers among these libraries, by name. Collective over the world, at its end too.

    After an exception nothing is given back, as the other ranks may be elsewhere.
    """
    wanted = {library: PACKAGES[library] for library in libraries if library in PACKAGES}
    made = {package: _make(ctx, package, largest) for package in dict.fromkeys(wanted.values())}
    yield {library: made[package] for library, package in wanted.items()}
    ctx.barrier()
    for peer in made.values():
        peer.close()


def _make(ctx: Iris, package: str, largest: Largest) -> Peer:
    """The package's peer, or `Missing` on all ranks if it cannot be made on any."""
    there = find_spec(package) is not None
    not_installed = on_any_rank(ctx, "" if there else f"not installed: pip install {_PROJECTS[package]}")
    if not_installed:
        return Missing(not_installed)
    peer: Peer | None = None
    reason = ""
    try:
        peer = importlib.import_module(f"iris.bench.{package}_peer").open_peer(ctx, largest)
    except UnavailableError as error:
        reason = str(error)
    except Exception as error:  # a peer's failure is a result too
        reason = failure(error)
    reason = on_any_rank(ctx, reason)
    if peer is None or reason:
        return Missing(reason)
    return peer
