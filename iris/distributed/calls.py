"""How a method of `iris.distributed` becomes a call on a stream, and the handles of torch.distributed it returns."""

import contextlib
import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from iris import observer
from iris.ccl.collectives import Collectives
from iris.ccl.config import Config
from iris.ccl.over_hosts import CollectivesOverHosts
from iris.ccl.work import Work
from iris.compat.cuda import is_current_stream_capturing
from iris.context import Iris
from iris.errors import InvalidCollectiveError
from iris.heap.pool import is_handed_out
from iris.operators.graph_break import breaks_graph
from iris.simulator.streams import Enqueued

# Enough for most of the link's bandwidth.
BESIDE_COMPUTATION = Config(comm_sms=32)
NO_CONTEXT = contextlib.nullcontext()


class EnqueuedWork(Work, dist.Work):
    """A call that has been enqueued on the current stream, and the tensors that it writes.

    ``followed``: whether the caller waits at once, on the same stream, so that no event is needed.
    """

    def __init__(self, outputs: Any, device: torch.device, followed: bool = False) -> None:
        dist.Work.__init__(self)
        has_event = device.type == "cuda" and not followed
        self._outputs, self._device = outputs, device
        self._stream = torch.cuda.current_stream(device) if has_event else None
        Work.__init__(self, has_event, self._stream)

    def wait(self, timeout: object = None) -> bool:
        """Let the current stream wait for the call; the host does not wait."""
        super().wait(timeout)
        observer.ended(self)
        return True

    def is_completed(self) -> bool:
        over = super().is_completed()
        if over:
            observer.ended(self)
        return over

    def get_future(self) -> torch.futures.Future:
        """A future of the outputs: whoever waits for it lets the current stream wait."""
        future: torch.futures.Future = torch.futures.Future(devices=[self._device] if self._event else None)
        observer.promised(self, future)
        # It stands for what is on the current stream when it gets its result.
        with torch.cuda.stream(self._stream):
            future.set_result(self._outputs)
        return future

    def result(self) -> Any:
        """The tensors that the call writes."""
        return self._outputs


class SimulatedMessage(EnqueuedWork):
    """A message in the simulator, which a thread sends or receives."""

    def __init__(
        self, outputs: Any, device: torch.device, enqueued: Enqueued, interrupted: Callable[..., None]
    ) -> None:
        super().__init__(outputs, device)
        self._enqueued, self._interrupted = enqueued, interrupted

    def wait(self, timeout: object = None) -> bool:
        """Return when the message has been sent or received. Raises what has gone wrong."""
        try:
            self._enqueued.wait()
        except BaseException as error:
            self._interrupted(error)
            raise
        observer.ended(self)
        return True

    def is_completed(self) -> bool:
        over = self._enqueued.is_over()
        if over:
            observer.ended(self)
        return over

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        observer.promised(self, future)

        def settle() -> None:
            try:
                self._enqueued.wait()
                future.set_result(self._outputs)
            except Exception as error:
                future.set_exception(error)

        Enqueued(settle)
        return future


class ConnectingMessage(dist.Work):
    """A message on a GPU whose ranks meet on the host first, in a thread, which then enqueues it on its stream.

    ``begin`` does both, and returns the handle of what it has enqueued; after it come the messages that have this one
    as ``before``.
    """

    def __init__(
        self, outputs: Any, device: torch.device, begin: Callable[[], EnqueuedWork], before: Enqueued | None
    ) -> None:
        super().__init__()
        self._outputs, self._device = outputs, device
        self._begun: EnqueuedWork | None = None

        def run() -> None:
            # A thread has a current device of its own.
            with torch.cuda.device(device):
                self._begun = begin()

        self.enqueued = Enqueued(run, before)

    def wait(self, timeout: object = None) -> bool:
        """Let the host wait until the ranks have met, and the current stream for the message."""
        self.enqueued.wait()
        assert self._begun is not None
        return self._begun.wait(timeout)

    def is_completed(self) -> bool:
        return self.enqueued.is_over() and (self._begun is None or self._begun.is_completed())

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future(devices=[self._device])

        def settle() -> None:
            try:
                with torch.cuda.device(self._device):
                    self.wait()
                    future.set_result(self._outputs)
            except Exception as error:
                future.set_exception(error)

        Enqueued(settle)
        return future


class HostBarrierWork(EnqueuedWork):
    """A barrier of the hosts, by Gloo, of a group that has been used on the GPU as well."""

    def __init__(self, context: Iris, barrier: dist.Work) -> None:
        super().__init__([], context.device)
        self._context, self._barrier = context, barrier

    def wait(self, timeout: object = None) -> bool:
        """Return when all ranks have come. Raises what has broken the group, as far as it is known."""
        self._barrier.wait()
        self._context._raise_recorded()
        self._context._check_whole(None)
        return True

    def is_completed(self) -> bool:
        return self._barrier.is_completed()


class BarrierWork(EnqueuedWork):
    """A barrier, for which the host waits too."""

    def __init__(self, context: Iris) -> None:
        super().__init__([], context.device)
        self._context = context

    def wait(self, timeout: object = None) -> bool:
        """Return when all ranks have come. Raises what a kernel has recorded, as ``ctx.barrier()`` does.

        In a capture the host does not wait: the graph has a barrier on the stream.
        """
        super().wait()
        if self._event is None or not torch.cuda.is_current_stream_capturing():
            self._context._drain(torch.cuda.current_stream() if self._event else None)
            self._context._check_whole(None)
        return True


class BesideComputation:
    """``ccl`` for calls that the program does not wait for at once: on few multiprocessors, the rest computes."""

    def __init__(self, ccl: Collectives) -> None:
        self._ccl = ccl

    def __getattr__(self, call: str) -> Callable[..., Any]:
        configured = functools.partial(getattr(self._ccl, call), config=BESIDE_COMPUTATION)
        setattr(self, call, configured)  # for the next time
        return configured


def beside_computation(group: Any, ccl: Collectives) -> Collectives | BesideComputation:
    """The one of a group whose ``ccl`` this is."""
    if group.beside_computation is None:
        # Over hosts each step is chosen, and takes no configuration.
        group.beside_computation = ccl if isinstance(ccl, CollectivesOverHosts) else BesideComputation(ccl)
    return group.beside_computation


def on_a_stream(method: Callable[..., Any]) -> Callable[..., dist.Work]:
    """A method that torch calls, from ``method(self, ccl, ...)``, which enqueues it and returns what it writes.

    On the current stream; what is asked for with ``async_op=True``, as DDP does, on one of the group's own, beside
    what the program enqueues next. That is on few multiprocessors, and so are calls with tensors of
    ``allocate_tensor``. With tensors on the CPU beside a GPU it is the method of the CPU's backend instead.
    """

    # DDP calls it from C++ in what torch.compile has left out of a graph, and would have traced by itself.
    @breaks_graph("a process group's calls are for the host")
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> dist.Work:
        values = (*args, *kwargs.values()) if kwargs else args
        tensors = tensors_in(values)
        device = tensors[0].device
        if device.type != self.device_type:
            return getattr(self._beside(device), method.__name__)(*args, **kwargs)
        context = self.context(device, method.__name__)
        # Not all calls have options that say so.
        asked: bool | None = None
        for value in values:
            asked = getattr(value, "asyncOp", asked)
        stream = self.stream_for("collectives", device) if asked else None
        # Who asks a group for memory has streams of its own, as FSDP2 does.
        beside = asked or any(map(is_handed_out, tensors))
        ccl = beside_computation(self, context.ccl) if beside else context.ccl

        def enqueue() -> EnqueuedWork:
            # Parameters require gradients, and are written all the same. To enter these contexts in vain takes the host
            # as long as the call.
            writes = torch.no_grad() if torch.is_grad_enabled() else NO_CONTEXT
            with writes, NO_CONTEXT if stream is None else torch.cuda.stream(stream):
                outputs = method(self, ccl, *args, **kwargs)
                if stream is not None:
                    self.keep_for(tensors, stream)
                # torch waits at once for what was not asked for with async_op=True.
                return EnqueuedWork(outputs, device, followed=asked is False)

        if not asked or observer.recorder is None:
            return enqueue()
        recorded, sign = observer.beside(method.__name__, self, enqueue, in_thread=False)
        return sign(recorded())

    return call


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """All tensors in nested sequences."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def flat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def deal_out(pieces: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    for piece, output in zip(pieces, outputs, strict=True):
        output.copy_(piece.view(output.shape))


def check_splits(role: str, tensor: Tensor, rows: Sequence[int], size: int) -> None:
    """That the rows of a tensor can be dealt out to ``size`` ranks, as for torch's own backends."""
    there = tensor.shape[0] if tensor.dim() else 1
    if not rows and there % size:
        raise InvalidCollectiveError(
            f"all_to_all_single() deals out the rows of its {role} to {size} ranks: {there} cannot be divided. "
            f"Give {role}_split_sizes."
        )
    if rows and (len(rows) != size or sum(rows) != there):
        raise InvalidCollectiveError(
            f"{role}_split_sizes={list(rows)} of all_to_all_single() should be {size} numbers, one a rank, which add "
            f"up to {there}, the rows of its {role}."
        )


def exchange(
    ccl: Collectives | BesideComputation, output: Tensor, input: Tensor, receive: list[int], send: list[int]
) -> None:
    """Counts of elements, a rank each; what is for or from a rank lies after that of the rank before."""
    if (
        isinstance(ccl, CollectivesOverHosts)
        and len({*receive, *send}) == 1
        and output.is_cuda
        and is_current_stream_capturing()
    ):
        # Over hosts a graph can hold parts of equal sizes alone; elsewhere those of other ranks may be unequal.
        ccl.all_to_all(output.view(-1), input.view(-1))
        return
    receive_from, send_from = ([0, *accumulate(counts[:-1])] for counts in (receive, send))
    ccl.all_to_all_v(output, input, send, send_from, receive, receive_from)
