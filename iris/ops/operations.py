"""`ctx.ops`: the fused operations as programs call them. `iris.ops.products` has what carries the products."""

from typing import Protocol

import torch

from iris.ccl.protocols import CollectivesContext
from iris.ccl.work import Work
from iris.errors import UnknownChoiceError
from iris.experts.expert_parallel import ExpertParallel
from iris.operators.graph_break import methods_break_graph
from iris.operators.version_counter import bump_version
from iris.ops.buffers import Buffers
from iris.ops.call import GATHERS_COLUMNS, GATHERS_ROWS, Call
from iris.ops.config import FusedConfig
from iris.ops.experts_mlp import ExpertsMlp, MlpCall
from iris.ops.norm_call import LAYOUTS, NormCall
from iris.ops.normalisation import AllReduceRmsNorm
from iris.ops.products import Products


@methods_break_graph("ctx.ops is for the host; iris.ops.functional has the same as operators for graphs")
class Operations(Products):
    """Fused operations among all ranks; made by `iris.iris`, as ``ctx.ops``.

    Matrices have two dimensions and any strides, and are fp16, bf16, fp32 or fp8; A and B have one dtype, sums are
    formed in float32. Every rank calls the same with matrices, bias and scales of equal shape and dtype, in the same
    order on its stream. A call is enqueued on the current stream; the host waits in the first of its kind alone, and
    where a call needs more memory than any before it on the stream.

    Arguments of all: ``bias``, of N elements, added once; ``scale_a`` and ``scale_b``, float32, a factor for all of A
    or B, or one a row of A and a column of B; ``config``, a `FusedConfig` that says how it is carried out, None for
    what is chosen; ``async_op``, whether to return a `Work`; ``workspace``, what the preamble returned, for one stream
    or graph at a time. A graph without one takes over that of the calls on a stream before the capture.

    Before anything is enqueued they raise `NotATensorError`, `WrongDeviceError`, `InvalidCollectiveError` (shapes and
    dtypes that do not fit together), `InvalidConfigError` (a configuration that cannot do it), `WorkspaceTooSmallError`
    and `HeapClosedError` (a workspace for other calls, or closed), `MismatchedCollectiveError` (on all ranks, where
    these meet and do not ask for the same memory), or `FirstUseInCaptureError`.
    """

    def __init__(self, context: CollectivesContext) -> None:
        super().__init__(context)
        self._all_reduce_rms_norm = AllReduceRmsNorm(context)
        self._experts_mlp = ExpertsMlp(context)

    def all_gather_matmul(
        self,
        out: torch.Tensor,
        A_shard: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        gather_dim: str = "m",
        gathered: torch.Tensor | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        config: FusedConfig | None = None,
        async_op: bool = False,
        workspace: Buffers | None = None,
    ) -> Work | None:
        """``out = A B + bias``, where the rows of A lie on the ranks: ``(M / W, K)``, ``(K, N)`` → ``(M, N)``.

        With ``gather_dim="k"`` its columns do, those of rank 0 first: ``(M, K / W)``, ``(K, N)`` → ``(M, N)``. Sums
        over the ranks are formed in float32 and rounded once, in the same order everywhere. By the vendor's GEMM or the
        Triton kernel: not with ``use_gluon`` or by copies.

        ``gathered``, on all ranks or on none: ``(M, K)`` of A's dtype, with any strides, in which the A of all ranks is
        left besides, for other products with it or for a gradient. Scales are not applied to it.
        """
        call = Call(_gathering(gather_dim), out, A_shard, B, bias, scale_a, scale_b, gathered)
        return self._run(call, config, async_op, workspace)

    def all_gather_matmul_preamble(
        self,
        out: torch.Tensor,
        A_shard: torch.Tensor,
        B: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        gather_dim: str = "m",
        gathered: torch.Tensor | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        config: FusedConfig | None = None,
    ) -> Buffers | None:
        """The workspace of calls like this one; None where none is needed. Collective; blocks the host.

        ``gathered`` as in these calls: without a ``config``, another way may be chosen where the A of all ranks is
        left, and then another workspace is needed.
        """
        return self._prepare(Call(_gathering(gather_dim), out, A_shard, B, bias, scale_a, scale_b, gathered), config)

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
        residual_layout: str = "replicated",
        async_op: bool = False,
    ) -> Work | None:
        """``x = residual + sum of all ranks' input``; ``out = x / sqrt(mean(x * x) + eps) * weight``, row by row.

        ``input``, ``out``: ``[..., H]``; ``weight``: ``[H]``, fp16, bf16 or fp32, as is the input. ``residual``, of the
        shape of ``out``, becomes ``x``. The sum is rounded to the input's dtype, as in `all_reduce`; x is normalised
        as it is in float32. All ranks give the same residual and weight, and get the same bits.

        An ``out`` of fp8 is saturated. It may be divided by ``scale``, one float32 on the device; or each row by the
        largest of its absolute values over the largest number of the dtype, which is stored in ``row_scales``, float32,
        one a row. Out and residual are contiguous. Either may be ``input`` itself, which is written over then.

        With ``residual_layout="sharded"`` each rank keeps a W-th of the rows of the residual, ``[rows / W, H]``: rank 0
        the first. It may not lie in the memory of ``input``. The rank adds up and normalises these rows and sends the
        results, so an ``out`` of fp8 takes less of the link. Over several hosts, or where there is no memory for that,
        it is a reduce_scatter, a kernel and an all_gather. `UnknownChoiceError` for another layout than this and
        "replicated".
        """
        if residual_layout not in LAYOUTS:
            raise UnknownChoiceError("residual_layout", residual_layout, LAYOUTS)
        self._context.heap.check_open()
        self._abort_flag.check()
        try:
            call = NormCall(out, input, weight, residual, scale, row_scales)
            self._all_reduce_rms_norm(call, eps, residual_layout)
        except BaseException as error:
            self._interrupted("all_reduce_rms_norm", error)
            raise
        for written in (out, residual, row_scales):
            if written is not None:
                bump_version(written)
        return Work(self._on_gpu) if async_op else None

    @torch.no_grad()
    def experts_mlp(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor | None,
        w_up: torch.Tensor,
        w_down: torch.Tensor,
        activation: str | None = "silu_and_mul",
        *,
        experts: ExpertParallel,
        x_scales: torch.Tensor | None = None,
        scale_up: torch.Tensor | None = None,
        scale_down: torch.Tensor | None = None,
        overlap: bool | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """``out[t] = sum of topk_weights[t, k] * w_down[e] @ act(w_up[e] @ x[t])`` over k; e is ``topk_ids[t, k]``.

        A layer of experts, among the ranks of ``experts``, what ``ctx.experts`` has made with the compact layout: it
        has the memory, and says which experts a rank has. Tokens are another number on each rank, 0 too. It takes one
        of `ExpertsConfig.in_flight` for as long as it lasts, and scratch memory from torch for the activation of as
        many rows as may come. May be captured, from the first call on.

        ``out``, ``x``: ``[tokens, hidden]``, out contiguous, and maybe x itself. ``topk_ids``, ``topk_weights``: as
        `ExpertParallel.dispatch` takes them. ``w_up``, ``w_down``: of this rank's E experts, ``[E, 2 I, hidden]``, the
        rows of the gate first, and ``[E, hidden, I]``, as checkpoints have them; without an activation w_up is
        ``[E, I, hidden]``. All are of the dtype of ``experts``.

        Or the weights are fp8, with ``scale_up`` and ``scale_down`` as the ``scale_b`` of `iris.ops.grouped_mm`. Then x
        is rounded to fp8 on the way, with a factor for 128 elements, or is fp8 with ``x_scales``; the activation is
        rounded likewise. Sums are float32; the activation, each row of an expert and what comes from another rank are
        rounded to the dtype of ``experts``.

        ``overlap``: whether combine runs beside the second product (Hopper, bf16, fp16 and fp8), the same on all ranks.
        Default: no, until a measurement says where it pays. The results are the same.

        Raises besides `InvalidExpertsError` (no ``experts`` of this context, or what `ExpertParallel.dispatch` does not
        take) and `TooManyInFlightError`. It has no gradient.
        """
        self._context.heap.check_open()
        call = MlpCall(
            out, x, topk_ids, topk_weights, w_up, w_down, activation, experts, x_scales, scale_up, scale_down, overlap
        )
        self._experts_mlp(call)
        return Work(self._on_gpu) if async_op else None

    def close(self) -> None:
        """Give back the memory of all calls, those in graphs too; later calls get new.

        The caller guarantees that no kernel uses it any more, on any rank, and that no graph captured so far will be
        replayed. Workspaces that a preamble returned are the caller's, and closed by their own ``close()``.
        """
        self._workspaces.close()
        self._known.forget()
        self._all_reduce_rms_norm.close()


def _gathering(gather_dim: str) -> str:
    """The name of the operation that gathers A in this dimension."""
    if gather_dim not in ("m", "k"):
        raise UnknownChoiceError("gather_dim", gather_dim, ("m", "k"))
    return GATHERS_ROWS if gather_dim == "m" else GATHERS_COLUMNS


class OperationsContext(CollectivesContext, Protocol):
    """A context with its fused operations."""

    ops: Operations
