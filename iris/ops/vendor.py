"""The same by the vendor's GEMM and a collective, one after the other: what a fused kernel has to beat.

It is the faster way where there is little to hide, and for what no kernel here is made for.
"""

import functools
from dataclasses import replace

import torch

from iris.ccl.config import ALL_REDUCE_VARIANTS, DEFAULT, Config, ReduceOp
from iris.ccl.protocols import CollectivesContext
from iris.compat.scaled_mm import scaled_mm
from iris.cuda_graphs.capture import refuse_in_capture
from iris.ops.call import Algorithm, Call
from iris.ops.config import FusedConfig

# "two_shot" is what a `FusedConfig` has where nothing was said: whatever is the fastest then.
_ALL_REDUCES = {name: Config(all_reduce_variant=name) for name in ALL_REDUCE_VARIANTS} | {"two_shot": DEFAULT}


def problem(call: Call) -> str | None:
    """Why the vendor's GEMM cannot do the call, in words; None if it can.

    By shapes and dtypes alone, which all ranks have in common: they have to come to the same answer.
    """
    a, out, bias = call.a, call.out, call.bias
    if bias is not None and bias.dtype != out.dtype:
        return "the bias needs the dtype of out"
    if a.itemsize == 1:
        return _problem_of_fp8(call)
    if call.scaled:
        return "scales are for fp8"
    return None if a.dtype == out.dtype else "A, B and out need one dtype"


def _problem_of_fp8(call: Call) -> str | None:
    """As `problem`: what cuBLAS asks of products of fp8 (its manual: cublasLtMatmul()), and torch besides."""
    a, out = call.a, call.out
    if torch.version.hip or (a.is_cuda and torch.cuda.get_device_capability(a.device) < (8, 9)):
        return "fp8 is for NVIDIA's GPUs from compute capability 8.9 on"
    if a.dtype != torch.float8_e4m3fn:
        return "of fp8 it takes float8_e4m3fn"
    K, N = call.b.shape
    if K % 16 or N % 16:
        return "of fp8, N and K are multiples of 16"
    if call.scaled_by_lines and out.dtype != torch.bfloat16:
        return "a scale for each row or column is for an out of bf16"
    if call.scaled_by_lines and not a.is_cuda and torch.__version__ < (2, 13):  # type: ignore[operator]
        return "on the CPU, a scale for each row or column needs torch 2.13"
    return None


class Product:
    """``a b + bias`` for rows of a call's A, in float32, rounded once; of fp8 times its scales."""

    def __init__(self, call: Call) -> None:
        self._b, self._of_fp8, self._by_lines = call.b, call.a.itemsize == 1, call.scaled_by_lines
        if self._of_fp8:
            # As cuBLAS takes B of fp8: by columns.
            self._b = _by_rows(call.b.t()).t()
            self._factors = _factors(call)

    def __call__(
        self, out: torch.Tensor, a: torch.Tensor, bias: torch.Tensor | None, rows: slice = slice(None)
    ) -> None:
        """``rows``: which of all that this rank multiplies, in this product or in others, ``a`` is."""
        if not out.numel():
            return
        if self._of_fp8:
            self._scaled(out, a, bias, rows)
        elif bias is None:
            torch.mm(a, self._b, out=out)
        else:
            torch.addmm(bias, a, self._b, out=out)

    def _scaled(self, out: torch.Tensor, a: torch.Tensor, bias: torch.Tensor | None, rows: slice) -> None:
        factor_a, factor_b = self._factors
        factor_a = _aligned(factor_a[rows]) if self._by_lines else factor_a
        # A result is contiguous; with one of float32 it takes no bias, and torch forgets that of products of nothing.
        fits = out.is_contiguous() and out.stride(0) >= out.shape[1] and _is_aligned(out)
        result = out if fits else torch.empty_like(out, memory_format=torch.contiguous_format)
        apart = bias is None or out.dtype == torch.float32 or not a.shape[1]
        inside = None if apart or bias is None else _aligned(bias.contiguous())
        scaled_mm(_by_rows(a), self._b, factor_a, factor_b, bias=inside, out_dtype=out.dtype, out=result)
        if apart and bias is not None:
            result.add_(bias)
        if not fits:
            out.copy_(result)


def _by_rows(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy, whose rows have no gaps inside and begin at multiples of 16 bytes, as the number of columns."""
    fits = x.stride(1) == 1 and x.stride(0) >= x.shape[1] and x.stride(0) % 16 == 0 and _is_aligned(x)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _is_aligned(x: torch.Tensor) -> bool:
    """As cuBLAS asks of all that a product of fp8 takes, also of factors and bias."""
    return x.data_ptr() % 16 == 0


def _aligned(x: torch.Tensor) -> torch.Tensor:
    return x if _is_aligned(x) else x.clone()


def _factors(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all of A and all of B, or of each row and each column."""
    if call.scaled_by_lines:
        rows, columns = call.scales()
        assert rows is not None and columns is not None
        return rows[:, None], _aligned(columns)[None, :]
    one = torch.ones((), dtype=torch.float32, device=call.a.device)
    a, b = (one if scale is None else _aligned(scale.reshape(())) for scale in (call.scale_a, call.scale_b))
    return a, b


# One object for equal configurations, by which launches are found again.
@functools.cache
def _with_sms(config: Config, num_sms: int | None) -> Config:
    return config if num_sms is None else replace(config, comm_sms=num_sms)


def _of_collective(config: FusedConfig) -> Config | None:
    return None if config.num_sms is None else _with_sms(DEFAULT, config.num_sms)


def _of_all_reduce(config: FusedConfig) -> Config:
    return _with_sms(_ALL_REDUCES[config.all_reduce_variant], config.num_sms)


def _all_gather_matmul(ctx: CollectivesContext, call: Call, config: FusedConfig) -> None:
    gathered = call.a.new_empty(call.rows, call.a.shape[1]) if call.gathered is None else call.gathered
    ctx.ccl.all_gather(gathered, call.a, config=_of_collective(config))
    Product(call)(call.out, gathered, call.bias)


def _all_gather_matmul_k(ctx: CollectivesContext, call: Call, config: FusedConfig) -> None:
    (M, K), W = call.a.shape, ctx.num_ranks
    gathered = call.a.new_empty(W * M, K)
    ctx.ccl.all_gather(gathered, call.a, config=_of_collective(config))
    # One product, so that the sum over the ranks is rounded once: their columns are put side by side before it.
    whole = call.a.new_empty(M, W * K) if call.gathered is None else call.gathered
    whole.unflatten(1, (W, K)).copy_(gathered.view(W, M, K).transpose(0, 1))
    Product(call)(call.out, whole, call.bias)


def _matmul_all_gather(ctx: CollectivesContext, call: Call, config: FusedConfig) -> None:
    own = call.out.new_empty(len(call.a), call.out.shape[1])
    Product(call)(own, call.a, call.bias)
    ctx.ccl.all_gather(call.out, own, config=_of_collective(config))


def _matmul_reduce_scatter(ctx: CollectivesContext, call: Call, config: FusedConfig) -> None:
    whole = call.out.new_empty(len(call.a), call.out.shape[1])
    Product(call)(whole, call.a, None)
    ctx.ccl.reduce_scatter(call.out, whole, op=ReduceOp.SUM, config=_of_collective(config))
    if call.bias is not None:
        call.out.add_(call.bias)


def _matmul_all_reduce(ctx: CollectivesContext, call: Call, config: FusedConfig) -> None:
    Product(call)(call.out, call.a, None)
    ctx.ccl.all_reduce(call.out, call.out, config=_of_all_reduce(config))
    if call.bias is not None:
        call.out.add_(call.bias)


_OPERATIONS = {
    "all_gather_matmul": _all_gather_matmul,
    "all_gather_matmul_k": _all_gather_matmul_k,
    "matmul_all_gather": _matmul_all_gather,
    "matmul_reduce_scatter": _matmul_reduce_scatter,
    "matmul_all_reduce": _matmul_all_reduce,
}


def in_steps(context: CollectivesContext, call: Call) -> None:
    """The product and the collective, also where ranks differ in what is not moved, for which no kernel is made."""
    _OPERATIONS[call.name](context, call, FusedConfig(variant="vendor"))


def refusal(call: Call, config: FusedConfig, field: str) -> str | None:
    """As `Algorithm.problem`, of a configuration that takes the vendor's GEMM by this field."""
    why = problem(call)
    if why is None and not config.use_gluon:
        return None
    asked = f"{field}={getattr(config, field)!r}"
    if why:
        return (
            f"FusedConfig({asked}) cannot do this {call.title} with the vendor's GEMM: {why}. "
            "Leave it out: then a kernel does it."
        )
    return (
        f"FusedConfig({asked}, use_gluon=True): the kernel is in Gluon, and {asked} takes the vendor's GEMM. "
        "Leave one of them out."
    )


def by_collective(call: Call, config: FusedConfig) -> bool:
    """Whether the configuration asks for an all-reduce of its own, which is none of the kernels'."""
    return call.name == "matmul_all_reduce" and config.all_reduce_variant != "two_shot"


class Vendor(Algorithm):
    """The GEMM and the collective, on the current stream."""

    name = variant = "vendor"
    _is_set_up = False

    def problem(self, call: Call, config: FusedConfig) -> str | None:
        return refusal(call, config, "all_reduce_variant" if by_collective(call, config) else "variant")

    def needs(self, call: Call, config: FusedConfig) -> None:
        return None

    def prepare(self, call: Call, config: FusedConfig, buffers: None) -> None:
        pass

    def enqueue(self, call: Call, config: FusedConfig, buffers: None, stream: int | None) -> None:
        if not self._is_set_up:
            # The vendor's library sets itself up in its first product.
            refuse_in_capture(call.title)
            self._is_set_up = True
        _OPERATIONS[call.name](self._context, call, config)
