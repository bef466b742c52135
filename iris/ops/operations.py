"""`ctx.ops`: products of matrices with their communication, checked and enqueued."""

from typing import Any

import torch

from iris import simulator
from iris.capture import capture_id
from iris.ccl.work import Work
from iris.errors import FirstUseInCaptureError
from iris.launch import addresses, prepare
from iris.ops import checks, vendor
from iris.ops.all_gather_matmul import all_gather_matmul
from iris.ops.buffers import Buffers
from iris.ops.config import FusedConfig
from iris.ops.matmul_all_gather import matmul_all_gather
from iris.ops.matmul_reduce import matmul_reduce

# Programs in the simulator; on a GPU there is one for each multiprocessor.
SIMULATED_PROGRAMS = 4
# Rows and columns of A that a program of all_gather_matmul sends at a time: 32 KiB of bfloat16.
SEND_M, SEND_K = 16, 1024


class Operations:
    """Fused operations among all ranks; made by `iris.iris`, as ``ctx.ops``.

    Matrices have two dimensions and any strides, and are fp16, bf16, fp32 or fp8; A and B have one dtype, sums are
    formed in float32. Every rank calls the same with matrices of equal shape and dtype, in the same order on its
    stream. A call is enqueued on the current stream; the host waits in the first of its kind alone.

    Arguments of all: ``bias``, of N elements, added once; ``scale_a`` and ``scale_b``, float32, a factor for all of A
    or B, or one a row of A and a column of B; ``config``, a `FusedConfig` for a kernel of this library, None for what
    is chosen; ``async_op``, whether to return a `Work`; ``workspace``, what the preamble returned, for one stream or
    graph at a time. A graph without one takes over that of a call like it before the capture.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._on_gpu = context.device.type == "cuda"
        self._buffers: dict[tuple, Buffers] = {}
        self._launches: dict[tuple, Any] = {}

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
        W = self._context.num_ranks
        used = self._check("all_gather_matmul", out, A_shard, B, bias, scale_a, scale_b, config, rows_out=W)
        if used is None:
            vendor.all_gather_matmul(self._context, out, A_shard, B, bias)
            return self._leave(async_op)
        m, K = A_shard.shape
        N, M = B.shape[1], W * m
        if M and N:
            kind = ("all_gather_matmul", m, N, K, A_shard.dtype, used)
            slabs = -(-m // used.block_size_m)
            buffers = self._workspace(kind, workspace, W * slabs, M * K, A_shard.dtype)
            programs = self._programs(used)
            senders = max(1, min(used.comm_sms or programs // 16, programs - 1)) if W > 1 else 0
            self._launch(
                kind, all_gather_matmul, used, max(programs, senders + 1),
                (buffers.context_tensor, buffers.counts, buffers.data),
                (A_shard, B, bias, *checks.scales(scale_a, scale_b, M, N), out),
                (m, N, K, *A_shard.stride(), *B.stride(), *out.stride(), W, senders, SEND_M, SEND_K,
                 *_blocks(used), *_rest(used, bias, scale_a, scale_b)),
            )  # fmt: skip
        return self._leave(async_op)

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
        W = self._context.num_ranks
        used = self._check("matmul_all_gather", out, A, B, bias, scale_a, scale_b, config, rows_out=W)
        if used is None:
            vendor.matmul_all_gather(self._context, out, A, B, bias)
            return self._leave(async_op)
        (M, K), N = A.shape, B.shape[1]
        if M and N:
            direct = self._context.is_symmetric(out)
            kind = ("matmul_all_gather", M, N, K, A.dtype, out.dtype, direct, used)
            buffers = self._workspace(kind, workspace, 0, 0 if direct else W * M * N, out.dtype)
            result, place = self._place(out, buffers, buffers.data)
            self._launch(
                kind, matmul_all_gather, used, self._programs(used),
                (buffers.context_tensor, place, buffers.counts),
                (A, B, bias, *checks.scales(scale_a, scale_b, M, N), result),
                (M, N, K, *A.stride(), *B.stride(), *result.stride(), W,
                 *_blocks(used), used.group_size_m, *_rest(used, bias, scale_a, scale_b)),
            )  # fmt: skip
            if not direct:
                out.copy_(result)
        return self._leave(async_op)

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
        used = self._check("matmul_reduce_scatter", out, A, B, bias, scale_a, scale_b, config,
                           rows_in=self._context.num_ranks)  # fmt: skip
        if used is None:
            vendor.matmul_reduce_scatter(self._context, out, A, B, bias)
        elif A.shape[0] and B.shape[1]:
            self._reduce("matmul_reduce_scatter", out, A, B, bias, scale_a, scale_b, used, workspace, False)
        return self._leave(async_op)

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
        used = self._check("matmul_all_reduce", out, A, B, bias, scale_a, scale_b, config)
        if used is None:
            vendor.matmul_all_reduce(self._context, out, A, B, bias)
        elif A.shape[0] and B.shape[1]:
            self._reduce("matmul_all_reduce", out, A, B, bias, scale_a, scale_b, used, workspace, True)
        return self._leave(async_op)

    def close(self) -> None:
        """Let go of the workspaces. The caller guarantees that no kernel uses them any more, on any rank."""
        for buffers in self._buffers.values():
            buffers.close()
        self._buffers.clear()
        self._launches.clear()

    # What they share -------------------------------------------------------------------------------------------------

    def _check(self, name: str, out: Any, a: Any, b: Any, bias: Any, scale_a: Any, scale_b: Any, config: Any,
               rows_out: int = 1, rows_in: int = 1) -> FusedConfig | None:  # fmt: skip
        """The configuration of the kernel that carries the call; None: the vendor's GEMM and a collective do."""
        self._context.heap.check_open()
        checks.check(self._context.device, name, out, a, b, bias, scale_a, scale_b, config, rows_out, rows_in)
        if config is None and (scale_a is not None or a.itemsize == 1 or out.dtype != a.dtype):
            return FusedConfig()
        return config

    def _reduce(
        self, name: str, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None,
        scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, used: FusedConfig, workspace: Buffers | None,
        spreads: bool,
    ) -> None:  # fmt: skip
        W = self._context.num_ranks
        (M, K), N = a.shape, b.shape[1]
        share = -(-M // W)
        direct = not spreads or self._context.is_symmetric(out)
        kind = (name, M, N, K, a.dtype, out.dtype, direct, used)
        tiles = -(-share // used.block_size_m) * -(-N // used.block_size_n)
        parts = W * share * N
        buffers = self._workspace(kind, workspace, tiles, parts + (0 if direct else M * N), out.dtype)
        result, place = self._place(out, buffers, buffers.data[parts:]) if spreads else (out, buffers.context_tensor)
        self._launch(
            kind, matmul_reduce, used, self._programs(used),
            (buffers.context_tensor, place, buffers.counts, buffers.data),
            (a, b, bias, *checks.scales(scale_a, scale_b, M, N), result),
            (M, N, K, share, *a.stride(), *b.stride(), *result.stride(), W,
             *_blocks(used), used.group_size_m, *_rest(used, bias, scale_a, scale_b), spreads),
        )  # fmt: skip
        if not direct:
            out.copy_(result)

    def _programs(self, config: FusedConfig) -> int:
        most = SIMULATED_PROGRAMS if simulator.ACTIVE else self._context.ccl.communicator().num_sms
        return min(config.num_sms or most, most)

    def _place(self, out: torch.Tensor, buffers: Buffers, data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where peers store the result, and the context tensor of that memory."""
        if self._context.is_symmetric(out):
            return out, self._context.get_device_context()
        return data.view(out.shape), buffers.context_tensor

    def _stream(self) -> int | None:
        return torch._C._cuda_getCurrentRawStream(self._context.gpu_id) if self._on_gpu else None

    def _workspace(self, kind: tuple, given: Buffers | None, parts: int, elements: int, dtype: torch.dtype) -> Buffers:
        """The memory of a call: what was given, this stream's, or this graph's."""
        if given is not None:
            given.check(kind)
            return given
        stream, capture = self._stream(), None
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            capture = capture_id(stream)
        key = (kind, stream, capture)
        if key not in self._buffers:
            if capture is None:
                self._buffers[key] = self._make(kind, parts, elements, dtype)
            else:
                # A graph keeps what it takes; of several the first that was made, which is the same one on all ranks.
                free = next((each for each in self._buffers if each[0] == kind and each[2] is None), None)
                if free is None:
                    raise FirstUseInCaptureError(f"{kind[0]}() of this shape")
                self._buffers[key] = self._buffers.pop(free)
        return self._buffers[key]

    def _make(self, kind: tuple, parts: int, elements: int, dtype: torch.dtype) -> Buffers:
        context = self._context
        return Buffers(context._world.group, context.device, context._record, kind, parts, elements, dtype)

    def _launch(
        self, kind: tuple, kernel: Any, config: FusedConfig, programs: int, memory: tuple, matrices: tuple,
        numbers: tuple,
    ) -> None:  # fmt: skip
        """Launch a kernel that is compiled once for all arguments of these kinds."""
        args = (*memory, *matrices, *numbers)
        aligned = tuple(x.data_ptr() % 16 if isinstance(x, torch.Tensor) else None for x in (*memory, *matrices))
        key = (kind, numbers, aligned)
        if key not in self._launches:
            self._launches[key] = prepare(
                kernel, (programs, 1, 1), *args, num_warps=config.num_warps, num_stages=config.num_stages
            )
        self._launches[key](self._stream(), addresses(args))

    def _leave(self, async_op: bool) -> Work | None:
        return Work(self._on_gpu) if async_op else None


def _blocks(config: FusedConfig) -> tuple[int, int, int]:
    return config.block_size_m, config.block_size_n, config.block_size_k


def _rest(
    config: FusedConfig, bias: torch.Tensor | None, scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The constants that all kernels have last."""
    return (
        config.num_xcds, config.chunk_size, config.cache_modifier_a or "", config.cache_modifier_b or "",
        config.allow_tf32, bias is not None, scale_a is not None or scale_b is not None,
    )  # fmt: skip
