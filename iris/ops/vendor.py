"""The same by the vendor's GEMM and a collective, one behind the other: what a fused kernel has to beat.

It is the faster way where there is little to hide, and for what no kernel here is made for.
"""

from typing import Any

import torch

from iris.ccl.config import ReduceOp
from iris.ops.call import Call

DENSE = torch.contiguous_format


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
    if call.scaled_by_lines and (out.dtype != torch.bfloat16 or call.rows == 1):
        return "a scale for each row or column is for an out of bf16 and of several rows"
    if call.scaled_by_lines and not a.is_cuda and torch.__version__ < (2, 13):
        return "on the CPU, a scale for each row or column needs torch 2.13"
    return None


def multiply(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """``out = a b + bias``, in float32, rounded once."""
    if bias is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(bias, a, b, out=out)


def _multiply(call: Call, out: torch.Tensor, a: torch.Tensor, bias: torch.Tensor | None) -> None:
    """The same for the B of a call, and for fp8 times its scales."""
    if a.itemsize > 1:
        return multiply(out, a, call.b, bias)
    # A by rows, B by columns, and a result that is contiguous; with one of float32 it takes no bias.
    result = out if out.is_contiguous() and _is_aligned(out) else torch.empty_like(out, memory_format=DENSE)
    inside = None if out.dtype == torch.float32 else bias
    b = _by_rows(call.b.t()).t()
    torch._scaled_mm(_by_rows(a), b, *_factors(call), bias=inside, out_dtype=out.dtype, out=result)
    if inside is not bias:
        result.add_(bias)
    if result is not out:
        out.copy_(result)


def _by_rows(x: torch.Tensor) -> torch.Tensor:
    """``x``, or a copy, whose rows have no gaps inside and begin at multiples of 16 bytes, as the number of columns."""
    fits = x.stride(1) == 1 and x.stride(0) % 16 == 0 and _is_aligned(x)
    return x if fits else x.clone(memory_format=DENSE)


def _is_aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % 16 == 0


def _factors(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all of A and all of B, or of each row and each column."""
    if call.scaled_by_lines:
        rows, columns = call.scales()
        return rows[:, None], columns[None, :]
    one = torch.ones((), device=call.a.device)
    return tuple(one if scale is None else scale.reshape(()) for scale in (call.scale_a, call.scale_b))


def all_gather_matmul(ctx: Any, call: Call) -> None:
    gathered = call.a.new_empty(call.rows, call.a.shape[1])
    ctx.ccl.all_gather(gathered, call.a)
    _multiply(call, call.out, gathered, call.bias)


def matmul_all_gather(ctx: Any, call: Call) -> None:
    own = call.out.new_empty(len(call.a), call.out.shape[1])
    _multiply(call, own, call.a, call.bias)
    ctx.ccl.all_gather(call.out, own)


def matmul_reduce_scatter(ctx: Any, call: Call) -> None:
    whole = call.out.new_empty(len(call.a), call.out.shape[1])
    _multiply(call, whole, call.a, None)
    ctx.ccl.reduce_scatter(call.out, whole, op=ReduceOp.SUM)
    if call.bias is not None:
        call.out.add_(call.bias)


def matmul_all_reduce(ctx: Any, call: Call) -> None:
    _multiply(call, call.out, call.a, None)
    ctx.ccl.all_reduce(call.out, call.out)
    if call.bias is not None:
        call.out.add_(call.bias)
