"""Fused operations side by side: Iris in each of its ways, the vendor's GEMM with NCCL or RCCL, torch's, GEMM alone.

All in one run, by turns, on the same random data. A shape is (M, N, K) of the whole product. For all_gather_matmul and
matmul_all_gather each rank has M / W rows of A and N / W, or all, columns of B; for the sums it has K / W columns of A
and rows of B. all_reduce_rms_norm has M rows of N columns and no K. Every result of Iris is compared with that of the
vendor once before it is timed.
"""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

from iris.bench.collectives import microseconds_of_each, ready
from iris.bench.report import environment
from iris.context import Iris
from iris.ops import FusedConfig
from iris.ops.copies import COPIED

PRODUCTS = ("all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter", "matmul_all_reduce")
NORM = "all_reduce_rms_norm"
OPERATIONS = (*PRODUCTS, NORM)
# "gemm" and "all_reduce": the vendor's product, and Iris' all-reduce, alone.
LIBRARIES = ("iris", "iris gluon", "iris triton", "iris copies", "vendor", "torch", "gemm", "all_reduce")
# Layers of large models, and of one small batch; the last is JAX's example of 1024 rows on each of four ranks.
SHAPES = [
    (8192, 4608, 36864),
    (8192, 8192, 8192),
    (4096, 14336, 4096),
    (8192, 28672, 8192),
    (1024, 8192, 28672),
    (4096, 16384, 4096),
]
# From the rows of a decoding step to those of a long prompt.
SWEEP = [(1 << i, 8192, 8192) for i in range(4, 15)]
NORM_SHAPES = [(rows, columns, 0) for columns in (4096, 8192) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
EPS = 1e-6


class Row(NamedTuple):
    """One measurement. ``microseconds``: none where the reason is given."""

    operation: str
    M: int
    N: int
    K: int
    dtype: str
    library: str
    microseconds: float | None
    reason: str = ""


class Operands(NamedTuple):
    """Of one rank: ``a [m, k]``, ``b [k, n]``, ``out``, and ``whole``: what is gathered, a product or a sum alone.

    Of `NORM`, ``a`` are the rows and ``b`` is the weight.
    """

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    whole: torch.Tensor


def operands(ctx: Iris, operation: str, shape: tuple[int, int, int], dtype: torch.dtype) -> Operands:
    """Random matrices of this rank; ``out`` is on the heap."""
    (M, N, K), W = shape, ctx.num_ranks
    generator = torch.Generator(ctx.device).manual_seed(M + ctx.cur_rank)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=ctx.device, dtype=dtype)

    if operation == "all_gather_matmul":
        return Operands(random(M // W, K), random(K, N // W), ctx.zeros(M, N // W, dtype=dtype), random(M, K))
    if operation == "matmul_all_gather":
        return Operands(random(M // W, K), random(K, N), ctx.zeros(M, N, dtype=dtype), random(M // W, N))
    if operation == NORM:
        return Operands(random(M, N), random(N), ctx.zeros(M, N, dtype=dtype), ctx.zeros(M, N, dtype=dtype))
    rows = M // W if operation == "matmul_reduce_scatter" else M
    return Operands(random(M, K // W), random(K // W, N), ctx.zeros(rows, N, dtype=dtype), random(M, N))


def vendor(operation: str, x: Operands) -> Callable[[], object]:
    """The vendor's GEMM and torch.distributed's collective, one behind the other."""
    a, b, out, whole = x

    def of(*calls: Callable[[], object]) -> Callable[[], object]:
        return lambda: [call() for call in calls]

    return {
        "all_gather_matmul": of(lambda: dist.all_gather_into_tensor(whole, a), lambda: torch.mm(whole, b, out=out)),
        "matmul_all_gather": of(lambda: torch.mm(a, b, out=whole), lambda: dist.all_gather_into_tensor(out, whole)),
        "matmul_reduce_scatter": of(lambda: torch.mm(a, b, out=whole), lambda: dist.reduce_scatter_tensor(out, whole)),
        "matmul_all_reduce": of(lambda: torch.mm(a, b, out=out), lambda: dist.all_reduce(out)),
        NORM: of(lambda: dist.all_reduce(whole), lambda: torch.nn.functional.rms_norm(whole, b.shape, b, EPS)),
    }[operation]


def case(ctx: Iris, operation: str, library: str, x: Operands) -> Callable[[], object] | None:
    """A call of the library, if it has that operation."""
    if operation == NORM:
        return {
            "iris": lambda: ctx.ops.all_reduce_rms_norm(x.out, x.a, x.b, EPS),
            "all_reduce": lambda: ctx.ccl.all_reduce(x.whole, x.a),
            "vendor": vendor(operation, x),
        }.get(library)
    configs = {
        "iris": None,
        "iris gluon": FusedConfig(use_gluon=True, block_size_m=128, block_size_n=256),
        "iris triton": FusedConfig(),
        "iris copies": FusedConfig(variant="copies"),
    }
    if library in configs:
        if library == "iris copies" and operation not in COPIED:
            return None
        return lambda: getattr(ctx.ops, operation)(x.out, x.a, x.b, config=configs[library])
    if library == "vendor":
        return vendor(operation, x)
    if library == "all_reduce":
        return None
    if library == "gemm":
        if operation == "all_gather_matmul":
            return lambda: torch.mm(x.whole, x.b, out=x.out)
        return lambda: torch.mm(x.a, x.b, out=x.whole)
    group = dist.group.WORLD.group_name
    enable_symm_mem_for_group(group)
    if operation == "all_gather_matmul":
        return lambda: torch.ops.symm_mem.fused_all_gather_matmul(x.a, [x.b], 0, group)
    if operation == "matmul_reduce_scatter":
        return lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(x.a, x.b, "sum", 0, group)
    return None


def check(ctx: Iris, operation: str, call: Callable[[], object], x: Operands) -> str:
    """An empty string if a call gives what the vendor does; else what is wrong."""
    if operation == NORM:
        x.whole.copy_(x.a)
        wanted = vendor(operation, x)()[-1].float()
        x.whole.zero_()  # whose sums stay what they are, however often they are formed
    else:
        vendor(operation, x)()
        wanted = x.out.to(torch.float32, copy=True)
    x.out.zero_()
    ctx.barrier()
    call()
    ctx.barrier()
    bound = 0.02 * wanted.abs().max().item()
    worst = (x.out.float() - wanted).abs().max().item()
    return "" if worst <= bound else f"wrong result: differs by {worst:.3g}"


def measure(
    ctx: Iris, operations: list[str], shapes: list[tuple[int, int, int]], libraries: list[str], dtype: torch.dtype
) -> Iterator[Row]:
    """All rows, as they come. Collective over the world; the rows are the same on all ranks."""
    ctx.device_barrier()
    for shape in shapes:
        for operation in operations:
            if (operation == NORM) != (shape[2] == 0):
                continue
            x = operands(ctx, operation, shape, dtype)
            reasons, readied = {}, {}
            nbytes = x.a.nbytes if operation == NORM else 8 << 20
            for library in libraries:
                reason, call = "", None
                try:
                    call = case(ctx, operation, library, x)
                    if call is None:
                        continue
                    if library.startswith("iris"):
                        reason = check(ctx, operation, call, x)
                    else:
                        call()
                except Exception as error:  # a peer's failure is a result too
                    reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                # One rank's failure is everybody's, so that all go on with the same case.
                everyone = [ctx.broadcast(reason, rank) for rank in range(ctx.num_ranks)]
                reasons[library] = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text)
                if not reasons[library]:
                    # At once, as a graph takes over the memory of the call before it.
                    readied[library] = ready(ctx, call, nbytes)
            times = microseconds_of_each(ctx, list(readied.values()), nbytes)
            spent = dict(zip(readied, times, strict=True))
            name = str(dtype).removeprefix("torch.")
            for library, reason in reasons.items():
                yield Row(operation, *shape, name, library, spent.get(library), reason)
            ctx.ops.close()
            ctx.ccl.release_graphs()
            del x, call, readied
            ctx.barrier()


def write(folder: Path, name: str, num_ranks: int, rows: list[Row]) -> None:
    """The rows as CSV and JSON, the latter with what they depend on."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f"{name}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        writer.writerows(rows)
    result = {**environment(), "num_ranks": num_ranks, "rows": [row._asdict() for row in rows]}
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
