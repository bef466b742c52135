"""A rail: the ranks with one local rank, one on each host, among which bytes travel from host to host.

Two engines carry them: Gloo in the simulator (`iris.world.gloo_rail`), NCCL or RCCL on GPUs (`iris.world.nccl_rail`).
A rail moves bytes and never adds: how sums are formed is up to who calls it. Calls of a rail are made in the same order
by all of its ranks, and by one thread.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from iris.compat import c10d
from iris.errors import GroupAbortedError, MismatchedCollectiveError
from iris.world.group import Group
from iris.world.hosts import Hosts


class Rail(ABC):
    """The ranks of ``hosts`` with this rank's local rank. Construction is collective among them; blocks the host.

    By NCCL a transfer is enqueued on the current stream, and the host goes on. By Gloo the host waits for it.

    Parameters
    ----------
    group
        The ranks of all hosts.
    hosts
        On which they are.
    engine
        torch's backend that moves the data.
    name
        What people call the engine.
    """

    def __init__(self, group: Group, hosts: Hosts, engine: Any, name: str) -> None:
        self._group, self._hosts, self._engine = group, hosts, engine
        self._ranks = hosts.rail
        self.name = name

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, what: str) -> Callable[[], None]:
        """Begin to gather every host's ``input`` into ``output``, ``(n,)`` → ``(H, n)``, both contiguous.

        Returns what waits until ``output`` is there (the host, or the stream that is then the current one): until then
        neither tensor is touched. ``what``: the call that this is part of, in words, the same on all hosts.
        """
        received, sent = as_bytes(output), as_bytes(input)
        return self._begin(lambda: c10d.all_gather(self._engine, received, sent), input.nbytes, what)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor, what: str) -> Callable[[], None]:
        """Begin to send row h of ``input`` to host h, and to receive its row for this host as row h of ``output``.

        ``(H, n)`` → ``(H, n)``, both contiguous. What it returns, and ``what``, are as for `all_gather`.
        """
        received, sent = as_bytes(output), as_bytes(input)
        return self._begin(lambda: self._engine.alltoall_base(received, sent, [], []), input.nbytes, what)

    def broadcast(self, tensor: torch.Tensor, host: int, what: str) -> None:
        """Copy ``tensor``, contiguous, of the rank on ``host`` into that of every other."""
        options = dist.BroadcastOptions()
        options.rootRank = host
        self._begin(lambda: self._engine.broadcast([as_bytes(tensor)], options), tensor.nbytes, what)()

    def gather(self, output: torch.Tensor | None, input: torch.Tensor, host: int, what: str) -> None:
        """Gather every host's ``input`` into ``output`` of the rank on ``host``, ``(n,)`` → ``(H, n)``.

        ``output`` is None elsewhere.
        """
        options = dist.GatherOptions()
        options.rootRank = host
        parts = [] if output is None else [list(as_bytes(output).chunk(len(self._ranks)))]
        self._begin(lambda: self._engine.gather(parts, [as_bytes(input)], options), input.nbytes, what)()

    def scatter(self, output: torch.Tensor, input: torch.Tensor | None, host: int, what: str) -> None:
        """Send row h of ``input`` of the rank on ``host`` to ``output`` of host h, ``(H, n)`` → ``(n,)``.

        ``input`` is None elsewhere.
        """
        options = dist.ScatterOptions()
        options.rootRank = host
        parts = [] if input is None else [list(as_bytes(input).chunk(len(self._ranks)))]
        self._begin(lambda: self._engine.scatter([as_bytes(output)], parts, options), output.nbytes, what)()

    @abstractmethod
    def barrier(self) -> None:
        """What comes behind it begins when all hosts' ranks have come."""

    @abstractmethod
    def refuse(self, what: str) -> None:
        """In the place of a call whose arguments were refused. Gloo raises if the other hosts have not refused it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the connections. Local. The caller guarantees that no call is under way on any rank."""

    @abstractmethod
    def _begin(self, start: Callable[[], Any], nbytes: int, what: str) -> Callable[[], None]:
        """Start a transfer of so many bytes by this rank. Returns what waits for it."""

    @contextlib.contextmanager
    def _in_step(self, what: str) -> Iterator[None]:
        """Whoever leaves a call by an error breaks the group of all: the others may have had the call, or wait."""
        try:
            yield
        except GroupAbortedError:
            raise
        except BaseException as error:
            this = self._group.ranks[self._group.rank]
            self._group.break_off(f"{what} of rank {this} ended with {type(error).__name__}: {error}".rstrip(". "))
            raise

    def _compare(self, calls: Sequence[str]) -> None:
        """Raise `MismatchedCollectiveError` unless the ranks' calls, in words and by host, are alike."""
        if len(set(calls)) > 1:
            differing = "; ".join(
                f"rank {self._in_world(rank)} on {self._hosts.name_of(rank)} calls {call}"
                for rank, call in zip(self._ranks, calls, strict=True)
            )
            raise MismatchedCollectiveError(f"The hosts do not make the same call: {differing}.")

    def _in_world(self, rank: int) -> int:
        return self._group.ranks[rank]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, ``(n,)``: what moves, moves as bytes, whatever the dtype."""
    # Of one element the stride may be anything.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
