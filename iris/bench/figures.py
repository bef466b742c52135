"""Measures figures by which fused operations are chosen: those of `iris.machine.figures` that single calls show.

Each is bytes or operations over a time, or the difference of two times of calls that differ in one thing. The other
figures are of things that go on beside each other. They were fitted to the times of whole calls, and are kept.
"""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from triton.testing import get_dram_gbps

from iris.bench.ceilings import link_calls
from iris.bench.collectives import microseconds
from iris.bench.operations import Operands, operands
from iris.bench.report import environment
from iris.context import Iris
from iris.errors import InvalidTableError
from iris.machine.figures import TILE_COLUMNS, Found, parse
from iris.ops import FusedConfig
from iris.ops.choose import DEPTH
from iris.ops.counts import MOST_PROGRAMS
from iris.ops.hopper.arguments import is_hopper

# Bytes that cross the link, and of a heap with room for them twice and for results.
LINK_BYTES = 256 << 20
HEAP_BYTES = 4 * LINK_BYTES + (128 << 20)
# Parts in which these are copied, beside one copy of all.
COPIES = 16
# Rows, columns and depth of a product that keeps the GPU busy.
GEMM_SIZE = 8192
# Two depths of a product, whose times differ by what this much more of K takes.
DEPTHS = (8192, 16384)
# Of products in elements of so many bytes.
DTYPES = {2: torch.bfloat16, 1: torch.float8_e4m3fn}

Timer = Callable[[Callable[[], object]], float]
"""Microseconds of a call, of the slowest rank."""


def problem(ctx: Iris) -> str | None:
    """Why nothing can be measured here, in words; None if it can."""
    if ctx.device.type != "cuda":
        return "the simulator's times say nothing about a GPU"
    if not is_hopper():
        return "they are for Hopper, which this GPU is not"
    return None if ctx.num_ranks > 1 else "a link takes two ranks at least"


def timer(ctx: Iris) -> Timer:
    """By graphs of several calls."""

    def time(call: Callable[[], object]) -> float:
        # Compiled and loaded first, outside the graph.
        call()
        spent = microseconds(ctx, call, LINK_BYTES)
        ctx.ops.close()
        ctx.ccl.release_graphs()
        return spent

    return time


def measure(ctx: Iris, time: Timer) -> dict[str, Any]:
    """The figures that are measured, by name, as a table has them. Collective over the world; blocks the host."""
    ctx.device_barrier()
    measured = {
        "tile_ns_per_k": {
            str(nbytes): {str(columns): tile_ns_per_k(ctx, time, DTYPES[nbytes], columns) for columns in tiles}
            for nbytes, tiles in TILE_COLUMNS.items()
        },
        "gemm_TFLOPS": {str(nbytes): gemm_TFLOPS(ctx, time, dtype) for nbytes, dtype in DTYPES.items()},
        **collectives_GBps(ctx, time),
        **{name: moved / time(call) / 1e3 for name, (moved, call) in link_calls(ctx, LINK_BYTES).items()},
        "copy_us": copy_us(ctx, time),
        "memory_GBps": get_dram_gbps(),
        "fp8_round_ns_per_k": fp8_round_ns_per_k(ctx, time),
    }
    ctx.barrier()
    return rounded(measured)


def collectives_GBps(ctx: Iris, time: Timer) -> dict[str, float]:
    """Of an all-gather, the bytes that each rank sends over its time: into the heap, and into other memory."""
    n = LINK_BYTES // 2 // ctx.num_ranks
    part = torch.randn(n, dtype=torch.bfloat16, device=ctx.device)
    sent = (ctx.num_ranks - 1) * part.nbytes
    outs = {
        "collective_GBps": ctx.empty(n * ctx.num_ranks, dtype=part.dtype),
        "staged_collective_GBps": part.new_empty(n * ctx.num_ranks),
    }
    return {name: sent / time(functools.partial(ctx.ccl.all_gather, out, part)) / 1e3 for name, out in outs.items()}


def copy_us(ctx: Iris, time: Timer) -> float:
    """By how much each copy more, with a word after it, makes it longer to copy the same bytes to one peer."""
    peer = (ctx.cur_rank + 1) % ctx.num_ranks
    source, target = (ctx.zeros(LINK_BYTES, dtype=torch.uint8) for _ in range(2))
    epoch, word = (ctx.zeros(1, dtype=torch.int32) for _ in range(2))
    there, word_there = ctx.peer(target, peer), ctx.peer(word, peer)
    ctx.device_barrier()  # peers write to what each rank has just filled

    def copy(parts: int) -> None:
        for here, at_peer in zip(source.chunk(parts), there.chunk(parts), strict=True):
            at_peer.copy_(here, non_blocking=True)
            word_there.copy_(epoch, non_blocking=True)

    one, many = (time(functools.partial(copy, parts)) for parts in (1, COPIES))
    return (many - one) / (COPIES - 1)


def gemm_TFLOPS(ctx: Iris, time: Timer, dtype: torch.dtype) -> float:
    """The vendor's GEMM alone, on all GPUs at once."""
    multiply = vendors_product(ctx, GEMM_SIZE, GEMM_SIZE, GEMM_SIZE, dtype)
    return 2 * GEMM_SIZE**3 / time(multiply) / 1e6


def fp8_round_ns_per_k(ctx: Iris, time: Timer) -> float:
    """Of the vendor's GEMM of fp8 with a tile of 128 x 128 for each multiprocessor."""
    rows, columns = grid(programs(ctx), ctx.num_ranks)
    return ns_per_k(time, lambda depth: vendors_product(ctx, 128 * rows, 128 * columns, depth, DTYPES[1]))


def tile_ns_per_k(ctx: Iris, time: Timer, dtype: torch.dtype, columns: int) -> float:
    """Of matmul_reduce_scatter, which sends and adds the same whatever K is, with one tile for each program."""
    config = FusedConfig(use_gluon=True, block_size_m=128, block_size_n=columns, block_size_k=DEPTH // dtype.itemsize)
    rows_of_tiles, tiles_of_row = grid(programs(ctx), ctx.num_ranks)

    def call(depth: int) -> Callable[[], object]:
        x = random_operands(ctx, 128 * rows_of_tiles, columns * tiles_of_row, depth, dtype)
        return lambda: ctx.ops.matmul_reduce_scatter(x.out, x.a, x.b, scale_a=x.scale, scale_b=x.scale, config=config)

    return ns_per_k(time, call)


def ns_per_k(time: Timer, call: Callable[[int], Callable[[], object]]) -> float:
    """What each k more adds to the time of a product; ``call`` makes one of a depth."""
    shallow, deep = (time(call(depth)) for depth in DEPTHS)
    return 1e3 * (deep - shallow) / (DEPTHS[1] - DEPTHS[0])


def programs(ctx: Iris) -> int:
    """Of a fused kernel: one for each multiprocessor."""
    return min(ctx.ccl.communicator().num_sms, MOST_PROGRAMS)


def grid(programs: int, size: int) -> tuple[int, int]:
    """Tiles along the rows, which so many ranks can share, and along the columns: no more than programs, if not many
    fewer, and near to a square, of which little is loaded."""
    rows = size * max(1, round(math.isqrt(programs) / size))
    return rows, programs // rows


def vendors_product(ctx: Iris, rows: int, columns: int, depth: int, dtype: torch.dtype) -> Callable[[], object]:
    """The vendor's GEMM of random matrices, on each rank for itself."""
    x = random_operands(ctx, rows, columns, depth, dtype)
    return lambda: x.multiply(x.a, x.whole)


def random_operands(ctx: Iris, rows: int, columns: int, depth: int, dtype: torch.dtype) -> Operands:
    """Matrices of these sizes on each rank."""
    # Where the sum over ranks is formed each has all rows and columns, and its part of the depth.
    return operands(ctx, "matmul_reduce_scatter", (rows, columns, depth * ctx.num_ranks), dtype)


def rounded(measured: Any) -> Any:
    """To four digits, as more of a measured number mean nothing."""
    if isinstance(measured, dict):
        return {name: rounded(value) for name, value in measured.items()}
    return float(f"{measured:.4g}")


def entry(measured: dict[str, Any], before: Found, num_ranks: int) -> dict[str, Any]:
    """An entry of a table: what was measured, and the other figures as they were.

    Raises `InvalidTableError` if that is no table that Iris could use.
    """
    kept = [name for name in asdict(before.figures) if name not in measured]
    made = {
        "measured": {**environment(), "num_ranks": num_ranks, "figures": list(measured)},
        "kept": {"from": before.source, "why": "fitted to times of whole calls", "figures": kept},
        "figures": {**asdict(before.figures), **measured},
    }
    try:
        parse(json.loads(json.dumps(made)))
    except ValueError as error:
        raise InvalidTableError(
            f"What was measured cannot be: {error}. Measure again, while nobody else uses the GPUs."
        ) from error
    return made
