"""How a method of a process group is put on a stream, and the `torch.distributed.Work` that it returns.

`on_a_stream` decorates the collectives of `iris.distributed.ProcessGroup`. The classes are the works: of calls on a
GPU's stream (`EnqueuedWork`), of send and recv, and of barriers. At the end is what the methods share.
"""

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

# Of collectives that run beside computation: so many multiprocessors reach most of the link's bandwidth.
BESIDE_COMPUTATION = Config(comm_sms=32)
NO_CONTEXT = contextlib.nullcontext()


class EnqueuedWork(Work, dist.Work):
    """A call that has been enqueued on the current stream, and the tensors that it writes.

    ``needs_event``: False where the caller waits at once on the same stream, which is in order by itself.
    """

    def __init__(self, outputs: Any, device: torch.device, needs_event: bool = True) -> None:
        dist.Work.__init__(self)
        has_event = device.type == "cuda" and needs_event
        self._outputs, self._device = outputs, device
        self._stream = torch.cuda.current_stream(device) if has_event else None
        Work.__init__(self, has_event, self._stream)

    def wait(self, timeout: object = None) -> bool:
        """Let the current stream wait for the call; the host does not wait."""
        super().wait(timeout)
        observer.ended(self)
        return True

    def block_current_stream(self, timeout: object = None) -> None:
        """As `wait`. (That of torch would wait for the future, which is there before the call is over.)"""
        self.wait()

    def is_completed(self) -> bool:
        over = super().is_completed()
        if over:
            observer.ended(self)
        return over

    def get_future(self) -> torch.futures.Future:
        """A future of the outputs: whoever waits for it lets the current stream wait."""
        future: torch.futures.Future = torch.futures.Future(devices=[self._device] if self._event else None)
        observer.promised(self, future)
        # torch's future takes its event on the current stream when its result is set.
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
    """A send or recv on a GPU whose two ranks have to connect first. A thread connects, and then enqueues the call.

    ``begin`` does both, and returns the work of what it has enqueued. It runs after the thread of ``before``, the
    message before this one between the same ranks, is over.
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

    def block_current_stream(self, timeout: object = None) -> None:
        """As `wait`."""
        self.wait()

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
    """A barrier among the host processes, by Gloo, in a group that has also been used on the GPU."""

    def __init__(self, context: Iris, barrier: dist.Work) -> None:
        super().__init__([], context.device)
        self._context, self._barrier = context, barrier

    def wait(self, timeout: object = None) -> bool:
        """Return when all ranks have come. Raises what is known to have broken the group."""
        self._barrier.wait()
        self._context._raise_recorded()
        self._context._check_whole(None)
        return True

    def is_completed(self) -> bool:
        return self._barrier.is_completed()


class BarrierWork(EnqueuedWork):
    """A barrier on the stream. `wait` also lets the host wait for it."""

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
    """``ccl`` for calls that run beside computation: each gets the configuration `BESIDE_COMPUTATION`."""

    def __init__(self, ccl: Collectives) -> None:
        self._ccl = ccl

    def __getattr__(self, call: str) -> Callable[..., Any]:
        configured = functools.partial(getattr(self._ccl, call), config=BESIDE_COMPUTATION)
        setattr(self, call, configured)  # for the next time
        return configured


def beside_computation(group: Any, ccl: Collectives) -> Collectives | BesideComputation:
    """``ccl``, the group's, for calls beside computation. Made at the first call."""
    if group.beside_computation is None:
        # Collectives over several hosts take no configuration: they choose one for each step.
        group.beside_computation = ccl if isinstance(ccl, CollectivesOverHosts) else BesideComputation(ccl)
    return group.beside_computation


def on_a_stream(method: Callable[..., Any]) -> Callable[..., dist.Work]:
    """Decorate ``method(self, ccl, ...)``, which enqueues a collective and returns the tensors that it writes.

    The result is the method that torch calls, and returns a work. The collective goes on the current stream. With
    ``async_op=True``, which DDP uses, it goes on a stream of the group's own, beside what the program enqueues next,
    and takes few multiprocessors. So do calls with tensors of ``allocate_tensor``. Where the tensors are on the CPU
    and the group is for GPUs, the method of the CPU's backend is called instead.
    """

    # DDP calls this from C++ in code that torch.compile has left out of a graph. Dynamo would trace it by itself there.
    @breaks_graph("a process group's calls are for the host")
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> dist.Work:
        values = (*args, *kwargs.values()) if kwargs else args
        tensors = tensors_in(values)
        if not tensors:
            raise InvalidCollectiveError(f"{method.__name__}() of torch.distributed was given lists without a tensor.")
        device = tensors[0].device
        if device.type != self.device_type:
            return getattr(self._cpu_group(device), method.__name__)(*args, **kwargs)
        context = self.context(device, method.__name__)
        # torch's options say whether the call is asynchronous. Some calls have no options: then it stays None.
        asked: bool | None = None
        for value in values:
            asked = getattr(value, "asyncOp", asked)
        stream = self.stream_for("collectives", device) if asked else None
        # Programs that use allocate_tensor, as FSDP2 does, call on streams of their own, beside computation.
        beside = asked or any(map(is_handed_out, tensors))
        ccl = beside_computation(self, context.ccl) if beside else context.ccl

        def enqueue() -> EnqueuedWork:
            # Parameters require gradients, and a collective may write them. The contexts are entered only where they
            # are needed: entering them takes the host as long as the call itself.
            writes = torch.no_grad() if torch.is_grad_enabled() else NO_CONTEXT
            with writes, NO_CONTEXT if stream is None else torch.cuda.stream(stream):
                outputs = method(self, ccl, *args, **kwargs)
                if stream is not None:
                    self.keep_for(tensors, stream)
                # torch waits at once for what was not asked for with async_op=True.
                return EnqueuedWork(outputs, device, needs_event=asked is not False)

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


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """The elements of all parts, in one row."""
    return torch.cat([part.reshape(-1) for part in parts])


def copy_each(pieces: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Copy each piece to its output, which may have another shape."""
    for piece, output in zip(pieces, outputs, strict=True):
        output.copy_(piece.view(output.shape))


def check_list(call: str, tensors: Sequence[Any], size: int) -> None:
    """Raise `InvalidCollectiveError` unless there is one for each of ``size`` ranks."""
    if len(tensors) != size:
        raise InvalidCollectiveError(
            f"{call}() among {size} ranks takes lists of {size} tensors, one a rank; one list has {len(tensors)}."
        )


def check_splits(role: str, tensor: Tensor, rows: Sequence[int], size: int) -> None:
    """Raise `InvalidCollectiveError` unless ``rows`` splits the tensor among ``size`` ranks, as torch's backends do."""
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
    """all_to_all with ``send[r]`` elements to rank r and ``receive[r]`` from it. Both lie in the order of the ranks."""
    if (
        isinstance(ccl, CollectivesOverHosts)
        and len({*receive, *send}) == 1
        and output.is_cuda
        and is_current_stream_capturing()
    ):
        # Over several hosts a graph can hold only an exchange of equal parts. Other calls must not take this branch:
        # the counts of other ranks, which this rank does not know, may be unequal.
        ccl.all_to_all(output.view(-1), input.view(-1))
        return
    receive_from, send_from = ([0, *accumulate(counts[:-1])] for counts in (receive, send))
    ccl.all_to_all_v(output, input, send, send_from, receive, receive_from)
