"""Which host each rank is on; and how a break of a host's group reaches the group of all hosts, and back.

A *host* is a set of ranks that can load and store each other's memory: those with one boot id, or with one value of the
environment variable ``IRIS_HOST``, if that is set. Hosts are numbered in the order of their first ranks. Every host has
the same number of ranks. A *local rank* numbers the ranks of a host from 0 on, in the order of their ranks.
"""

import contextlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from iris import observer
from iris.arg_parser import index
from iris.errors import GroupAbortedError, InvalidGroupError, RankOutOfRangeError, names
from iris.world.group import Group
from iris.world.placement import Placement
from iris.world.process_group import check_among


@dataclass(frozen=True)
class Hosts:
    """The hosts of a group of ranks, as one of these ranks sees them.

    Attributes
    ----------
    group : Group
        The ranks of this host. With one host it is the group of all ranks itself.
    number : int
        The number of this host.
    local_rank : int
        The local rank of this rank.
    ranks : tuple of tuple of int
        The ranks of each host, by host and local rank. They need not be consecutive.
    names : tuple of str
        What messages call each host.
    """

    group: Group
    number: int
    local_rank: int
    ranks: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    _host_of: dict[int, int] = field(repr=False)

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks of this host, by local rank."""
        return self.ranks[self.number]

    @property
    def rail(self) -> tuple[int, ...]:
        """The ranks with the local rank of this one, by host."""
        return tuple(ranks[self.local_rank] for ranks in self.ranks)

    def host_of(self, rank: int) -> int:
        """The host of a rank. Raises `RankOutOfRangeError` if there is no such rank."""
        number = index(rank)
        if number not in self._host_of:
            raise observer.reported(RankOutOfRangeError(rank, len(self._host_of)))
        return self._host_of[number]

    def is_local(self, rank: int) -> bool:
        """Whether a rank is on this host. Raises `RankOutOfRangeError` if there is no such rank."""
        return self.host_of(rank) == self.number

    def name_of(self, rank: int) -> str:
        """What messages call the host of a rank."""
        return self.names[self.host_of(rank)]

    def by_rank(self, of_local_ranks: Sequence[int]) -> tuple[int, ...]:
        """Spread numbers of this host's local ranks over all ranks: ranks of other hosts get 0."""
        here = dict(zip(self.local_ranks, of_local_ranks, strict=True))
        return tuple(here.get(rank, 0) for rank in range(len(self._host_of)))


def divide(group: Group, placements: Sequence[Placement]) -> Hosts:
    """The hosts of a group, from the placement of each rank. Every rank makes its host's group; nobody waits.

    Raises, on every rank:

    InvalidGroupError
        The hosts have different numbers of ranks.
    """
    ranks = _by_host([placement.host for placement in placements])
    host_names = tuple(placements[those[0]].host_name for those in ranks)
    if len(ranks) > 1:
        _check_equal_counts(
            ranks,
            host_names,
            group,
            "Every host has the same number of ranks, and these differ",
            "Start as many on each (torchrun --nproc-per-node), or give iris.iris() a process_group with as many ranks "
            "of each.",
        )
    return _seen_by(group, ranks, host_names)


def divide_members(members: Group, everyone: Group, hosts: Hosts) -> Hosts:
    """The hosts of ``members``, some of the ranks of ``everyone``, whose hosts are ``hosts``.

    Every member makes its host's group; nobody waits. Raises `InvalidGroupError` on every member if hosts have
    different numbers of them.
    """
    on_host = hosts_of(members.ranks, everyone, hosts)
    ranks = _by_host(on_host)
    host_names = tuple(hosts.names[on_host[those[0]]] for those in ranks)
    if len(ranks) > 1:
        _check_equal_counts(
            ranks,
            host_names,
            members,
            "A group over several hosts has the same number of ranks on each, and these differ",
            "Use a group with as many ranks of each, or of one host alone; or for this group the backend nccl of "
            "torch.distributed, in the simulator gloo.",
        )
    return _seen_by(members, ranks, host_names)


def hosts_of(ranks: Sequence[int], everyone: Group, hosts: Hosts) -> list[int]:
    """The host of each of these global ranks. Raises `InvalidGroupError` if one is not among ``everyone``."""
    check_among(ranks, everyone.ranks)
    return [hosts.host_of(everyone.ranks.index(rank)) for rank in ranks]


def _by_host(on_host: Sequence[Hashable]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, from the host of each rank."""
    found: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(on_host):
        found.setdefault(host, []).append(rank)
    return tuple(map(tuple, found.values()))


def _seen_by(group: Group, ranks: tuple[tuple[int, ...], ...], host_names: tuple[str, ...]) -> Hosts:
    """The hosts as this rank of the group sees them. It makes its host's group, where there are several."""
    host_of = {rank: number for number, those in enumerate(ranks) for rank in those}
    number = host_of[group.rank]
    own = group if len(ranks) == 1 else Group(group.process_group, part=ranks[number])
    return Hosts(own, number, ranks[number].index(group.rank), ranks, host_names, host_of)


def _check_equal_counts(
    ranks: Sequence[Sequence[int]], host_names: Sequence[str], group: Group, rule: str, instead: str
) -> None:
    if len(set(map(len, ranks))) > 1:
        counts = ", ".join(f"{len(those)} on {name}" for those, name in zip(ranks, host_names, strict=True))
        raise InvalidGroupError(f"{rule}: {counts} ({_places(ranks, host_names, group)}). {instead}")


def _places(ranks: Sequence[Sequence[int]], host_names: Sequence[str], group: Group) -> str:
    """Which global ranks are on which host, in words."""
    return "; ".join(
        f"{names([group.ranks[rank] for rank in those])} on {name}"
        for those, name in zip(ranks, host_names, strict=True)
    )


def link_aborts(everyone: Group, host: Group) -> None:
    """From now on a break of the host's group breaks that of all hosts, and the other way round. Local.

    The abort flag belongs to the host's group (`iris.runtime.abort`), and only ranks of the host see it. Ranks of other
    hosts find in the store that the group of all is broken.
    """

    def check_whole() -> None:
        try:
            host.check()
        except GroupAbortedError as error:
            if everyone.broken is None:
                everyone.break_off(error.why.rstrip("."))
            raise

    def abort(why: str) -> None:
        with contextlib.suppress(GroupAbortedError):
            host.check()  # If it is broken already, the first cause stays.
            if host.abort is not None:
                host.abort(why)

    everyone.check_whole, everyone.abort = check_whole, abort


def notify_other_hosts(everyone: Group) -> None:
    """If the group of this host is broken, break that of all hosts: ranks of other hosts may wait in a transfer."""
    with contextlib.suppress(GroupAbortedError):
        everyone.check()
