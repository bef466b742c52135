"""`ctx.ccl`: the collectives of a context, checked and enqueued."""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist

from iris.abort import SIZES_KEPT
from iris.arg_parser import index
from iris.capture import GraphLine, Line, refuse_in_capture
from iris.ccl import checks, counts, moves, sums
from iris.ccl.communicator import Communicator, Launch
from iris.ccl.config import Config, ReduceOp
from iris.ccl.reduction import PREMUL_SUM, Factor, on_device, reduction
from iris.ccl.refusal import refuse, refuse_broadcast
from iris.ccl.work import Work
from iris.errors import (
    FirstUseInCaptureError,
    GroupAbortedError,
    InvalidCollectiveError,
    IrisError,
)
from iris.heap.history import debugging
from iris.untraced import untraced_methods
from iris.versions import note_written
from iris.workspace import RankContext
from iris.world import check_process_group

DEBUGGING = debugging()
NOTHING, STRIDED = torch.empty(0), torch.strided


@untraced_methods("ctx.ccl is for the host; iris.ccl.functional has its collectives as operators for graphs")
class Collectives:
    """The collectives among the ranks of a group, by default all of them; made by `iris.iris`, as ``ctx.ccl``.

    Every member of the group calls the same collective with tensors of equal shape and dtype, in the same order on its
    stream. A call is enqueued on the current stream; the host does not wait, but where a first call of its kind needs
    memory and meets the ranks. It may be captured in a CUDA graph, once the group has been used before. Tensors may be
    anywhere on the context's device; large results on the symmetric heap are written by the peers directly. Tensors
    that are not contiguous are copied, where not said otherwise.

    Arguments of all: ``group``, a process group that this rank is in; ``async_op``, whether to return a `Work`;
    ``config``, a `Config`, the same on all members.
    """

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._on_gpu = context.device.type == "cuda"
        self._index = context.gpu_id
        self._communicators: dict[dist.ProcessGroup | None, Communicator] = {}

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
        source = input if _has_rows(input) else _to_read(input)
        result = _to_write(output)
        # What is plain goes as one row, unless it is cut into tiles.
        plain = config is None and source.is_contiguous()
        call = "all_gather" if plain else ("all_gather", source.shape, source.stride())
        key = self._key(call, result, source, config, line)
        launch = comm.launches.get(key)
        if launch is None:
            checks.check_pair(comm, "all_gather", output, input, comm.size, 1)
            launch = self._remember(comm, key, config, result, lambda used: moves.prepare_exchange(
                comm, moves.all_gather(comm, source, result, used), result, source, used, line))  # fmt: skip
        inside = result.data_ptr() + comm.rank * source.nbytes
        if source.data_ptr() != inside or not source.is_contiguous():
            checks.check_overlap("all_gather", result, source)
        return self._leave(comm, "all_gather", launch, stream, source, result, output, async_op)

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
        source = input if _has_rows(input) else _to_read(input)
        result = _to_write(output)
        key = self._key(("all_to_all", source.shape, source.stride(), result.shape), result, source, config, line)
        launch = comm.launches.get(key)
        if launch is None:
            checks.check_pair(comm, "all_to_all", output, input, 1, 1)
            if input.dim() == 0 or input.shape[-1] % comm.size or output.shape != input.shape:
                raise InvalidCollectiveError(
                    f"all_to_all among {comm.size} ranks takes an input and an output of the same shape whose last "
                    f"dimension is a multiple of {comm.size}; it got {list(input.shape)} and {list(output.shape)}."
                )
            launch = self._remember(comm, key, config, result, lambda used: moves.prepare_exchange(
                comm, moves.all_to_all(comm, source, result), result, source, used, line))  # fmt: skip
        checks.check_overlap("all_to_all", result, source)
        return self._leave(comm, "all_to_all", launch, stream, source, result, output, async_op)

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int = 0,
        *,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Copy ``tensor`` of rank ``src`` (its rank in the world) into ``tensor`` of every rank."""
        try:
            comm, stream, line = self._enter("broadcast", group, tensor, tensor, config, src)
            root = checks.rank_in_group(comm, "src", src, self._context.num_ranks)
            dense = _to_read(tensor)
            key = self._key(("broadcast", root), dense, dense, config, line)
            launch = comm.launches.get(key)
            if launch is None:
                checks.check_pair(comm, "broadcast", tensor, tensor, 1, 1)
                launch = self._remember(comm, key, config, dense, lambda used: moves.prepare_broadcast(
                    comm, root, dense, used, line))  # fmt: skip
        except IrisError as error:
            self._refuse_broadcast(error, src, group, config)
        if not comm.refuses:
            comm.broadcasts += 1
            comm.state[comm.begun_sizes + comm.broadcasts % SIZES_KEPT] = dense.nbytes
            comm.state[comm.begun] = comm.broadcasts
        return self._leave(
            comm, "broadcast", launch, stream, dense, dense, None if comm.rank == root else tensor, async_op
        )

    def gather(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,
        dst: int = 0,
        *,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Gather every rank's ``input`` into ``output`` of rank ``dst`` (its rank in the world), by rank.

        ``output`` is not looked at elsewhere, and may be None.
        """
        comm, stream, line = self._enter("gather", group, input, input, config, dst)
        root = checks.rank_in_group(comm, "dst", dst, self._context.num_ranks)
        here = comm.rank == root
        try:
            if here:
                checks.check_at_root(comm, "gather", "output", output, root)
            source = _to_read(input)
            target = output if here and output is not None else source
            result = _to_write(target)
            key = self._key(("gather", root), result, source, config, line)
            launch = comm.launches.get(key)
            if launch is None:
                checks.check_pair(comm, "gather", target, input, comm.size if here else 1, 1)
                launch = self._remember(comm, key, config, None, lambda used: moves.prepare_exchange(
                    comm, moves.gather(comm, root, source, result), result, source, used, line))  # fmt: skip
            if here and source.data_ptr() != result.data_ptr() + comm.rank * source.nbytes:
                checks.check_overlap("gather", result, source)
        except IrisError as error:
            refuse(comm, "gather", error, here, stream, line, lambda: self.gather(
                input.new_empty(comm.size * input.numel()), input, dst, group=group, config=config))  # fmt: skip
        return self._leave(comm, "gather", launch, stream, source, result, output if here else None, async_op)

    def scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor | Sequence[torch.Tensor] | None,
        src: int = 0,
        *,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Send part r of ``input`` of rank ``src`` (its rank in the world) to ``output`` of rank r.

        ``input`` has W times the elements of ``output``, or is a list of W tensors of as many as that; it is not looked
        at elsewhere, and may be None.
        """
        comm, stream, line = self._enter("scatter", group, output, output, config, src)
        root = checks.rank_in_group(comm, "src", src, self._context.num_ranks)
        here = comm.rank == root
        try:
            if here:
                if isinstance(input, list | tuple):
                    input = checks.joined(comm, "scatter", input, output)
                checks.check_at_root(comm, "scatter", "input", input, root)
            result = _to_write(output)
            source = _to_read(input) if here and isinstance(input, torch.Tensor) else result
            key = self._key(("scatter", root), result, source, config, line)
            launch = comm.launches.get(key)
            if launch is None:
                checks.check_pair(comm, "scatter", output, source, 1, comm.size if here else 1)
                launch = self._remember(comm, key, config, None, lambda used: moves.prepare_exchange(
                    comm, moves.scatter(comm, root, source, result), result, source, used, line))  # fmt: skip
            if here and result.data_ptr() != source.data_ptr() + comm.rank * result.nbytes:
                checks.check_overlap("scatter", result, source)
        except IrisError as error:
            refuse(comm, "scatter", error, here, stream, line, lambda: self.scatter(
                output, output.new_zeros(comm.size * output.numel()), src, group=group, config=config))  # fmt: skip
        return self._leave(comm, "scatter", launch, stream, source, result, output, async_op)

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
        the tensors. What rank r sends to this rank must be as many as ``recv_counts[r]``. Both tensors are contiguous.
        """
        comm, stream, line = self._enter("all_to_all_v", group, output, input, config)
        if not (input.is_contiguous() and output.is_contiguous()):
            raise InvalidCollectiveError(
                "all_to_all_v() counts elements in the order of memory, so input and output must be contiguous; the "
                f"strides are {input.stride()} and {output.stride()}. Pass x.contiguous()."
            )
        lists = (send_counts, send_displs, recv_counts, recv_displs)
        if DEBUGGING and not isinstance(line, GraphLine):
            checks.compare_counts(comm, send_counts, recv_counts)
        if isinstance(send_counts, torch.Tensor) and send_counts.device.type == "cuda":
            rows = checks.check_rows(comm, lists)
        else:
            rows = counts.on_device(comm, lists, output.numel(), input.numel(), line)
        aligned = tuple(row.data_ptr() & 15 for row in rows)
        key = self._key(("all_to_all_v", aligned), output, input, config, line)
        launch = comm.launches.get(key)
        if launch is None:
            checks.check_pair(comm, "all_to_all_v", output, input, None, None)
            launch = self._remember(comm, key, config, None, lambda used: moves.prepare_exchange_v(
                comm, output, input, rows, used, line))  # fmt: skip
        checks.check_overlap("all_to_all_v", output, input)
        try:
            launch(stream, input, output, *rows)
        except BaseException as error:
            comm.abort_flag.interrupted("all_to_all_v", error)
            raise
        note_written(output)
        return Work(self._on_gpu) if async_op else None

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
        comm, stream, line = self._enter("send", group, tensor, tensor, config)
        peer = checks.rank_in_group(comm, "dst", dst, self._context.num_ranks)
        source = _to_read(tensor)
        everyone_to = range(peer, peer + 1)
        return self._message(comm, "send", peer, everyone_to, range(0), source, tensor, stream, line, config, async_op)

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
        comm, stream, line = self._enter("recv", group, tensor, tensor, config)
        peer = checks.rank_in_group(comm, "src", src, self._context.num_ranks)
        result = _to_write(tensor)
        sources = range(peer, peer + 1)
        return self._message(comm, "recv", peer, range(0), sources, result, tensor, stream, line, config, async_op)

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
        factor = None
        if op.__class__ is not ReduceOp:
            op, factor = reduction(op)
        comm, stream, line = self._enter("all_reduce", group, output, input, config, None, op)
        factors = () if factor is None else self._factors(comm, factor, input, group)
        if workspace is not None:
            _preparation(workspace).check(comm, output, input)
        source, result = _to_read(input), _to_write(output)
        key = self._key(("all_reduce", id(op)), result, source, config, line)
        launch = comm.launches.get(key)
        if launch is None:
            checks.check_pair(comm, "all_reduce", output, input, 1, 1)
            sums.check(op, input.dtype)
            launch = self._remember(comm, key, config, result, lambda used: sums.prepare_all_reduce(
                comm, op, result, source, factors, used, line))  # fmt: skip
        if source.data_ptr() != result.data_ptr():
            checks.check_overlap("all_reduce", result, source)
        return self._leave(comm, "all_reduce", launch, stream, source, result, output, async_op, factors)

    def all_reduce_preamble(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        config: Config | None = None,
        workspace: Any = None,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> "sums.Preparation":
        """Prepare `all_reduce` for tensors of this size; calls that are no larger may share what it returns.

        Without ``group`` it is for calls of any group of this context.

        The memory itself belongs to the stream (see `iris.workspace`); this makes its first use happen now.
        """
        comm, stream, line = self._enter("all_reduce_preamble", group, output, input, config)
        checks.check_pair(comm, "all_reduce_preamble", output, input, 1, 1)
        checks.check_config(config)
        if workspace is not None and _preparation(workspace).covers(comm, output, input):
            return workspace
        return sums.Preparation(comm, input.nbytes, input.dtype, any_group=group is None)

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
        factor = None
        if op.__class__ is not ReduceOp:
            op, factor = reduction(op)
        comm, stream, line = self._enter("reduce_scatter", group, output, input, config, None, op)
        factors = () if factor is None else self._factors(comm, factor, input, group)
        source = _to_read(input)
        result = _to_write(output)
        key = self._key(("reduce_scatter", id(op)), result, source, config, line)
        launch = comm.launches.get(key)
        if launch is None:
            checks.check_pair(comm, "reduce_scatter", output, input, 1, comm.size)
            sums.check(op, input.dtype)
            launch = self._remember(comm, key, config, result, lambda used: sums.prepare_reduce_scatter(
                comm, op, result, source, factors, used, line))  # fmt: skip
        if result.data_ptr() != source.data_ptr() + comm.rank * result.nbytes:
            checks.check_overlap("reduce_scatter", result, source)
        return self._leave(comm, "reduce_scatter", launch, stream, source, result, output, async_op, factors)

    def reduce(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,
        dst: int = 0,
        *,
        op: Any = ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Combine every rank's ``input`` element by element into ``output`` of rank ``dst`` (its rank in the world).

        ``output`` is not touched elsewhere, and may be None; on ``dst`` it may be the ``input``. Rounding as in
        `all_reduce`.
        """
        asked, factor = op, None
        if op.__class__ is not ReduceOp:
            op, factor = reduction(op)
        comm, stream, line = self._enter("reduce", group, input, input, config, dst, op)
        factors = () if factor is None else self._factors(comm, factor, input, group)
        root = checks.rank_in_group(comm, "dst", dst, self._context.num_ranks)
        here = comm.rank == root
        try:
            if here:
                checks.check_at_root(comm, "reduce", "output", output, root)
            target = output if here and output is not None else input
            source = _to_read(input)
            result = _to_write(target) if here else source
            key = self._key(("reduce", id(op), root), result, source, config, line)
            launch = comm.launches.get(key)
            if launch is None:
                checks.check_pair(comm, "reduce", target, input, 1, 1)
                sums.check(op, input.dtype)
                launch = self._remember(comm, key, config, result, lambda used: sums.prepare_reduce(
                    comm, op, root, result, source, factors, used, line))  # fmt: skip
            if here and source.data_ptr() != result.data_ptr():
                checks.check_overlap("reduce", result, source)
        except IrisError as error:
            refuse(comm, "reduce", error, here, stream, line, lambda: self.reduce(
                torch.empty_like(input), input, dst, op=asked, group=group, config=config))  # fmt: skip
        return self._leave(comm, "reduce", launch, stream, source, result, output if here else None, async_op, factors)

    def barrier(self, *, group: dist.ProcessGroup | None = None, async_op: bool = False) -> Work | None:
        """As ``ctx.device_barrier``: what a rank enqueued before it is visible to every rank's work behind it."""
        self._context.device_barrier(group)
        return Work(self._on_gpu) if async_op else None

    def communicator(self, group: dist.ProcessGroup | None = None) -> Communicator:
        """What the collectives of ``group`` share. The first call for a group is collective and blocks the host."""
        self._context.heap.check_open()
        if group is not None:
            check_process_group(group)
        if group not in self._communicators:
            refuse_in_capture("collective")
            workspace = self._context._workspace(group)
            self._communicators[group] = Communicator(workspace, self._context.heap, self._context.get_cu_count())
        return self._communicators[group]

    def forget(self, group: dist.ProcessGroup) -> None:
        """Let go of a group. The caller guarantees that no kernel of its calls runs any more on this rank."""
        self._communicators.pop(group, None)

    def close(self) -> None:
        """Let go of the groups. The caller guarantees that no kernel of theirs runs any more, on any rank."""
        self._communicators.clear()

    def release_graphs(self, group: dist.ProcessGroup | None = None) -> None:
        """Give back the memory of the collectives, and barriers, in CUDA graphs. Collective; blocks the host.

        Graphs keep flags and staging, since nobody can see whether they will be replayed. The caller guarantees that
        none of those captured so far will be.
        """
        comm, _, _ = self._enter("release_graphs", group, NOTHING, NOTHING, None)
        comm.release_graphs()

    # What they share -------------------------------------------------------------------------------------------------

    def _enter(
        self, name: str, group: dist.ProcessGroup | None, output: torch.Tensor, input: torch.Tensor,
        config: Config | None, root: int | None = None, op: Any = None,
    ) -> tuple[Communicator, int | None, Line]:  # fmt: skip
        """The group's communicator, the current stream's handle, and the `Line` of the call.

        Raises `GroupAbortedError` if the group is broken.
        """
        if self._context.heap.closed:
            self._context.heap.check_open()
        if not (output.__class__ is input.__class__ is torch.Tensor and output.layout is input.layout is STRIDED):
            checks.check_tensor(name, output)
            checks.check_tensor(name, input)
        stream, capturing = None, False
        if self._on_gpu:
            # The raw handle: making a Stream object costs the host ten times as much.
            stream = torch._C._cuda_getCurrentRawStream(self._index)
            capturing = torch._C._cuda_isCurrentStreamCapturing()
        if group is not None:
            if group is dist.group.WORLD:
                group = None
            else:
                check_process_group(group)
        comm = self._communicators.get(group)
        if comm is None:
            if capturing:
                raise FirstUseInCaptureError(f"{name}()")
            comm = self.communicator(group)
        if comm.state[0]:
            raise comm.abort_flag.error()
        if DEBUGGING and not capturing and not comm.refuses:
            checks.compare(comm, name, input, config, root, op)
        return comm, stream, comm.workspace.line(stream, True) if capturing else stream

    def _refuse_broadcast(
        self, error: IrisError, src: int, group: dist.ProcessGroup | None, config: Config | None
    ) -> NoReturn:
        if isinstance(error, GroupAbortedError) or not isinstance(group, dist.ProcessGroup | None):
            raise error
        comm = self._communicators.get(None if group is dist.group.WORLD else group)
        if comm is None:
            raise error
        capturing, stream = False, None
        if self._on_gpu:
            capturing, stream = torch.cuda.is_current_stream_capturing(), torch.cuda.current_stream().cuda_stream

        def take_part(size: int) -> None:
            own = torch.zeros(size, dtype=torch.uint8, device=comm.device)
            self.broadcast(own, src, group=group, config=config if isinstance(config, Config) else None)

        refuse_broadcast(comm, error, index(src) == comm.ranks[comm.rank], stream, capturing, take_part)

    def _message(
        self, comm: Communicator, name: str, peer: int, to: range, sources: range, dense: torch.Tensor,
        tensor: torch.Tensor, stream: int | None, line: Line, config: Config | None, async_op: bool,
    ) -> Work | None:  # fmt: skip
        """`send` and `recv`: an exchange that two ranks alone know of."""
        if peer == comm.rank:
            raise InvalidCollectiveError(f"Rank {comm.ranks[peer]} calls {name}() with itself as the other rank.")
        key = self._key((name, peer), dense, dense, config, line)
        launch = comm.launches.get(key)
        if launch is None:
            checks.check_pair(comm, name, tensor, tensor, 1, 1)
            piece = dense.nbytes
            exchange = moves.Exchange(1, piece, piece, piece, 0, 0, piece, to, sources, True)
            launch = self._remember(comm, key, config, None, lambda used: moves.prepare_exchange(
                comm, exchange, dense, dense, used, line, peer))  # fmt: skip
        try:
            launch(stream, dense, dense)
        except BaseException as error:
            comm.abort_flag.interrupted(name, error)
            raise
        _finish(tensor if name == "recv" else None, dense)
        return Work(self._on_gpu) if async_op else None

    def _factors(
        self, comm: Communicator, factor: Factor, input: torch.Tensor, group: dist.ProcessGroup | None
    ) -> tuple[torch.Tensor]:
        """Of PREMUL_SUM: every rank's factor on the device, in the type that sums are formed in."""
        sums.check(PREMUL_SUM, input.dtype)
        dtype, _, _ = sums.elements(input.dtype, PREMUL_SUM)
        own = on_device(factor, sums.accumulator(dtype), comm.device)
        if comm.size == 1:
            return (own,)
        everyone = own.new_empty(comm.size)
        self.all_gather(everyone, own, group=group)
        return (everyone,)

    def _key(
        self,
        call: Any,
        output: torch.Tensor,
        input: torch.Tensor,
        config: Config | None,
        line: Line,
    ) -> tuple:
        """All that a prepared launch depends on; ``call`` has what the collective wants to know of shapes."""
        try:
            reads, writes = input.data_ptr(), output.data_ptr()
        except RuntimeError:
            reads = writes = 0
        if not (reads and writes):
            # Nothing, or a stand-in of torch.func, whose class says nothing.
            checks.check_tensor(_name(call), output)
            checks.check_tensor(_name(call), input)
            reads, writes = input.data_ptr(), output.data_ptr()
        return (
            call,
            input.device, input.dtype, input.numel(), reads & 15,
            output.device, output.dtype, output.numel(), writes & 15,
            id(config), line,
        )  # fmt: skip

    def _remember(
        self,
        comm: Communicator,
        key: tuple,
        config: Config | None,
        result: torch.Tensor | None,
        make: Callable[[Config], Launch],
    ) -> Launch:
        used = checks.check_config(config)
        try:
            launch = make(used) if result is None or result.numel() else _nothing
        except BaseException as error:
            # The first call of a kind compiles, and may meet the other ranks: seconds, in which a signal may come.
            comm.abort_flag.interrupted(_name(key[0]), error)
            raise
        comm.remember(key, config, launch)
        return launch

    def _leave(
        self,
        comm: Communicator,
        name: str,
        launch: Launch,
        stream: int | None,
        source: torch.Tensor,
        result: torch.Tensor,
        output: torch.Tensor | None,
        async_op: bool,
        more: tuple[torch.Tensor, ...] = (),
    ) -> Work | None:
        """``output``: what is written on this rank, or None. ``more``: what else the kernel takes."""
        try:
            launch(stream, source, result, *more)
        except BaseException as error:
            comm.abort_flag.interrupted(name, error)
            raise
        _finish(output, result)
        return Work(self._on_gpu) if async_op else None


def _name(call: Any) -> str:
    """Of the collective, from what `_key` is given."""
    return call if isinstance(call, str) else call[0]


def _nothing(stream: int | None, source: torch.Tensor, result: torch.Tensor, *more: torch.Tensor) -> None:
    """The launch of a collective of no elements."""


def _preparation(workspace: object) -> sums.Preparation:
    if not isinstance(workspace, sums.Preparation):
        raise InvalidCollectiveError(f"workspace={workspace!r} is not what all_reduce_preamble() returned.")
    return workspace


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in memory in their order, as they are."""
    return tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


def _has_rows(tensor: torch.Tensor) -> bool:
    """Whether an exchange reads the tensor as it lies: plain, or two-dimensional with plain rows."""
    return _is_plain(tensor) or (
        tensor.dim() == 2 and tensor.stride(1) == 1 and not (tensor.is_neg() or tensor.is_conj())
    )


def _to_read(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a plain copy: what has another order in memory here may have yet another one on other ranks."""
    return tensor if _is_plain(tensor) else tensor.resolve_neg().resolve_conj().contiguous()


def _finish(output: torch.Tensor | None, result: torch.Tensor) -> None:
    """Copy the result to ``output``, or tell autograd that kernels have written it there. None: this rank gets none."""
    if output is result:
        note_written(output)
    elif output is not None:
        # To a parameter as well.
        with torch.no_grad():
            output.copy_(result)


def _to_write(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or plain room for a result that `_leave` copies into it."""
    return tensor if _is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


class CollectivesContext(RankContext, Protocol):
    """A context with its collectives."""

    ccl: Collectives
