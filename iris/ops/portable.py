"""The kernels in Triton, for every platform: what they are launched with, and the memory that their calls need."""

from typing import Any

import torch

from iris.ops.all_gather_matmul import all_gather_matmul
from iris.ops.all_gather_matmul_k import all_gather_matmul_k
from iris.ops.buffers import Buffers, Needs
from iris.ops.call import GATHERS_A, GATHERS_ROWS, Call
from iris.ops.config import FusedConfig
from iris.ops.matmul_all_gather import matmul_all_gather
from iris.ops.matmul_reduce import matmul_reduce

# Rows and columns of A that a program of all_gather_matmul sends at a time: 32 KiB of bfloat16.
SEND_M, SEND_K = 16, 1024


def with_operands_that_fit(call: Call, size: int) -> Call:
    """The call, with a copy of A by rows where it is gathered: rows are sent, and multiplied, as they lie."""
    if call.name in GATHERS_A and call.a.stride(1) != 1:
        return call._replace(a=call.a.contiguous())
    return call


def needs(kind: tuple, call: Call, config: FusedConfig, size: int, direct: bool) -> Needs:
    """The workspace of a call, whose result peers store to where it is if ``direct``; of CDNA3's kernels, too."""
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


def arguments(
    call: Call, config: FusedConfig, buffers: Buffers, size: int, place: torch.Tensor, result: torch.Tensor,
    programs: int,
) -> tuple:  # fmt: skip
    """The kernel, its programs, and all that it gets.

    ``place``: the context of the memory where peers store ``result``, if so. ``programs``: those that there may be.
    """
    (M, K), N = call.a.shape, call.b.shape[1]
    # What a tile of a wider type has less of, so that as many fit. A product of fp8 takes 32 at least.
    depth = max(32 if call.a.itemsize == 1 else 16, config.block_size_k * 2 // max(2, call.a.itemsize))
    strides, tensors = call.strides(result), (call.a, call.b, call.bias, *call.scales(), result)
    tiles = (config.block_size_m, config.block_size_n, depth, config.group_size_m)
    # Who takes tiles for a chiplet is a program on it.
    chiplets = (min(config.num_xcds, programs), config.chunk_size)
    tail = (*chiplets, config.cache_modifier_a or "", config.cache_modifier_b or "", config.allow_tf32,
            call.bias is not None, call.scaled)  # fmt: skip
    if call.name in GATHERS_A:
        own_tiles = -(-M // config.block_size_m) * -(-N // config.block_size_n)
        senders = config.senders(programs, size, programs - own_tiles)
        memory = (buffers.context_tensor, buffers.counts, buffers.data)
        numbers = (M, N, K, strides[0], *strides[2:], size, senders, SEND_M, SEND_K)
        kernel = all_gather_matmul if call.name == GATHERS_ROWS else all_gather_matmul_k
        return kernel, programs, (*memory, *tensors, *numbers, *tiles, *tail)
    memory = (buffers.context_tensor, place, buffers.counts)
    if call.name == "matmul_all_gather":
        return matmul_all_gather, programs, (*memory, *tensors, M, N, K, *strides, size, *tiles, *tail)
    numbers = (M, N, K, -(-M // size), *strides, size, *tiles, call.name == "matmul_all_reduce")
    return matmul_reduce, programs, (*memory, buffers.data, *tensors, *numbers, *tail)


def options(config: FusedConfig) -> dict[str, Any]:
    """Triton's. Two stages of the default tiles are what a program has shared memory for on MI300: 64 KiB."""
    stages = config.num_stages or (2 if torch.version.hip else 3)
    return {"num_warps": config.num_warps, "num_stages": stages}
