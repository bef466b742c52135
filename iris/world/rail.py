"""What carries bytes from host to host, among some ranks: those of a `Route`.

A *rail* has the ranks with one local rank, one on each host. It moves bytes and never adds: how sums are formed is up
to who calls it. Two other routes go by the same class: two ranks that exchange messages (`iris.world.links`), and all
ranks of all hosts, which `iris.ccl.vendor` asks for the engine's own sums.

Two engines carry them: Gloo in the simulator (`iris.world.gloo_rail`), NCCL or RCCL on GPUs (`iris.world.nccl_rail`).
Calls of a route are made in the same order by all of its ranks, and by one thread.
"""

import contextlib
import functools
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from iris import observer
from iris.compat import c10d
from iris.errors import GroupAbortedError
from iris.world.group import Group
from iris.world.hosts import Hosts
from iris.world.rail_calls import differing

# Transfers so far on each route of a group, by the names of both, which are the same on all ranks of these.
_transfers: Counter[tuple[str, str]] = Counter()


class Route(NamedTuple):
    """Between whom data travel.

    ``name``: unique among the routes of a group, and the same on all its ranks; ``ranks``: these, in the group;
    ``place``: this rank's, among them.
    """

    name: str
    ranks: tuple[int, ...]
    place: int


def rail_of(hosts: Hosts) -> Route:
    """That of the ranks with this local rank, by host."""
    return Route(f"rail/{hosts.local_rank}", hosts.rail, hosts.number)


class Transfer(NamedTuple):
    """What one rank does in a transfer.

    ``sent[i]`` bytes go to ``targets[i]``, and ``received[i]`` come from ``sources[i]``.
    ``kind``: the method of `Rail`; ``call``: what it is part of, in words; ``rail``: the names of the group and of
    its route. Ranks are the world's.
    """

    kind: str
    call: str
    rail: str
    targets: tuple[int, ...]
    sent: tuple[int, ...]
    sources: tuple[int, ...]
    received: tuple[int, ...]


class Timer(Protocol):
    """Who wants to know when transfers begin and end: `iris.tracing.rail_times`."""

    def timed(self, transfer: Transfer, start: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], None]]:
        """The transfer begins. Returns ``start`` with a note of its end, and what to call when it was waited for."""


# By group: who notes the transfers of its rails.
_timers: "weakref.WeakKeyDictionary[Group, Timer]" = weakref.WeakKeyDictionary()


def time_rails(group: Group, timer: Timer | None) -> None:
    """Let this timer note every transfer of the group's rails from here on, or nobody. Local."""
    if timer is None:
        _timers.pop(group, None)
    else:
        _timers[group] = timer


@contextlib.contextmanager
def timed_by(group: Group, timer: Timer | None) -> Iterator[None]:
    """While this lasts, this timer notes the transfers of the group's rails, or nobody does, and not who does else."""
    before = _timers.get(group)
    time_rails(group, timer)
    try:
        yield
    finally:
        time_rails(group, before)


class Rail(ABC):
    """The ranks of a route. Construction is collective among them; blocks the host.

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
    route
        Its ranks. What methods call a host is the place of one of these; of a rail it is the host's number.
    """

    def __init__(self, group: Group, hosts: Hosts, engine: Any, name: str, route: Route) -> None:
        self._group, self._hosts, self._engine = group, hosts, engine
        self._route, self._ranks, self._place = route.name, route.ranks, route.place
        self.name = name

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, what: str) -> Callable[[], None]:
        """Begin to gather every host's ``input`` into ``output``, ``(n,)`` → ``(H, n)``, both contiguous.

        Returns what waits until ``output`` is there (the host, or the stream that is then the current one): until then
        neither tensor is touched. ``what``: the call that this is part of, in words, the same on all hosts.
        """
        received, sent = as_bytes(output), as_bytes(input)
        start = functools.partial(c10d.all_gather, self._engine, received, sent)
        move = "all_gather", input.nbytes
        return self._transfer(start, input.nbytes, what, move=move, sent=[sent], received=[received])

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor, what: str) -> Callable[[], None]:
        """Begin to send row h of ``input`` to host h, and to receive its row for this host as row h of ``output``.

        ``(H, n)`` → ``(H, n)``, both contiguous. What it returns, and ``what``, are as for `all_gather`.
        """
        received, sent = as_bytes(output), as_bytes(input)
        start = functools.partial(self._engine.alltoall_base, received, sent, [], [])
        move = "all_to_all", input.nbytes // len(self._ranks)
        return self._transfer(start, input.nbytes, what, move=move, sent=[sent], received=[received])

    def all_to_all_v(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        comes: Sequence[int],
        goes: Sequence[int],
        nbytes: int,
        what: str,
    ) -> Callable[[], None]:
        """Begin to send ``goes[h]`` elements of ``input`` to host h, and to receive ``comes[h]`` from it.

        Both are contiguous and have what is for, or from, each host in the order of hosts. ``nbytes``: what the rail
        moves in all, the same on all hosts. The caller guarantees that ``goes`` here is what ``comes`` is there. What
        it returns, and ``what``, are as for `all_gather`.
        """
        received, sent, size = as_bytes(output), as_bytes(input), input.itemsize
        splits = [count * size for count in comes], [count * size for count in goes]
        start = functools.partial(self._engine.alltoall_base, received, sent, *splits)
        move = "all_to_all_v", splits
        return self._transfer(start, nbytes, what, move=move, sent=[sent], received=[received])

    def shift(self, output: torch.Tensor, input: torch.Tensor, distance: int, what: str) -> Callable[[], None]:
        """Begin to send ``input`` to the host ``distance`` after this one, and to receive that of the one before it.

        Both are contiguous and of one size; hosts are in a ring, and ``distance`` is from 1 to H - 1. What it returns,
        and ``what``, are as for `all_gather`.
        """
        received, sent, size = as_bytes(output), as_bytes(input), len(self._ranks)
        to, source = (self._place + distance) % size, (self._place - distance) % size
        comes, goes = ([input.nbytes * (host == peer) for host in range(size)] for peer in (source, to))
        start = functools.partial(self._engine.alltoall_base, received, sent, comes, goes)
        move = "shift", input.nbytes
        given = {"source": source, "receivers": size, "to": to}
        return self._transfer(start, input.nbytes, what, move=move, sent=[sent], received=[received], **given)

    def broadcast(self, tensor: torch.Tensor, host: int, what: str) -> Callable[[], None]:
        """Begin to copy ``tensor``, contiguous, of the rank on ``host`` into that of every other. As `all_gather`."""
        options = dist.BroadcastOptions()
        options.rootRank = host
        moved = [as_bytes(tensor)]
        start = functools.partial(self._engine.broadcast, moved, options)
        sent, received = (moved, []) if host == self._place else ([], moved)
        move = "broadcast", tensor.nbytes
        return self._transfer(start, tensor.nbytes, what, move=move, sent=sent, received=received, source=host)

    def gather(self, output: torch.Tensor | None, input: torch.Tensor, host: int, what: str) -> Callable[[], None]:
        """Begin to gather every host's ``input`` into ``output`` of the rank on ``host``, ``(n,)`` → ``(H, n)``.

        ``output`` is None elsewhere. What it returns, and ``what``, are as for `all_gather`.
        """
        options = dist.GatherOptions()
        options.rootRank = host
        sent, received = [as_bytes(input)], [] if output is None else [as_bytes(output)]
        parts = [list(each.chunk(len(self._ranks))) for each in received]
        start = functools.partial(self._engine.gather, parts, sent, options)
        move = "gather", input.nbytes
        return self._transfer(start, input.nbytes, what, move=move, sent=sent, received=received, receivers=1, to=host)

    def scatter(self, output: torch.Tensor, input: torch.Tensor | None, host: int, what: str) -> Callable[[], None]:
        """Begin to send row h of ``input`` of the rank on ``host`` to ``output`` of host h, ``(H, n)`` → ``(n,)``.

        ``input`` is None elsewhere. What it returns, and ``what``, are as for `all_gather`.
        """
        options = dist.ScatterOptions()
        options.rootRank = host
        received, sent = [as_bytes(output)], [] if input is None else [as_bytes(input)]
        parts = [list(each.chunk(len(self._ranks))) for each in sent]
        start = functools.partial(self._engine.scatter, received, parts, options)
        move = "scatter", output.nbytes
        return self._transfer(start, output.nbytes, what, move=move, sent=sent, received=received, source=host)

    # The engine's own sums, which `iris.ccl.vendor` asks a rail of all ranks for. ``op``: a name in torch's ReduceOp.

    def all_reduce(self, tensor: torch.Tensor, op: str, what: str) -> None:
        """Combine every rank's ``tensor``, contiguous, in its place."""
        options = dist.AllreduceOptions()
        options.reduceOp, divisor = self._sum(op)
        start = functools.partial(self._engine.allreduce, [tensor], options)
        move = "all_reduce", 2 * tensor.nbytes // len(self._ranks)
        self._transfer(start, tensor.nbytes, what, move=move, sent=[tensor], received=[tensor])()
        if divisor:
            tensor.div_(divisor)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str, what: str) -> None:
        """Combine every rank's ``input``, and give rank r the r-th part; both are contiguous."""
        options = dist.ReduceScatterOptions()
        options.reduceOp, divisor = self._sum(op)
        # As a row each, as not every engine takes other shapes.
        start = functools.partial(c10d.reduce_scatter, self._engine, output.view(-1), input.view(-1), options)
        move = "reduce_scatter", input.nbytes // len(self._ranks)
        self._transfer(start, input.nbytes, what, move=move, sent=[input], received=[output])()
        if divisor:
            output.div_(divisor)

    def reduce(self, tensor: torch.Tensor, root: int, op: str, what: str) -> None:
        """Combine every rank's ``tensor``, contiguous, in that of the ``root``. Those of others are undefined then."""
        options = dist.ReduceOptions()
        options.reduceOp, divisor = self._sum(op)
        options.rootRank = root
        start = functools.partial(self._engine.reduce, [tensor], options)
        move = "reduce", tensor.nbytes
        self._transfer(start, tensor.nbytes, what, move=move, sent=[tensor], received=[tensor], to=root)()
        if divisor:
            tensor.div_(divisor)

    def _sum(self, op: str) -> tuple[Any, int | None]:
        """torch's operation of this name, and by what to divide after it."""
        return getattr(dist.ReduceOp, op), None

    @abstractmethod
    def barrier(self) -> None:
        """What comes after it begins when all hosts' ranks have come."""

    @abstractmethod
    def refuse(self, what: str) -> None:
        """In the place of a call whose arguments were refused. Gloo raises if the other hosts have not refused it."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the connections. Local. The caller guarantees that no call is under way on this rank.

        Those of other ranks end well, unless the group is broken.
        """

    def _transfer(
        self,
        start: Callable[[], Any],
        nbytes: int,
        what: str,
        *,
        move: tuple[str, int | tuple[Sequence[int], Sequence[int]]] = ("barrier", 0),
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
        source: int | None = None,
        receivers: int | None = None,
        to: int | None = None,
    ) -> Callable[[], None]:
        """Start a transfer of so many bytes by this rank, as whoever watches is told. Returns what waits for it.

        ``move``: the method, and the bytes from one rank to another, or those that come from, and go to, each host.
        ``sent``, ``received``: the tensors that this rank reads and writes. ``source``, ``to``: the host whose data
        come, and the one to which they go, if not all. Both, where each rank sends to one and receives from one.
        ``receivers``: the hosts that get any, if not all, or all but the source.
        """
        everyone, noted = tuple(self._in_world(rank) for rank in self._ranks), _nothing
        timer = _timers.get(self._group)
        if timer is not None:
            start, noted = timer.timed(self._described(what, *move, source, to), start)
        recorder = observer.recorder
        if recorder is None and noted is _nothing:
            return self._begin(start, nbytes, what)
        rail = self._group.name, self._route
        _transfers[rail] += 1
        key = (*rail, _transfers[rail])
        with contextlib.nullcontext() if recorder is None else recorder.sending(key, everyone, what, sent):
            wait = self._begin(start, nbytes, what)

        def note() -> None:
            wait()
            noted()
            if recorder is not None and source is None:
                recorder.received(key, everyone if received else (), receivers or len(everyone), received)
            elif recorder is not None and source is not None and source != self._place:
                recorder.received(key, (everyone[source],), receivers or len(everyone) - 1, received)

        return note

    def _described(
        self,
        what: str,
        kind: str,
        nbytes: int | tuple[Sequence[int], Sequence[int]],
        source: int | None,
        to: int | None,
    ) -> Transfer:
        """What a timer is told of a transfer; as `_transfer`."""
        this, size = self._place, len(self._ranks)
        comes, goes = ([nbytes] * size,) * 2 if isinstance(nbytes, int) else nbytes
        others = [host for host in range(size) if host != this]
        if source is not None and to is not None:
            targets, sources = [to], [source]
        else:
            targets = [host for host in others if source in (None, this) and to in (None, host)]
            sources = [host for host in others if source in (None, host) and to in (None, this)]
        return Transfer(
            kind,
            what,
            f"{self._group.name}/{self._route}",
            targets=tuple(self._in_world(self._ranks[host]) for host in targets),
            sent=tuple(goes[host] for host in targets),
            sources=tuple(self._in_world(self._ranks[host]) for host in sources),
            received=tuple(comes[host] for host in sources),
        )

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
            raise differing(zip(map(self._who, self._ranks), calls, strict=True))

    def _who(self, rank: int) -> str:
        """What messages call a rank of the group."""
        return f"rank {self._in_world(rank)} on {self._hosts.name_of(rank)}"

    def _in_world(self, rank: int) -> int:
        return self._group.ranks[rank]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, ``(n,)``: what moves, moves as bytes, whatever the dtype."""
    # Of one element the stride may be anything.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _nothing() -> None:
    """Notes nothing."""
