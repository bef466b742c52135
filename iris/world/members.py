"""The processes of a group's ranks: which they are, which of them have ended, and how."""

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

# What a rank that has said that it fails gets to end, so that its launcher sees it before the others.
ENDING_S = 0.8

# How a member has ended that did so well.
OVER = "the program has ended there"
# Or before it had made a group with this one.
UNKNOWN = "its process has ended before it could be known"

# How often a wait asks the store for what only it knows: who the other members are, and who has died elsewhere.
INTERVAL_S = 0.25
# What the system gets to notice that a process has ended whose connection is gone already; and all those of a host.
NOTICE_S, NOTICE_HOST_S = 0.5, 2.0

# The processes of the ranks of the world, for each default process group.
_processes: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, Peer]]" = weakref.WeakKeyDictionary()


class Members:
    """The members of one group. Local but for the store, in which each member says who it is.

    Parameters
    ----------
    store
        The group's; None in a group of one.
    ranks
        Their ranks in the world, by rank in the group.
    rank
        This one, in the group.

    Attributes
    ----------
    processes : list of Peer or None
        By rank in the group; None for this one, and for those that are not known yet.
    failures : dict of int to str
        What members have said that they end by.
    store_is_gone : bool
        Nothing more is asked there then.
    """

    def __init__(self, store: dist.Store | None, ranks: tuple[int, ...], rank: int) -> None:
        self._store, self._ranks, self._rank = store, ranks, rank
        self.store_is_gone = store is None
        self.failures: dict[int, str] = {}
        # Ranks keep their processes as long as the default process group lives, and so are known in all later groups.
        world = dist.group.WORLD if dist.is_initialized() else None
        self._known: dict[int, Peer] = {} if world is None else _processes.setdefault(world, {})
        self.processes: list[Peer | None] = [self._known.get(each) for each in ranks]
        self.processes[rank] = None
        if store is not None:
            # Without a store the group finds the same when it goes on, and then says which process was lost.
            with contextlib.suppress(dist.DistNetworkError):
                put(store, f"who/{rank}", wire.encode(peers.own_identity()))

    def unknown(self) -> list[int]:
        """The members whose processes are not known yet."""
        return [rank for rank, peer in enumerate(self.processes) if peer is None and rank != self._rank]

    def ended(self) -> dict[int, Peer]:
        """The members whose processes have ended, as far as they are known: these, by rank."""
        return {rank: peer for rank, peer in enumerate(self.processes) if peer is not None and peer.ended}

    def ask(self) -> None:
        """Ask the store who the members are that are not known, and which have ended on other hosts."""
        store = self._store
        if store is None:
            return
        for rank in self.unknown():
            if store.check([f"who/{rank}"]):
                # Of another version of Iris: that is reported when it comes to a meeting.
                with contextlib.suppress(TypeError, ValueError):
                    identity = Identity(*wire.decode(store.get(f"who/{rank}")))
                    self.processes[rank] = self._known[self._ranks[rank]] = peers.watch(identity)
        for rank, peer in enumerate(self.processes):
            if peer is None or peer.watched or peer.ended:
                continue
            self._ask_how_ended(rank, peer)

    def _ask_how_ended(self, rank: int, peer: Peer) -> None:
        if self._store is not None and self._store.check([f"ended/{rank}"]):
            text = self._store.get(f"ended/{rank}").decode()
            peer.status, peer.ended = int(text) if text else None, True

    def whole_hosts(self, lost: Sequence[int]) -> list[int]:
        """``lost``, and who ends with them on other hosts, but for those whose programs have ended well.

        A host that goes takes a moment to close all connections, unless somebody there still says how those have ended.
        If so, this notes it.
        """
        hosts = {peer.identity[:2] for peer in (self.processes[rank] for rank in lost) if peer and not peer.watched}
        there = {rank: peer for rank, peer in enumerate(self.processes) if peer and peer.identity[:2] in hosts}
        await_(lambda: all(peer.ended for peer in there.values()) or self._report_ends(lost), NOTICE_HOST_S)
        for rank, peer in there.items():
            if peer.status is None and not self.store_is_gone:
                with contextlib.suppress(dist.DistError):
                    self._ask_how_ended(rank, peer)
        return sorted({*lost, *(rank for rank, peer in there.items() if peer.ended and peer.status != 0)})

    def _report_ends(self, lost: Sequence[int]) -> bool:
        """Whether a process of their host has told how these have ended: then the host is there."""
        if self._store is None or self.store_is_gone:
            return False
        try:
            return self._store.check([f"ended/{rank}" for rank in lost])
        except dist.DistError:
            return False

    def are_gone(self) -> bool:
        """Whether those that are not known have ended."""
        known = [peer.identity.number for peer in self._known.values()]
        return self._store is not None and strangers.are_gone(self._store, known)

    def report_end(self, peer: Peer) -> None:
        """Let members that cannot see it, since they are on other hosts, know that a process has ended. Any thread."""
        if self._store is None or not peer.watched or peer not in self.processes:
            return
        if any(other is not None and not other.watched for other in self.processes):
            text = "" if peer.status is None else str(peer.status)
            self._store.set(f"ended/{self.processes.index(peer)}", text)

    def leave_word(self, failure: str) -> None:
        """What this rank's program ends by, in words."""
        if self._store is not None:
            self._store.set(f"failure/{self._rank}", failure)

    def lost(self, well: bool) -> list[str]:
        """Which members have ended: "rank 3 is gone: its process (77) was killed by SIGKILL". Any thread.

        ``well``: also those whose programs have ended well.
        """
        ended = [rank for rank, peer in self.ended().items() if well or peer.status != 0]
        return [f"rank {self._ranks[rank]} is gone: {how}" for rank, how in self.how_ended(ended).items()]

    def how_ended(self, ended: Sequence[int]) -> dict[int, str]:
        """How members have ended, in words; without those that only failed because another one was lost."""
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
        if self._store is not None and rank not in self.failures and not self.store_is_gone:
            try:
                if self._store.check([f"failure/{rank}"]):
                    self.failures[rank] = self._store.get(f"failure/{rank}").decode(errors="replace")
            except dist.DistError:
                self.store_is_gone = True
        return self.failures.get(rank)

    def await_ends(self, leaving: Sequence[int]) -> None:
        """Give members that have said that they come no more the time to end: their launcher is to see them first."""
        here = [peer for peer in (self.processes[rank] for rank in leaving) if peer is not None and peer.watched]
        await_(lambda: all(peer.ended for peer in here), ENDING_S)


def await_all(store: dist.Store, rank: int, ranks: Sequence[int], timeout_s: float) -> dict[int, Peer]:
    """Wait until all ranks are here, where a group is made. Returns their processes, by rank in the world.

    Parameters
    ----------
    store
        The new group's.
    rank
        This one in it.
    ranks
        All of it, by their ranks in the world.

    Raises
    ------
    PeerLostError
        One has ended that is known from other groups, or that was there when the default process group was made.
    IrisTimeoutError
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
            raise _lost(ranks, lost[0], known)

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
        if await_(ended, NOTICE_S):
            raise _lost(ranks, ended()[0], known) from error
        raise
    return known


def _lost(ranks: Sequence[int], lost: int, known: dict[int, Peer]) -> PeerLostError:
    how = known.get(lost, UNKNOWN)
    return PeerLostError(f"A group of {names(ranks)} is made, and rank {lost} will not come: {how}.")


def await_(condition: Callable[[], Any], limit_s: float) -> bool:
    """Whether something came to be true within the limit."""
    deadline = time.monotonic() + limit_s
    while not (is_so := bool(condition())) and time.monotonic() < deadline:
        time.sleep(LONGEST_PAUSE_S)
    return is_so


def introduce(process_group: dist.ProcessGroup, processes: dict[int, Peer]) -> None:
    """Note the processes of a group that has just been made: from now on, if it is the default one."""
    if not dist.is_initialized():
        _processes[process_group] = processes


def _report_end(peer: Peer) -> None:
    for group in list(farewell.groups):
        with contextlib.suppress(dist.DistError):
            group.members.report_end(peer)


peers.listeners.append(_report_end)
