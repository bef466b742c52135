"""What the kernels of this folder are launched with, and which calls they are for."""

from typing import Any

import torch

from iris import simulator
from iris.language.target import architecture
from iris.ops.buffers import Buffers
from iris.ops.call import Call
from iris.ops.cdna3.all_gather_matmul import cdna3_all_gather_matmul
from iris.ops.cdna3.matmul_all_gather import cdna3_matmul_all_gather
from iris.ops.cdna3.matmul_reduce import cdna3_matmul_reduce
from iris.ops.cdna3.product import VECTOR, WARPS
from iris.ops.config import FusedConfig

TARGETS = ("gfx942", "gfx950")
SHARED_MEMORY = 64 << 10
# Strides up to here: offsets in a tile, of 256 lines and a depth of 128 at most, have 31 bits, in bytes.
LARGEST_STRIDE = (1 << 30) // (256 + 128)
LANES = 64 * WARPS.value


def problem(call: Call, config: FusedConfig, size: int) -> str | None:
    """Why the kernels are not for this call, if they are not: the same on all ranks, whatever their strides are."""
    if not simulator.ACTIVE and architecture() not in TARGETS:
        return f"on AMD the Gluon kernels are for {' and '.join(TARGETS)}"
    if call.a.dtype not in (torch.float16, torch.bfloat16) or call.out.dtype != call.a.dtype or call.scaled:
        return "the Gluon kernels are for A, B and out of one dtype, fp16 or bf16, and no scales"
    if not call.a.shape[1]:
        return "A has no columns"
    if max(call.a.shape[1], call.b.shape[1]) > LARGEST_STRIDE:
        return f"the Gluon kernels are for matrices of up to {LARGEST_STRIDE} columns"
    M, N, K = config.block_size_m, config.block_size_n, config.block_size_k
    if M not in (64, 128, 256) or N not in (64, 128, 256) or K not in (32, 64, 128):
        return "the Gluon kernels have tiles of 64, 128 or 256 rows and columns, and a depth of 32, 64 or 128"
    if (M + N) * K * 2 > SHARED_MEMORY:
        return f"tiles of A and B have {SHARED_MEMORY >> 10} KiB of shared memory; block_size_k=64 fits all"
    if min(M, N) * K < LANES * VECTOR:
        return f"each of {LANES} threads loads {VECTOR} elements at least of a tile of A and of B; 64 x 64 will do"
    return None


def with_operands_that_fit(call: Call, size: int) -> Call:
    """The call, with copies by rows of A and B where they lie too far apart for the kernels' offsets.

    Where A is gathered it has rows without gaps, as those of the peers have that came.
    """
    a, b = (
        matrix if max(matrix.stride()) <= LARGEST_STRIDE else matrix.clone(memory_format=torch.contiguous_format)
        for matrix in (call.a, call.b)
    )
    return call._replace(a=a.contiguous() if call.name == "all_gather_matmul" else a, b=b)


def arguments(
    call: Call, config: FusedConfig, buffers: Buffers, size: int, place: torch.Tensor, result: torch.Tensor,
    programs: int,
) -> tuple:  # fmt: skip
    """The kernel, its programs, and all that it gets.

    ``place``: the context of the memory where peers store ``result``, if so. ``programs``: those that there may be.
    """
    (M, K), N = call.a.shape, call.b.shape[1]
    blocks = (config.block_size_m, config.block_size_n, config.block_size_k)
    by_lines_b, biased = call.b.stride(0) == 1, call.bias is not None
    if call.name == "all_gather_matmul":
        senders = config.senders(programs, size)
        memory = (buffers.context_tensor, buffers.counts, buffers.data)
        tensors = (call.a, call.b, call.bias, result, M, N, K, *call.b.stride(), *result.stride())
        options = (size, senders, *blocks, config.num_xcds, config.chunk_size, by_lines_b, biased)
        return cdna3_all_gather_matmul, max(programs, senders + 1), (*memory, *tensors, *options)
    front = (buffers.context_tensor, place, buffers.counts)
    tensors = (call.a, call.b, call.bias, result)
    tiles = (size, *blocks, config.group_size_m)
    tail = (config.num_xcds, config.chunk_size, call.a.stride(1) == 1, by_lines_b, biased)
    if call.name == "matmul_all_gather":
        return cdna3_matmul_all_gather, programs, (*front, *tensors, M, N, K, *call.strides(result), *tiles, *tail)
    numbers = (M, N, K, -(-M // size), *call.strides(result))
    spreads = call.name == "matmul_all_reduce"
    return cdna3_matmul_reduce, programs, (*front, buffers.data, *tensors, *numbers, *tiles, spreads, *tail)


def options(config: FusedConfig) -> dict[str, Any]:
    """Triton's. A program of these kernels has as many warps as their layouts are made for."""
    return {"num_warps": WARPS.value}
