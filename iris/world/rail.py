"""Carries bytes from host to host, among the ranks of a `Route`.

The usual route is a *rail*: the ranks with one local rank, one on each host. (The word is from rail-optimised
networks.) The class here moves bytes along it and adds nothing: callers form sums themselves. Two other routes use the
same class: the two ranks of a link (`iris.world.links`), and all ranks of all hosts, for which `iris.ccl.vendor` also
calls the engine's own reductions (the methods at the end).

The engine is one of torch's backends: Gloo in the simulator (`iris.world.gloo_rail`), NCCL or RCCL on GPUs
(`iris.world.nccl_rail`). All ranks of a route make its calls in the same order, each from one thread.
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

# The number of transfers so far, by the names of the group and of the route, which are the same on all of its ranks.
_transfers: Counter[tuple[str, str]] = Counter()


class Route(NamedTuple):
    """Some ranks of a group that exchange data.

    ``name``: unique among the routes of a group, and the same on all ranks of the route. ``ranks``: its ranks in the
    group. ``place``: the index of this rank among them.
    """

    name: str
    ranks: tuple[int, ...]
    place: int


def rail_of(hosts: Hosts) -> Route:
    """The route of the ranks with this local rank, one on each host."""
    return Route(f"rail/{hosts.local_rank}", hosts.rail, hosts.number)


class Transfer(NamedTuple):
    """What one rank sends and receives in a transfer, for a `Timer`.

    ``sent[i]`` bytes go to ``targets[i]``, and ``received[i]`` bytes come from ``sources[i]``, all global ranks.
    ``kind``: the method of `Rail`. ``call``: the collective that it is part of, in words. ``rail``: the names of the
    group and of the route.
    """

    kind: str
    call: str
    rail: str
    targets: tuple[int, ...]
    sent: tuple[int, ...]
    sources: tuple[int, ...]
    received: tuple[int, ...]


class Timer(Protocol):
    """Notes when transfers begin and end: `iris.tracing.rail_times`."""

    def timed(self, transfer: Transfer, start: Callable[[], Any]) -> tuple[Callable[[], Any], Callable[[], None]]:
        """Called before ``start`` begins the transfer.

        Returns what to call in the place of ``start``, which notes when the transfer ends, and what to call when the
        transfer has been waited for.
        """


# The timer of each group whose transfers are noted.
_timers: "weakref.WeakKeyDictionary[Group, Timer]" = weakref.WeakKeyDictionary()


def time_rails(group: Group, timer: Timer | None) -> None:
    """Let ``timer`` note all transfers of the group from here on; None: let nobody. Local."""
    if timer is None:
        _timers.pop(group, None)
    else:
        _timers[group] = timer


@contextlib.contextmanager
def timed_by(group: Group, timer: Timer | None) -> Iterator[None]:
    """In this context ``timer``, or nobody, notes the group's transfers in the place of the group's own timer."""
    before = _timers.get(group)
    time_rails(group, timer)
    try:
        yield
    finally:
        time_rails(group, before)


class Rail(ABC):
    """The connection between the ranks of a route. Construction is collective among them and blocks the host.

    With NCCL a transfer is enqueued on the current stream, and the host goes on. With Gloo the host waits for it.

    Parameters
    ----------
    group
        All ranks of all hosts.
    hosts
        The hosts that they are on.
    engine
        The backend of torch.distributed that moves the data.
    name
        The name of the engine, for people.
    route
        The ranks that are connected. Where a method says "host h", it means the h-th of these. On a rail that is the
        number of the host.
    """

    def __init__(self, group: Group, hosts: Hosts, engine: Any, name: str, route: Route) -> None:
        self._group, self._hosts, self._engine = group, hosts, engine
        self._route, self._ranks, self._place = route.name, route.ranks, route.place
        self.name = name

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, what: str) -> Callable[[], None]:
        """Begin to gather every host's ``input`` into ``output``, ``(n,)`` → ``(H, n)``, both contiguous.

        Returns a function that waits until ``output`` is there. With Gloo the host waits in it, with NCCL the stream
        that is then the current one. Until then the caller touches neither tensor. ``what``: the collective that this
        is part of, in words, the same on all hosts.
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
        recv_counts: Sequence[int],
        send_counts: Sequence[int],
        nbytes: int,
        what: str,
    ) -> Callable[[], None]:
        """Begin to send ``send_counts[h]`` elements of ``input`` to host h, and to receive ``recv_counts[h]`` from it.

        Both tensors are contiguous, with the parts in the order of the hosts. ``nbytes``: what all ranks of the rail
        send together, the same on all hosts. The caller guarantees that the counts of sender and receiver agree. What
        it returns, and ``what``, are as for `all_gather`.
        """
        received, sent, size = as_bytes(output), as_bytes(input), input.itemsize
        splits = [count * size for count in recv_counts], [count * size for count in send_counts]
        start = functools.partial(self._engine.alltoall_base, received, sent, *splits)
        move = "all_to_all_v", splits
        return self._transfer(start, nbytes, what, move=move, sent=[sent], received=[received])

    def shift(self, output: torch.Tensor, input: torch.Tensor, distance: int, what: str) -> Callable[[], None]:
        """Begin to send ``input`` to the host ``distance`` after this one, and to receive that of the one before it.

        The hosts form a ring, and ``distance`` is from 1 to H - 1. Both tensors are contiguous and of one size. What it
        returns, and ``what``, are as for `all_gather`.
        """
        received, sent, size = as_bytes(output), as_bytes(input), len(self._ranks)
        to, source = (self._place + distance) % size, (self._place - distance) % size
        recv_sizes, send_sizes = ([input.nbytes * (host == peer) for host in range(size)] for peer in (source, to))
        start = functools.partial(self._engine.alltoall_base, received, sent, recv_sizes, send_sizes)
        move = "shift", input.nbytes
        given = {"source": source, "receivers": size, "to": to}
        return self._transfer(start, input.nbytes, what, move=move, sent=[sent], received=[received], **given)

    def broadcast(self, tensor: torch.Tensor, host: int, what: str) -> Callable[[], None]:
        """Begin to copy the contiguous ``tensor`` of ``host`` into that of every other. Returns as `all_gather`."""
        options = dist.BroadcastOptions()
        options.rootRank = host
        moved = [as_bytes(tensor)]
        start = functools.partial(self._engine.broadcast, moved, options)
        sent, received = (moved, []) if host == self._place else ([], moved)
        move = "broadcast", tensor.nbytes
        return self._transfer(start, tensor.nbytes, what, move=move, sent=sent, received=received, source=host)

    def gather(self, output: torch.Tensor | None, input: torch.Tensor, host: int, what: str) -> Callable[[], None]:
        """Begin to gather every host's ``input`` into the ``output`` of ``host``, ``(n,)`` → ``(H, n)``.

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
        """Begin to send row h of the ``input`` of ``host`` to the ``output`` of host h, ``(H, n)`` → ``(n,)``.

        ``input`` is None elsewhere. What it returns, and ``what``, are as for `all_gather`.
        """
        options = dist.ScatterOptions()
        options.rootRank = host
        received, sent = [as_bytes(output)], [] if input is None else [as_bytes(input)]
        parts = [list(each.chunk(len(self._ranks))) for each in sent]
        start = functools.partial(self._engine.scatter, received, parts, options)
        move = "scatter", output.nbytes
        return self._transfer(start, output.nbytes, what, move=move, sent=sent, received=received, source=host)

    # The engine's own reductions, for a route of all ranks (`iris.ccl.vendor`). They return when the wait is enqueued,
    # or over. ``op``: a name in torch's ReduceOp.

    def all_reduce(self, tensor: torch.Tensor, op: str, what: str) -> None:
        """Combine every rank's contiguous ``tensor``, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp, divisor = self._reduce_op(op)
        start = functools.partial(self._engine.allreduce, [tensor], options)
        move = "all_reduce", 2 * tensor.nbytes // len(self._ranks)
        self._transfer(start, tensor.nbytes, what, move=move, sent=[tensor], received=[tensor])()
        if divisor:
            tensor.div_(divisor)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: str, what: str) -> None:
        """Combine every rank's ``input``, and give rank r the r-th part; both are contiguous."""
        options = dist.ReduceScatterOptions()
        options.reduceOp, divisor = self._reduce_op(op)
        # As one-dimensional tensors, since not every engine takes other shapes.
        start = functools.partial(c10d.reduce_scatter, self._engine, output.view(-1), input.view(-1), options)
        move = "reduce_scatter", input.nbytes // len(self._ranks)
        self._transfer(start, input.nbytes, what, move=move, sent=[input], received=[output])()
        if divisor:
            output.div_(divisor)

    def reduce(self, tensor: torch.Tensor, root: int, op: str, what: str) -> None:
        """Combine every rank's contiguous ``tensor`` in that of the ``root``. Those of other ranks become undefined."""
        options = dist.ReduceOptions()
        options.reduceOp, divisor = self._reduce_op(op)
        options.rootRank = root
        start = functools.partial(self._engine.reduce, [tensor], options)
        move = "reduce", tensor.nbytes
        self._transfer(start, tensor.nbytes, what, move=move, sent=[tensor], received=[tensor], to=root)()
        if divisor:
            tensor.div_(divisor)

    def _reduce_op(self, op: str) -> tuple[Any, int | None]:
        """torch's operation of this name, and by what to divide its result; None: by nothing."""
        return getattr(dist.ReduceOp, op), None

    @abstractmethod
    def barrier(self) -> None:
        """Wait for all ranks of the route. With NCCL the current stream does, with Gloo the host."""

    @abstractmethod
    def refuse(self, what: str) -> None:
        """Called in the place of a call that this rank refuses. Gloo raises if other hosts do not refuse it."""

    @abstractmethod
    def close(self) -> None:
        """Close the connections. Local. The caller guarantees that no call is under way on this rank.

        Calls that are under way on other ranks still end well, unless the group is broken.
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
        """Start a transfer of ``nbytes`` by this rank, and tell the timer and the sanitizer. Returns what waits for it.

        ``move``: the name of the method, and the bytes from one rank to another; where these differ, the bytes received
        from each host, and those sent to each. ``sent``, ``received``: the tensors that this rank reads and writes.
        ``source``: the host that all data come from, if it is one. ``to``: the host that all data go to, if it is one.
        Both: each rank sends to one and receives from one. ``receivers``: how many hosts receive, if it is not all, or
        all but the source.
        """
        everyone, note_end = tuple(self._in_world(rank) for rank in self._ranks), _nothing
        timer = _timers.get(self._group)
        if timer is not None:
            start, note_end = timer.timed(self._describe(what, *move, source, to), start)
        recorder = observer.recorder
        if recorder is None and note_end is _nothing:
            return self._begin(start, nbytes, what)
        rail = self._group.name, self._route
        _transfers[rail] += 1
        key = (*rail, _transfers[rail])
        with contextlib.nullcontext() if recorder is None else recorder.sending(key, everyone, what, sent):
            wait = self._begin(start, nbytes, what)

        def wait_and_note() -> None:
            wait()
            note_end()
            if recorder is not None and source is None:
                recorder.received(key, everyone if received else (), receivers or len(everyone), received)
            elif recorder is not None and source is not None and source != self._place:
                recorder.received(key, (everyone[source],), receivers or len(everyone) - 1, received)

        return wait_and_note

    def _describe(
        self,
        what: str,
        kind: str,
        nbytes: int | tuple[Sequence[int], Sequence[int]],
        source: int | None,
        to: int | None,
    ) -> Transfer:
        """What a timer is told of a transfer, from the arguments of `_transfer`."""
        this, size = self._place, len(self._ranks)
        recv_sizes, send_sizes = ([nbytes] * size,) * 2 if isinstance(nbytes, int) else nbytes
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
            sent=tuple(send_sizes[host] for host in targets),
            sources=tuple(self._in_world(self._ranks[host]) for host in sources),
            received=tuple(recv_sizes[host] for host in sources),
        )

    @abstractmethod
    def _begin(self, start: Callable[[], Any], nbytes: int, what: str) -> Callable[[], None]:
        """Start a transfer of ``nbytes`` by this rank. Returns what waits for it."""

    @contextlib.contextmanager
    def _in_step(self, what: str) -> Iterator[None]:
        """Break the group of all ranks if the call fails here: other ranks may have completed it, or wait in it."""
        try:
            yield
        except GroupAbortedError:
            raise
        except BaseException as error:
            this = self._group.ranks[self._group.rank]
            self._group.break_off(f"{what} of rank {this} ended with {type(error).__name__}: {error}".rstrip(". "))
            raise

    def _compare(self, calls: Sequence[str]) -> None:
        """Raise `MismatchedCollectiveError` unless ``calls``, in words, one a rank of the route, are all the same."""
        if len(set(calls)) > 1:
            raise differing(zip(map(self._who, self._ranks), calls, strict=True))

    def _who(self, rank: int) -> str:
        """What messages call a rank of the group."""
        return f"rank {self._in_world(rank)} on {self._hosts.name_of(rank)}"

    def _in_world(self, rank: int) -> int:
        return self._group.ranks[rank]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8, ``(n,)``. Transfers move bytes, whatever the dtype."""
    # Not view(-1): the stride of a tensor of one element may be anything.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _nothing() -> None:
    """Notes nothing."""
