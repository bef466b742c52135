"""What every collective does on the host, around its own checks.

It finds the group and the stream, finds or prepares the launch, and enqueues it.

A launch that was prepared serves all later calls of its kind (`Communicator.launches`), so a call costs the host a few
microseconds: the checks that depend on addresses, a look into a dictionary, and the driver's call.
"""

from typing import Any

import torch
import torch.distributed as dist

from iris.ccl import checks
from iris.ccl.algorithms import prepare
from iris.ccl.call import Call
from iris.ccl.communicator import Communicator, Launch
from iris.ccl.config import Config
from iris.ccl.work import Work
from iris.compat.cuda import current_raw_stream, is_current_stream_capturing
from iris.cuda_graphs.capture import Line, refuse_in_capture
from iris.errors import FirstUseInCaptureError, InvalidCollectiveError
from iris.operators.graph_break import methods_break_graph
from iris.operators.version_counter import bump_version
from iris.runtime.workspace import RankContext
from iris.world import check_process_group

NOTHING, STRIDED = torch.empty(0), torch.strided
# What torch.compile says of a call in a graph.
FOR_THE_HOST = "ctx.ccl is for the host; iris.ccl.functional has its collectives as operators for graphs"


@methods_break_graph(FOR_THE_HOST)
class Enqueuer:
    """The groups of a context, and the way of a call to the current stream."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._on_gpu = context.device.type == "cuda"
        self._index = context.gpu_id
        self._communicators: dict[dist.ProcessGroup | None, Communicator] = {}

    # Groups ----------------------------------------------------------------------------------------------------------

    def communicator(self, group: dist.ProcessGroup | None = None) -> Communicator:
        """What the collectives of ``group`` share. The first call for a group is collective and blocks the host."""
        self._context.heap.check_open()
        group = self._context._named(group)
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

    # Calls -----------------------------------------------------------------------------------------------------------

    def _enter(
        self,
        name: str,
        group: dist.ProcessGroup | None,
        output: torch.Tensor,
        input: torch.Tensor,
        config: Config | None,
        root: int | None = None,
        op: Any = None,
    ) -> tuple[Communicator, int | None, Line]:
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
            stream = current_raw_stream(self._index)
            capturing = is_current_stream_capturing()
        if group is not None:
            group = self._context._named(group)
            if group is not None:
                check_process_group(group)
        comm = self._communicators.get(group)
        if comm is None:
            if capturing:
                raise FirstUseInCaptureError(f"{name}()")
            comm = self.communicator(group)
        if comm.state[0]:
            raise comm.abort_flag.error()
        if checks.DEBUGGING and not capturing and not comm.refuses:
            checks.compare(comm, name, input, config, root, op)
        return comm, stream, comm.workspace.line(stream, True) if capturing else stream

    def _key(self, call: Any, output: torch.Tensor, input: torch.Tensor, config: Config | None, line: Line) -> tuple:
        """All that a prepared launch depends on; ``call`` has what the collective wants to know of shapes."""
        try:
            reads, writes = input.data_ptr(), output.data_ptr()
        except RuntimeError:
            reads = writes = 0
        if not (reads and writes):
            # Nothing, or a stand-in of torch.func, whose class says nothing.
            name = call if isinstance(call, str) else call[0]
            checks.check_tensor(name, output)
            checks.check_tensor(name, input)
            reads, writes = input.data_ptr(), output.data_ptr()
        if not self._on_gpu:
            # There a launch takes the tensors' storages for words anew (`iris.ccl.kernel_launch.as_words`).
            call = (call, *(each.storage_offset() * each.itemsize & 7 for each in (input, output)))
        return (
            call,
            input.device,
            input.dtype,
            input.numel(),
            reads & 15,
            output.device,
            output.dtype,
            output.numel(),
            writes & 15,
            id(config),
            line,
        )

    def _prepare(self, key: tuple, config: Config | None, call: Call) -> Launch:
        """The launch for calls of this key."""
        comm, call = call.comm, call._replace(config=checks.check_config(config))
        try:
            launch = prepare(call)
        except BaseException as error:
            # The first call of a kind compiles, and may meet the other ranks: seconds, in which a signal may come.
            comm.abort_flag.interrupted(call.collective, error)
            raise
        comm.remember(key, config, launch)
        return launch

    def _launch(
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
        """Enqueue the kernel. ``output``: what is written on this rank, or None; ``more``: what else it takes."""
        try:
            launch(stream, source, result, *more)
        except BaseException as error:
            comm.abort_flag.interrupted(name, error)
            raise
        if output is result:
            # Kernels have written there, and autograd counts the versions.
            bump_version(output)
        elif output is not None:
            # To a parameter as well.
            with torch.no_grad():
                output.copy_(result)
        return Work(self._on_gpu) if async_op else None

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
        """A collective of two ranks, of which the others know nothing."""
        comm, stream, line = self._enter(name, group, tensor, tensor, config)
        peer = checks.rank_in_group(comm, role, peer, self._context.num_ranks)
        dense = to_read(tensor) if name == "send" else to_write(tensor)
        if peer == comm.rank:
            raise InvalidCollectiveError(f"Rank {comm.ranks[peer]} calls {name}() with itself as the other rank.")
        key = self._key((name, peer), dense, dense, config, line)
        launch = comm.launches.get(key)
        if launch is None:
            checks.check_pair(comm, name, tensor, tensor, 1, 1)
            launch = self._prepare(key, config, Call(name, comm, dense, dense, line, peer))
        output = tensor if name == "recv" else None
        return self._launch(comm, name, launch, stream, dense, dense, output, async_op)

    def _factors(self, comm: Communicator, own: torch.Tensor, stream: int | None, line: Line) -> tuple[torch.Tensor]:
        """Of PREMUL_SUM: every rank's factor on the device."""
        if comm.size == 1:
            return (own,)
        everyones = own.new_empty(comm.size)
        key = self._key("all_gather", everyones, own, None, line)
        launch = comm.launches.get(key)
        if launch is None:
            launch = self._prepare(key, None, Call("all_gather", comm, everyones, own, line))
        self._launch(comm, "all_gather", launch, stream, own, everyones, everyones, False)
        return (everyones,)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the elements lie in memory in their order, as they are."""
    return tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


def has_rows(tensor: torch.Tensor) -> bool:
    """Whether an exchange reads the tensor as it lies: plain, or two-dimensional with plain rows."""
    return is_plain(tensor) or (
        tensor.dim() == 2 and tensor.stride(1) == 1 and not (tensor.is_neg() or tensor.is_conj())
    )


def to_read(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a plain copy: what has another order in memory here may have yet another one on other ranks."""
    return tensor if is_plain(tensor) else tensor.resolve_neg().resolve_conj().contiguous()


def to_write(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or plain room for a result that `Enqueuer._launch` copies into it."""
    return tensor if is_plain(tensor) else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
