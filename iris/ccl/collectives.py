"""`ctx.ccl`: the collectives of a context. Each checks its arguments, has its launch chosen, and calls it.

A call takes four steps. `Enqueuer._enter` finds the group and the stream. A key of all that a launch depends on finds
the launch of an earlier call. Where there is none, the arguments are checked, and `iris.ccl.algorithms` chooses the
algorithm, whose file prepares the launch: for all_reduce of 8 KiB, `one_shot`. `Enqueuer._launch` calls it.

Collectives that have a root are in `iris.ccl.rooted`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from iris.ccl import checks, counts
from iris.ccl.call import Call
from iris.ccl.config import Config, ReduceOp
from iris.ccl.enqueue import FOR_THE_HOST, has_rows, to_read, to_write
from iris.ccl.preparation import Preparation, check_preparation
from iris.ccl.reduction import check_op, own_factor, reduction
from iris.ccl.rooted import RootedCollectives
from iris.ccl.work import Work
from iris.operators.graph_break import methods_break_graph


@methods_break_graph(FOR_THE_HOST)
class Collectives(RootedCollectives):
    """The collectives among the ranks of a group, by default all of them; made by `iris.iris`, as ``ctx.ccl``.

    Every member of the group calls the same collective with tensors of equal shape and dtype, in the same order on its
    stream. A call is enqueued on the current stream; the host does not wait, but where a first call of its kind needs
    memory and meets the ranks. It may be captured in a CUDA graph, once the group has been used before. Tensors may be
    anywhere on the context's device; large results on the symmetric heap are written by the peers directly. Tensors
    that are not contiguous are copied, where not said otherwise.

    Arguments of all: ``group``, a process group that this rank is in; ``async_op``, whether to return a `Work`;
    ``config``, a `Config`, the same on all members.
    """

    # Moving data -----------------------------------------------------------------------------------------------------

    def all_gather(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Gather every rank's ``input`` into every rank's ``output``, by rank along the first dimension.

        ``(M, N)`` → ``(W * M, N)``; in general ``output`` has W times the elements of ``input``. ``input`` may be its
        own place in ``output``. A 2-D input may have rows that are apart.
        """
        comm, stream, line = self._enter("all_gather", group, output, input, config)
        source = input if has_rows(input) else to_read(input)
        result = to_write(output)
        # What is plain goes as one row, unless it is cut into tiles.
        plain = config is None and source.is_contiguous()
        call = "all_gather" if plain else ("all_gather", source.shape, source.stride())
        key = self._key(call, result, source, config, line)
        launch = comm.launches.get(key)
        if launch is None:
            checks.check_pair(comm, "all_gather", output, input, comm.size, 1)
            launch = self._prepare(key, config, Call("all_gather", comm, result, source, line))
        inside = result.data_ptr() + comm.rank * source.nbytes
        if source.data_ptr() != inside or not source.is_contiguous():
            checks.check_overlap("all_gather", result, source)
        return self._launch(comm, "all_gather", launch, stream, source, result, output, async_op)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Send chunk r of ``input`` to rank r, and receive rank r's chunk for this rank into chunk r of ``output``.

        ``(M, N * W)``: a chunk is N columns. One dimension: a chunk is a W-th of the elements.
        """
        comm, stream, line = self._enter("all_to_all", group, output, input, config)
        source = input if has_rows(input) else to_read(input)
        result = to_write(output)
        key = self._key(("all_to_all", source.shape, source.stride(), result.shape), result, source, config, line)
        launch = comm.launches.get(key)
        if launch is None:
            checks.check_pair(comm, "all_to_all", output, input, 1, 1)
            checks.check_columns(comm, "all_to_all", output, input)
            launch = self._prepare(key, config, Call("all_to_all", comm, result, source, line))
        checks.check_overlap("all_to_all", result, source)
        return self._launch(comm, "all_to_all", launch, stream, source, result, output, async_op)

    def all_to_all_v(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        send_counts: Sequence[int] | torch.Tensor,
        send_displs: Sequence[int] | torch.Tensor,
        recv_counts: Sequence[int] | torch.Tensor,
        recv_displs: Sequence[int] | torch.Tensor,
        *,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Send ``send_counts[r]`` elements of ``input`` from ``send_displs[r]`` on to rank r, and receive likewise.

        Counts and displacements are numbers of elements of the flattened tensors, one a rank: sequences of integers, or
        int64 tensors on the device, which the host does not look at; then the caller guarantees that they stay within
        the tensors. What rank r sends to this rank must be as many as ``recv_counts[r]``. Both tensors are contiguous,
        and no views as ``x.conj()`` makes them.
        """
        comm, stream, line = self._enter("all_to_all_v", group, output, input, config)
        rows = counts.on_device(comm, (send_counts, send_displs, recv_counts, recv_displs), output, input, line)
        key = self._key(("all_to_all_v", *(row.data_ptr() & 15 for row in rows)), output, input, config, line)
        launch = comm.launches.get(key)
        if launch is None:
            checks.check_pair(comm, "all_to_all_v", output, input, None, None)
            launch = self._prepare(key, config, Call("all_to_all_v", comm, output, input, line, more=rows))
        checks.check_overlap("all_to_all_v", output, input)
        return self._launch(comm, "all_to_all_v", launch, stream, input, output, output, async_op, rows)

    def send(
        self,
        tensor: torch.Tensor,
        dst: int,
        *,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Send ``tensor`` to rank ``dst`` (its rank in the world), which calls `recv`.

        Messages between two ranks arrive in the order of the calls on a stream. Two ranks that both send first and then
        receive on one stream may wait for each other for ever: send on one stream and receive on another, or use
        `all_to_all_v`. The first collective of a group is called by all of its ranks, so it cannot be a message between
        two of four (`communicator`).
        """
        return self._message("send", "dst", tensor, dst, group, async_op, config)

    def recv(
        self,
        tensor: torch.Tensor,
        src: int,
        *,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Receive into ``tensor`` what rank ``src`` (its rank in the world) gives to `send`: as many bytes."""
        return self._message("recv", "src", tensor, src, group, async_op, config)

    # Combining data --------------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        op: Any = ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        config: Config | None = None,
        workspace: Any = None,
    ) -> Work | None:
        """Combine every rank's ``input`` element by element into every rank's ``output``, which may be the ``input``.

        Sums are formed in float32 (float64 for float64, integers in their own type, which wraps) and rounded once.
        Every rank gets the same bits. ``workspace`` is what `all_reduce_preamble` returned.
        """
        op, factor = (op, None) if op.__class__ is ReduceOp else reduction(op)
        comm, stream, line = self._enter("all_reduce", group, output, input, config, None, op)
        factors = (
            () if factor is None else self._factors(comm, own_factor(factor, input.dtype, comm.device), stream, line)
        )
        if workspace is not None:
            check_preparation(workspace).check(comm, output, input)
        source, result = to_read(input), to_write(output)
        key = self._key(("all_reduce", id(op)), result, source, config, line)
        launch = comm.launches.get(key)
        if launch is None:
            checks.check_pair(comm, "all_reduce", output, input, 1, 1)
            check_op(op, input.dtype)
            launch = self._prepare(key, config, Call("all_reduce", comm, result, source, line, op=op, more=factors))
        if source.data_ptr() != result.data_ptr():
            checks.check_overlap("all_reduce", result, source)
        return self._launch(comm, "all_reduce", launch, stream, source, result, output, async_op, factors)

    def all_reduce_preamble(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        config: Config | None = None,
        workspace: Any = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> Preparation:
        """Prepare `all_reduce` for tensors of this size; calls that are no larger may share what it returns.

        Without ``group`` it is for calls of any group of this context. The memory itself belongs to the stream (see
        `iris.runtime.workspace`); this makes its first use happen now.
        """
        comm, _, _ = self._enter("all_reduce_preamble", group, output, input, config)
        checks.check_pair(comm, "all_reduce_preamble", output, input, 1, 1)
        checks.check_config(config)
        if workspace is not None and check_preparation(workspace).covers(comm, output, input):
            return workspace
        return Preparation(comm, input.nbytes, input.dtype, any_group=group is None)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        *,
        op: Any = ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Combine every rank's ``input`` element by element; rank r gets the r-th of W equal parts in ``output``.

        ``input`` has W times the elements of ``output``, as for ``torch.distributed.reduce_scatter_tensor``.
        Rounding as in `all_reduce`. ``output`` may be its own part of ``input``.
        """
        op, factor = (op, None) if op.__class__ is ReduceOp else reduction(op)
        comm, stream, line = self._enter("reduce_scatter", group, output, input, config, None, op)
        factors = (
            () if factor is None else self._factors(comm, own_factor(factor, input.dtype, comm.device), stream, line)
        )
        source, result = to_read(input), to_write(output)
        key = self._key(("reduce_scatter", id(op)), result, source, config, line)
        launch = comm.launches.get(key)
        if launch is None:
            checks.check_pair(comm, "reduce_scatter", output, input, 1, comm.size)
            check_op(op, input.dtype)
            launch = self._prepare(key, config, Call("reduce_scatter", comm, result, source, line, op=op, more=factors))
        if result.data_ptr() != source.data_ptr() + comm.rank * result.nbytes:
            checks.check_overlap("reduce_scatter", result, source)
        return self._launch(comm, "reduce_scatter", launch, stream, source, result, output, async_op, factors)

    def barrier(self, *, group: dist.ProcessGroup | None = None, async_op: bool = False) -> Work | None:
        """As ``ctx.device_barrier``: what a rank enqueued before it is visible to every rank's work after it."""
        self._context.device_barrier(group)
        return Work(self._on_gpu) if async_op else None
