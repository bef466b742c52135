"""The Iris context of a rank: a world, a symmetric heap, the factories of tensors on it, and the meetings of ranks."""

import logging
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from iris import world
from iris.ccl.collectives import Collectives
from iris.ccl.over_hosts import CollectivesOverHosts
from iris.compat.cuda import current_raw_stream
from iris.cuda_graphs.capture import refuse_in_capture
from iris.errors import NotAStreamError, NotPicklableError, PeerLostError
from iris.experts import ExpertParallel, ExpertsConfig
from iris.experts.registry import ExpertParallels
from iris.failures import differing_calls, peer_loss  # noqa: F401 (each registers what this process does then)
from iris.failures.device_record import DeviceRecord
from iris.heap import SymmetricHeap, describe_address
from iris.heap.symmetric_tensors import SymmetricTensors
from iris.language.context_tensor import context_tensor, heap_bases_tensor
from iris.log import logger
from iris.operators.graph_break import breaks_graph
from iris.ops.operations import Operations
from iris.ops.over_hosts import OperationsOverHosts
from iris.runtime.device_barrier import DeviceBarrier
from iris.runtime.process_groups import ProcessGroups
from iris.tensors import Factories
from iris.tracing.recording import Tracing
from iris.world import check_process_group
from iris.world.object_broadcast import broadcast_object


class Iris(Factories, SymmetricTensors, ProcessGroups):
    """A rank's part of a symmetric heap, and what can be done with it. Made by `iris.iris`.

    A context manager. Leaving the block closes the context with all ranks. Leaving it by an exception closes it
    locally, so that the error is not hidden behind a wait for ranks that never come.

    Parameters
    ----------
    heap_size : int
        Bytes of the heap, the same on all ranks.
    process_group : torch.distributed.ProcessGroup, optional
        Whose members are the ranks of the context; by default all ranks of the program.

    Attributes
    ----------
    cur_rank : int
        This rank, from 0 on.
    num_ranks : int
        The number of ranks.
    device : torch.device
        Where the heap lives: the rank's GPU, or the CPU in the simulator.
    gpu_id : int
        Index of the GPU; 0 in the simulator.
    heap_size : int
        Bytes of the heap, all of them the user's.
    heap : SymmetricHeap
        The memory itself, and what is in use of it.
    heap_bases : torch.Tensor
        int64 ``[num_ranks]``, where each rank's heap begins in this rank's address space; see `get_heap_bases`.
    host, num_hosts : int
        Which host this rank is on, from 0 on in the order of their first ranks, and the number of hosts.
    local_rank, num_local_ranks : int
        This rank among those of its host, from 0 on in the order of ranks, and their number, the same on every host.
    local_ranks : tuple of int
        The ranks of this host, by local rank. They need not follow each other.
    ccl : iris.ccl.collectives.Collectives
        The collectives among all ranks, or those of a group.
    ops : iris.ops.operations.Operations
        Products of matrices with their communication.
    tracing : iris.tracing.recording.Tracing
        What kernels did, and when.
    """

    def __init__(self, heap_size: int = 1 << 30, *, process_group: dist.ProcessGroup | None = None) -> None:
        refuse_in_capture("context")
        self._world = world.join(process_group)
        self.cur_rank, self.num_ranks = self._world.rank, self._world.size
        hosts, self._rail = self._world.hosts, self._world.rail
        self.host, self.num_hosts, self.local_rank = hosts.number, len(hosts), hosts.local_rank
        self.local_ranks, self.num_local_ranks = hosts.local_ranks, len(hosts.local_ranks)
        self.device = self._world.device
        self.gpu_id = self.device.index or 0
        with ExitStack() as taken:
            # What was taken goes back if a later step fails. Steps wait for their kernels, so none is left running.
            with ExitStack() as joined:
                joined.callback(self._world.disconnect)
                self.heap = SymmetricHeap(self._world.group, heap_size, self.device, hosts)
                taken.callback(self.heap.close)
                self.heap_size = heap_size
                self._barriers: dict[dist.ProcessGroup | None, DeviceBarrier] = {}
                self._experts = ExpertParallels(self)
                ProcessGroups.__init__(self, self._world, DeviceRecord(self.device))
                joined.pop_all()  # From here on `_close_groups` disconnects.
            taken.callback(self._close_groups)
            bases, size, record = self.heap.bases, self.heap.mapped_size, self._record.address
            self.heap_bases = heap_bases_tensor(bases, size, record, self.device)
            # Over hosts it is collective, and a setting may be wrong on any rank.
            self.ccl: Collectives = CollectivesOverHosts(self) if self._rail else Collectives(self)
            self.ops: Operations = OperationsOverHosts(self, self._rail) if self._rail else Operations(self)
            self._device_context = context_tensor(self.cur_rank, bases, size, record, self.device)
            self.tracing = Tracing(self._world, self._workspaces[None], self._record, self._drain, self._time_rails)
            self.tracing.enable_if_wanted()
            taken.pop_all()

    def __repr__(self) -> str:
        return f"<Iris rank {self.cur_rank} of {self.num_ranks}, heap of {self.heap_size} bytes on {self.device}>"

    def __copy__(self) -> "Iris":
        return self

    def __deepcopy__(self, memo: dict) -> "Iris":
        """The context itself: a copy of a module that holds one works on the same ranks and heap."""
        return self

    def __reduce__(self) -> tuple:
        raise NotPicklableError()

    def get_rank(self) -> int:
        """This rank, from 0 on. Local."""
        return self.cur_rank

    def get_num_ranks(self) -> int:
        """The number of ranks. Local."""
        return self.num_ranks

    def get_device(self) -> torch.device:
        """The device that the heap is on. Local."""
        return self.device

    def get_device_id(self) -> int:
        """The index of this rank's GPU; 0 in the simulator. Local."""
        return self.gpu_id

    def get_cu_count(self) -> int:
        """Multiprocessors (NVIDIA) or compute units (AMD) of this rank's GPU; 1 in the simulator. Local."""
        if self.device.type == "cpu":
            return 1
        return torch.cuda.get_device_properties(self.device).multi_processor_count

    def is_local(self, rank: int) -> bool:
        """Whether ``rank`` is on this rank's host: then kernels reach its memory, and so does `peer`. Local.

        Raises
        ------
        RankOutOfRangeError
            There is no such rank.
        """
        return self._world.hosts.is_local(rank)

    def get_heap_bases(self) -> torch.Tensor:
        """What functional device operations take: int64 ``[num_ranks]`` on the heap's device. Local.

        It holds the address at which each rank's heap begins in this process, and 0 for ranks of other hosts. Where
        there are any, on GPUs, it is uint64, by which kernels guard what they access.
        """
        self.heap.check_open()
        return self.heap_bases

    def get_device_context(self) -> torch.Tensor:
        """What ``DeviceContext.initialize`` takes, in Gluon too: int64, opaque, on the heap's device. Local."""
        self.heap.check_open()
        return self._device_context

    @breaks_graph("the ranks meet on the host")
    def barrier(self, stream: torch.cuda.Stream | None = None, group: dist.ProcessGroup | None = None) -> None:
        """Wait for the work on ``stream`` (default: the whole device), then for all ranks of ``group`` (default: all).

        Collective over the group; blocks the host. A barrier of all ranks also frees the memory of tensors that have
        died on every rank, and compares the ranks' allocations.

        Raises
        ------
        IrisTimeoutError
            A kernel gave up a wait, or a rank does not come within the time limit of the process group.
        RemoteRankError
            A kernel reached for the memory of a rank on another host.
        OutOfStepError
            A rank is in another collective call.
        AsymmetricHeapError
            The ranks did not make the same allocations.
        GroupAbortedError
            The group is broken by an earlier call.
        NotAStreamError
            ``stream`` is something else, such as the flags of a kernel's barrier.
        """
        self._drain(stream)
        if stream is None:
            self._forget_destroyed_groups()
        group = self._named(group)
        members = self._group(group)
        self._check_whole(group)
        if group is None:
            self.heap.meet()
        else:
            members.all_gather(None, "a barrier of a group")
        # All have drained their streams: what has broken the group is known now.
        self._check_whole(group)

    @breaks_graph("a barrier is a launch by the host")
    def device_barrier(self, group: dist.ProcessGroup | None = None) -> None:
        """Enqueue a barrier of ``group`` (default: all ranks) on the current stream; does not block the host.

        What each rank enqueued before it on this stream is visible to all ranks' work after it. Collective over the
        group, in the same order on each stream. All ranks use their streams for the first time in the same order.

        The first call for a group meets its ranks on the host and compiles, so make it outside of any capture, else
        `FirstUseInCaptureError` is raised. Later calls can be captured in a CUDA graph. All ranks must replay graphs
        that contain a barrier in the same order. Graphs that never run at once share their flags.
        """
        self.heap.check_open()
        group = self._named(group)
        if group is not None:
            check_process_group(group)
        if group not in self._barriers:
            refuse_in_capture("device_barrier()")
            self._barriers[group] = DeviceBarrier(self._workspace(group))
        self._check_whole(group)
        stream = current_raw_stream(self.gpu_id) if self.device.type == "cuda" else None
        capturing = stream is not None and torch.cuda.is_current_stream_capturing()
        self._barriers[group].enqueue(stream, capturing)
        spanning = self._spanning.get(group)
        if spanning is not None and spanning.rail:
            # All members on this host have come: when one of each other host knows that of its own, so have all.
            spanning.rail.barrier()

    @breaks_graph("the ranks meet on the host")
    def broadcast(self, value: Any, src: int = 0, *, source_rank: int | None = None) -> Any:
        """Every rank gets ``src``'s ``value``: a number, tensor, array or any object that can be pickled.

        Collective over all ranks; blocks the host. Each rank's kernels are over before, as at a `barrier`: what is sent
        may be what peers have put there. Ranks other than ``src`` may pass None. A tensor arrives on the type of device
        that it has on ``src``, and not on the heap. ``source_rank`` is an older name of ``src``.

        Raises
        ------
        RankOutOfRangeError
            There is no rank ``src``.
        PeerFailedError
            Something failed on another rank, such as pickling the value on ``src``; has its text.
        """
        self.heap.check_open()
        src = src if source_rank is None else source_rank
        return broadcast_object(self._world.group, self.device, value, src, lambda: self._drain(None))

    @breaks_graph("the ranks meet on the host")
    def experts(
        self,
        *,
        num_experts: int,
        hidden: int,
        max_tokens: int,
        top_k: int,
        dtype: torch.dtype = torch.bfloat16,
        group: dist.ProcessGroup | None = None,
        config: ExpertsConfig | None = None,
    ) -> ExpertParallel:
        """Set memory aside for tokens that go to experts on other ranks, and back. Collective over ``group``; blocks.

        ``num_experts``: of all ranks together; each has an equal share. A token is a row of ``hidden`` elements of
        ``dtype`` (bf16, fp16 or fp32), and has up to ``top_k`` experts. ``max_tokens`` is the most that a rank has in
        one call. The page "Expert parallelism" has the bytes of all this, under "Memory"; they are set aside for each
        of `ExpertsConfig.in_flight`. Over S hosts, count S times ``max_tokens``, and the ranks and experts of one
        host; and calls take memory of torch's besides.

        `InvalidExpertsError` and `InvalidConfigError` say what cannot work, `MismatchedCollectiveError` that ranks ask
        for different things.
        """
        self.heap.check_open()
        return self._experts.make(num_experts, hidden, max_tokens, top_k, dtype, group, config)

    def debug(self, message: object) -> None:
        """Log ``message`` at level ``iris.DEBUG`` with the rank in front. Local."""
        self._log(logging.DEBUG, message)

    def info(self, message: object) -> None:
        """Log ``message`` at level ``iris.INFO`` with the rank in front. Local."""
        self._log(logging.INFO, message)

    def warning(self, message: object) -> None:
        """Log ``message`` at level ``iris.WARNING`` with the rank in front. Local."""
        self._log(logging.WARNING, message)

    def error(self, message: object) -> None:
        """Log ``message`` at level ``iris.ERROR`` with the rank in front. Local."""
        self._log(logging.ERROR, message)

    @breaks_graph("the ranks meet on the host")
    def close(self) -> None:
        """Meet all ranks, then give the heap back. Collective; blocks the host. A second call does nothing.

        The caller guarantees that no kernel uses the heap any more. Afterwards, calls that need the heap raise
        `HeapClosedError`; tensors that still live stay valid. If the group is broken, each rank closes alone; if a rank
        has died, the others close all the same, and then raise `PeerLostError`.
        """
        if self.heap.closed:
            return
        alone = bool(self._workspaces[None].abort_flag.state[0])
        lost = None
        if not alone:
            try:
                self.barrier()
            except PeerLostError as error:
                alone, lost = True, error
        try:
            self.tracing.save(alone=alone)
        finally:
            self._release()
        if lost is not None:
            raise lost

    def __enter__(self) -> "Iris":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error the other ranks may never come, and a meeting would hide the error behind a time-out.
        if kind is None:
            self.close()
        else:
            try:
                self.tracing.save(alone=True)
            finally:
                # The library's own memory stays as long as the context, since kernels may be waiting in it.
                self.heap.close()

    def _release(self) -> None:
        """Give all memory back, without meeting the others. The caller guarantees that this rank's kernels are over."""
        self._close_groups()
        self.heap.close()
        # The library's own memory goes with those that use it.
        self._barriers.clear()
        self.ccl.close()
        self.ops.close()
        self._experts.close()
        self._workspaces.clear()

    def _forget(self, group: dist.ProcessGroup) -> None:
        self._barriers.pop(group, None)
        self.ccl.forget(group)
        self._experts.forget(group)
        super()._forget(group)

    def _drain(self, stream: torch.cuda.Stream | None = None) -> None:
        """Wait on the host for ``stream`` (None: the device), and raise what its kernels have recorded."""
        self.heap.check_open()
        if not isinstance(stream, torch.cuda.Stream | torch.Stream | None):
            raise NotAStreamError(stream)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device) if stream is None else stream.synchronize()
            # On the drained stream: the current one may be waiting for a peer.
            with torch.cuda.stream(stream):
                self._record.raise_if_claimed(self.cur_rank, describe_address, self._world.hosts.name_of)
        self._raise_recorded()

    def _raise_recorded(self) -> None:
        """Raise what kernels of the library have recorded, as far as it is known. Local; does not wait."""
        for workspace in self._workspaces.values():
            workspace.abort_flag.raise_recorded(describe_address)

    def _log(self, level: int, message: object) -> None:
        logger.log(level, "[%d/%d] %s", self.cur_rank, self.num_ranks, message)

    # The name by which older programs ask whether a tensor is on the heap.
    def __on_symmetric_heap(self, tensor: torch.Tensor) -> bool:
        return self.is_symmetric(tensor)


def iris(heap_size: int = 1 << 30, *, process_group: dist.ProcessGroup | None = None) -> Iris:
    """Make a context: this rank's part of a symmetric heap of ``heap_size`` bytes. Collective; blocks the host.

    Rank, number of ranks and device are those of ``torch.distributed``. If it is not initialised and torchrun's
    environment variables are set, it is initialised here, with NCCL if each rank has a GPU, else with Gloo. Without
    these variables, the world has one rank. The heap is on the GPU of the process, or in main memory in the simulator.
    A process may have several contexts at once.

    These are raised on the ranks at fault, and `PeerFailedError` on the others: `NoGpuForRankError`,
    `InvalidHeapSizeError`, `MismatchedHeapError`, `HeapTooLargeError`, `InvalidGroupError` (unequal hosts),
    `SharedDeviceError`, `NoPeerAccessError`, `MappingError`, `IrisTimeoutError`.

    Parameters
    ----------
    heap_size : int
        Bytes of the heap, the same on all ranks.
    process_group : torch.distributed.ProcessGroup, optional
        Whose members are the ranks, and alone make the call; by default all ranks of the program.
    """
    return Iris(heap_size, process_group=process_group)
