"""The processes of a group's ranks: which they are, which of them have ended, and how.

Each rank writes its process's identity into the group's store. From then on `iris.world.peers` or
`iris.world.remote_peers` notes its end. `Group` asks here while it waits for ranks in a meeting, and so do rails.
"""

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from iris.errors import IrisTimeoutError, PeerLostError, names
from iris.world import farewell, peers, strangers, wire
from iris.world.peers import Identity, Peer
from iris.world.store import LONGEST_PAUSE_S, await_keys, put

# How long this rank waits for a rank that has said that it fails. Its launcher should see that one end first.
ENDING_S = 0.8

# What messages say of a member whose program has ended without an error,
OVER = "the program has ended there"
# and of one that has ended before it said who it is.
UNKNOWN = "its process has ended before it could be known"

# How often a wait reads from the store who the other members are, and which processes of other hosts have ended.
INTERVAL_S = 0.25
# A connection closes a moment before the system reports the end of its process. How long to wait for that report; and
# for those of all processes of a host.
NOTICE_S, NOTICE_HOST_S = 0.5, 2.0

# The processes that are known, by global rank, for each default process group.
_processes: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Peer]]" = weakref.WeakKeyDictionary()


class Members:
    """The members of one group. Nothing here waits for them: it looks in the store, where each has said who it is.

    Parameters
    ----------
    store
        The group's; None in a group of one.
    ranks
        The members' global ranks, by rank in the group.
    rank
        This rank in the group.

    Attributes
    ----------
    processes : list of Peer or None
        By rank in the group; None for this rank, and for those that are not known yet.
    failures : dict of int to str
        The errors that members have said they end with, by rank in the group.
    store_is_gone : bool
        The connection to the store is lost, so nothing is read there any more.
    """

    def __init__(self, store: dist.Store | None, ranks: tuple[int, ...], rank: int) -> None:
        self._store, self._ranks, self._rank = store, ranks, rank
        self.store_is_gone = store is None
        self.failures: dict[int, str] = {}
        # A global rank keeps its process as long as the default process group lives. So a process that is known from
        # one group is known in all later ones.
        world = dist.group.WORLD if dist.is_initialized() else None
        self._known: dict[int, Peer] = {} if world is None else _processes.setdefault(world, {})
        self.processes: list[Peer | None] = [self._known.get(each) for each in ranks]
        self.processes[rank] = None
        if store is not None:
            # If the store is gone, the group's first use of it says so, and which process was lost.
            with contextlib.suppress(dist.DistNetworkError):
                put(store, f"who/{rank}", wire.encode(peers.own_identity()))

    def unknown(self) -> list[int]:
        """The members whose processes are not known yet."""
        return [rank for rank, peer in enumerate(self.processes) if peer is None and rank != self._rank]

    def ended(self) -> dict[int, Peer]:
        """The processes that are known to have ended, by rank in the group."""
        return {rank: peer for rank, peer in enumerate(self.processes) if peer is not None and peer.ended}

    def update(self) -> None:
        """Read from the store who the unknown members are, and which processes of other hosts have ended."""
        store = self._store
        if store is None:
            return
        for rank in self.unknown():
            if store.check([f"who/{rank}"]):
                # What cannot be read is of another version of Iris. The next meeting reports that.
                with contextlib.suppress(TypeError, ValueError):
                    identity = Identity(*wire.decode(store.get(f"who/{rank}")))
                    self.processes[rank] = self._known[self._ranks[rank]] = peers.watch(identity)
        for rank, peer in enumerate(self.processes):
            if peer is None or peer.watched or peer.ended:
                continue
            self._read_end(rank, peer)

    def _read_end(self, rank: int, peer: Peer) -> None:
        """Read from the store whether a process has ended, and how (`report_end` of a rank on its host)."""
        if self._store is not None and self._store.check([f"ended/{rank}"]):
            text = self._store.get(f"ended/{rank}").decode()
            peer.status, peer.ended = int(text) if text else None, True

    def whole_hosts(self, lost: Sequence[int]) -> list[int]:
        """``lost``, and the members that ended with them as their host went down; not those that exited with status 0.

        A host that goes down takes a moment to close the connections of all its processes: this waits for that. Where
        the host still runs, a process there reports how the lost ones ended, and this notes it.
        """
        hosts = {peer.identity[:2] for peer in (self.processes[rank] for rank in lost) if peer and not peer.watched}
        there = {rank: peer for rank, peer in enumerate(self.processes) if peer and peer.identity[:2] in hosts}
        wait_until(lambda: all(peer.ended for peer in there.values()) or self._ends_reported(lost), NOTICE_HOST_S)
        for rank, peer in there.items():
            if peer.status is None and not self.store_is_gone:
                with contextlib.suppress(dist.DistError):
                    self._read_end(rank, peer)
        return sorted({*lost, *(rank for rank, peer in there.items() if peer.ended and peer.status != 0)})

    def _ends_reported(self, lost: Sequence[int]) -> bool:
        """Whether a process of their host has reported how these ended. If so, the host still runs."""
        if self._store is None or self.store_is_gone:
            return False
        try:
            return self._store.check([f"ended/{rank}" for rank in lost])
        except dist.DistError:
            return False

    def unknown_are_gone(self) -> bool:
        """Whether all members that are not known yet have ended."""
        known = [peer.identity.number for peer in self._known.values()]
        return self._store is not None and strangers.are_gone(self._store, known)

    def report_end(self, peer: Peer) -> None:
        """Write into the store how a process of this host ended, for members of other hosts. Any thread."""
        if self._store is None or not peer.watched or peer not in self.processes:
            return
        if any(other is not None and not other.watched for other in self.processes):
            text = "" if peer.status is None else str(peer.status)
            self._store.set(f"ended/{self.processes.index(peer)}", text)

    def publish_failure(self, failure: str) -> None:
        """Let the other members know which error this rank's program ends with."""
        if self._store is not None:
            self._store.set(f"failure/{self._rank}", failure)

    def lost(self, well: bool) -> list[str]:
        """Which members have ended: "rank 3 is gone: its process (77) was killed by SIGKILL". Any thread.

        ``well``: also those whose programs have exited with status 0.
        """
        ended = [rank for rank, peer in self.ended().items() if well or peer.status != 0]
        return [f"rank {self._ranks[rank]} is gone: {how}" for rank, how in self.how_ended(ended).items()]

    def how_ended(self, ended: Sequence[int]) -> dict[int, str]:
        """How members have ended, in words. Leaves out those that failed only because another one was lost."""
        hows = {}
        for rank in ended:
            peer, failure = self.processes[rank], self._failure(rank)
            if failure is not None:
                hows[rank] = f"the program has failed there with {failure}"
            elif peer is None:
                hows[rank] = UNKNOWN
            else:
                hows[rank] = str(peer) if peer.ended and peer.status != 0 else OVER
        causes = {rank: how for rank, how in hows.items() if f"with {PeerLostError.__name__}: " not in how}
        return causes or hows

    def _failure(self, rank: int) -> str | None:
        """The error that a member has said it ends with (`publish_failure`); None if it has said nothing."""
        if self._store is not None and rank not in self.failures and not self.store_is_gone:
            try:
                if self._store.check([f"failure/{rank}"]):
                    self.failures[rank] = self._store.get(f"failure/{rank}").decode(errors="replace")
            except dist.DistError:
                self.store_is_gone = True
        return self.failures.get(rank)

    def await_ends(self, leaving: Sequence[int]) -> None:
        """Wait a moment for members that have said they end. Their launcher should see them end before this rank."""
        here = [peer for peer in (self.processes[rank] for rank in leaving) if peer is not None and peer.watched]
        wait_until(lambda: all(peer.ended for peer in here), ENDING_S)


def await_all(store: dist.Store, rank: int, ranks: Sequence[int], timeout_s: float) -> dict[int, Peer]:
    """Wait until all ranks of a new process group have come. Returns the known processes, by global rank.

    Parameters
    ----------
    store
        The store of the new group.
    rank
        This rank in it.
    ranks
        The global ranks of all its members.

    Raises
    ------
    PeerLostError
        A rank has ended. It was known from another group, or was there when the default process group was made.
    IrisTimeoutError
        Some did not come within ``timeout_s``.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    known: dict[int, Peer] = {} if world is None else _processes.setdefault(world, {})
    keys = [f"made/{number}" for number in range(len(ranks))]
    next_look = INTERVAL_S

    def missing() -> list[int]:
        return [each for each, key in zip(ranks, keys, strict=True) if not store.check([key])]

    def ended() -> list[int]:
        return [each for each in ranks if each in known and known[each].ended]

    def ask() -> None:
        for each, key in zip(ranks, keys, strict=True):
            if each not in known and key != keys[rank] and store.check([key]):
                with contextlib.suppress(TypeError, ValueError):  # of another version of Iris
                    known[each] = peers.watch(Identity(*wire.decode(store.get(key))))

    def look(waited: float) -> None:
        nonlocal next_look
        lost = ended()
        if waited >= next_look and world is not None:
            next_look = waited + INTERVAL_S
            ask()
            if strangers.are_gone(store, [peer.identity.number for peer in known.values()]):
                lost += [each for each in ranks if each not in known]
        if lost and (lost := [each for each in missing() if each in lost]):
            raise _lost_error(ranks, lost[0], known)

    try:
        put(store, keys[rank], wire.encode(peers.own_identity()))
        if not await_keys(store, keys, timeout_s, look):
            raise IrisTimeoutError(
                f"A group of {names(ranks)} is made, and {names(missing() or ranks)} did not come within {timeout_s:g} "
                "s, the time limit of the group. Does every rank of the program call new_group()?"
            )
        ask()
    except dist.DistNetworkError as error:
        # The process that holds the store has most likely ended, and it is one of these.
        if wait_until(ended, NOTICE_S):
            raise _lost_error(ranks, ended()[0], known) from error
        raise
    return known


def _lost_error(ranks: Sequence[int], lost: int, known: dict[int, Peer]) -> PeerLostError:
    how = known.get(lost, UNKNOWN)
    return PeerLostError(f"A group of {names(ranks)} is made, and rank {lost} will not come: {how}.")


def wait_until(condition: Callable[[], Any], limit_s: float) -> bool:
    """Poll until the condition holds. Returns whether it did within the limit."""
    deadline = time.monotonic() + limit_s
    while not (is_so := bool(condition())) and time.monotonic() < deadline:
        time.sleep(LONGEST_PAUSE_S)
    return is_so


def keep_processes(process_group: dist.ProcessGroup, processes: dict[int, Peer]) -> None:
    """If the group that has just been made is to be the default one, keep its processes for all later groups."""
    if not dist.is_initialized():
        _processes[process_group] = processes


def _report_end(peer: Peer) -> None:
    """A listener of `peers`: let all groups of this process report the end of this peer."""
    for group in list(farewell.groups):
        with contextlib.suppress(dist.DistError):
            group.members.report_end(peer)


peers.listeners.append(_report_end)
