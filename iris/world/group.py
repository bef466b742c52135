"""Ranks that meet on the host, through the *store* of their process group: its small key-value server.

Nothing here touches a GPU, so ranks can meet while their kernels wait for each other.
"""

import contextlib
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from iris.errors import InvalidGroupError, IrisTimeoutError, OutOfStepError, PeerFailedError, PeerLostError, names
from iris.simulator import sanitizer
from iris.world import farewell
from iris.world.farewell import ENDED

T = TypeVar("T")


def check_process_group(group: object) -> None:
    """Raise `InvalidGroupError` unless ``group`` is one that this rank is in."""
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidGroupError(
            "This rank is not a member of the group: torch.distributed.new_group() gave it a placeholder. "
            "Only members make this call."
            if group is dist.GroupMember.NON_GROUP_MEMBER
            else f"group={group!r} is not a process group: make one with torch.distributed.new_group()."
        )


class Group:
    """Ranks that meet on the host.

    Parameters
    ----------
    process_group
        The torch process group whose members meet; None for a group of this process alone.

    Attributes
    ----------
    rank, size : int
        This process within the group, and the number of members.
    ranks : tuple of int
        The members' ranks in the world, by rank in the group.
    timeout : float
        Seconds after which a meeting fails: the time limit that ``torch.distributed`` was initialised with.
    name : str
        Another one for every group of the process, and the same on all its members.
    store : torch.distributed.Store
        The members' own, on every host.
    meetings : int
        How many there have been, the same number on all members.

    Notes
    -----
    Members must create their groups over one process group in the same order: the n-th is the n-th everywhere, and that
    is what keeps two of them apart.
    """

    # Counted for the life of the process, because a store may outlive the process group (torchrun's agent holds one).
    _made: Counter[str] = Counter()

    def __init__(self, process_group: dist.ProcessGroup | None) -> None:
        self.process_group = process_group
        self.meetings = 0
        if process_group is None:
            self.rank, self.size, self.ranks = 0, 1, (0,)
            self.name = f"alone/{Group._made['alone']}"
            Group._made["alone"] += 1
            self.timeout = distributed_c10d.default_pg_timeout.total_seconds()
            return
        check_process_group(process_group)
        self.rank, self.size = process_group.rank(), process_group.size()
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        store = distributed_c10d._get_process_group_store(process_group)
        number = Group._made[process_group.group_name]
        Group._made[process_group.group_name] += 1
        self.name = f"{process_group.group_name}/iris/{number}"
        self.store = dist.PrefixStore(f"iris/{number}", store)
        self.store.set(f"-1/{self.rank}", "")
        farewell.groups.add(self)
        farewell.register(os.getpid())
        self.timeout = store.timeout.total_seconds()

    def all_gather(self, value: Any, what: str, orders: bool = True) -> list[Any]:
        """Every member's ``value``, by rank in the group. Collective; blocks the host; no GPU takes part.

        Parameters
        ----------
        value
            Anything that can be pickled. What may fail on some members, as a user's value, is for `agree`.
        what
            What the members meet for, the same words on all of them: it completes "while waiting for …" in the errors.
        orders
            Whether a program may rely on it: not on a meeting that only debug mode adds.

        Raises
        ------
        IrisTimeoutError
            Members did not come within the time limit; the message names them.
        OutOfStepError
            Members met for different things, on every member.
        PeerLostError
            The store is gone, or a member's program has ended.
        """
        if self.size == 1:
            return [value]
        # Before the meeting counts: a value that cannot be pickled must not put this member out of step.
        text = pickle.dumps((what, value))
        recorder = sanitizer.recorder if orders else None
        key = (self.name, self.meetings)
        with recorder.meeting(key, self.ranks, what) if recorder is not None else contextlib.nullcontext():
            return self._exchange(value, what, text)

    def _exchange(self, value: Any, what: str, text: bytes) -> list[Any]:
        """`all_gather` of what is pickled as ``text``."""
        this, last = self.meetings, self.meetings - 1
        self.meetings += 1
        peers = self._peers()
        keys = [f"{this}/{rank}" for rank in peers]
        try:
            self.store.set(f"{this}/{self.rank}", text)
            if self.store.has_extended_api():
                texts = self.store.multi_get(keys)
            else:
                texts = [self.store.get(key) for key in keys]
            # Whoever has come to this meeting has left the last one, so nobody will read this any more. That it is gone
            # also tells the others that this meeting's values have been read.
            self.store.delete_key(f"{last}/{self.rank}")
            farewell.latest[self.process_group.group_name] = self
        except dist.DistStoreError as error:
            raise self._timed_out(this, what) from error
        except dist.DistNetworkError as error:
            raise self._lost(what) from error
        met = dict(zip(peers, map(pickle.loads, texts), strict=True))
        met[self.rank] = (what, value)
        ended = [self.ranks[rank] for rank, (other, _) in sorted(met.items()) if other == ENDED]
        if ended:
            raise PeerLostError(
                f"Rank {self.ranks[self.rank]} waits in {what}, and {names(ended)} will not come: the program has "
                "ended there. Is every rank of the group making this call?"
            )
        if any(other != what for other, _ in met.values()):
            if sanitizer.recorder is not None:
                sanitizer.recorder.out_of_step(what)
            points = "; ".join(f"rank {self.ranks[rank]} in {met[rank][0]}" for rank in range(self.size))
            raise OutOfStepError(
                f"The ranks are at different points of the program: {points}. "
                "Collective calls must be made by all ranks of the group, in the same order."
            )
        return [met[rank][1] for rank in range(self.size)]

    def agree(self, step: Callable[[], T], what: str) -> list[T]:
        """Do a step that may fail on some members: it worked on all of them, or it raises on all of them.

        Collective; blocks the host. Whoever calls undoes what its own step did when this raises.

        Parameters
        ----------
        step
            Called once on each member. That what it returns can be pickled is part of the step.
        what
            Completes "could not …", the same words on all members.

        Returns
        -------
        list
            What ``step`` returned on every member, by rank in the group.

        Raises
        ------
        Exception
            On a member whose step raised: what it raised.
        PeerFailedError
            On the others, with the text of the error.
        """
        if self.size == 1:
            return [step()]
        result, failure = None, None
        try:
            result = pickle.dumps(step())
        except Exception as error:
            failure = error
        text = failure and f"{type(failure).__name__}: {failure}"
        outcomes = self.all_gather((result, text), f"a meeting to {what}")
        if failure is not None:
            raise failure
        failed = [(self.ranks[rank], text) for rank, (_, text) in enumerate(outcomes) if text is not None]
        if failed:
            raise PeerFailedError("; ".join(f"rank {rank} could not {what}: {text}" for rank, text in failed))
        return [pickle.loads(result) for result, _ in outcomes]

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def say_goodbye(self) -> None:
        """Come to the next meeting for the last time: whoever waits there waits no longer."""
        self.store.set(f"{self.meetings}/{self.rank}", pickle.dumps((ENDED, None)))

    def leave(self, deadline: float) -> None:
        """Wait until every peer has read the last meeting's values, or ``deadline``."""
        keys = [f"{self.meetings - 2}/{rank}" for rank in self._peers()]
        while any(self.store.check([key]) for key in keys) and time.monotonic() < deadline:
            time.sleep(1e-3)

    def _timed_out(self, this: int, what: str) -> Exception:
        try:
            missing = [self.ranks[rank] for rank in range(self.size) if not self.store.check([f"{this}/{rank}"])]
        except dist.DistNetworkError:
            return self._lost(what)
        verb = "has" if len(missing) == 1 else "have"
        return IrisTimeoutError(
            f"Rank {self.ranks[self.rank]} waited {self.timeout:g} s in {what}, "
            + (f"and {names(missing)} {verb} not come. " if missing else "which took that long. ")
            + "Is every rank of the group making this call? The limit is the time-out of the process group."
        )

    def _lost(self, what: str) -> Exception:
        return PeerLostError(
            f"Rank {self.ranks[self.rank]} lost its connection to the other ranks in {what}. "
            "The process that holds the store has most likely ended; look for an error in its output."
        )
