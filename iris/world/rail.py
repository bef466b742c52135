"""A rail: the ranks with one local rank, one on each host, among which bytes travel from host to host.

In the simulator they travel by Gloo, which is torch's and speaks TCP. A rail moves bytes and never adds: how sums are
formed is up to who calls it. Calls of a rail are made in the same order by all of its ranks, and by one thread.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from iris.errors import GroupAbortedError, IrisTimeoutError, MismatchedCollectiveError, PeerLostError, names
from iris.world import wire
from iris.world.group import BROKEN, Group
from iris.world.hosts import Hosts
from iris.world.members import INTERVAL_S, NOTICE_S, await_
from iris.world.store import LONGEST_PAUSE_S, NO_PAUSE_S, SHARE, own_client


class Rail:
    """The ranks of ``hosts`` with this rank's local rank. Construction is collective among them; blocks the host.

    Parameters
    ----------
    group
        The ranks of all hosts.
    hosts
        On which they are.
    """

    def __init__(self, group: Group, hosts: Hosts) -> None:
        self._group, self._hosts = group, hosts
        self._ranks = hosts.rail
        # Gloo waits in the store, and must not hold up those who share the group's connection (`shared_client`).
        store = dist.PrefixStore(f"rail/{hosts.local_rank}", own_client(group.store))
        # Connects to all others, so no later call is the first.
        limit = timedelta(seconds=group.timeout)
        # torch's annotations know no methods of it.
        self._gloo: Any = dist.ProcessGroupGloo(store, hosts.number, len(self._ranks), limit)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, what: str) -> Callable[[], None]:
        """Begin to gather every host's ``input`` into ``output``, ``(n,)`` → ``(H, n)``, both contiguous.

        Returns what waits until ``output`` is there: until then neither tensor is touched. ``what``: the call that this
        is part of, in words, the same on all hosts.
        """
        parts = [list(as_bytes(output).chunk(len(self._ranks)))] if output.numel() else [[]]
        return self._begin(lambda: self._gloo.allgather(parts, [as_bytes(input)]), input.nbytes, what)

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor, what: str) -> None:
        """Send row h of ``input`` to host h, and receive host h's row for this host into row h of ``output``.

        ``(H, n)`` → ``(H, n)``, both contiguous. Blocks the host. ``what`` as for `all_gather`.
        """
        sent, received = as_bytes(input), as_bytes(output)
        self._begin(lambda: self._gloo.alltoall_base(received, sent, [], []), input.nbytes, what)()

    def broadcast(self, tensor: torch.Tensor, host: int, what: str) -> None:
        """Copy ``tensor``, contiguous, of the rank on ``host`` into that of every other. Blocks the host."""
        options = dist.BroadcastOptions()
        options.rootRank = host
        self._begin(lambda: self._gloo.broadcast([as_bytes(tensor)], options), tensor.nbytes, what)()

    def gather(self, output: torch.Tensor | None, input: torch.Tensor, host: int, what: str) -> None:
        """Gather every host's ``input`` into ``output`` of the rank on ``host``, ``(n,)`` → ``(H, n)``; None elsewhere.

        Blocks the host.
        """
        options = dist.GatherOptions()
        options.rootRank = host
        parts = [] if output is None else [list(as_bytes(output).chunk(len(self._ranks)))]
        self._begin(lambda: self._gloo.gather(parts, [as_bytes(input)], options), input.nbytes, what)()

    def scatter(self, output: torch.Tensor, input: torch.Tensor | None, host: int, what: str) -> None:
        """Send row h of ``input`` of the rank on ``host`` to ``output`` of host h, ``(H, n)`` → ``(n,)``.

        ``input`` is None elsewhere. Blocks the host.
        """
        options = dist.ScatterOptions()
        options.rootRank = host
        parts = [] if input is None else [list(as_bytes(input).chunk(len(self._ranks)))]
        self._begin(lambda: self._gloo.scatter([as_bytes(output)], parts, options), output.nbytes, what)()

    def barrier(self) -> None:
        """Return when all hosts' ranks have come. Blocks the host."""
        self._begin(_nothing, 0, "device_barrier()")()

    def refuse(self, what: str) -> None:
        """In the place of a call whose arguments were refused. Blocks the host.

        Raises if the other hosts have not refused it.
        """
        self._begin(_nothing, 0, f"{what}, which was refused,")()

    def close(self) -> None:
        """Let go of the connections. Local. The caller guarantees that no call is under way on any rank."""
        del self._gloo

    def _begin(self, start: Callable[[], Any], nbytes: int, what: str) -> Callable[[], None]:
        """Start a transfer of so many bytes by this rank. Returns what waits for it."""
        with self._in_step(what):
            self._check_alike(nbytes, what)
            work = self._started(start, what) if nbytes else None

        def wait() -> None:
            with self._in_step(what):
                if work is not None:
                    self._wait(work, what)

        return wait

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

    def _check_alike(self, nbytes: int, what: str) -> None:
        """Raise on all ranks unless they make the same call: Gloo ends a process that gets more than it expects."""
        text = f"{what} of {nbytes} bytes".encode()[:MOST_TEXT]
        mine = torch.zeros(MOST_TEXT, dtype=torch.uint8)
        mine[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        everyone = torch.zeros(len(self._ranks), MOST_TEXT, dtype=torch.uint8)
        self._wait(self._started(lambda: self._gloo.allgather([list(everyone)], [mine]), what), what)
        calls = [bytes(row.tolist()).rstrip(b"\0").decode(errors="ignore") for row in everyone]
        if len(set(calls)) > 1:
            differing = "; ".join(
                f"rank {self._in_world(rank)} on {self._hosts.name_of(rank)} calls {call}"
                for rank, call in zip(self._ranks, calls, strict=True)
            )
            raise MismatchedCollectiveError(f"The hosts do not make the same call: {differing}.")

    def _started(self, start: Callable[[], Any], what: str) -> Any:
        try:
            return start()
        except RuntimeError as error:
            raise self._failed(error, what) from error

    def _wait(self, work: Any, what: str) -> None:
        """Wait for a transfer. Signals interrupt it, and so does the loss of a rank, on any host."""
        start, next_look, lost = time.monotonic(), INTERVAL_S, False
        while not (lost or work.is_completed()):
            waited = time.monotonic() - start
            if waited > NO_PAUSE_S:
                lost = any(peer.status for peer in self._group.members.ended().values())
                self._check_whole(what)
                if waited > next_look:
                    next_look = waited + INTERVAL_S
                    self._look_at_other_hosts(what)
                time.sleep(min(waited * SHARE, LONGEST_PAUSE_S))
        if lost and not work.is_completed():
            raise self._failed(RuntimeError("a rank was lost"), what)
        try:
            work.wait()
        except RuntimeError as error:
            if TIMED_OUT not in str(error):
                # A rank may have broken the group, and is about to say so: its connections close a moment before.
                await_(lambda: self._ended(what), NOTICE_S)
            raise self._failed(error, what) from error

    def _check_whole(self, what: str) -> None:
        try:
            self._group.check()
        except GroupAbortedError as error:
            # Another rank of this host may have been faster to find that one is lost.
            why = self._group.why(error, what)
            raise (error if why is error else self._failed(why, what)) from error

    def _ended(self, what: str) -> bool:
        """Whether a rank's process has. Raises if the group has been broken."""
        self._look_at_other_hosts(what)
        return bool(self._group.members.ended())

    def _look_at_other_hosts(self, what: str) -> None:
        """Raise if the group has been broken there. Who breaks it says so in the place of the next meeting."""
        group = self._group
        for rank in range(group.size):
            key = f"{group.meetings}/{rank}"
            # What is of another version of Iris, or a store that is gone, the next meeting reports.
            with contextlib.suppress(TypeError, ValueError, dist.DistError):
                if rank != group.rank and group.store.check([key]):
                    come_for, why = wire.decode(group.store.get(key))
                    if come_for == BROKEN:
                        group.break_off(why)
        self._check_whole(what)

    def _failed(self, error: Exception, what: str) -> Exception:
        """What to raise where Gloo has ended a call with this error."""
        ranks = "; ".join(f"rank {self._in_world(rank)} is on {self._hosts.name_of(rank)}" for rank in self._ranks)
        if TIMED_OUT in str(error):
            others = [self._in_world(rank) for rank in self._ranks if rank != self._group.rank]
            return IrisTimeoutError(
                f"Rank {self._group.ranks[self._group.rank]} waited {self._group.timeout:g} s in {what} for "
                f"{names(others)} ({ranks}). Does every rank make this call? The limit is the time-out of the process "
                "group."
            )
        why = error if isinstance(error, PeerLostError) else self._group.why(error, what)
        if not isinstance(why, PeerLostError):
            this, first_line = self._group.ranks[self._group.rank], str(error).partition("\n")[0].partition(". ")[0]
            why = PeerLostError(f"Rank {this} lost its connection to other hosts in {what}: {first_line}.")
        return PeerLostError(f"{why} Of the ranks that exchange data here, {ranks}.")

    def _in_world(self, rank: int) -> int:
        return self._group.ranks[rank]


# Bytes of the words that describe a call.
MOST_TEXT = 96
# What Gloo says of a call that took longer than its limit.
TIMED_OUT = "Timed out"


def connect(group: Group, hosts: Hosts) -> Rail:
    """This rank's rail. Collective over all hosts; blocks the host. It works on all ranks, or raises on all."""
    rails: list[Rail] = []
    try:
        group.agree(lambda: rails.append(Rail(group, hosts)), "connect to the ranks of other hosts")
    except BaseException:
        rails.clear()
        raise
    return rails[0]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, ``(n,)``: what moves, moves as bytes, whatever the dtype."""
    # Of one element the stride may be anything.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _nothing() -> None:
    """Begins the transfer of no bytes."""
