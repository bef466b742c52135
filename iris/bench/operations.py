"""Fused operations side by side: Iris in each of its ways, the vendor's GEMM with NCCL or RCCL, torch's, GEMM alone.

All in one run, by turns, on the same random data. A shape is (M, N, K) of the whole product. For all_gather_matmul and
matmul_all_gather each rank has M / W rows of A and N / W, or all, columns of B; for all_gather_matmul_k, which is
all_gather_matmul with ``gather_dim="k"``, K / W columns of A and all of B; for the sums it has K / W columns of A and
rows of B. all_reduce_rms_norm has M rows of N columns and no K (`iris.bench.norms`). Every product of Iris is compared
with that of the vendor once before it is timed.

Of fp8 A lies by rows and B by columns, as cuBLAS takes them, the result is bf16, and the scales are 1.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from iris.bench import norms, optional_peers
from iris.bench.checked import Checked, of_all_ranks
from iris.bench.collectives import microseconds_of_each, ready
from iris.bench.norms import NORM
from iris.bench.ranks import failure
from iris.bench.repetitions import Repetitions, repetitions
from iris.compat.scaled_mm import scaled_mm
from iris.compat.symmetric_memory import allow_fused_operators
from iris.context import Iris
from iris.errors import InvalidConfigError, SeveralHostsError
from iris.ops import FusedConfig
from iris.ops.choose import by_triton
from iris.ops.copies import COPIED
from iris.ops.over_hosts import OperationsOverHosts

GATHER_K = "all_gather_matmul_k"
PRODUCTS = ("all_gather_matmul", GATHER_K, "matmul_all_gather", "matmul_reduce_scatter", "matmul_all_reduce")
OPERATIONS = (*PRODUCTS, NORM)
# "gemm": the vendor's product alone.
OF_PRODUCTS = ("iris", "iris gluon", "iris triton", "iris copies", "vendor", "torch", "gemm")
# Over several hosts: "iris" with products that run at the same time as transfers between hosts (rails), or in turn with
# them, where plain "iris" chooses one of the two.
BESIDE_RAILS = {"iris beside rails": True, "iris in turn": False}
ON_ONE_HOST = tuple(dict.fromkeys((*OF_PRODUCTS, *norms.LIBRARIES)))
LIBRARIES = (*ON_ONE_HOST, *BESIDE_RAILS)
# Of these, those that span hosts.
OVER_HOSTS = tuple(library for library in LIBRARIES if library not in ("torch", *optional_peers.NAMES))
# Layers of large models, and of one small batch.
SHAPES = [
    (8192, 4608, 36864),
    (8192, 8192, 8192),
    (4096, 14336, 4096),
    (8192, 28672, 8192),
    (1024, 8192, 28672),
]
# From the rows of a decoding step to those of a long prompt.
SWEEP = [(1 << i, 8192, 8192) for i in range(4, 15)]
# The sizes that are split among the ranks.
SHARED = {
    "all_gather_matmul": "MN",
    GATHER_K: "K",
    "matmul_all_gather": "M",
    "matmul_reduce_scatter": "MK",
    "matmul_all_reduce": "K",
    NORM: "",
}
# How the reason begins where a library does not take this shape or dtype.
NOT_AVAILABLE = "not available: "


def default_shapes(num_ranks: int) -> list[tuple[int, int, int]]:
    """What is measured if nothing else is asked for; the last product is JAX's example, of 1024 rows on each rank."""
    return [*SHAPES, (1024 * num_ranks, 4096 * num_ranks, 4096), *norms.SHAPES]


def is_of(operation: str, shape: tuple[int, int, int]) -> bool:
    """Whether the shape is meant for the operation: K is 0 in those of `NORM`, and only there."""
    return (operation == NORM) == (shape[2] == 0)


def problem(operation: str, shape: tuple[int, int, int], num_ranks: int) -> str | None:
    """Why a shape that is meant for the operation cannot be measured, in words; None if it can."""
    sizes = dict(zip("MNK", shape, strict=True))
    for name in "MN":
        if not sizes[name]:
            return f"{name} is 0; give 1 or more"
    for name in SHARED[operation]:
        if sizes[name] % num_ranks:
            return f"{num_ranks} ranks cannot share {name}={sizes[name]} in {operation}; give a multiple of {num_ranks}"
    return None


def has(library: str, operation: str) -> bool:
    """Whether the library has the operation, for whatever shapes and dtypes."""
    if operation == NORM:
        return library in norms.LIBRARIES
    if operation == GATHER_K:
        return library in ("iris", "iris triton", "vendor", "gemm")
    of_product = library in OF_PRODUCTS or library in BESIDE_RAILS
    return of_product and (operation in COPIED or library not in ("iris copies", "torch", *BESIDE_RAILS))


class Row(NamedTuple):
    """One measurement.

    ``microseconds``: none where the reason is given. ``error``: of `NORM` alone, against float64 (`relative_error`).
    """

    operation: str
    M: int
    N: int
    K: int
    dtype: str
    library: str
    microseconds: float | None
    reason: str = ""
    error: float | None = None

    @property
    def failed(self) -> bool:
        """Whether there is no time, or a wrong result, of what the library can do."""
        return bool(self.reason) and not self.reason.startswith(NOT_AVAILABLE)


class Operands(NamedTuple):
    """Of one rank: ``a [m, k]``, ``b [k, n]``, ``out``, and ``whole``: what is gathered, or a product alone.

    ``scale``: of fp8, that of A and of B, a float32 number on the device.
    """

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    whole: torch.Tensor
    scale: torch.Tensor | None = None

    def multiply(self, a: torch.Tensor, out: torch.Tensor) -> None:
        """``out = a b``, by the vendor's GEMM."""
        if self.scale is None:
            torch.mm(a, self.b, out=out)
        else:
            scaled_mm(a, self.b, self.scale, self.scale, out_dtype=out.dtype, out=out)


def operands(ctx: Iris, operation: str, shape: tuple[int, int, int], dtype: torch.dtype) -> Operands:
    """Random matrices of this rank; ``out`` is on the heap."""
    (M, N, K), W = shape, ctx.num_ranks
    generator = torch.Generator(ctx.device).manual_seed(M + ctx.cur_rank)
    result, scale = dtype, None
    if dtype.itemsize == 1:
        result, scale = torch.bfloat16, torch.ones((), device=ctx.device)

    def random(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=ctx.device, dtype=result).to(dtype)

    def b(rows: int, columns: int) -> torch.Tensor:
        return random(columns, rows).t() if dtype.itemsize == 1 else random(rows, columns)

    def out(*size: int) -> torch.Tensor:
        return ctx.zeros(*size, dtype=result)

    if operation == "all_gather_matmul":
        return Operands(random(M // W, K), b(K, N // W), out(M, N // W), random(M, K), scale)
    if operation == GATHER_K:
        return Operands(random(M, K // W), b(K, N), out(M, N), random(M, K), scale)
    if operation == "matmul_all_gather":
        return Operands(random(M // W, K), b(K, N), out(M, N), random(M // W, N, dtype=result), scale)
    rows = M // W if operation == "matmul_reduce_scatter" else M
    return Operands(random(M, K // W), b(K // W, N), out(rows, N), random(M, N, dtype=result), scale)


def vendor(operation: str, x: Operands) -> Callable[[], list[Any]]:
    """The vendor's GEMM and torch.distributed's collective, one after the other."""
    a, b, out, whole, *_ = x

    def gather(result: torch.Tensor, own: torch.Tensor) -> None:
        # As bytes, since not every library knows fp8.
        dist.all_gather_into_tensor(result.view(torch.uint8), own.view(torch.uint8))

    # What is gathered of A that is split along K, the columns of one rank after those of another.
    parts = a.new_empty(whole.numel() // a.shape[1], a.shape[1]) if operation == GATHER_K else a

    def side_by_side() -> None:
        columns = whole.view(torch.uint8).unflatten(1, (-1, a.shape[1] * a.itemsize))
        columns.copy_(parts.view(torch.uint8).unflatten(0, (-1, len(a))).transpose(0, 1))

    def of(*calls: Callable[[], object]) -> Callable[[], list[Any]]:
        return lambda: [call() for call in calls]

    return {
        "all_gather_matmul": of(lambda: gather(whole, a), lambda: x.multiply(whole, out)),
        GATHER_K: of(lambda: gather(parts, a), side_by_side, lambda: x.multiply(whole, out)),
        "matmul_all_gather": of(lambda: x.multiply(a, whole), lambda: gather(out, whole)),
        "matmul_reduce_scatter": of(lambda: x.multiply(a, whole), lambda: dist.reduce_scatter_tensor(out, whole)),
        "matmul_all_reduce": of(lambda: x.multiply(a, out), lambda: dist.all_reduce(out)),
    }[operation]


def case(ctx: Iris, operation: str, library: str, x: Operands) -> Callable[[], object]:
    """A call of the library, which has that operation."""
    if library in BESIDE_RAILS:
        return functools.partial(
            beside_rails, cast(OperationsOverHosts, ctx.ops), BESIDE_RAILS[library], case(ctx, operation, "iris", x)
        )
    columns, depth = (256, 64) if x.scale is None else (128, 128)
    configs = {
        "iris": None,
        "iris gluon": FusedConfig(use_gluon=True, block_size_m=128, block_size_n=columns, block_size_k=depth),
        "iris triton": by_triton(x.a.itemsize, x.a.is_cuda),
        "iris copies": FusedConfig(variant="copies"),
    }
    if library in configs:
        options: dict[str, Any] = {"scale_a": x.scale, "scale_b": x.scale, "config": configs[library]}
        if operation == GATHER_K:
            return lambda: ctx.ops.all_gather_matmul(x.out, x.a, x.b, gather_dim="k", **options)
        return lambda: getattr(ctx.ops, operation)(x.out, x.a, x.b, **options)
    if library == "vendor":
        return vendor(operation, x)
    if library == "gemm":
        if operation in ("all_gather_matmul", GATHER_K):
            return lambda: x.multiply(x.whole, x.out)
        return lambda: x.multiply(x.a, x.whole)
    return fused_by_torch(operation, x)


def beside_rails(ops: OperationsOverHosts, wanted: bool, call: Callable[[], object]) -> None:
    """The call, with products beside rails if that is ``wanted``, else in turn with them."""
    before, ops.beside_rails = ops.beside_rails, wanted
    try:
        call()
    finally:
        ops.beside_rails = before


def fused_by_torch(operation: str, x: Operands) -> Callable[[], object]:
    """A call of torch's fused operator."""
    world, operators = dist.group.WORLD, torch.ops.symm_mem
    assert world is not None
    group = world.group_name
    allow_fused_operators(group)
    if x.scale is not None:
        one, dtype = x.scale, x.out.dtype
        return {
            "all_gather_matmul": lambda: operators.fused_all_gather_scaled_matmul(
                x.a, [x.b], one, [one], 0, group, [None], [None], [dtype], [False]
            ),
            "matmul_reduce_scatter": lambda: operators.fused_scaled_matmul_reduce_scatter(
                x.a, x.b, one, one, "sum", 0, 0, group, list(x.whole.shape), None, None, dtype, False
            ),
        }[operation]
    return {
        "all_gather_matmul": lambda: operators.fused_all_gather_matmul(x.a, [x.b], 0, group),
        "matmul_reduce_scatter": lambda: operators.fused_matmul_reduce_scatter(x.a, x.b, "sum", 0, group),
    }[operation]


def check(ctx: Iris, operation: str, x: Operands, call: Callable[[], object]) -> Checked:
    """What is wrong with the product of a call on this rank."""
    vendor(operation, x)()
    wanted = x.out.to(torch.float32, copy=True)
    x.out.zero_()
    ctx.barrier()
    call()
    ctx.barrier()
    worst = (x.out.float() - wanted).abs().max().item()
    return Checked("" if worst <= 0.02 * wanted.abs().max().item() else f"wrong result: differs by {worst:.3g}")


def measure(
    ctx: Iris, operations: list[str], shapes: list[tuple[int, int, int]], libraries: list[str], dtype: torch.dtype
) -> Iterator[Row]:
    """All rows, as they come: of shapes that the operation can be measured with, by libraries that have it.

    Collective over the world; the rows are the same on all ranks.
    """
    ctx.device_barrier()
    rows = max((M * N for M, N, K in shapes if NORM in operations and not K), default=0)
    asked = libraries if rows else []
    with optional_peers.opened(ctx, asked, optional_peers.Largest(0, rows, dtype)) as others:
        for shape in shapes:
            for operation in operations:
                if not is_of(operation, shape) or problem(operation, shape, ctx.num_ranks):
                    continue
                # A function of its own, so that its tensors and graphs are gone when it returns.
                found = _side_by_side(ctx, operation, shape, libraries, dtype, others)
                ctx.ops.close()
                ctx.ccl.release_graphs()
                ctx.barrier()
                yield from found


def _side_by_side(
    ctx: Iris,
    operation: str,
    shape: tuple[int, int, int],
    libraries: list[str],
    dtype: torch.dtype,
    others: dict[str, optional_peers.Peer],
) -> list[Row]:
    """The rows of one operation with one shape."""
    make, compare, nbytes = _ways(ctx, operation, shape, dtype, others)
    found: dict[str, Checked] = {}
    readied: dict[str, Any] = {}
    often: Repetitions | None = None
    for library in libraries:
        if not has(library, operation):
            continue
        checked = Checked("")
        call: Callable[[], object] | None = None
        try:
            calls = make(library)
            call = calls.timed
            if library.startswith("iris") or operation == NORM and library != norms.SUM:
                checked = compare(library, calls.checked)
            else:
                call()
        except (InvalidConfigError, SeveralHostsError) as error:
            # The configuration that a library's name stands for may not suit this shape. Iris' own choice has to.
            checked = Checked(f"{'' if library == 'iris' else NOT_AVAILABLE}{error}")
        except optional_peers.UnavailableError as error:
            checked = Checked(f"{NOT_AVAILABLE}{error}")
        except Exception as error:  # a peer's failure is a result too
            checked = Checked(failure(error))
        # One rank's failure is everybody's, so that all go on with the same case.
        found[library] = of_all_ranks(ctx, checked)
        if call is not None and not found[library].reason:
            # Captured at once, as the graph takes over the memory of the call before it.
            capturing = others[library].capturing if library in others else nullcontext
            often = often or repetitions(ctx, call, nbytes)
            readied[library] = ready(ctx, call, often, capturing)
    times = [] if often is None else microseconds_of_each(ctx, list(readied.values()), often)
    spent = dict(zip(readied, times, strict=True))
    name = str(dtype).removeprefix("torch.")
    return [Row(operation, *shape, name, library, spent.get(library), *checked) for library, checked in found.items()]


def _ways(
    ctx: Iris,
    operation: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    others: dict[str, optional_peers.Peer],
) -> tuple[Callable[[str], optional_peers.Calls], Callable[[str, Callable[[], object]], Checked], int]:
    """What makes the calls of a library, what checks one, and the bytes that `repetitions` takes.

    Products are measured as calls of many bytes are, whatever their shape.
    """
    if operation == NORM:
        rows = norms.rows(ctx, shape, dtype)
        return (
            functools.partial(norms.calls, ctx, rows, others),
            functools.partial(norms.check, ctx, rows),
            rows.input.nbytes,
        )
    x = operands(ctx, operation, shape, dtype)

    def make(library: str) -> optional_peers.Calls:
        call = case(ctx, operation, library, x)
        return optional_peers.Calls(call, call)

    return make, lambda library, call: check(ctx, operation, x, call), 8 << 20
