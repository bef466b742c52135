"""Kernels that carry a whole call: what the three families of them share, which is memory and the way to a launch.

Each family is a row of `iris.ops.algorithms`, and says in a file of its own what its kernels are launched with:
`iris.ops.portable` of those in Triton, `iris.ops.hopper` and `iris.ops.cdna3` of those in Gluon.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from iris import simulator
from iris.ccl.protocols import CollectivesContext
from iris.ops.buffers import Buffers, Needs
from iris.ops.call import GATHERS_A, GATHERS_ROWS, Algorithm, Call
from iris.ops.config import FusedConfig
from iris.ops.counts import MOST_PROGRAMS
from iris.ops.kernel_arguments import by_name
from iris.runtime.copies import copier
from iris.runtime.launch import addresses, prepare, remember, specialization_of
from iris.runtime.template import Template, template_of

# Programs in the simulator; on a GPU there is one for each multiprocessor.
SIMULATED_PROGRAMS = 4
# The operations to whose results peers store.
STORED_BY_PEERS = ("matmul_all_gather", "matmul_all_reduce")


def most_programs(context: CollectivesContext) -> int:
    """Programs of a launch, if the configuration does not say."""
    if simulator.ACTIVE:
        return SIMULATED_PROGRAMS
    return min(context.ccl.communicator().num_sms, MOST_PROGRAMS)


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


class Kernels(Algorithm):
    """One family, which says its `operations`, their `limit`, and the `tensors`, `kernel` and `options` of a launch."""

    variant = "kernel"

    def __init__(self, context: CollectivesContext) -> None:
        super().__init__(context)
        self._prepared: dict[tuple, Prepared] = {}

    def limit(self, call: Call, config: FusedConfig) -> str | None:
        """Why the kernels are not for a call of their operations, if they are not, whatever the strides are."""
        return None

    @abstractmethod
    def tensors(
        self, call: Call, config: FusedConfig, buffers: Buffers, place: torch.Tensor, result: torch.Tensor
    ) -> dict[str, Any]:
        """What a kernel takes that is the call's own.

        ``place``: the context of the memory where peers store ``result``, if they do.
        """

    @abstractmethod
    def kernel(self, call: Call, config: FusedConfig) -> tuple[Any, int, dict[str, Any]]:
        """What carries calls of this kind, its programs, and the arguments that all of them have.

        The others are `tensors`, and those of `Buffers`.
        """

    @staticmethod
    @abstractmethod
    def options(config: FusedConfig) -> dict[str, Any]:
        """Triton's."""

    def problem(self, call: Call, config: FusedConfig) -> str | None:
        why = self.limit(call, config) if call.name in self.operations else "its kernel is in Triton"
        return f"FusedConfig(use_gluon=True) cannot do this {call.title}: {why}." if why else None

    def operands(self, call: Call) -> Call:
        # What torch has negated without writing it, as the imaginary part of a conjugate.
        return super().operands(call)._replace(a=call.a.resolve_neg(), b=call.b.resolve_neg())

    def direct(self, call: Call) -> bool:
        return call.name in STORED_BY_PEERS and self._context.is_symmetric(call.out)

    def needs(self, call: Call, config: FusedConfig) -> Needs:
        direct, size = self.direct(call), self._context.num_ranks
        kind = call.kind(config, direct)
        (M, K), N, dtype = call.a.shape, call.b.shape[1], call.out.dtype
        if call.name in GATHERS_A:
            # A ticket for strips of rows, and one for the tiles of each chiplet.
            slabs = size * -(-M // config.block_size_m)
            return Needs(kind, slabs, size * M * K, call.a.dtype, tickets=1 + config.num_xcds)
        if call.name == "matmul_all_gather":
            return Needs(kind, 0, 0 if direct else size * M * N, dtype)
        share = -(-M // size)
        tiles = -(-share // config.block_size_m) * -(-N // config.block_size_n)
        result = M * N if call.name == "matmul_all_reduce" and not direct else 0
        return Needs(kind, tiles, size * share * N + result, dtype)

    def prepare(self, call: Call, config: FusedConfig, buffers: Buffers) -> None:
        self.launch(call, config, buffers)

    def enqueue(self, call: Call, config: FusedConfig, buffers: Buffers, stream: int | None) -> None:
        launch, sender = self.launch(call, config, buffers), buffers.mover
        kept = call.gathered_by_rank(self._context.num_ranks)
        if sender:
            # Its own rows a rank has at once: they are copied where nothing waits for it.
            sender.send(call.a, None if kept is None else kept[self._context.cur_rank])
        elif kept is not None:
            kept[self._context.cur_rank].copy_(call.a)
        launch.kernel.launch(stream, buffers, launch.tensors)
        if sender:
            sender.join()
        if launch.result is not call.out:
            call.out.copy_(launch.result)
        if kept is not None:
            self._keep_gathered(kept, buffers)

    def relaunch(self, call: Call, config: FusedConfig, buffers: Buffers) -> "Relaunch | None":
        # Where peers store the result may differ from call to call.
        kept = call.gathered
        if call.name in STORED_BY_PEERS or not (kept is None or call.name == GATHERS_ROWS and kept.is_contiguous()):
            return None
        kernel, tensors, _ = self.launch(call, config, buffers)
        arguments = {**buffers.tensors, **kernel.constants, **tensors}
        template = template_of(tuple([arguments[name] for name in kernel.names]), _own(call))
        if template is None:
            return None
        return Relaunch(kernel.run, template, buffers, self._context.cur_rank, self._context.num_ranks, call)

    def _keep_gathered(self, kept: torch.Tensor, buffers: Buffers) -> None:
        """Enqueue, after the kernel, what copies the peers' A out of the workspace to ``kept``, by rank.

        1. Peers have written what is read: each tile waits, with acquire, for the rows that it multiplies, and every
           row of every peer is in a tile. The kernel is over before this begins, since the stream is one.
        2. No peer writes over it before it is read. Each stores in its next call with this memory, of whatever kind,
           once this rank has told it that it is ready, which the kernel of this rank's next call does. That one comes
           after this on the stream. It begins when what is before it is over, by its gdc_wait() too.
        3. What is left over in the workspace nobody needs: who copies it writes to none but the caller's memory.

        Its own rows a rank has never stored there.
        """
        rank = self._context.cur_rank
        for peers, there in _rows_of_peers(buffers, rank, *kept.shape):
            kept[peers].copy_(there)

    def launch(self, call: Call, config: FusedConfig, buffers: Buffers) -> Launch:
        """What carries the call, compiled and loaded if that was not done for a call like it."""
        direct = self.direct(call)
        result = call.out if direct or call.name not in STORED_BY_PEERS else self._staged(call, buffers)
        place = self._context.get_device_context() if direct else buffers.context_tensor
        tensors = self.tensors(call, config, buffers, place, result)
        # The precision is no part of a kind: it is each rank's own.
        key = (buffers.kind, config.allow_tf32, *[specialization_of(each) for each in tensors.values()])
        prepared = self._prepared.get(key)
        if prepared is None:
            kernel, programs, constants = self.kernel(call, config)
            workspace = {name: each for name, each in buffers.tensors.items() if name in kernel.arg_names}
            arguments = by_name(kernel, **{**workspace, **tensors, **constants})
            run = prepare(kernel, (programs, 1, 1), *arguments, **self.options(config))
            prepared = Prepared(run, kernel.arg_names, constants)
            remember(self._prepared, key, prepared)
        return Launch(prepared, tensors, result)

    def programs(self, config: FusedConfig) -> int:
        """Those that there may be."""
        most = most_programs(self._context)
        return min(config.num_sms or most, most)

    def _staged(self, call: Call, buffers: Buffers) -> torch.Tensor:
        """The place in the workspace where peers store the result: after the parts of a sum, if it is one."""
        W, rows = self._context.num_ranks, len(call.a)
        parts = 0 if call.name == "matmul_all_gather" else W * -(-rows // W) * call.b.shape[1]
        return buffers.data[parts:].view(call.out.shape)


def _rows_of_peers(buffers: Buffers, rank: int, size: int, M: int, K: int) -> list[tuple[slice, torch.Tensor]]:
    """Which peers come before this rank, and which after it, and where their rows of A lie in the workspace."""
    # A rank's place may have room for more rows than it has.
    there = buffers.data.view(size, -1, K)[:, :M]
    sides = slice(0, rank), slice(rank + 1, size)
    return [(peers, there[peers]) for peers in sides if peers.start < peers.stop]


def _own(call: Call) -> tuple[torch.Tensor, ...]:
    """The tensors of a call that its kernel takes."""
    return (call.out, call.a, call.b) if call.bias is None else (call.out, call.a, call.b, call.bias)


class Relaunch:
    """`Kernels.enqueue` of calls like an earlier one in the same workspace, where results are not staged there."""

    def __init__(
        self, run: Callable[..., None], template: Template, buffers: Buffers, rank: int, size: int, call: Call
    ) -> None:
        self._run, self._template, self._sender = run, template, buffers.mover
        self._own = slice(0)
        self._of_peers: list[tuple[slice, torch.Tensor]] = []
        self._copy = copier() if call.out.is_cuda else None
        if call.gathered is not None:
            M, K = call.a.shape
            self._own = slice(rank * M, (rank + 1) * M)
            self._of_peers = [
                (slice(peers.start * M, peers.stop * M), there)
                for peers, there in _rows_of_peers(buffers, rank, size, M, K)
            ]

    def __call__(self, call: Call, stream: int | None) -> None:
        sender, gathered = self._sender, call.gathered
        kept = None if gathered is None else gathered[self._own]
        if sender:
            sender.send(call.a, kept)
        elif kept is not None:
            kept.copy_(call.a)
        self._run(stream, self._template(_own(call)))
        if sender:
            sender.join()
        if gathered is not None:
            # As `Kernels._keep_gathered` does, where it says why this may be read.
            for rows, there in self._of_peers:
                kept = gathered[rows]
                if self._copy is None or stream is None or not there.is_contiguous():
                    kept.view(there.shape).copy_(there)
                else:
                    self._copy(kept.data_ptr(), there.data_ptr(), there.nbytes, stream)
