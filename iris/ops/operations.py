"""`ctx.ops`: products of matrices with their communication, checked and enqueued."""

import dataclasses
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from iris import simulator
from iris.ccl.checks import compare_calls
from iris.ccl.work import Work
from iris.errors import InvalidConfigError
from iris.heap.history import debugging
from iris.heap.tensor_map import places
from iris.launch import addresses, prepare, remember
from iris.ops import copies, vendor
from iris.ops.all_gather_matmul import all_gather_matmul
from iris.ops.buffers import Buffers, Needs
from iris.ops.call import Call, told
from iris.ops.cdna3 import arguments as cdna3
from iris.ops.choose import allows_tf32, choose, plan
from iris.ops.config import FusedConfig
from iris.ops.hopper import arguments as hopper
from iris.ops.hopper.sender import Sender
from iris.ops.matmul_all_gather import matmul_all_gather
from iris.ops.matmul_reduce import matmul_reduce
from iris.ops.normalisation import AllReduceRmsNorm, Rows
from iris.ops.workspaces import Workspaces

# Programs in the simulator; on a GPU there is one for each multiprocessor.
SIMULATED_PROGRAMS = 4
# Rows and columns of A that a program of all_gather_matmul sends at a time: 32 KiB of bfloat16.
SEND_M, SEND_K = 16, 1024

DEBUGGING = debugging()

# Those to whose results peers store.
STORED_BY_PEERS = ("matmul_all_gather", "matmul_all_reduce")
VENDORS = {
    "all_gather_matmul": vendor.all_gather_matmul,
    "matmul_all_gather": vendor.matmul_all_gather,
    "matmul_reduce_scatter": vendor.matmul_reduce_scatter,
}


class Operations:
    """Fused operations among all ranks; made by `iris.iris`, as ``ctx.ops``.

    Matrices have two dimensions and any strides, and are fp16, bf16, fp32 or fp8; A and B have one dtype, sums are
    formed in float32. Every rank calls the same with matrices, bias and scales of equal shape and dtype, in the same
    order on its stream. A call is enqueued on the current stream; the host waits in the first of its kind alone, and
    where a call needs more memory than any before it on the stream.

    Arguments of all: ``bias``, of N elements, added once; ``scale_a`` and ``scale_b``, float32, a factor for all of A
    or B, or one a row of A and a column of B; ``config``, a `FusedConfig` for a kernel of this library, None for what
    is chosen; ``async_op``, whether to return a `Work`; ``workspace``, what the preamble returned, for one stream or
    graph at a time. A graph without one takes over that of the calls on a stream before the capture.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._on_gpu = context.device.type == "cuda"
        # Whose Gluon kernels; the simulator runs both.
        self._gluon = cdna3 if torch.version.hip else hopper
        self._workspaces = Workspaces(context)
        self._launches: dict[tuple, Any] = {}
        self._chosen: dict[tuple, FusedConfig] = {}
        self._plans: dict[tuple, hopper.Plan] = {}
        self._places: torch.Tensor | None = None
        self._all_reduce_rms_norm = AllReduceRmsNorm(context)

    def all_gather_matmul(
        self,
        out: torch.Tensor,
        A_shard: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        config: FusedConfig | None = None,
        async_op: bool = False,
        workspace: Buffers | None = None,
    ) -> Work | None:
        """``out = A B + bias``, where the rows of A lie on the ranks: ``(M / W, K)``, ``(K, N)`` → ``(M, N)``."""
        call = Call("all_gather_matmul", out, A_shard, B, bias, scale_a, scale_b)
        return self._run(call, config, async_op, workspace)

    def all_gather_matmul_preamble(
        self,
        out: torch.Tensor,
        A_shard: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        config: FusedConfig | None = None,
    ) -> Buffers | None:
        """The workspace of calls like this one; None where none is needed. Collective; blocks the host."""
        return self._prepare(Call("all_gather_matmul", out, A_shard, B, bias, scale_a, scale_b), config)

    def matmul_all_gather(
        self,
        out: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        config: FusedConfig | None = None,
        async_op: bool = False,
        workspace: Buffers | None = None,
    ) -> Work | None:
        """The rows of every rank's ``A B + bias``, by rank: ``(M, K)``, ``(K, N)`` → ``(W * M, N)``.

        A result on the heap is written by the peers directly, and is the same place on all ranks.
        """
        call = Call("matmul_all_gather", out, A, B, bias, scale_a, scale_b)
        return self._run(call, config, async_op, workspace)

    def matmul_all_gather_preamble(
        self,
        out: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        config: FusedConfig | None = None,
    ) -> Buffers | None:
        """The workspace of calls like this one; None where none is needed. Collective; blocks the host."""
        return self._prepare(Call("matmul_all_gather", out, A, B, bias, scale_a, scale_b), config)

    def matmul_reduce_scatter(
        self,
        out: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        config: FusedConfig | None = None,
        async_op: bool = False,
        workspace: Buffers | None = None,
    ) -> Work | None:
        """This rank's rows of the sum of all ranks' ``A B``, plus bias: ``(M, K)``, ``(K, N)`` → ``(M / W, N)``."""
        call = Call("matmul_reduce_scatter", out, A, B, bias, scale_a, scale_b)
        return self._run(call, config, async_op, workspace)

    def matmul_reduce_scatter_preamble(
        self,
        out: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        config: FusedConfig | None = None,
    ) -> Buffers | None:
        """The workspace of calls like this one; None where none is needed. Collective; blocks the host."""
        return self._prepare(Call("matmul_reduce_scatter", out, A, B, bias, scale_a, scale_b), config)

    def matmul_all_reduce(
        self,
        out: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        config: FusedConfig | None = None,
        async_op: bool = False,
        workspace: Buffers | None = None,
    ) -> Work | None:
        """The sum of all ranks' ``A B``, plus bias: ``(M, K)``, ``(K, N)`` → ``(M, N)``, the same bits on all ranks.

        A result on the heap is written by the peers directly, and is the same place on all ranks.
        """
        call = Call("matmul_all_reduce", out, A, B, bias, scale_a, scale_b)
        return self._run(call, config, async_op, workspace)

    def matmul_all_reduce_preamble(
        self,
        out: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        config: FusedConfig | None = None,
    ) -> Buffers | None:
        """The workspace of calls like this one; None where none is needed. Collective; blocks the host."""
        return self._prepare(Call("matmul_all_reduce", out, A, B, bias, scale_a, scale_b), config)

    def all_reduce_rms_norm(
        self,
        out: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        *,
        residual: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
        row_scales: torch.Tensor | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """``x = residual + sum of all ranks' input``; ``out = x / sqrt(mean(x * x) + eps) * weight``, row by row.

        ``input``, ``out``: ``[..., H]``; ``weight``: ``[H]``, fp16, bf16 or fp32, as is the input. ``residual``, of the
        shape of ``out``, becomes ``x``. The sum is rounded to the input's dtype, as in `all_reduce`; x is normalised
        as it is in float32. All ranks give the same residual and weight, and get the same bits.

        An ``out`` of fp8 is saturated. It may be divided by ``scale``, one float32 on the device; or each row by the
        largest of its absolute values over the largest number of the dtype, which is stored in ``row_scales``, float32,
        one a row. Out and residual are contiguous.
        """
        self._context.heap.check_open()
        self._all_reduce_rms_norm(Rows(out, input, weight, residual, scale, row_scales), eps)
        return Work(self._on_gpu) if async_op else None

    def close(self) -> None:
        """Let go of the workspaces. The caller guarantees that no kernel uses them any more, on any rank."""
        self._workspaces.close()
        self._launches.clear()
        self._all_reduce_rms_norm.close()

    # What they share -------------------------------------------------------------------------------------------------

    # As with collectives: `iris.ops.functional` has the gradients.
    @torch.no_grad()
    def _run(self, call: Call, config: FusedConfig | None, async_op: bool, workspace: Buffers | None) -> Work | None:
        used = self._check(call, config)
        if DEBUGGING and not (self._on_gpu and torch.cuda.is_current_stream_capturing()):
            self._compare(call, used)
        by_vendor = used.variant == "vendor"
        if call.bias is not None:
            # As kernels take it.
            call = call._replace(bias=call.bias.contiguous())
        if used.use_gluon:
            call = self._gluon.with_operands_that_fit(call, self._context.num_ranks)
        elif used.variant == "kernel" and call.name == "all_gather_matmul" and call.a.stride(1) != 1:
            # Rows are sent, and multiplied, as they lie.
            call = call._replace(a=call.a.contiguous())
        needs = None if by_vendor else self._needs(call, used)
        if workspace is not None:
            self._workspaces.check(call.name, workspace, needs and needs.kind)
        if by_vendor and call.name == "matmul_all_reduce":
            vendor.matmul_all_reduce(self._context, call, used.all_reduce_variant)
        elif by_vendor:
            VENDORS[call.name](self._context, call)
        elif call.out.numel():
            buffers = workspace or self._workspaces.find(needs, self._stream())
            if used.variant == "copies":
                self._copy(call, buffers)
            else:
                self._fuse(call, used, buffers)
        return Work(self._on_gpu) if async_op else None

    def _prepare(self, call: Call, config: FusedConfig | None) -> Buffers | None:
        used = self._check(call, config)
        return None if used.variant == "vendor" else self._workspaces.make(self._needs(call, used))

    def _check(self, call: Call, config: FusedConfig | None) -> FusedConfig:
        """The configuration that carries the call."""
        self._context.heap.check_open()
        call.check(self._context.device, self._context.num_ranks, config)
        vendors_problem = vendor.problem(call)
        used = config
        if config is not None and call.name == "matmul_all_reduce" and config.all_reduce_variant != "two_shot":
            used = dataclasses.replace(config, variant="vendor")
        if used is None:
            by_vendor = vendors_problem is None
            key = (call.name, call.a.shape, call.b.shape, call.a.dtype, call.out.dtype, by_vendor, allows_tf32())
            used = self._chosen.get(key)
            if used is None:
                programs = self._most_programs()
                used = choose(call, self._context.num_ranks, programs, self._on_gpu, by_vendor)
                remember(self._chosen, key, used)
        if used.variant != "kernel" and vendors_problem:
            raise InvalidConfigError(
                f"FusedConfig(variant={used.variant!r}) cannot do this {call.name}() with the vendor's GEMM: "
                f"{vendors_problem}. Use the kernel."
            )
        if used.variant == "copies" and call.name not in copies.COPIED:
            raise InvalidConfigError(
                f"FusedConfig(variant='copies') is for {' and '.join(copies.COPIED)}, and not for {call.name}()."
            )
        if used.use_gluon and used.variant != "kernel":
            asked = f"variant={used.variant!r}" if used is config else f"all_reduce_variant={used.all_reduce_variant!r}"
            raise InvalidConfigError(f"FusedConfig({asked}, use_gluon=True): the kernel is in Gluon.")
        if used.use_gluon:
            problem = self._gluon.problem(call, used, self._context.num_ranks)
            if problem:
                raise InvalidConfigError(f"FusedConfig(use_gluon=True) cannot do this {call.name}(): {problem}.")
        return used

    def _compare(self, call: Call, config: FusedConfig) -> None:
        """In debug mode: that all ranks make the same call, with the result at the same place if peers store it."""
        said = f"{call.name}() with {told(call.given())}, {config}"
        if config.variant == "kernel" and self._direct(call, config):
            place = call.out.data_ptr() - self._context.heap.mapping.bases[self._context.cur_rank]
            said += f", out at offset {place:#x} of the heap with strides {list(call.out.stride())}"
        compare_calls(self._context._world.group, said)

    def _fuse(self, call: Call, config: FusedConfig, buffers: Buffers) -> None:
        """Enqueue the kernel."""
        direct, result = self._result(call, config, buffers)
        programs = self._programs(config)
        place = self._context.get_device_context() if direct else buffers.context_tensor
        if config.use_gluon and self._gluon is cdna3:
            W = self._context.num_ranks
            kernel, programs, args = cdna3.arguments(call, config, buffers, W, place, result, programs)
            options = {"num_warps": cdna3.WARPS.value}
        elif config.use_gluon:
            memory = self._context.heap.mapping if direct else buffers.mapping
            memory_places = self._heap_places() if direct else buffers.places
            kernel, args = hopper.arguments(
                call, config, self._plan(call, config), buffers, self._context.num_ranks, memory, memory_places, result
            )
            options = {"num_warps": 4}
        else:
            kernel, programs, args = self._arguments(call, config, buffers, place, result, programs)
            options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        key = (buffers.kind, *map(_kind_of, args))
        launch = self._launches.get(key)
        if launch is None:
            launch = prepare(kernel, (programs, 1, 1), *args, **options)
            remember(self._launches, key, launch)
        by_engine = config.use_gluon and self._gluon is hopper and call.name == "all_gather_matmul"
        sender = self._sender(call, config, buffers) if by_engine else None
        if sender:
            sender.send(call.a)
        launch(self._stream(), addresses(args))
        if sender:
            sender.join()
        if result is not call.out:
            call.out.copy_(result)

    def _sender(self, call: Call, config: FusedConfig, buffers: Buffers) -> Sender:
        if buffers.mover is None:
            (rows, depth), context = call.a.shape, self._context
            chunk = hopper.chunk_rows(call.a, config)
            buffers.mover = Sender(buffers, context.cur_rank, context.num_ranks, rows, depth, chunk)
        return buffers.mover

    def _result(self, call: Call, config: FusedConfig, buffers: Buffers) -> tuple[bool, torch.Tensor]:
        """Where a kernel leaves the result, and whether peers store it on the heap."""
        direct = self._direct(call, config)
        if direct or call.name not in STORED_BY_PEERS:
            return direct, call.out
        W, rows = self._context.num_ranks, len(call.a)
        parts = 0 if call.name == "matmul_all_gather" else W * -(-rows // W) * call.b.shape[1]
        return False, buffers.data[parts:].view(call.out.shape)

    def _direct(self, call: Call, config: FusedConfig) -> bool:
        """Whether peers store into the result, and can where it is."""
        if call.name not in STORED_BY_PEERS:
            return False
        by_tma = config.use_gluon and self._gluon is hopper
        return self._context.is_symmetric(call.out) and (not by_tma or hopper.fits_tma(call.out))

    def _heap_places(self) -> torch.Tensor:
        if self._places is None:
            self._places = places(self._context.heap.mapping)
        return self._places

    def _copy(self, call: Call, buffers: Buffers) -> None:
        """Enqueue products and copies on their streams."""
        if buffers.mover is None:
            context = self._context
            buffers.mover = copies.Copies(
                buffers, context.cur_rank, context.num_ranks, context.device, self._most_programs()
            )
        carry = copies.all_gather_matmul if call.name == "all_gather_matmul" else copies.matmul_reduce_scatter
        carry(buffers.mover, call)

    def _needs(self, call: Call, config: FusedConfig) -> Needs:
        W, (M, K), N = self._context.num_ranks, call.a.shape, call.b.shape[1]
        direct = self._direct(call, config)
        # The precision is each rank's own, and the memory the same.
        config_of_all = dataclasses.replace(config, allow_tf32=True)
        kind = (call.name, M, N, K, call.a.dtype, call.out.dtype, direct, config_of_all)
        if config.use_gluon and self._gluon is hopper:
            return hopper.needs(kind, call, config, self._plan(call, config), W, direct)
        share = -(-M // W)
        if call.name == "all_gather_matmul":
            # Of slabs of rows; and of the tiles that are taken, by chiplet.
            return Needs(kind, W * -(-M // config.block_size_m) + config.num_xcds, W * M * K, call.a.dtype)
        if config.variant == "copies":
            # Parts that came, and parts to be sent.
            return Needs(kind, 0, 2 * M * N, call.out.dtype)
        if call.name == "matmul_all_gather":
            return Needs(kind, 0, 0 if direct else W * M * N, call.out.dtype)
        tiles = -(-share // config.block_size_m) * -(-N // config.block_size_n)
        result = M * N if call.name == "matmul_all_reduce" and not direct else 0
        return Needs(kind, tiles, W * share * N + result, call.out.dtype)

    def _arguments(
        self, call: Call, config: FusedConfig, buffers: Buffers, place: torch.Tensor, result: torch.Tensor,
        programs: int,
    ) -> tuple:  # fmt: skip
        """The Triton kernel, its programs, and all that it gets."""
        W, (M, K), N = self._context.num_ranks, call.a.shape, call.b.shape[1]
        # What a tile of a wider type has less of, so that as many fit. A product of fp8 takes 32 at least.
        depth = max(32 if call.a.itemsize == 1 else 16, config.block_size_k * 2 // max(2, call.a.itemsize))
        blocks = (config.block_size_m, config.block_size_n, depth)
        strides = call.strides(result)
        tensors = (call.a, call.b, call.bias, *call.scales(), result)
        options = (config.num_xcds, config.chunk_size, config.cache_modifier_a or "", config.cache_modifier_b or "",
                   config.allow_tf32, call.bias is not None, call.scaled)  # fmt: skip
        if call.name == "all_gather_matmul":
            own_tiles = -(-M // config.block_size_m) * -(-N // config.block_size_n)
            senders = config.senders(programs, W, programs - own_tiles)
            memory = (buffers.context_tensor, buffers.counts, buffers.data)
            numbers = (M, N, K, strides[0], *strides[2:], W, senders, SEND_M, SEND_K, *blocks, config.group_size_m)
            # Who takes tiles for a chiplet is a program on it.
            options = (min(config.num_xcds, programs), *options[1:])
            return all_gather_matmul, programs, (*memory, *tensors, *numbers, *options)
        memory = (buffers.context_tensor, place, buffers.counts)
        tail = (W, *blocks, config.group_size_m)
        if call.name == "matmul_all_gather":
            return matmul_all_gather, programs, (*memory, *tensors, M, N, K, *strides, *tail, *options)
        spreads = call.name == "matmul_all_reduce"
        numbers = (M, N, K, -(-M // W), *strides, *tail, spreads)
        return matmul_reduce, programs, (*memory, buffers.data, *tensors, *numbers, *options)

    def _most_programs(self) -> int:
        return SIMULATED_PROGRAMS if simulator.ACTIVE else self._context.ccl.communicator().num_sms

    def _plan(self, call: Call, config: FusedConfig) -> hopper.Plan:
        key = (call.name, call.a.shape, call.b.shape, call.a.dtype, config)
        chosen = self._plans.get(key)
        if chosen is None:
            chosen = plan(call, self._context.num_ranks, self._programs(config), config)
            remember(self._plans, key, chosen)
        return chosen

    def _programs(self, config: FusedConfig) -> int:
        """Of a kernel with this configuration."""
        return min(config.num_sms or self._most_programs(), self._most_programs())

    def _stream(self) -> int | None:
        return torch._C._cuda_getCurrentRawStream(self._context.gpu_id) if self._on_gpu else None


def _kind_of(argument: Any) -> Any:
    """What of a kernel's argument a prepared launch is for."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, *argument.block_shape
    return argument
