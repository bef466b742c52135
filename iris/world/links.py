"""send and recv between two ranks of different hosts, whatever their local ranks are.

The first message between two ranks, in either direction, connects them: they meet on the host, and make a `Rail` of two
ranks for each direction. So a message from the lower rank to the higher ("up") never waits for one in the other
direction, nor for one of another pair.
"""

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from iris.world.group import Group
from iris.world.pair import Pair
from iris.world.rail import Rail, Route
from iris.world.store import own_client

# Makes a rail. It is given a connection to the store of its own, as it may wait in it: waiting in the group's own would
# block all who share that.
Make = Callable[[Route, dist.Store], Rail]


class Link:
    """This rank's connection to one rank of another host. Making it is local; the first message connects.

    Two threads may use it at once, one that sends and one that receives.
    """

    def __init__(self, group: Group, peer: int, make: Make) -> None:
        self._group, self._peer, self._make = group, peer, make
        self._connecting = threading.Lock()
        ranks = (min(group.rank, peer), max(group.rank, peer))
        self._route = Route(f"pair/{ranks[0]}-{ranks[1]}", ranks, ranks.index(group.rank))
        self._pair: Pair | None = None
        # True: the rail for messages from the lower rank to the higher; False: for those from the higher to the lower.
        self._rails: dict[bool, Rail] = {}

    @property
    def connected(self) -> bool:
        return len(self._rails) == 2

    def connect(self) -> None:
        """Connect, if it has not been done. Blocks the host until the other rank connects, sends or receives."""
        with self._connecting:
            if self.connected:
                return
            group, peer = self._group, self._peer
            here, there = group.ranks[group.rank], group.ranks[peer]
            self._pair = self._pair or Pair(group, self._route)
            rails: dict[bool, Rail] = {}
            try:
                self._pair.all_gather("", f"the first message between ranks {here} and {there}")
                store = own_client(group.store)
                for up, name in ((True, "up"), (False, "down")):
                    rails[up] = self._make(self._route._replace(name=f"{self._route.name}/{name}"), store)
            except BaseException as error:
                # The other rank may have connected, and would wait for a message for ever.
                group.break_off(f"Rank {here} could not connect to rank {there}: {error}")
                for rail in rails.values():
                    rail.close()
                raise
            self._rails = rails

    def send(self, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor. With NCCL it is enqueued on the current stream. With Gloo the host waits for it."""
        self._move(tensor, self._group.rank, self._peer)

    def recv(self, tensor: torch.Tensor) -> None:
        """Receive into a contiguous tensor of as many bytes as the other rank sends. Waits as `send` does."""
        self._move(tensor, self._peer, self._group.rank)

    def close(self) -> None:
        for rail in self._rails.values():
            rail.close()
        self._rails.clear()

    def _move(self, tensor: torch.Tensor, source: int, target: int) -> None:
        self.connect()
        what = f"a message from rank {self._group.ranks[source]} to rank {self._group.ranks[target]}"
        self._rails[source < target].broadcast(tensor, 0 if source < target else 1, what)()


class Links:
    """This rank's links in a group, and the rail of all ranks of the group. Both are made when first asked for."""

    def __init__(self, group: Group, make: Make) -> None:
        self._group, self._make = group, make
        self._links: dict[int, Link] = {}
        self._everyone: Rail | None = None
        self._attempts = 0

    def everyone(self) -> Rail:
        """A rail of all ranks of the group. The first call is collective over it, and blocks the host."""
        if self._everyone is None:
            group = self._group
            made: list[Rail] = []
            # Each attempt has a name of its own, so it does not find what a failed one has left in the store. All ranks
            # make the same number of attempts.
            self._attempts += 1
            route = Route(f"everyone/{self._attempts}", tuple(range(group.size)), group.rank)
            group.agree(
                lambda: made.append(self._make(route, own_client(group.store))), "connect to all ranks of all hosts"
            )
            (self._everyone,) = made
        return self._everyone

    @property
    def everyone_connected(self) -> bool:
        return self._everyone is not None

    def to(self, peer: int) -> Link:
        """The link to a rank of the group, which is on another host."""
        return self._links.setdefault(peer, Link(self._group, peer, self._make))

    def close(self) -> None:
        """Close all connections. The caller guarantees that no message is under way on this rank."""
        for link in self._links.values():
            link.close()
        self._links.clear()
        if self._everyone is not None:
            self._everyone.close()
            self._everyone = None
