"""The variant "kernel": which kernel carries a call, where it leaves the result, and its launch.

There are three families, each with a file of what its kernels are launched with: `iris.ops.portable` has those in
Triton, `iris.ops.hopper` and `iris.ops.cdna3` those in Gluon.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from iris import simulator
from iris.ccl.protocols import CollectivesContext
from iris.heap.tensor_map import places
from iris.launch import addresses, prepare, remember
from iris.machine.figures import Figures
from iris.ops import portable
from iris.ops.buffers import Buffers, Needs
from iris.ops.call import Call
from iris.ops.cdna3 import arguments as cdna3
from iris.ops.choose import plan
from iris.ops.config import FusedConfig
from iris.ops.counts import MOST_PROGRAMS
from iris.ops.hopper import arguments as hopper
from iris.ops.hopper.sender import Sender
from iris.ops.kernel_arguments import by_name

# Programs in the simulator; on a GPU there is one for each multiprocessor.
SIMULATED_PROGRAMS = 4
# The operations to whose results peers store.
STORED_BY_PEERS = ("matmul_all_gather", "matmul_all_reduce")


class Prepared(NamedTuple):
    """A kernel for calls of one kind, compiled and loaded."""

    run: Callable[..., None]
    names: list[str]
    """Its parameters."""
    constants: dict[str, Any]
    """The arguments that all of these calls have."""

    def launch(self, stream: int | None, buffers: Buffers, tensors: dict[str, Any]) -> None:
        """``tensors``: the arguments that are the call's own."""
        own = addresses(tuple(tensors.values()))
        arguments = {**buffers.addresses, **self.constants, **dict(zip(tensors, own, strict=True))}
        self.run(stream, tuple([arguments[name] for name in self.names]))


class Launch(NamedTuple):
    """A kernel for one call."""

    kernel: Prepared
    tensors: dict[str, Any]
    result: torch.Tensor
    """Where the kernel leaves the result: ``out``, or in the workspace."""
    sender: Sender | None
    """What sends A beside the kernel, if that does not do it itself."""


class Kernels:
    """The fused kernels of one context. All ranks ask for the same."""

    def __init__(self, context: CollectivesContext) -> None:
        self._context = context
        # Whose Gluon kernels; the simulator runs both.
        self.gluon = cdna3 if torch.version.hip else hopper
        self._prepared: dict[tuple, Prepared] = {}
        self._plans: dict[tuple, hopper.Plan] = {}
        self._heap_places: torch.Tensor | None = None

    def most_programs(self) -> int:
        """Programs of a launch, if the configuration does not say."""
        if simulator.ACTIVE:
            return SIMULATED_PROGRAMS
        return min(self._context.ccl.communicator().num_sms, MOST_PROGRAMS)

    def figures(self) -> Figures | None:
        """What was measured of the GPUs; None where ranks that choose by it, each for its own, do not choose alike."""
        communicator = self._context.ccl.communicator()
        return communicator.figures if communicator.alike else None

    def with_operands_that_fit(self, call: Call, config: FusedConfig) -> Call:
        """The call, with copies of matrices that the kernel cannot use as they lie."""
        return self._family(config).with_operands_that_fit(call, self._context.num_ranks)

    def direct(self, call: Call, config: FusedConfig) -> bool:
        """Whether peers store into ``out`` itself: they do where it is on the heap, and TMA can, if that stores."""
        if call.name not in STORED_BY_PEERS:
            return False
        by_tma = self._is_for_hopper(config) and call.name == "matmul_all_gather"
        return self._context.is_symmetric(call.out) and (not by_tma or hopper.fits_tma(call.out))

    def needs(self, kind: tuple, call: Call, config: FusedConfig, direct: bool) -> Needs:
        """The workspace of a call, whose result peers store to where it is if ``direct``."""
        W = self._context.num_ranks
        if self._is_for_hopper(config):
            return hopper.needs(kind, call, config, self.plan(call, config), W, direct)
        return portable.needs(kind, call, config, W, direct)

    def enqueue(self, call: Call, config: FusedConfig, buffers: Buffers, stream: int | None) -> None:
        """On the current stream, whose handle is given; None in the simulator."""
        launch = self.prepare(call, config, buffers)
        if launch.sender:
            launch.sender.send(call.a)
        launch.kernel.launch(stream, buffers, launch.tensors)
        if launch.sender:
            launch.sender.join()
        if launch.result is not call.out:
            call.out.copy_(launch.result)

    def prepare(self, call: Call, config: FusedConfig, buffers: Buffers) -> Launch:
        """Compile and load what carries the call, if no call like it has."""
        W, programs = self._context.num_ranks, self._programs(config)
        direct = self.direct(call, config)
        result = call.out if direct or call.name not in STORED_BY_PEERS else self._staged(call, buffers)
        place = self._context.get_device_context() if direct else buffers.context_tensor
        family: Any = self._family(config)
        sender = None
        if family is hopper:
            memory = self._context.heap.mapping if direct else buffers.mapping
            memory_places = self._places() if direct else buffers.places
            tensors = hopper.tensors(
                call, config, self.plan(call, config), buffers, W, memory, memory_places, place, result
            )
            if call.name == "all_gather_matmul":
                sender = self._sender(call, config, buffers)
        else:
            tensors = family.tensors(call, place, result)
        # The precision is no part of a kind: it is each rank's own.
        key = (buffers.kind, config.allow_tf32, *[_kind_of(each) for each in tensors.values()])
        prepared = self._prepared.get(key)
        if prepared is None:
            if family is hopper:
                kernel, constants = hopper.kernel(call, config, self.plan(call, config), W)
            else:
                kernel, programs, constants = family.kernel(call, config, W, programs)
            workspace = {name: each for name, each in buffers.tensors.items() if name in kernel.arg_names}
            arguments = by_name(kernel, **{**workspace, **tensors, **constants})
            run = prepare(kernel, (programs, 1, 1), *arguments, **family.options(config))
            prepared = Prepared(run, kernel.arg_names, constants)
            remember(self._prepared, key, prepared)
        return Launch(prepared, tensors, result, sender)

    def plan(self, call: Call, config: FusedConfig) -> hopper.Plan:
        """Of a kernel for Hopper: how it divides its tiles among programs, by time."""
        key = (call.name, call.a.shape, call.b.shape, call.a.dtype, config)
        chosen = self._plans.get(key)
        if chosen is None:
            W, programs, gpu = self._context.num_ranks, self._programs(config), self.figures()
            chosen = plan(call, W, programs, config, gpu) if gpu else hopper.Plan()
            remember(self._plans, key, chosen)
        return chosen

    def _family(self, config: FusedConfig) -> Any:
        """The module of the kernels."""
        return self.gluon if config.use_gluon else portable

    def _is_for_hopper(self, config: FusedConfig) -> bool:
        """Whether the kernel is one of `iris.ops.hopper`, whose arguments are tensor maps."""
        return config.use_gluon and self.gluon is hopper

    def _programs(self, config: FusedConfig) -> int:
        return min(config.num_sms or self.most_programs(), self.most_programs())

    def _staged(self, call: Call, buffers: Buffers) -> torch.Tensor:
        """The place in the workspace where peers store the result: behind the parts of a sum, if it is one."""
        W, rows = self._context.num_ranks, len(call.a)
        parts = 0 if call.name == "matmul_all_gather" else W * -(-rows // W) * call.b.shape[1]
        return buffers.data[parts:].view(call.out.shape)

    def _sender(self, call: Call, config: FusedConfig, buffers: Buffers) -> Sender:
        if buffers.mover is None:
            (rows, depth), context = call.a.shape, self._context
            chunk, together = hopper.chunk_rows(call.a, config), self.plan(call, config).together
            buffers.mover = Sender(buffers, context.cur_rank, context.num_ranks, rows, depth, chunk, together)
        return buffers.mover

    def _places(self) -> torch.Tensor:
        """Where the heap of each rank is in a tensor map of all."""
        if self._heap_places is None:
            self._heap_places = places(self._context.heap.mapping)
        return self._heap_places


def _kind_of(argument: Any) -> Any:
    """What of a kernel's argument a prepared launch is for."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if isinstance(argument, tuple):
        return tuple([_kind_of(field) for field in argument])
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, *argument.block_shape
    return argument
