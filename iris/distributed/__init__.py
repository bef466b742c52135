"""Iris as a backend of ``torch.distributed``: what trains with NCCL trains with Iris.

    import iris.distributed                        # not needed where Iris is installed, only where it is on the path

    dist.init_process_group("cuda:iris")           # or "cpu:gloo,cuda:iris"

This file has the methods that torch calls: collectives, send and recv, windows. Each calls ``ctx.ccl``. What a group is
apart from its calls is in `iris.distributed.group`; `iris.distributed.calls` puts a method on a stream and makes the
`torch.distributed.Work` that it returns.

Contract
--------
*A collective is enqueued on the current stream*, like any kernel: it follows what was enqueued before, and what is
enqueued after it follows it, whether or not anyone calls `wait`. With ``async_op=True`` it runs on a stream of the
group's own, on few multiprocessors; all ranks pass it, or none does. send and recv have a stream for each peer and
direction: on one stream, ranks that send before they receive would wait for each other.

*Ranks use streams in the same order*: a group's n-th stream meets the n-th of the other ranks.

*A group meets when it is first used*, on the host, through its store. Its memory is set aside then, on the device of
its first tensor: a group that is never used costs nothing, and no rank outside it takes part.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from iris import observer
from iris.ccl.collectives import Collectives
from iris.ccl.over_hosts import CollectivesOverHosts
from iris.compat.cuda import is_current_stream_capturing
from iris.distributed.calls import (
    BarrierWork,
    ConnectingMessage,
    EnqueuedWork,
    HostBarrierWork,
    SimulatedMessage,
    check_list,
    check_splits,
    concatenate,
    copy_each,
    exchange,
    on_a_stream,
)
from iris.distributed.group import NAME, ProcessGroupBase
from iris.distributed.window import Window
from iris.errors import InvalidCollectiveError, InvalidGroupError, IrisError
from iris.simulator.streams import Stream
from iris.world.members import await_all, keep_processes


class ProcessGroup(ProcessGroupBase):
    """A group of ``torch.distributed``, with the methods that torch calls. Ranks are those of the group.

    Methods with two names are called by the first in older releases of torch, and by the second in newer ones.
    """

    # Calls on a stream follow each other without the host, so there is nothing to gain by holding them back.

    def start_coalescing(self, device: torch.device) -> None:
        if device.type != self.device_type:
            self._cpu_group(device)._start_coalescing(device)

    def end_coalescing(self, device: torch.device) -> dist.Work:
        if device.type != self.device_type:
            return self._cpu_group(device)._end_coalescing(device)
        # The returned work has an event on the stream of the coalesced calls, so it is over when they are.
        enqueue, sign = observer.beside("coalescing", self, EnqueuedWork, in_thread=False)
        stream = self.stream_for("collectives", device)
        assert not isinstance(stream, Stream)  # the simulator's streams are for send and recv alone
        with torch.cuda.stream(stream):
            return sign(enqueue([], device))

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    # Collectives ------------------------------------------------------------------------------------------------------

    @on_a_stream
    def allreduce(self, ccl: Collectives, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            ccl.all_reduce(tensor, tensor, op=opts.reduceOp)
        return tensors

    # A method of its own, with its own name: to Gloo `allreduce` of several tensors means their sum.
    @on_a_stream
    def allreduce_coalesced(self, ccl: Collectives, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            ccl.all_reduce(tensor, tensor, op=opts.reduceOp)
        return tensors

    @on_a_stream
    def broadcast(self, ccl: Collectives, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            ccl.broadcast(tensor, self._global_rank(opts.rootRank))
        return tensors

    @on_a_stream
    def reduce(self, ccl: Collectives, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            output = tensor if opts.rootRank == self.rank() else None
            ccl.reduce(output, tensor, self._global_rank(opts.rootRank), op=opts.reduceOp)
        return tensors

    @on_a_stream
    def allgather(self, ccl: Collectives, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for parts, mine in zip(outputs, inputs, strict=True):
            self._gather_into(ccl, parts, mine)
        return outputs

    @on_a_stream
    def allgather_coalesced(
        self, ccl: Collectives, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        check_list("all_gather_coalesced", outputs, self.size())
        for parts, mine in zip(zip(*outputs, strict=True), inputs, strict=True):
            self._gather_into(ccl, parts, mine)
        return outputs

    def _gather_into(self, ccl: Collectives, parts: Sequence[Tensor], mine: Tensor) -> None:
        """Gather what each rank has into its part. All ranks have the same list of sizes, and decide by this alone."""
        check_list("all_gather", parts, self.size())
        if len({part.numel() for part in parts}) == 1:
            gathered = mine.new_empty(self.size(), parts[0].numel())
            ccl.all_gather(gathered, mine)
            copy_each(list(gathered), parts)
            return
        for rank, part in enumerate(parts):
            root = self._global_rank(rank)
            if rank == self.rank():
                if part.numel() != mine.numel():
                    # The others would wait for this rank's part: see `gather`.
                    with contextlib.suppress(IrisError):
                        ccl.broadcast(None, root)  # type: ignore[arg-type]
                    raise InvalidCollectiveError(
                        f"all_gather() brings {mine.numel()} elements of rank {root}, and the list of its outputs has "
                        f"{part.numel()} in their place."
                    )
                copy_each([mine.reshape(-1)], [part])
            ccl.broadcast(part, root)

    @on_a_stream
    def _allgather_base(self, ccl: Collectives, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        ccl.all_gather(output, input)
        return [output]

    @on_a_stream
    def allgather_into_tensor_coalesced(
        self, ccl: Collectives, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        for output, input in zip(outputs, inputs, strict=True):
            ccl.all_gather(output, input)
        return outputs

    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced

    @on_a_stream
    def reduce_scatter(self, ccl: Collectives, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            check_list("reduce_scatter", parts, self.size())
            # All ranks have the same list of sizes.
            if len({part.numel() for part in parts}) == 1:
                ccl.reduce_scatter(output, concatenate(parts), op=opts.reduceOp)
            else:
                for rank, part in enumerate(parts):
                    target = output if rank == self.rank() else None
                    ccl.reduce(target, part, self._global_rank(rank), op=opts.reduceOp)
        return outputs

    @on_a_stream
    def _reduce_scatter_base(self, ccl: Collectives, output: Tensor, input: Tensor, opts: Any) -> Any:
        ccl.reduce_scatter(output, input, op=opts.reduceOp)
        return [output]

    @on_a_stream
    def reduce_scatter_tensor_coalesced(
        self, ccl: Collectives, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Any:
        for output, input in zip(outputs, inputs, strict=True):
            ccl.reduce_scatter(output, input, op=opts.reduceOp)
        return outputs

    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced

    @on_a_stream
    def alltoall_base(
        self,
        ccl: Collectives,
        output: Tensor,
        input: Tensor,
        output_rows: list[int],
        input_rows: list[int],
        opts: Any = None,
    ) -> Any:
        received = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
        check_splits("output", output, output_rows, self.size())
        check_splits("input", input, input_rows, self.size())
        if output_rows or input_rows:
            receive, send = (self._split_counts(x, rows) for x, rows in ((output, output_rows), (input, input_rows)))
            exchange(ccl, received, input.contiguous(), receive, send)
        else:
            ccl.all_to_all(received.view(-1), input.reshape(-1))
        if received is not output:
            output.copy_(received)
        return [output]

    all_to_all_single = alltoall_base

    @on_a_stream
    def alltoall(self, ccl: Collectives, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        for parts in (outputs, inputs):
            check_list("all_to_all", parts, self.size())
        receive, send = ([part.numel() for part in parts] for parts in (outputs, inputs))
        received = inputs[0].new_empty(sum(receive))
        exchange(ccl, received, concatenate(inputs), receive, send)
        copy_each(received.split(receive), outputs)
        return outputs

    @on_a_stream
    def gather(self, ccl: Collectives, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        is_root, mine = opts.rootRank == self.rank(), inputs[0]
        gathered = mine.new_empty(self.size(), mine.numel()) if is_root else None
        sizes = [output.numel() for output in outputs[0]] if is_root else []
        if is_root and sizes != [mine.numel()] * self.size():
            # Only the root has this list, so the other ranks would wait for it. A root that calls without an output is
            # refused, and breaks the group for them (`iris.ccl.refusal`).
            with contextlib.suppress(IrisError):
                ccl.gather(None, mine, self._global_rank(opts.rootRank))
            raise InvalidCollectiveError(
                f"gather() brings {mine.numel()} elements from each of {self.size()} ranks; the list has tensors of "
                f"{sizes}."
            )
        ccl.gather(gathered, mine, self._global_rank(opts.rootRank))
        if gathered is not None:
            copy_each(list(gathered), outputs[0])
        return outputs

    @on_a_stream
    def gather_single(self, ccl: Collectives, output: Tensor, input: Tensor, opts: Any) -> Any:
        is_root = opts.rootRank == self.rank()
        ccl.gather(output if is_root else None, input, self._global_rank(opts.rootRank))
        return [output]

    @on_a_stream
    def scatter(self, ccl: Collectives, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        parts = inputs[0] if opts.rootRank == self.rank() else None
        ccl.scatter(outputs[0], parts, self._global_rank(opts.rootRank))
        return outputs

    def barrier(self, opts: Any = None) -> dist.Work:
        device = opts.device if opts is not None and opts.device is not None else torch.device(self.device_type)
        if device.type == "cpu" and self._has_gloo():
            work = self._cpu_group(device).barrier(opts)
            return work if self._context is None else HostBarrierWork(self._context, work)
        context = self.context(device, "barrier")
        context.ccl.barrier()
        return BarrierWork(context)

    # send and recv, matched by their order: a tag changes nothing -----------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        return self._send_or_recv("send", tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        return self._send_or_recv("recv", tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        device = tensors[0].device
        if device.type != self.device_type:
            return self._cpu_group(device).recv_anysource(tensors, tag)
        raise InvalidCollectiveError("The Iris backend receives from a rank that it knows: give recv() a src.")

    def _send_or_recv(self, call: str, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        """Enqueue ``call``, "send" or "recv", on the stream for this peer and direction."""
        device = tensors[0].device
        if device.type != self.device_type:
            return getattr(self._cpu_group(device), call)(tensors, peer, tag)
        context = self.context(device, call)
        ccl, stream = context.ccl, self.stream_for((call, peer), device)

        def enqueue() -> None:
            with torch.no_grad():
                for tensor in tensors:
                    getattr(ccl, call)(tensor, self._global_rank(peer))

        if isinstance(stream, Stream):
            # The first use of the group makes the communicator, and the ranks meet for it on the host.
            flag = ccl.communicator().abort_flag
            flag.check()
            enqueue, sign = observer.beside(call, stream, enqueue, in_thread=True)
            message = stream.enqueue(enqueue)
            return sign(SimulatedMessage(tensors, device, message, functools.partial(flag.interrupted, call)))

        def begin() -> EnqueuedWork:
            with torch.cuda.stream(stream):
                enqueue()
                self.keep_for(tensors, stream)
                return EnqueuedWork(tensors, device)

        before = self._connecting.get((call, peer))
        at_once = not isinstance(ccl, CollectivesOverHosts) or ccl.sends_at_once(self._global_rank(peer))
        if is_current_stream_capturing() or (at_once and (before is None or before.is_over())):
            return begin()
        # Connecting waits for the other rank on the host, which may need other calls of this rank first. So a thread
        # connects.
        connecting = ConnectingMessage(tensors, device, begin, before)
        self._connecting[call, peer] = connecting.enqueued
        return connecting

    # Windows, of torch 2.14 and newer ---------------------------------------------------------------------------------

    @property
    def supports_window(self) -> bool:
        """Whether `new_window` works: among ranks of one host."""
        return self._context is None or self._context.num_hosts == 1

    def new_window(self, tensor: Tensor | None = None) -> Window:
        """A window over a tensor of `allocate_tensor` on each rank. Collective; blocks the host.

        Without a tensor, `Window.tensor_register` gives it one later. Raises `InvalidGroupError` over several hosts,
        and what `Window.tensor_register` raises.
        """
        device = torch.device(self.device_type) if tensor is None else tensor.device
        self.context(device, "new_window")
        if not self.supports_window:
            raise InvalidGroupError(
                "A window is for ranks of one host, whose memory this rank can address, and this group has several. "
                "Make a group of those on one host. Others are reached by send() and recv()."
            )
        self._windows += 1
        window = Window(self, self.context(device).device, self._windows)
        if tensor is not None:
            window.tensor_register(tensor)
        return window

    def _global_rank(self, rank: int) -> int:
        return dist.get_global_rank(self, rank)

    def _split_counts(self, tensor: Tensor, rows: Sequence[int]) -> list[int]:
        """The number of elements for each rank: of ``rows[r]`` rows for rank r; without ``rows``, equal shares."""
        if not rows:
            return [tensor.numel() // self.size()] * self.size()
        return [count * (tensor.numel() // max(tensor.shape[0] if tensor.dim() else 1, 1)) for count in rows]


def create(options: Any, backend_options: Any) -> ProcessGroup:
    """Make a group for torch, which `register_backend` lets call this. Collective; blocks the host."""
    # When this returns, torch drops the Gloo group that it made for these ranks. Other ranks may still be connecting to
    # it, so this rank waits for all of them first.
    ranks = options.global_ranks_in_group or range(options.group_size)
    processes = await_all(options.store, options.group_rank, ranks, options.timeout.total_seconds())
    group = ProcessGroup(options)
    keep_processes(group, processes)
    return group


dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
