"""Iris as a backend of ``torch.distributed``: what trains with NCCL trains with Iris.

    import iris.distributed                        # not needed where Iris is installed, only where it is on the path

    dist.init_process_group("cuda:iris")           # or "cpu:gloo,cuda:iris"

Contract
--------
*A collective is enqueued on the current stream*, like any kernel: it follows what was enqueued before, and what is
enqueued behind it follows it, whether or not anyone calls `wait`. With ``async_op=True``, which all ranks say or none,
it is on a stream of the group's own, on few multiprocessors. Messages have a stream for each peer and direction, or
programs that send before they receive would wait for each other.

*Ranks use streams in the same order*: a group's n-th stream meets the n-th of the other ranks.

*A group meets when it is first used*, on the host, through its store. Its memory is set aside then, on the device of
its first tensor: a group that is never used costs nothing, and no rank outside it takes part.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from iris import simulator
from iris.ccl.collectives import Collectives
from iris.ccl.config import Config, ReduceOp
from iris.ccl.work import Work
from iris.context import Iris
from iris.errors import InvalidCollectiveError, UnsupportedReductionError, WrongDeviceError

NAME = "iris"

# Enough for most of the link's bandwidth.
BESIDE_COMPUTATION = Config(comm_sms=32)


class EnqueuedWork(Work, dist.Work):
    """A call that has been enqueued on the current stream, and the tensors that it writes."""

    def __init__(self, outputs: Any, device: torch.device) -> None:
        dist.Work.__init__(self)
        Work.__init__(self, device.type == "cuda")
        self._outputs, self._device = outputs, device
        self._stream = torch.cuda.current_stream(device) if self._event else None

    def get_future(self) -> torch.futures.Future:
        """A future of the outputs: whoever waits for it lets the current stream wait."""
        future = torch.futures.Future(devices=[self._device] if self._event else None)
        # It stands for what is on the current stream when it gets its result.
        with torch.cuda.stream(self._stream):
            future.set_result(self._outputs)
        return future

    def result(self) -> Any:
        """The tensors that the call writes."""
        return self._outputs


class BarrierWork(EnqueuedWork):
    """A barrier, for which the host waits too."""

    def __init__(self, context: Iris) -> None:
        super().__init__([], context.device)
        self._context = context

    def wait(self, timeout: object = None) -> bool:
        """Return when all ranks have come. Raises what a kernel has recorded, as ``ctx.barrier()`` does."""
        super().wait()
        self._context._drain(torch.cuda.current_stream() if self._event else None)
        return True


class _BesideComputation:
    """``ccl`` for calls that the program does not wait for at once: on few multiprocessors, the rest computes."""

    def __init__(self, ccl: Collectives) -> None:
        self._ccl = ccl

    def __getattr__(self, call: str) -> Callable[..., Any]:
        return functools.partial(getattr(self._ccl, call), config=BESIDE_COMPUTATION)


def _call(method: Callable[..., Any]) -> Callable[..., dist.Work]:
    """A method that torch calls, from ``method(self, ccl, ...)``, which enqueues it and returns what it writes.

    On the current stream; what is asked for with ``async_op=True``, as DDP does, on one of the group's own, beside
    what the program enqueues next. With tensors on the CPU beside a GPU it is the method of the CPU's backend instead.
    """

    @functools.wraps(method)
    def call(self: "ProcessGroup", *args: Any, **kwargs: Any) -> dist.Work:
        tensors = list(_tensors([*args, *kwargs.values()]))
        device = tensors[0].device
        if device.type != self.device_type:
            return getattr(self._beside(device), method.__name__)(*args, **kwargs)
        ccl, stream = self.context(device).ccl, None
        if any(getattr(value, "asyncOp", False) for value in [*args, *kwargs.values()]):
            ccl, stream = _BesideComputation(ccl), self._stream_for("collectives", device)
        # Parameters require gradients, and are written all the same.
        with torch.no_grad(), torch.cuda.stream(stream):
            outputs = method(self, ccl, *args, **kwargs)
            _keep(tensors, stream)
            return EnqueuedWork(outputs, device)

    return call


class ProcessGroup(dist.ProcessGroup):
    """A group of ``torch.distributed``, with the methods that torch calls. Ranks are those of the group.

    Up to torch 2.13 Python may stand for a whole process group, and not for one of its backends. Methods with two names
    are called by the first in older releases, and by the second in newer ones.
    """

    # torch asks backends for these before it uses what not all of them have.
    supports_splitting = supports_coalescing = supports_time_estimate = False

    def __init__(self, options: Any) -> None:
        """Local. ``options``: what ``torch.distributed`` hands to backends with an extended API."""
        super().__init__(options.group_rank, options.group_size)
        self._store, self._timeout, self._name = options.store, options.timeout, options.group_id
        self.device_type = "cpu" if simulator.ACTIVE else "cuda"
        self._context: Iris | None = None
        self._gloo: dist.ProcessGroup | None = None
        self._streams: dict[Any, torch.cuda.Stream] = {}

    def context(self, device: torch.device) -> Iris:
        """The group's context, on ``device``. The first call is collective over the group and blocks the host.

        Its heap is empty, for the collectives take tensors from anywhere.
        """
        if self._context is None:
            if device.type == "cuda" and device.index is not None:
                torch.cuda.set_device(device)
            self._context = Iris(0, process_group=self)
        return self._context

    # What torch asks about a group ------------------------------------------------------------------------------------

    def name(self) -> str:
        return NAME

    getBackendName = name

    # torch's own groups have their names and devices from their backends.
    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in ([self.device_type, "cpu"] if self._has_gloo() else [self.device_type])]

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == self.device_type else self._beside(device)._get_backend(device)

    def _beside(self, device: torch.device) -> dist.ProcessGroup:
        """The group with the same ranks for tensors on the CPU beside a GPU."""
        if device.type != "cpu" or not self._has_gloo():
            raise WrongDeviceError(
                f"The Iris backend of this group works on {self.device_type}, and was given a tensor on {device}. Move "
                'it, or give that device a backend: dist.init_process_group("cpu:gloo,cuda:iris").'
            )
        if self._gloo is None:
            # What torch made for the CPU went away with the group that this one replaces.
            store, kind = dist.PrefixStore("gloo", self._store), dist.ProcessGroup.BackendType.GLOO
            gloo = dist.ProcessGroupGloo(store, self.rank(), self.size(), timeout=self._timeout)
            self._gloo = dist.ProcessGroup(store, self.rank(), self.size())
            self._gloo._register_backend(device, kind, gloo)
            self._gloo._set_default_backend(kind)
        return self._gloo

    def _has_gloo(self) -> bool:
        return self.device_type != "cpu" and "cpu:gloo" in dist.get_backend_config(self).split(",")

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def shutdown(self) -> None:
        """Let go of the group's memory. Local; blocks the host until this rank's calls are over."""
        if self._context is not None:
            if self.device_type == "cuda":
                torch.cuda.synchronize(self._context.device)
            self._context._release()
        self._gloo = None

    def abort(self) -> None:
        """Nothing: kernels that wait in vain end by their own time limit, and memory that they use stays."""

    # Calls on a stream follow each other without the host, so there is nothing to gain by holding them back.

    def start_coalescing(self, device: torch.device) -> None:
        pass

    def end_coalescing(self, device: torch.device) -> dist.Work:
        with torch.cuda.stream(self._stream_for("collectives", device)):
            return EnqueuedWork([], device)

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    # Collectives ------------------------------------------------------------------------------------------------------

    @_call
    def allreduce(self, ccl: Collectives, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            ccl.all_reduce(tensor, tensor, op=_operation(opts))
        return tensors

    allreduce_coalesced = allreduce

    @_call
    def broadcast(self, ccl: Collectives, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            ccl.broadcast(tensor, self._rank_in_world(opts.rootRank))
        return tensors

    @_call
    def reduce(self, ccl: Collectives, tensors: list[Tensor], opts: Any) -> Any:
        for tensor in tensors:
            output = tensor if opts.rootRank == self.rank() else None
            ccl.reduce(output, tensor, self._rank_in_world(opts.rootRank), op=_operation(opts))
        return tensors

    @_call
    def allgather(self, ccl: Collectives, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for parts, mine in zip(outputs, inputs, strict=True):
            if all(part.numel() == mine.numel() for part in parts):
                together = mine.new_empty(self.size(), mine.numel())
                ccl.all_gather(together, mine)
                _deal_out(together, parts)
            else:  # on every rank, for all know all sizes
                parts[self.rank()].copy_(mine)
                for rank, part in enumerate(parts):
                    ccl.broadcast(part, self._rank_in_world(rank))
        return outputs

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return self.allgather([list(parts) for parts in zip(*outputs, strict=True)], inputs)

    @_call
    def _allgather_base(self, ccl: Collectives, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        ccl.all_gather(output, input)
        return [output]

    @_call
    def allgather_into_tensor_coalesced(
        self, ccl: Collectives, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        for output, input in zip(outputs, inputs, strict=True):
            ccl.all_gather(output, input)
        return outputs

    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced

    @_call
    def reduce_scatter(self, ccl: Collectives, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        for output, parts in zip(outputs, inputs, strict=True):
            if all(part.numel() == output.numel() for part in parts):
                ccl.reduce_scatter(output, _flat(parts), op=_operation(opts))
            else:
                for rank, part in enumerate(parts):
                    target = output if rank == self.rank() else None
                    ccl.reduce(target, part, self._rank_in_world(rank), op=_operation(opts))
        return outputs

    @_call
    def _reduce_scatter_base(self, ccl: Collectives, output: Tensor, input: Tensor, opts: Any) -> Any:
        ccl.reduce_scatter(output, input, op=_operation(opts))
        return [output]

    @_call
    def reduce_scatter_tensor_coalesced(
        self, ccl: Collectives, outputs: list[Tensor], inputs: list[Tensor], opts: Any
    ) -> Any:
        for output, input in zip(outputs, inputs, strict=True):
            ccl.reduce_scatter(output, input, op=_operation(opts))
        return outputs

    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced

    @_call
    def alltoall_base(
        self, ccl: Collectives, output: Tensor, input: Tensor, output_rows: list[int], input_rows: list[int],
        opts: Any = None,
    ) -> Any:  # fmt: skip
        received = output if output.is_contiguous() else torch.empty_like(output, memory_format=torch.contiguous_format)
        if output_rows or input_rows:
            receive, send = (self._elements(x, rows) for x, rows in ((output, output_rows), (input, input_rows)))
            _exchange(ccl, received, input.contiguous(), receive, send)
        else:
            ccl.all_to_all(received.view(-1), input.reshape(-1))
        if received is not output:
            output.copy_(received)
        return [output]

    all_to_all_single = alltoall_base

    @_call
    def alltoall(self, ccl: Collectives, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Any:
        receive, send = ([part.numel() for part in parts] for parts in (outputs, inputs))
        received = inputs[0].new_empty(sum(receive))
        _exchange(ccl, received, _flat(inputs), receive, send)
        _deal_out(received.split(receive), outputs)
        return outputs

    @_call
    def gather(self, ccl: Collectives, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        here, mine = opts.rootRank == self.rank(), inputs[0]
        together = mine.new_empty(self.size(), mine.numel()) if here else None
        ccl.gather(together, mine, self._rank_in_world(opts.rootRank))
        if here:
            _deal_out(together, outputs[0])
        return outputs

    @_call
    def scatter(self, ccl: Collectives, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        parts = _flat(inputs[0]) if opts.rootRank == self.rank() else None
        ccl.scatter(outputs[0], parts, self._rank_in_world(opts.rootRank))
        return outputs

    def barrier(self, opts: Any = None) -> dist.Work:
        device = opts.device if opts is not None and opts.device is not None else torch.device(self.device_type)
        if device.type == "cpu" and self._has_gloo():
            return self._beside(device).barrier(opts)
        context = self.context(device)
        context.ccl.barrier()
        return BarrierWork(context)

    # Messages, matched by their order: a tag changes nothing ----------------------------------------------------------

    def send(self, tensors: list[Tensor], dst: int, tag: int = 0) -> dist.Work:
        return self._message("send", tensors, dst, tag)

    def recv(self, tensors: list[Tensor], src: int, tag: int = 0) -> dist.Work:
        return self._message("recv", tensors, src, tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> dist.Work:
        raise InvalidCollectiveError("The Iris backend receives from a rank that it knows: give recv() a src.")

    def _message(self, call: str, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        device = tensors[0].device
        if device.type != self.device_type:
            return getattr(self._beside(device), call)(tensors, peer, tag)
        ccl, stream = self.context(device).ccl, self._stream_for((call, peer), device)
        with torch.no_grad(), torch.cuda.stream(stream):
            for tensor in tensors:
                getattr(ccl, call)(tensor, self._rank_in_world(peer))
            _keep(tensors, stream)
            return EnqueuedWork(tensors, device)

    def _stream_for(self, use: Any, device: torch.device) -> torch.cuda.Stream | None:
        """The group's own stream for some calls, behind what is on the current one; None in the simulator."""
        if device.type != "cuda":
            return None
        if use not in self._streams:
            # Before computation that waits for a place as well: all other ranks wait for the last one.
            self._streams[use] = torch.cuda.Stream(device, priority=-1)
        self._streams[use].wait_stream(torch.cuda.current_stream(device))
        return self._streams[use]

    def _rank_in_world(self, rank: int) -> int:
        return dist.get_global_rank(self, rank)

    def _elements(self, tensor: Tensor, rows: Sequence[int]) -> list[int]:
        """How many elements there are for each rank: so many ``rows`` of the tensor, or as many for each."""
        if not rows:
            return [tensor.numel() // self.size()] * self.size()
        return [count * (tensor.numel() // max(tensor.shape[0], 1)) for count in rows]


def _operation(opts: Any) -> ReduceOp:
    name = opts.reduceOp.op.name
    if name not in ReduceOp.__members__:
        raise UnsupportedReductionError(
            f"The Iris backend has no ReduceOp.{name}: it knows {', '.join(ReduceOp.__members__)}."
        )
    return ReduceOp[name]


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    """All tensors in nested sequences."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            yield value


def _keep(tensors: Sequence[Tensor], stream: torch.cuda.Stream | None) -> None:
    """Their memory is not given to others before the stream is done, though they may die before anyone waits for it."""
    if stream is not None:
        for tensor in tensors:
            tensor.record_stream(stream)


def _flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def _deal_out(pieces: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    for piece, output in zip(pieces, outputs, strict=True):
        output.copy_(piece.view(output.shape))


def _exchange(ccl: Collectives, output: Tensor, input: Tensor, receive: list[int], send: list[int]) -> None:
    """Counts of elements, a rank each; what is for or from a rank lies behind that of the rank before."""
    receive_from, send_from = ([0, *accumulate(counts[:-1])] for counts in (receive, send))
    ccl.all_to_all_v(output, input, send, send_from, receive, receive_from)


def create(options: Any, backend_options: Any) -> ProcessGroup:
    """Make the group that torch asks for; what `register_backend` is given. Collective; blocks the host."""
    # Behind this torch drops what it made for the CPU, to which other members may still be connecting.
    options.store.set(f"made/{options.group_rank}", "")
    options.store.wait([f"made/{rank}" for rank in range(options.group_size)], options.timeout)
    return ProcessGroup(options)


dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
