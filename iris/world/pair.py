"""Meetings of two ranks of a group, through its store, in which the other ranks take no part.

For two ranks that send each other their first message (`iris.world.links`). `Group` would need all ranks to make a
group for the two.
"""

from typing import Any

import torch.distributed as dist

from iris.errors import IrisTimeoutError, PeerLostError
from iris.world import wire
from iris.world.broken import break_if_others_have
from iris.world.group import Group
from iris.world.members import INTERVAL_S
from iris.world.rail import Route
from iris.world.store import await_keys, put


class Pair:
    """The two ranks of a ``route``. For one thread at a time. Construction is local."""

    def __init__(self, group: Group, route: Route) -> None:
        self._group, self._peer, self._meetings, self._next_look = group, route.ranks[1 - route.place], 0, 0.0
        self._store = dist.PrefixStore(f"{route.name}/meetings", group.store)

    def all_gather(self, value: Any, what: str, orders: bool = False) -> list[Any]:
        """The values of both, the lower rank's first. Blocks the host until the other has come.

        ``orders`` is there because `Group.all_gather` has it, and changes nothing. Raises `IrisTimeoutError`,
        `PeerLostError` or `GroupAbortedError`, as `Group.all_gather` does.
        """
        group, peer, this = self._group, self._peer, self._meetings
        self._meetings, self._next_look = this + 1, 0.0
        try:
            put(self._store, f"{this}/{group.rank}", wire.encode(value))
            if not await_keys(self._store, [f"{this}/{peer}"], group.timeout, lambda waited: self._look(what, waited)):
                raise IrisTimeoutError(
                    f"Rank {group.ranks[group.rank]} waited {group.timeout:g} s in {what} for rank "
                    f"{group.ranks[peer]}. Does it make the other half of this call? The limit is the time-out of the "
                    "process group."
                )
            theirs = wire.decode(self._store.get(f"{this}/{peer}"))
            # The other has come to this meeting, so it has read what was of the last one.
            self._store.delete_key(f"{this - 1}/{group.rank}")
        except dist.DistNetworkError as error:
            raise self._lost_error(what) from error
        return [value, theirs] if group.rank < peer else [theirs, value]

    def _look(self, what: str, waited: float) -> None:
        group = self._group
        group.check()
        if waited >= self._next_look:
            self._next_look = waited + INTERVAL_S
            group.members.update()
            break_if_others_have(group)
        if self._peer in group.members.ended() and not self._store.check([f"{self._meetings - 1}/{self._peer}"]):
            raise self._lost_error(what)

    def _lost_error(self, what: str) -> Exception:
        this, peer = (self._group.ranks[rank] for rank in (self._group.rank, self._peer))
        return self._group.cause_of(PeerLostError(f"Rank {this} lost its connection to rank {peer} in {what}."), what)
