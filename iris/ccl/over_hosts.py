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
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist

from iris.arg_parser import index
from iris.ccl import checks
from iris.ccl.all_to_all_v_over_hosts import exchange_over_hosts
from iris.ccl.collectives import Collectives
from iris.ccl.communicator import Communicator
from iris.ccl.config import DEFAULT, Config, ReduceOp
from iris.ccl.enqueue import FOR_THE_HOST, to_read, to_write
from iris.ccl.host_sums import add_up
from iris.ccl.reduction import check_op, reduction
from iris.ccl.span import Span
from iris.ccl.work import Work
from iris.cuda_graphs.capture import refuse_in_capture
from iris.errors import IrisError, SeveralHostsError
from iris.operators.graph_break import methods_break_graph
from iris.operators.version_counter import bump_version
from iris.runtime.workspace import RankContext
from iris.world import World, check_process_group
from iris.world.hosts import hosts_of
from iris.world.rail import as_bytes

MORE = "all_to_all has equal sizes for all ranks."


def _over_hosts(steps: Callable[..., None]) -> Any:
    """A collective made of ``steps``, for ranks on several hosts; for a group within one, that of `Collectives`."""
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
        span = self._find(name, group)
        if span is None:
            return getattr(self.within, name)(*args, group=group, async_op=async_op, config=config, **named)
        comm = self._begin(name, span, config)
        try:
            with torch.no_grad():
                steps(self, span, *args, **named)
        except BaseException as error:
            comm.abort_flag.interrupted(name, error)
            raise
        return Work(self._on_gpu) if async_op else None

    return call


def _within_a_host(name: str) -> Any:
    """The collective of that name for groups within a host; `SeveralHostsError` for ranks on several."""

    @functools.wraps(getattr(Collectives, name))
    def call(
        self: "CollectivesOverHosts", *args: Any, group: dist.ProcessGroup | None = None, **named: Any
    ) -> Work | None:
        if self._spans_hosts(group):
            raise SeveralHostsError(f"ctx.ccl.{name}()", f"Use a group of ranks that are on one host. {MORE}")
        return getattr(self.within, name)(*args, group=group, **named)

    return call


@methods_break_graph(FOR_THE_HOST)
class CollectivesOverHosts(Collectives):
    """``ctx.ccl`` where there are several hosts. A group of one host's ranks has all collectives, as on one host.

    Attributes
    ----------
    within : Collectives
        Those of this host's ranks, and of groups within the host. Of a group over several hosts, they are those of its
        members on this one.
    """

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self.within = Collectives(context)
        # One set of groups, which this object lets go of.
        self.within._communicators = self._communicators
        # By group, those that were used; None for one within a host.
        self._spans: dict[dist.ProcessGroup | None, Span | None] = {}
        self._spans[None] = self._span(context._world, None)

    def forget(self, group: dist.ProcessGroup) -> None:
        super().forget(group)
        self._spans.pop(group, None)

    def close(self) -> None:
        super().close()
        self._spans.clear()

    @_over_hosts
    def all_gather(self, span: Span, output: torch.Tensor, input: torch.Tensor) -> None:
        checks.check_pair(span, "all_gather", output, input, span.size, 1)
        source, result = to_read(input), to_write(output)
        if source.data_ptr() != result.data_ptr() + span.rank * source.nbytes:
            checks.check_overlap("all_gather", result, source)
        if source.numel():
            span.all_gather(result, source, _described("all_gather", input))
            _deliver(output, result)

    @_over_hosts
    def all_to_all(self, span: Span, output: torch.Tensor, input: torch.Tensor) -> None:
        checks.check_pair(span, "all_to_all", output, input, 1, 1)
        checks.check_columns(span, "all_to_all", output, input)
        source, result = to_read(input), to_write(output)
        checks.check_overlap("all_to_all", result, source)
        if not source.numel():
            return
        size, number = span.size, len(span.hosts)
        columns = source.shape[-1] * source.itemsize // size
        rows = source.nbytes // (columns * size)
        # `ours`: from this rail, what is for each rank of this host.
        sent = span.order.by_host(as_bytes(source).view(rows, size, columns), 1).transpose(0, 1).contiguous()
        arrived = torch.empty_like(sent)
        span.rail.all_to_all(arrived, sent, _described("all_to_all", input))()
        ours = arrived.view(number, -1, rows * columns).transpose(0, 1).contiguous()
        theirs = torch.empty_like(ours)
        span.within.all_to_all(theirs.view(-1), ours.view(-1), group=span.group)
        chunks = theirs.view(-1, number, rows, columns).permute(2, 1, 0, 3).reshape(rows, size, columns)
        span.order.write(as_bytes(result).view(rows, size, columns), chunks, 1)
        _deliver(output, result)

    @_over_hosts
    def all_to_all_v(
        self,
        span: Span,
        output: torch.Tensor,
        input: torch.Tensor,
        send_counts: Sequence[int] | torch.Tensor,
        send_displs: Sequence[int] | torch.Tensor,
        recv_counts: Sequence[int] | torch.Tensor,
        recv_displs: Sequence[int] | torch.Tensor,
    ) -> None:
        checks.check_tensor("all_to_all_v", input)
        lists = send_counts, send_displs, recv_counts, recv_displs
        exchange_over_hosts(span, output, input, lists, _described("all_to_all_v", input))
        bump_version(output)

    @_over_hosts
    def broadcast(self, span: Span, tensor: torch.Tensor, src: int = 0) -> None:
        root = span.root("src", src)
        try:
            checks.check_pair(span, "broadcast", tensor, tensor, 1, 1)
        except IrisError:
            if root.on_rail:
                # All ranks may refuse it, and then go on. If this one alone does, nobody is to wait for it.
                with contextlib.suppress(IrisError):
                    span.rail.refuse("broadcast()")
            raise
        dense = to_read(tensor)
        if not dense.numel():
            return
        if root.on_rail:
            span.rail.broadcast(dense, root.host, _described("broadcast", tensor))
        span.within.broadcast(dense, root.in_this_host, group=span.group)
        if not root.here:
            _deliver(tensor, dense)

    @_over_hosts
    def gather(self, span: Span, output: torch.Tensor | None, input: torch.Tensor, dst: int = 0) -> None:
        root, size = span.root("dst", dst), span.size
        checks.check_pair(span, "gather", input, input, 1, 1)
        source, result = to_read(input), output
        if root.here:
            with span.root_alone("gather"):
                checks.check_at_root(span, "gather", "output", output, span.rank)
                checks.check_pair(span, "gather", cast(torch.Tensor, output), input, size, 1)
                result = to_write(cast(torch.Tensor, output))
                if source.data_ptr() != result.data_ptr() + span.rank * source.nbytes:
                    checks.check_overlap("gather", result, source)
        if not source.numel():
            return
        mine = as_bytes(source)
        of_host = mine.new_empty(len(span.hosts.local_ranks), len(mine)) if root.on_rail else None
        span.within.gather(of_host, mine, root.in_this_host, group=span.group)
        if of_host is None:
            return
        arrived = of_host.new_empty(size, len(mine)) if root.here else None
        span.rail.gather(arrived, of_host, root.host, _described("gather", input))
        if arrived is not None and result is not None:
            span.order.write(as_bytes(result).view(size, len(mine)), arrived)
            _deliver(cast(torch.Tensor, output), result)

    @_over_hosts
    def scatter(
        self, span: Span, output: torch.Tensor, input: torch.Tensor | Sequence[torch.Tensor] | None, src: int = 0
    ) -> None:
        root, size, result = span.root("src", src), span.size, to_write(output)
        checks.check_pair(span, "scatter", output, output, 1, 1)
        parts = None
        if root.here:
            with span.root_alone("scatter"):
                whole = checks.joined(span, "scatter", input, output) if _is_list(input) else input
                checks.check_at_root(span, "scatter", "input", whole, span.rank)
                source = to_read(cast(torch.Tensor, whole))
                checks.check_pair(span, "scatter", output, source, 1, size)
                if result.data_ptr() != source.data_ptr() + span.rank * result.nbytes:
                    checks.check_overlap("scatter", result, source)
                if source.numel():
                    parts = span.order.by_host(as_bytes(source).view(size, -1))
        if not output.numel():
            return
        mine = as_bytes(result)
        of_host = mine.new_empty(len(span.hosts.local_ranks), len(mine)) if root.on_rail else None
        if of_host is not None:
            span.rail.scatter(of_host, parts, root.host, _described("scatter", output))
        span.within.scatter(mine, of_host, root.in_this_host, group=span.group)
        _deliver(output, result)

    @_over_hosts
    def reduce(
        self, span: Span, output: torch.Tensor | None, input: torch.Tensor, dst: int = 0, *, op: Any = ReduceOp.SUM
    ) -> None:
        root = span.root("dst", dst)
        checks.check_pair(span, "reduce", input, input, 1, 1)
        check_op(reduction(op)[0], input.dtype)
        source, result = to_read(input), output
        if root.here:
            with span.root_alone("reduce"):
                checks.check_at_root(span, "reduce", "output", output, span.rank)
                checks.check_pair(span, "reduce", cast(torch.Tensor, output), input, 1, 1)
                result = to_write(cast(torch.Tensor, output))
                if source.data_ptr() != result.data_ptr():
                    checks.check_overlap("reduce", result, source)
        if not source.numel():
            return
        of_host = torch.empty_like(source) if root.on_rail else None
        span.within.reduce(of_host, source, root.in_this_host, op=op, group=span.group)
        if of_host is None:
            return
        arrived = of_host.new_empty(len(span.hosts), of_host.numel()) if root.here else None
        span.rail.gather(arrived, of_host, root.host, _described("reduce", input, op))
        if arrived is not None and result is not None:
            add_up(result, arrived, reduction(op)[0], span.stream())
            _deliver(cast(torch.Tensor, output), result)

    @_over_hosts
    def reduce_scatter(self, span: Span, output: torch.Tensor, input: torch.Tensor, *, op: Any = ReduceOp.SUM) -> None:
        checks.check_pair(span, "reduce_scatter", output, input, 1, span.size)
        source, result = to_read(input), to_write(output)
        if result.data_ptr() != source.data_ptr() + span.rank * result.nbytes:
            checks.check_overlap("reduce_scatter", result, source)
        check_op(reduction(op)[0], input.dtype)
        if source.numel():
            span.reduce_scatter(result, source, op, _described("reduce_scatter", input, op))
            _deliver(output, result)

    @_over_hosts
    def all_reduce(
        self, span: Span, output: torch.Tensor, input: torch.Tensor, *, op: Any = ReduceOp.SUM, workspace: Any = None
    ) -> None:
        if workspace is not None:
            raise SeveralHostsError("ctx.ccl.all_reduce(workspace=…)", "Call it without a workspace.")
        checks.check_pair(span, "all_reduce", output, input, 1, 1)
        source, result = to_read(input), to_write(output)
        if source.data_ptr() != result.data_ptr():
            checks.check_overlap("all_reduce", result, source)
        check_op(reduction(op)[0], input.dtype)
        if not source.numel():
            return
        call, size, nbytes = _described("all_reduce", input, op), span.size, input.nbytes
        # Parts of equal size: what is beyond the end is added up as well, and dropped.
        padded = -(-input.numel() // size) * size * input.itemsize
        exact = padded == nbytes
        summands = as_bytes(source) if exact else torch.nn.functional.pad(as_bytes(source), (0, padded - nbytes))
        part = torch.empty_like(summands[: padded // size])
        span.reduce_scatter(part.view(input.dtype), summands.view(input.dtype), op, call)
        total = as_bytes(result) if exact else torch.empty_like(summands)
        span.all_gather(total, part, call)
        if not exact:
            as_bytes(result).copy_(total[:nbytes])
        _deliver(output, result)

    all_reduce_preamble = _within_a_host("all_reduce_preamble")

    def _message(
        self,
        name: str,
        role: str,
        tensor: torch.Tensor,
        peer: int,
        group: dist.ProcessGroup | None,
        async_op: bool,
        config: Config | None,
    ) -> Work | None:
        """`send` and `recv`. Of two ranks of a host, it is theirs; else it goes by a link of the two ranks."""
        span = self._find(name, group)
        number = None if span is None else checks.rank_in_group(span, role, peer, self._context.num_ranks)
        if span is None or number is None or span.hosts.is_local(number):
            return self.within._message(name, role, tensor, peer, group, async_op, config)
        self._check(name, span, config)
        checks.check_pair(span, name, tensor, tensor, 1, 1)
        dense, link = to_read(tensor) if name == "send" else to_write(tensor), span.links.to(number)
        if not link.connected:
            refuse_in_capture(f"message between ranks {self._context.cur_rank} and {index(peer)}")
        with torch.no_grad():
            (link.send if name == "send" else link.recv)(dense)
            if name == "recv":
                _deliver(tensor, dense)
        return Work(self._on_gpu) if async_op else None

    def sends_at_once(self, peer: int, group: dist.ProcessGroup | None = None) -> bool:
        """Whether a message to or from rank ``peer`` (in the world) is enqueued without the host waiting for it."""
        span = self._find("send", group)
        number = None if span is None else checks.rank_in_group(span, "peer", peer, self._context.num_ranks)
        if span is None or number is None or span.hosts.is_local(number):
            return True
        return span.links.to(number).connected and not checks.DEBUGGING

    # Who takes part --------------------------------------------------------------------------------------------------

    def _find(self, name: str, group: dist.ProcessGroup | None) -> Span | None:
        """The ranks of a collective, if they are on several hosts. Collective, and blocks the host, for a new group.

        Raises `FirstUseInCaptureError` if the first use of a group is in a capture.
        """
        group = self._named(group)
        if group not in self._spans:
            refuse_in_capture(f"{name}()")
            self.communicator(group)
            part = self._context._spanning.get(group)
            self._spans[group] = None if part is None else self._span(part, group)
        return self._spans[group]

    def _span(self, part: World, group: dist.ProcessGroup | None) -> Span:
        assert part.rail and part.links
        return Span(part, part.rail, part.links, self.within, group, self._context.num_ranks, self._index)

    def _spans_hosts(self, group: dist.ProcessGroup | None) -> bool:
        """Whether its ranks are on several hosts. Local: messages meet no others."""
        group = self._named(group)
        if group not in self._spans:
            assert group is not None
            world = self._context._world
            return len(set(hosts_of(dist.get_process_group_ranks(group), world.group, world.hosts))) > 1
        return self._spans[group] is not None

    def _named(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """The group, or None, which stands for all ranks."""
        self._context.heap.check_open()
        if group is None or group is dist.group.WORLD:
            return None
        check_process_group(group)
        return group

    def _begin(self, name: str, span: Span, config: Config | None) -> Communicator:
        """The communicator of this host's ranks, which they meet to make when it is first used."""
        self._check(name, span, config)
        return self.communicator(span.group)

    def _check(self, name: str, span: Span, config: Config | None) -> None:
        """That the group is whole, and no step has been asked for that is chosen."""
        span.whole.check()
        if config not in (None, DEFAULT):
            raise SeveralHostsError(f"ctx.ccl.{name}(config=…)", "Call it without a config: each step is chosen.")


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
