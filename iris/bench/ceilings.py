"""What the links give at best, measured in the same run as the collectives."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from iris.bench.collectives import microseconds
from iris.context import Iris
from iris.language.context import DeviceContext

PROGRAMS, BLOCK = 128, 8192


@triton.jit
def store_to_all(context_tensor, source, target, n, num_ranks: tl.constexpr, BLOCK: tl.constexpr):
    """Every rank stores its ``source [n]`` to a place of its own in the ``target [num_ranks, n]`` of all others.

    The bytes of an all-gather, ``n`` elements to each peer in one step, and nothing else: no rank waits for another.
    """
    ctx = DeviceContext.initialize(context_tensor, num_ranks=num_ranks)
    place = target + tl.cast(ctx.cur_rank, tl.int64) * n
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        i = block * BLOCK + tl.arange(0, BLOCK)
        data = tl.load(source + i, mask=i < n)
        for distance in tl.static_range(1, num_ranks):
            ctx.store(place + i, data, (ctx.cur_rank + distance) % num_ranks, mask=i < n)


def link_calls(ctx: Iris, nbytes: int) -> dict[str, tuple[int, Callable[[], object]]]:
    """By the name of its rate, how many bytes leave each rank in a call, and the call, which all ranks make at once.

    The copy engine's is to the right neighbour, kernels' are to all others. Collective over the world.
    """
    n = nbytes // 2 // ctx.num_ranks
    source, target = (ctx.randn(n * ctx.num_ranks, dtype=torch.bfloat16) for _ in range(2))
    there = ctx.peer(target, (ctx.cur_rank + 1) % ctx.num_ranks)
    ctx.device_barrier()  # peers write to what each rank has just filled
    grid, record = (PROGRAMS,), ctx.get_device_context()
    return {
        "copy_engine_GBps": (2 * n * ctx.num_ranks, lambda: there.copy_(source)),
        "stores_GBps": (
            2 * n * (ctx.num_ranks - 1),
            lambda: store_to_all[grid](record, source, target, n, ctx.num_ranks, BLOCK, num_warps=16),
        ),
    }


def ceilings(ctx: Iris, nbytes: int = 256 << 20) -> dict[str, float]:
    """GB/s out of each rank, of `link_calls`. Collective over the world; blocks the host. Nothing without GPUs."""
    if ctx.device.type != "cuda" or ctx.num_ranks == 1:
        return {}
    found = {}
    for name, (moved, call) in link_calls(ctx, nbytes).items():
        call()
        found[name] = moved / microseconds(ctx, call, nbytes) / 1e3
    ctx.barrier()
    return found
