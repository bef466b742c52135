"""Collectives over several hosts: Iris' kernels move data within a host, and a rail moves them between hosts.

| collective | steps |
| --- | --- |
| all_gather | the rail gathers; each host's part is gathered within the host, the own host's first |
| reduce_scatter | a reduce_scatter within the host for each host; the rail exchanges the sums; they are added up |
| all_reduce | reduce_scatter, then all_gather |
| all_to_all | the rail exchanges what is for each host; an all_to_all within the host |
| broadcast, scatter | along the rail of the root; then within each host |
| gather, reduce | within each host, to the rank with the root's local rank; then along its rail |

A rank sends to other hosts what its own GPU holds, once, and only to ranks with its local rank. A rail never adds. Sums
are formed within a host in the order of ranks and rounded once, then over hosts in the order of hosts and rounded once
more, so they are the same from run to run and on every rank.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard, cast

import torch
import torch.distributed as dist

from iris.ccl import checks
from iris.ccl.collectives import Collectives
from iris.ccl.communicator import Communicator
from iris.ccl.config import DEFAULT, Config, ReduceOp
from iris.ccl.enqueue import FOR_THE_HOST, to_read, to_write
from iris.ccl.host_order import HostOrder
from iris.ccl.host_sums import add_up
from iris.ccl.reduction import check_op, reduction
from iris.ccl.work import Work
from iris.compat.cuda import current_raw_stream
from iris.errors import IrisError, SeveralHostsError
from iris.operators.graph_break import methods_break_graph
from iris.operators.version_counter import bump_version
from iris.runtime.workspace import RankContext
from iris.world.rail import Rail, as_bytes

MORE = "all_to_all has equal sizes for all ranks."


class Ranks(NamedTuple):
    """All ranks of a context, as `iris.ccl.checks` asks for them; ``ranks`` are those in the world."""

    size: int
    ranks: tuple[int, ...]
    device: torch.device


class Root(NamedTuple):
    """The root of a collective.

    ``here``: this rank is it; ``host``: its host; ``on_rail``: this rank has its local rank; ``in_this_host``: which
    rank of this host has its local rank, by its rank in the world.
    """

    here: bool
    host: int
    on_rail: bool
    in_this_host: int


def _over_hosts(steps: Callable[..., None]) -> Any:
    """A collective made of ``steps``, for all ranks; for a group within a host it is that of `Collectives`."""
    name = steps.__name__

    @functools.wraps(getattr(Collectives, name))
    def call(
        self: "CollectivesOverHosts",
        *args: Any,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        config: Config | None = None,
        **named: Any,
    ) -> Work | None:
        if group is not None and group is not dist.group.WORLD:
            return getattr(self.within, name)(*args, group=group, async_op=async_op, config=config, **named)
        comm = self._begin(name, config)
        try:
            with torch.no_grad():
                steps(self, *args, **named)
        except BaseException as error:
            comm.abort_flag.interrupted(name, error)
            raise
        return Work(self._on_gpu) if async_op else None

    return call


def _within_a_host(name: str) -> Any:
    """The collective of that name for groups within a host; `SeveralHostsError` for all ranks."""

    @functools.wraps(getattr(Collectives, name))
    def call(
        self: "CollectivesOverHosts", *args: Any, group: dist.ProcessGroup | None = None, **named: Any
    ) -> Work | None:
        if group is not None and group is not dist.group.WORLD:
            return getattr(self.within, name)(*args, group=group, **named)
        raise SeveralHostsError(f"ctx.ccl.{name}() of all ranks", f"A group of one host's ranks has it. {MORE}")

    return call


@methods_break_graph(FOR_THE_HOST)
class CollectivesOverHosts(Collectives):
    """``ctx.ccl`` where there are several hosts. A group of one host's ranks has all collectives, as on one host.

    Attributes
    ----------
    within : Collectives
        Those of this host's ranks, and of groups within the host.
    """

    def __init__(self, context: RankContext, rail: Rail) -> None:
        super().__init__(context)
        self.within = Collectives(context)
        # One set of groups, which this object lets go of.
        self.within._communicators = self._communicators
        world = context._world
        self._everyone = Ranks(world.size, world.group.ranks, context.device)
        self._rank, self._hosts, self._rail = world.rank, world.hosts, rail
        self._order = HostOrder(world.hosts, context.device)

    @_over_hosts
    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> None:
        checks.check_pair(self._everyone, "all_gather", output, input, self._everyone.size, 1)
        source, result = to_read(input), to_write(output)
        if source.data_ptr() != result.data_ptr() + self._rank * source.nbytes:
            checks.check_overlap("all_gather", result, source)
        if source.numel():
            self._all_gather(result, source, _described("all_gather", input))
            _deliver(output, result)

    @_over_hosts
    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> None:
        checks.check_pair(self._everyone, "all_to_all", output, input, 1, 1)
        checks.check_columns(self._everyone, "all_to_all", output, input)
        source, result = to_read(input), to_write(output)
        checks.check_overlap("all_to_all", result, source)
        if not source.numel():
            return
        size, number = self._everyone.size, len(self._hosts)
        columns = source.shape[-1] * source.itemsize // size
        rows = source.nbytes // (columns * size)
        # `ours`: from this rail, what is for each rank of this host.
        sent = self._order.by_host(as_bytes(source).view(rows, size, columns), 1).transpose(0, 1).contiguous()
        arrived = torch.empty_like(sent)
        self._rail.all_to_all(arrived, sent, _described("all_to_all", input))()
        ours = arrived.view(number, -1, rows * columns).transpose(0, 1).contiguous()
        theirs = torch.empty_like(ours)
        self.within.all_to_all(theirs.view(-1), ours.view(-1))
        chunks = theirs.view(-1, number, rows, columns).permute(2, 1, 0, 3).reshape(rows, size, columns)
        self._order.write(as_bytes(result).view(rows, size, columns), chunks, 1)
        _deliver(output, result)

    @_over_hosts
    def broadcast(self, tensor: torch.Tensor, src: int = 0) -> None:
        root = self._root("src", src)
        try:
            checks.check_pair(self._everyone, "broadcast", tensor, tensor, 1, 1)
        except IrisError:
            if root.on_rail:
                # All ranks may refuse it, and then go on. If this one alone does, nobody is to wait for it.
                with contextlib.suppress(IrisError):
                    self._rail.refuse("broadcast()")
            raise
        dense = to_read(tensor)
        if not dense.numel():
            return
        if root.on_rail:
            self._rail.broadcast(dense, root.host, _described("broadcast", tensor))
        self.within.broadcast(dense, root.in_this_host)
        if not root.here:
            _deliver(tensor, dense)

    @_over_hosts
    def gather(self, output: torch.Tensor | None, input: torch.Tensor, dst: int = 0) -> None:
        root, size = self._root("dst", dst), self._everyone.size
        checks.check_pair(self._everyone, "gather", input, input, 1, 1)
        source, result = to_read(input), output
        if root.here:
            with self._root_alone("gather"):
                checks.check_at_root(self._everyone, "gather", "output", output, self._rank)
                checks.check_pair(self._everyone, "gather", cast(torch.Tensor, output), input, size, 1)
                result = to_write(cast(torch.Tensor, output))
                if source.data_ptr() != result.data_ptr() + self._rank * source.nbytes:
                    checks.check_overlap("gather", result, source)
        if not source.numel():
            return
        mine = as_bytes(source)
        of_host = mine.new_empty(len(self._hosts.local_ranks), len(mine)) if root.on_rail else None
        self.within.gather(of_host, mine, root.in_this_host)
        if of_host is None:
            return
        arrived = of_host.new_empty(size, len(mine)) if root.here else None
        self._rail.gather(arrived, of_host, root.host, _described("gather", input))
        if arrived is not None and result is not None:
            self._order.write(as_bytes(result).view(size, len(mine)), arrived)
            _deliver(cast(torch.Tensor, output), result)

    @_over_hosts
    def scatter(self, output: torch.Tensor, input: torch.Tensor | Sequence[torch.Tensor] | None, src: int = 0) -> None:
        root, size, result = self._root("src", src), self._everyone.size, to_write(output)
        checks.check_pair(self._everyone, "scatter", output, output, 1, 1)
        parts = None
        if root.here:
            with self._root_alone("scatter"):
                whole = checks.joined(self._everyone, "scatter", input, output) if _is_list(input) else input
                checks.check_at_root(self._everyone, "scatter", "input", whole, self._rank)
                source = to_read(cast(torch.Tensor, whole))
                checks.check_pair(self._everyone, "scatter", output, source, 1, size)
                if result.data_ptr() != source.data_ptr() + self._rank * result.nbytes:
                    checks.check_overlap("scatter", result, source)
                if source.numel():
                    parts = self._order.by_host(as_bytes(source).view(size, -1))
        if not output.numel():
            return
        mine = as_bytes(result)
        of_host = mine.new_empty(len(self._hosts.local_ranks), len(mine)) if root.on_rail else None
        if of_host is not None:
            self._rail.scatter(of_host, parts, root.host, _described("scatter", output))
        self.within.scatter(mine, of_host, root.in_this_host)
        _deliver(output, result)

    @_over_hosts
    def reduce(self, output: torch.Tensor | None, input: torch.Tensor, dst: int = 0, *, op: Any = ReduceOp.SUM) -> None:
        root = self._root("dst", dst)
        checks.check_pair(self._everyone, "reduce", input, input, 1, 1)
        check_op(reduction(op)[0], input.dtype)
        source, result = to_read(input), output
        if root.here:
            with self._root_alone("reduce"):
                checks.check_at_root(self._everyone, "reduce", "output", output, self._rank)
                checks.check_pair(self._everyone, "reduce", cast(torch.Tensor, output), input, 1, 1)
                result = to_write(cast(torch.Tensor, output))
                if source.data_ptr() != result.data_ptr():
                    checks.check_overlap("reduce", result, source)
        if not source.numel():
            return
        of_host = torch.empty_like(source) if root.on_rail else None
        self.within.reduce(of_host, source, root.in_this_host, op=op)
        if of_host is None:
            return
        arrived = of_host.new_empty(len(self._hosts), of_host.numel()) if root.here else None
        self._rail.gather(arrived, of_host, root.host, _described("reduce", input, op))
        if arrived is not None and result is not None:
            add_up(result, arrived, reduction(op)[0], self._stream())
            _deliver(cast(torch.Tensor, output), result)

    @_over_hosts
    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, *, op: Any = ReduceOp.SUM) -> None:
        checks.check_pair(self._everyone, "reduce_scatter", output, input, 1, self._everyone.size)
        source, result = to_read(input), to_write(output)
        if result.data_ptr() != source.data_ptr() + self._rank * result.nbytes:
            checks.check_overlap("reduce_scatter", result, source)
        check_op(reduction(op)[0], input.dtype)
        if source.numel():
            self._reduce_scatter(result, source, op, _described("reduce_scatter", input, op))
            _deliver(output, result)

    @_over_hosts
    def all_reduce(
        self, output: torch.Tensor, input: torch.Tensor, *, op: Any = ReduceOp.SUM, workspace: Any = None
    ) -> None:
        if workspace is not None:
            raise SeveralHostsError("ctx.ccl.all_reduce(workspace=…)", "Call it without a workspace.")
        checks.check_pair(self._everyone, "all_reduce", output, input, 1, 1)
        source, result = to_read(input), to_write(output)
        if source.data_ptr() != result.data_ptr():
            checks.check_overlap("all_reduce", result, source)
        check_op(reduction(op)[0], input.dtype)
        if not source.numel():
            return
        call, size, nbytes = _described("all_reduce", input, op), self._everyone.size, input.nbytes
        # Parts of equal size: what is beyond the end is added up as well, and dropped.
        padded = -(-input.numel() // size) * size * input.itemsize
        exact = padded == nbytes
        summands = as_bytes(source) if exact else torch.nn.functional.pad(as_bytes(source), (0, padded - nbytes))
        part = torch.empty_like(summands[: padded // size])
        self._reduce_scatter(part.view(input.dtype), summands.view(input.dtype), op, call)
        total = as_bytes(result) if exact else torch.empty_like(summands)
        self._all_gather(total, part, call)
        if not exact:
            as_bytes(result).copy_(total[:nbytes])
        _deliver(output, result)

    all_to_all_v = _within_a_host("all_to_all_v")
    send = _within_a_host("send")
    recv = _within_a_host("recv")
    all_reduce_preamble = _within_a_host("all_reduce_preamble")

    # Steps -----------------------------------------------------------------------------------------------------------

    def _begin(self, name: str, config: Config | None) -> Communicator:
        """The communicator of this host's ranks, which they meet to make when it is first used."""
        self._context.heap.check_open()
        self._context._world.group.check()
        if config not in (None, DEFAULT):
            raise SeveralHostsError(f"ctx.ccl.{name}(config=…)", "Call it without a config: each step is chosen.")
        return self.communicator()

    def _stream(self) -> int | None:
        """The handle of the current stream; None in the simulator."""
        return current_raw_stream(self._index) if self._on_gpu else None

    def _root(self, role: str, rank: int) -> Root:
        """Where ``rank`` (in the world), which has this role, is. Raises if there is none."""
        number = checks.rank_in_group(self._everyone, role, rank, self._everyone.size)
        host = self._hosts.host_of(number)
        local = self._hosts.ranks[host].index(number)
        in_this_host = self._everyone.ranks[self._hosts.local_ranks[local]]
        return Root(number == self._rank, host, self._hosts.local_rank == local, in_this_host)

    @contextlib.contextmanager
    def _root_alone(self, name: str) -> Iterator[None]:
        """Around checks of what the root alone gives: the others would wait for it, so it breaks the group."""
        try:
            yield
        except IrisError as error:
            this, why = self._everyone.ranks[self._rank], str(error).rstrip(".")
            self._context._world.group.break_off(f"rank {this} is the root of {name}(), and refused it: {why}")
            raise

    def _all_gather(self, output: torch.Tensor, input: torch.Tensor, call: str) -> None:
        mine, hosts = as_bytes(input), self._hosts
        everyone = as_bytes(output).view(self._everyone.size, len(mine))
        arrived = mine.new_empty(len(hosts), len(mine))
        wait = self._rail.all_gather(arrived, mine, call)
        self._spread(everyone, mine, hosts.number)
        wait()
        for host in range(len(hosts)):
            if host != hosts.number:
                self._spread(everyone, arrived[host], host)

    def _spread(self, everyone: torch.Tensor, part: torch.Tensor, host: int) -> None:
        """Gather the rows of a host's ranks: local rank l brings that of its l-th rank as ``part``. All are bytes."""
        rows = self._order.view_of_host(everyone, host)
        if rows is not None:
            self.within.all_gather(rows, part)
            return
        rows = part.new_empty(len(self._hosts.local_ranks), len(part))
        self.within.all_gather(rows, part)
        self._order.write_of_host(everyone, host, rows)

    def _reduce_scatter(self, output: torch.Tensor, input: torch.Tensor, op: Any, call: str) -> None:
        hosts, mine = self._hosts, as_bytes(output)
        rows = as_bytes(input).view(self._everyone.size, len(mine))
        sums = mine.new_empty(len(hosts), len(mine))
        others = [host for host in range(len(hosts)) if host != hosts.number]
        for host in (*others, hosts.number):
            summands = self._order.of_host(rows, host)
            self.within.reduce_scatter(sums[host].view(input.dtype), summands.view(input.dtype), op=op)
        arrived = torch.empty_like(sums)
        self._rail.all_to_all(arrived, sums, call)()
        add_up(output, arrived.view(input.dtype), reduction(op)[0], self._stream())


def _is_list(input: object) -> TypeGuard[Sequence[torch.Tensor]]:
    return isinstance(input, list | tuple)


def _deliver(output: torch.Tensor, result: torch.Tensor) -> None:
    """Let the caller's tensor have the result, which may be in memory of its own."""
    if output is result:
        bump_version(output)
    else:
        output.copy_(result)


def _described(name: str, input: torch.Tensor, op: Any = None) -> str:
    """A call in words, by which hosts compare what they do."""
    return f"{name}() of {input.dtype}" + ("" if op is None else f", {reduction(op)[0]}")
