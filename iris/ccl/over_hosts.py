"""Collectives over several hosts: Iris' kernels move data within a host, and a rail moves them between hosts.

| collective | steps |
| --- | --- |
| all_gather | the rail gathers; each host's part is gathered within the host, the own host's first |
| reduce_scatter | one within the host for each host, the own one last; the rail exchanges the sums; they are added up |
| all_reduce | reduce_scatter, then all_gather |
| all_to_all | the rail exchanges what is for each host; an all_to_all within the host |
| all_to_all_v | likewise, once all ranks know all counts (`iris.ccl.all_to_all_v_over_hosts`) |
| broadcast, scatter | along the rail of the root; then within each host |
| gather, reduce | within each host, to the rank with the root's local rank; then along its rail |

In these steps a rank sends to other hosts what its own GPU holds, once, and only to ranks with its local rank. Sums
are formed within a host in the order of ranks and rounded once, then over hosts in the order of hosts and rounded once
more, so they are the same from run to run and on every rank. With `Config.fp32_partials` only the latter is rounded.

Large calls of all but all_to_all_v go in chunks: the rail moves one while the ranks of a host work on another
(`iris.ccl.chunks`).

A message between ranks of different hosts goes by a link of the two (`iris.world.links`).
"""

from collections.abc import Sequence
from typing import Any, TypeGuard, cast

import torch
import torch.distributed as dist

from iris.arg_parser import index
from iris.ccl import checks
from iris.ccl import rooted_over_hosts as steps
from iris.ccl.all_to_all_v_over_hosts import exchange_over_hosts
from iris.ccl.config import Config, ReduceOp
from iris.ccl.enqueue import FOR_THE_HOST, to_read, to_write
from iris.ccl.reduction import check_op, reduction
from iris.ccl.span import Partials, Span
from iris.ccl.spans import Spans, over_hosts, within_a_host
from iris.ccl.work import Work
from iris.cuda_graphs.capture import refuse_in_capture
from iris.errors import InvalidConfigError, SeveralHostsError
from iris.operators.graph_break import methods_break_graph
from iris.operators.version_counter import bump_version
from iris.world.rail import as_bytes


@methods_break_graph(FOR_THE_HOST)
class CollectivesOverHosts(Spans):
    """``ctx.ccl`` where there are several hosts. A group of one host's ranks has all collectives, as on one host."""

    @over_hosts
    def all_gather(self, span: Span, config: Config, output: torch.Tensor, input: torch.Tensor) -> None:
        checks.check_pair(span, "all_gather", output, input, span.size, 1)
        source, result = to_read(input), to_write(output)
        if source.data_ptr() != result.data_ptr() + span.rank * source.nbytes:
            checks.check_overlap("all_gather", result, source)
        if source.numel():
            call = _described("all_gather", input)
            vendor = self._vendor(span, config, "all_gather", result.nbytes, input.dtype)
            (vendor or span).all_gather(result, source, call)
            _deliver(output, result)

    @over_hosts
    def all_to_all(self, span: Span, config: Config, output: torch.Tensor, input: torch.Tensor) -> None:
        checks.check_pair(span, "all_to_all", output, input, 1, 1)
        checks.check_columns(span, "all_to_all", output, input)
        source, result = to_read(input), to_write(output)
        checks.check_overlap("all_to_all", result, source)
        if not source.numel():
            return
        size = span.size
        columns = source.shape[-1] * source.itemsize // size
        rows = source.nbytes // (columns * size)
        if vendor := self._vendor(span, config, "all_to_all", source.nbytes, input.dtype):
            goes = as_bytes(source).view(rows, size, columns).transpose(0, 1).contiguous()
            comes = as_bytes(result).view(size, 1, columns) if rows == 1 else torch.empty_like(goes)
            vendor.all_to_all(comes, goes, _described("all_to_all", input))
            if rows > 1:
                as_bytes(result).view(rows, size, columns).copy_(comes.transpose(0, 1))
            _deliver(output, result)
            return
        goes, comes = as_bytes(source).view(rows, size, columns), as_bytes(result).view(rows, size, columns)
        span.all_to_all(comes, goes, _described("all_to_all", input))
        _deliver(output, result)

    @over_hosts
    def all_to_all_v(
        self,
        span: Span,
        config: Config,
        output: torch.Tensor,
        input: torch.Tensor,
        send_counts: Sequence[int] | torch.Tensor,
        send_displs: Sequence[int] | torch.Tensor,
        recv_counts: Sequence[int] | torch.Tensor,
        recv_displs: Sequence[int] | torch.Tensor,
    ) -> None:
        exchange_over_hosts(span, output, input, (send_counts, send_displs, recv_counts, recv_displs))
        bump_version(output)

    @over_hosts
    def broadcast(self, span: Span, config: Config, tensor: torch.Tensor, src: int = 0) -> None:
        root = span.root("src", src)
        with span.all_give("broadcast", root, config):
            checks.check_pair(span, "broadcast", tensor, tensor, 1, 1)
        dense = to_read(tensor)
        if not dense.numel():
            return
        if vendor := self._vendor(span, config, "broadcast", dense.nbytes, tensor.dtype):
            vendor.broadcast(dense, root.rank, _described("broadcast", tensor))
        else:
            span.broadcast(dense, root, _described("broadcast", tensor))
        if not root.here:
            _deliver(tensor, dense)

    @over_hosts
    def gather(
        self, span: Span, config: Config, output: torch.Tensor | None, input: torch.Tensor, dst: int = 0
    ) -> None:
        root, size = span.root("dst", dst), span.size
        with span.all_give("gather", root, config):
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
        everyone = as_bytes(result).view(size, -1) if root.here and result is not None else None
        steps.gather(span, everyone, as_bytes(source), root, _described("gather", input))
        if root.here and result is not None:
            _deliver(cast(torch.Tensor, output), result)

    @over_hosts
    def scatter(
        self,
        span: Span,
        config: Config,
        output: torch.Tensor,
        input: torch.Tensor | Sequence[torch.Tensor] | None,
        src: int = 0,
    ) -> None:
        root, size = span.root("src", src), span.size
        with span.all_give("scatter", root, config):
            checks.check_pair(span, "scatter", output, output, 1, 1)
        result, parts = to_write(output), None
        if root.here:
            with span.root_alone("scatter"):
                whole = checks.joined(span, "scatter", input, output) if _is_list(input) else input
                checks.check_at_root(span, "scatter", "input", whole, span.rank)
                source = to_read(cast(torch.Tensor, whole))
                checks.check_pair(span, "scatter", output, source, 1, size)
                if result.data_ptr() != source.data_ptr() + span.rank * result.nbytes:
                    checks.check_overlap("scatter", result, source)
                if source.numel():
                    parts = as_bytes(source).view(size, -1)
        if not output.numel():
            return
        steps.scatter(span, as_bytes(result), parts, root, _described("scatter", output))
        _deliver(output, result)

    @over_hosts
    def reduce(
        self,
        span: Span,
        config: Config,
        output: torch.Tensor | None,
        input: torch.Tensor,
        dst: int = 0,
        *,
        op: Any = ReduceOp.SUM,
    ) -> None:
        root = span.root("dst", dst)
        with span.all_give("reduce", root, config):
            checks.check_pair(span, "reduce", input, input, 1, 1)
            sent = _partials(span, "reduce", input, op, config)
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
        if vendor := self._vendor(span, config, "reduce", source.nbytes, input.dtype, op):
            kind = cast(ReduceOp, reduction(op)[0])
            vendor.reduce(result, source, kind, root.rank, root.here, _described("reduce", input, op))
            if root.here:
                _deliver(cast(torch.Tensor, output), cast(torch.Tensor, result))
            return
        steps.reduce(span, result if root.here else None, source, root, op, _described("reduce", input, op), sent)
        if root.here:
            _deliver(cast(torch.Tensor, output), cast(torch.Tensor, result))

    @over_hosts
    def reduce_scatter(
        self,
        span: Span,
        config: Config,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        op: Any = ReduceOp.SUM,
    ) -> None:
        checks.check_pair(span, "reduce_scatter", output, input, 1, span.size)
        source, result = to_read(input), to_write(output)
        if result.data_ptr() != source.data_ptr() + span.rank * result.nbytes:
            checks.check_overlap("reduce_scatter", result, source)
        sent = _partials(span, "reduce_scatter", input, op, config)
        if source.numel():
            call = _described("reduce_scatter", input, op)
            if vendor := self._vendor(span, config, "reduce_scatter", source.nbytes, input.dtype, op):
                vendor.reduce_scatter(result, source, cast(ReduceOp, reduction(op)[0]), call)
            else:
                span.reduce_scatter(result, source, op, call, sent)
            _deliver(output, result)

    @over_hosts
    def all_reduce(
        self,
        span: Span,
        config: Config,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        op: Any = ReduceOp.SUM,
        workspace: Any = None,
    ) -> None:
        if workspace is not None:
            raise SeveralHostsError("ctx.ccl.all_reduce(workspace=…)", "Call it without a workspace.")
        checks.check_pair(span, "all_reduce", output, input, 1, 1)
        source, result = to_read(input), to_write(output)
        if source.data_ptr() != result.data_ptr():
            checks.check_overlap("all_reduce", result, source)
        sent = _partials(span, "all_reduce", input, op, config)
        if not source.numel():
            return
        call, size, nbytes = _described("all_reduce", input, op), span.size, input.nbytes
        if vendor := self._vendor(span, config, "all_reduce", nbytes, input.dtype, op):
            vendor.all_reduce(result, source, cast(ReduceOp, reduction(op)[0]), call)
            _deliver(output, result)
            return
        # Parts of equal size: what is beyond the end is added up as well, and dropped.
        padded = -(-input.numel() // size) * size * input.itemsize
        exact = padded == nbytes
        summands = as_bytes(source) if exact else torch.nn.functional.pad(as_bytes(source), (0, padded - nbytes))
        total = as_bytes(result) if exact else torch.empty_like(summands)
        span.all_reduce(total.view(input.dtype), summands.view(input.dtype), op, call, sent)
        if not exact:
            as_bytes(result).copy_(total[:nbytes])
        _deliver(output, result)

    all_reduce_preamble = within_a_host("all_reduce_preamble")

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


def _partials(span: Span, name: str, input: torch.Tensor, op: Any, config: Config) -> Partials:
    """How hosts send their sums. Raises if the operation has no meaning for the dtype."""
    check_op(reduction(op)[0], input.dtype)
    if config.fp32_partials and not (input.dtype.is_floating_point or input.dtype.is_complex):
        raise InvalidConfigError(
            f"Config(fp32_partials=True) has no meaning for {name}() of {input.dtype}, whose sums are never rounded. "
            "Call it without."
        )
    return span.partials(input.dtype, op) if config.fp32_partials else Partials(input.dtype, op, None)


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
