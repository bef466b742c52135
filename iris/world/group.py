"""Ranks that meet on the host, through the store of their process group.

A *meeting* is an all_gather on the host: each member writes a value under the meeting's number and its own rank, and
waits for those of all others. It also writes what the meeting is for, so members at different calls find out. Nothing
here touches a GPU, so ranks can meet while their kernels wait for each other. A meeting ends in the same way for all:
with everybody's values, or with an error that names who has not come, or has died.

A member that leaves a meeting by an error *breaks* the group, as its number of meetings no longer is that of the
others. Then no member can meet any more. Who waits asks `iris.world.members` whether others have ended.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from iris import observer
from iris.compat.c10d import default_store, store_of
from iris.errors import (
    GroupAbortedError,
    InvalidMessageError,
    IrisTimeoutError,
    OutOfStepError,
    PeerFailedError,
    PeerLostError,
    names,
)
from iris.world import farewell, wire
from iris.world.farewell import ENDED, Attendance
from iris.world.members import INTERVAL_S, NOTICE_S, OVER, Members, wait_until
from iris.world.process_group import ranks_of
from iris.world.store import await_keys, own_client, put, shared_client

T = TypeVar("T")

# A member that breaks the group writes this for its next meeting, in the place of what the meeting is for.
BROKEN = "a broken group"


class Group:
    """Ranks that meet on the host. One thread at a time may use a group.

    Parameters
    ----------
    process_group
        The torch process group whose members meet; None for a group of this process alone.
    part
        The ranks of ``process_group`` that meet here; by default all. The others make a group of another part.

    Attributes
    ----------
    rank, size : int
        This process within the group, and the number of members.
    ranks : tuple of int
        The members' global ranks, by rank in the group.
    timeout : float
        Seconds after which a meeting fails: the time limit that ``torch.distributed`` was initialised with.
    name : str
        Unique among the groups of the process, and the same on all members.
    store : torch.distributed.Store
        Where the members meet. It does not use torch's own connection, so threads can meet in several groups at once.
    members : iris.world.members.Members
        Their processes.
    step : str or None
        What the members do together in `agree`, while this one does its part; else None.
    check_whole : callable or None
        Raises `GroupAbortedError` if the group's abort flag is set (`iris.runtime.abort`). Called during waits.
    abort : callable or None
        Sets the abort flag, with the reason, which also stops calls that do not meet.
    broken : str or None
        Why no member may meet any more: one has left a meeting that others count as held.
    meetings : int
        How many there have been, the same number on all members.

    Notes
    -----
    Members must create their groups over one process group in the same order. Groups are matched by that order: the
    n-th group of one member is the n-th of all.
    """

    # Counted for the life of the process, because a store may outlive the process group (torchrun's agent holds one).
    _made: Counter[str] = Counter()

    def __init__(self, process_group: dist.ProcessGroup | None, part: Sequence[int] | None = None) -> None:
        self.process_group = process_group
        self.ranks: tuple[int, ...]
        self.meetings = 0
        self.step: str | None = None
        self.check_whole: Callable[[], None] | None = None
        self.abort: Callable[[str], None] | None = None
        self.broken: str | None = None
        if process_group is None:
            self.rank, self.size, self.ranks = 0, 1, (0,)
            self.name = f"alone/{Group._made['alone']}"
            Group._made["alone"] += 1
            self.timeout = default_pg_timeout.total_seconds()
            self.members = Members(None, self.ranks, self.rank)
            return
        everyone = ranks_of(process_group)
        chosen = range(len(everyone)) if part is None else part
        self.rank, self.size = chosen.index(process_group.rank()), len(chosen)
        self.ranks = tuple(everyone[rank] for rank in chosen)
        store = store_of(process_group)
        world = default_store()
        name = process_group.group_name
        number = f"{Group._made[name]}" if part is None else f"{Group._made[name]}/from rank {self.ranks[0]}"
        Group._made[name] += 1
        self.name = f"{name}/iris/{number}"
        # The key in `farewell.latest`. A part has its own: a member that has come to a meeting of the part may still be
        # reading in one of the whole group.
        self._group_name = name if part is None else self.name
        # torch gives most groups a prefix in the default group's store. They share a connection; others have their own.
        has_part = isinstance(store, dist.PrefixStore) and world in (store, store.underlying_store)
        whole, prefix = (world, self.name) if has_part else (store, f"iris/{number}")
        try:
            self.store = dist.PrefixStore(prefix, shared_client(whole) if has_part else own_client(whole))
        except dist.DistNetworkError as error:
            raise self._disconnected("the making of a group") from error
        self.timeout = store.timeout.total_seconds()  # type: ignore[attr-defined]
        # First of all, so that whoever reads anything else of this group finds who has written it.
        self.members = Members(self.store, self.ranks, self.rank)
        self._attendance = Attendance(dist.PrefixStore(prefix, whole), self.members.processes, self.rank)
        try:
            self.store.set(f"-1/{self.rank}", "")  # deleted in the first meeting, for `farewell.Attendance`
        except dist.DistNetworkError as error:
            raise self._store_lost("the making of a group") from error
        farewell.groups.add(self)
        farewell.register(os.getpid())

    def all_gather(self, value: Any, what: str, orders: bool = True) -> list[Any]:
        """Every member's ``value``, by rank in the group. Collective; blocks the host; no GPU takes part.

        Parameters
        ----------
        value
            Of the types of `iris.world.wire`; named tuples arrive as plain ones. What may fail on some members is for
            `agree`.
        what
            What the members meet for, the same words on all of them. It completes "Rank 0 waits in …" in errors.
        orders
            Whether the sanitizer takes it for synchronisation. False for meetings that only debug mode adds.

        Raises
        ------
        IrisTimeoutError
            Members did not come within the time limit; the message names them.
        OutOfStepError
            Members met for different things, on every member.
        PeerLostError
            A member has died, or its program has ended; or the store is gone.
        GroupAbortedError
            The group is broken, as by a member that has left a meeting by a time limit or Ctrl-C.
        InvalidMessageError
            What a member brought is not of this version of Iris.
        """
        if self.size == 1:
            return [value]
        self.check()
        # Before the meeting counts: a value that cannot be sent must not put this member out of step.
        text = wire.encode((what, value))
        recorder = observer.recorder if orders else None
        key = (self.name, self.meetings)
        with recorder.meeting(key, self.ranks, what) if recorder is not None else contextlib.nullcontext():
            try:
                return self._exchange(value, what, text)
            except (PeerLostError, OutOfStepError, InvalidMessageError, GroupAbortedError):
                raise
            except BaseException as error:
                # Others may still complete this meeting, or have completed it.
                self._left(what, error)
                raise

    def _exchange(self, value: Any, what: str, text: bytes) -> list[Any]:
        """One meeting: `all_gather` of ``value``, which is encoded as ``text``."""
        this, last = self.meetings, self.meetings - 1
        self.meetings += 1
        self._next_look = 0.0
        others = self._peers()
        keys = [f"{this}/{rank}" for rank in others]
        try:
            put(self.store, f"{this}/{self.rank}", text)
            if not await_keys(self.store, keys, self.timeout, lambda waited: self._look(this, what, waited)):
                raise self._timed_out(this, what)
            met = dict(zip(others, map(self._decode, others, self._read(keys)), strict=True))
            if self.members.unknown():
                self.members.update()
            ended = [rank for rank, (other, _) in met.items() if other == ENDED]
            self.members.failures.update({rank: met[rank][1] for rank in ended if met[rank][1] is not None})
            if ended:
                self.members.await_ends(ended)
                raise self._lost_error(what, ended)
            for other, why in met.values():
                if other == BROKEN:
                    self.break_off(why)
                    self.check()
            # All have come to this meeting, so all have left the last one, and nobody reads this key any more. Its
            # absence also tells the others that this rank has read the values of this meeting (`farewell.Attendance`).
            self.store.delete_key(f"{last}/{self.rank}")
            self._attendance.latest = this
            farewell.latest[self._group_name] = self._attendance
        except dist.DistNetworkError as error:
            raise self._store_lost(what) from error
        met[self.rank] = (what, value)
        if any(other != what for other, _ in met.values()):
            if observer.recorder is not None:
                observer.recorder.out_of_step(what)
            points = "; ".join(f"rank {self.ranks[rank]} in {met[rank][0]}" for rank in range(self.size))
            raise OutOfStepError(
                f"The ranks are at different points of the program: {points}. "
                "Collective calls must be made by all ranks of the group, in the same order."
            )
        return [met[rank][1] for rank in range(self.size)]

    def agree(self, step: Callable[[], T], what: str) -> list[T]:
        """Do a step that may fail on some members. If it fails on one, this raises on all of them.

        Collective; blocks the host. When this raises, each caller undoes what its own step has done.

        Parameters
        ----------
        step
            Called once on each member. What it returns is sent as a value of `all_gather`; if it cannot be sent, the
            step has failed.
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
        self.step = what
        try:
            result = step()
            wire.encode(result)
        except Exception as error:
            failure = error
        except BaseException as error:
            self._left(f"a meeting to {what}", error)
            raise
        finally:
            self.step = None
        text = failure and f"{type(failure).__name__}: {failure}"
        outcomes = self.all_gather((None if failure else result, text), f"a meeting to {what}")
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # Its traceback holds this frame: the cycle would keep alive what the step has made.
        failed = [(self.ranks[rank], text) for rank, (_, text) in enumerate(outcomes) if text is not None]
        if failed:
            raise PeerFailedError("; ".join(f"rank {rank} could not {what}: {text}" for rank, text in failed))
        return [result for result, _ in outcomes]

    def _peers(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _read(self, keys: list[str]) -> list[bytes]:
        if self.store.has_extended_api():  # type: ignore[attr-defined]
            return self.store.multi_get(keys)
        return [self.store.get(key) for key in keys]

    def _decode(self, rank: int, text: bytes) -> tuple[str, Any]:
        try:
            what, value = wire.decode(text)
        except (TypeError, ValueError) as error:
            raise InvalidMessageError(
                f"In a meeting of ranks, what lies in the store for rank {self.ranks[rank]} is no message of this "
                f"version of Iris ({error}). Do all ranks run the same version, and can nobody else reach the store?"
            ) from error
        return what, value

    def check(self) -> None:
        """Raise `GroupAbortedError` if no member may meet any more."""
        if self.broken is not None:
            raise GroupAbortedError(self.ranks, f"{self.broken}.")
        if self.check_whole is not None:
            self.check_whole()

    def _left(self, what: str, error: BaseException) -> None:
        """Break the group: this member has left a meeting by an error, so its number of meetings may be another."""
        self.break_off(f"rank {self.ranks[self.rank]} has left {what} by {type(error).__name__}")

    def break_off(self, why: str) -> None:
        """Break the group, and write why for each meeting that this member has not completed, up to its next one."""
        self.broken = why
        if self.abort is not None:
            self.abort(f"{why}.")
        with contextlib.suppress(dist.DistError):
            for number in range(self._attendance.latest + 1, self.meetings + 1):
                put(self.store, f"{number}/{self.rank}", wire.encode((BROKEN, why)))

    def say_goodbye(self, failure: str | None) -> None:
        """Write for the next meeting that this member has ended, so that nobody waits for it there.

        ``failure``: the error that the program ends with, in words; None if it ends well.
        """
        if self.members.store_is_gone:
            return
        put(self.store, f"{self.meetings}/{self.rank}", wire.encode((ENDED, failure)))
        if failure is not None:
            self.members.publish_failure(failure)

    # Who does not come ----------------------------------------------------------------------------------------------

    def _look(self, this: int, what: str, waited: float) -> None:
        """Called again and again while waiting: raise if a member will not come any more, or the group is broken."""
        if self.check_whole is not None:
            try:
                self.check_whole()
            except GroupAbortedError:
                # Unless all have come by now. A member may have ended this meeting well and broken the group after it.
                # The meeting then has to end well here, too.
                if not self._all_came(this):
                    raise
        if waited >= self._next_look:
            self._next_look = waited + INTERVAL_S
            self.members.update()
            unknown = self.members.unknown()
            if unknown and waited >= INTERVAL_S and self.members.unknown_are_gone():
                raise self._lost_error(what, unknown)
        ended = self.members.ended()
        # A member that came, and then ended with status 0, is not missing here. And all may have come by now.
        lost = [rank for rank, peer in ended.items() if peer.status or not self._came(this, rank)]
        if lost and not self._all_came(this):
            raise self._lost_error(what, lost)

    def _all_came(self, this: int) -> bool:
        return self.store.check([f"{this}/{rank}" for rank in self._peers()])

    def _came(self, this: int, rank: int) -> bool:
        key = f"{this}/{rank}"
        return self.store.check([key]) and self._decode(rank, self.store.get(key))[0] != ENDED

    def _lost_error(self, what: str, lost: list[int]) -> Exception:
        lost = self.members.whole_hosts(lost)
        hows = self.members.how_ended(lost)
        texts = [f"rank {self.ranks[rank]} will not come: {how}" for rank, how in hows.items()]
        over = " Is every rank of the group making this call?" if OVER in hows.values() else ""
        return PeerLostError(f"Rank {self.ranks[self.rank]} waits in {what}, and {'; '.join(texts)}.{over}")

    def _timed_out(self, this: int, what: str) -> Exception:
        try:
            missing = [self.ranks[rank] for rank in range(self.size) if not self.store.check([f"{this}/{rank}"])]
        except dist.DistNetworkError:
            return self._store_lost(what)
        verb = "has" if len(missing) == 1 else "have"
        return IrisTimeoutError(
            f"Rank {self.ranks[self.rank]} waited {self.timeout:g} s in {what}, "
            + (f"and {names(missing)} {verb} not come. " if missing else "which took that long. ")
            + "Is every rank of the group making this call? The limit is the time-out of the process group."
        )

    def cause_of(self, error: Exception, what: str) -> Exception:
        """What to raise where a call with other members has failed with ``error``: `PeerLostError` if one has ended.

        Else ``error`` itself. Waits a moment, as connections close before the system reports which process has ended.
        """
        wait_until(self.members.ended, NOTICE_S)
        ended = list(self.members.ended())
        return self._lost_error(what, ended) if ended else error

    def _store_lost(self, what: str) -> Exception:
        self.members.store_is_gone = True
        return self.cause_of(self._disconnected(what), what)

    def _disconnected(self, what: str) -> Exception:
        holder = "torchrun" if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else "that of rank 0, mostly"
        return PeerLostError(
            f"Rank {self.ranks[self.rank]} lost its connection to the other ranks in {what}. "
            f"The process that holds the store ({holder}) has most likely ended; look for an error in its output. "
            "Or it is on another host, which cannot be reached any more."
        )
