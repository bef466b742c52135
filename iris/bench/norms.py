"""Sums that are normalised by rows, by the libraries of `iris.bench.operations`: all_reduce_rms_norm.

Each result is compared with one in float64 before it is timed, the vendor's too; of Iris also what the residual has
become. Calls change the residual, so it is filled anew for each.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from iris.bench import optional_peers
from iris.bench.checked import Checked, relative_error
from iris.bench.optional_peers import Calls, UnavailableError
from iris.context import Iris

NORM = "all_reduce_rms_norm"
EPS = 1e-6
# With a residual, as other projects' kernels have it; with a result of fp8 besides, and a scale for each row; and both
# with a residual that is sharded by rows.
RESIDUAL, FP8, SHARDED, SHARDED_FP8 = "iris residual", "iris fp8", "iris sharded", "iris sharded fp8"
OF_IRIS = ("iris", RESIDUAL, FP8, SHARDED, SHARDED_FP8)
# Iris' all-reduce, alone.
SUM = "all_reduce"
LIBRARIES = (*OF_IRIS, "vendor", SUM, *optional_peers.NAMES)
# From a single token to a prompt.
SHAPES = [(1 << i, columns, 0) for columns in (4096, 7168, 8192) for i in range(13)]


class Rows(NamedTuple):
    """Of one rank.

    ``input``, and the ``residual``: ``[M, N]``; ``weight``: ``[N]``. The latter two are the same on all ranks. What
    calls write, ``[M, N]`` each: ``out``; ``narrow``, of fp8, with ``row_scales``, ``[M]``; ``total``, sums alone.
    """

    input: torch.Tensor
    residual: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    narrow: torch.Tensor
    row_scales: torch.Tensor
    total: torch.Tensor


def rows(ctx: Iris, shape: tuple[int, int, int], dtype: torch.dtype) -> Rows:
    """Random ones; ``out`` and ``total`` are on the heap."""
    M, N, _ = shape

    def random(seed: int, *size: int) -> torch.Tensor:
        generator = torch.Generator(ctx.device).manual_seed(seed)
        return torch.randn(size, generator=generator, device=ctx.device, dtype=dtype)

    given = random(M + ctx.cur_rank, M, N)
    return Rows(
        given,
        residual=torch.empty_like(given),
        weight=random(N, N),
        out=ctx.zeros(M, N, dtype=dtype),
        narrow=torch.empty(M, N, device=ctx.device, dtype=torch.float8_e4m3fn),
        row_scales=torch.empty(M, device=ctx.device),
        total=ctx.zeros(M, N, dtype=dtype),
    )


def calls(ctx: Iris, x: Rows, others: dict[str, optional_peers.Peer], library: str) -> Calls:
    """Of a library among `LIBRARIES`. Raises what this does, or `UnavailableError`."""
    if library in others:
        return others[library].all_reduce_rms_norm(library, x.out, x.input, x.weight, EPS, x.residual)
    if library == "vendor":

        def of_vendor() -> torch.Tensor:
            dist.all_reduce(x.total)
            return torch.nn.functional.rms_norm(x.total, x.weight.shape, x.weight, EPS)

        def checked() -> None:
            x.total.copy_(x.input)
            x.out.copy_(of_vendor())
            x.total.zero_()  # sums in place of zeros stay what they are, however often they are formed

        return Calls(of_vendor, checked)
    call = functools.partial(ctx.ccl.all_reduce, x.total, x.input) if library == SUM else of_iris(ctx, x, library)
    return Calls(call, call)


def of_iris(ctx: Iris, x: Rows, library: str) -> Callable[[], object]:
    """A call of Iris."""
    if library == "iris":
        return lambda: ctx.ops.all_reduce_rms_norm(x.out, x.input, x.weight, EPS)
    layout, residual = "replicated", x.residual
    if library in (SHARDED, SHARDED_FP8):
        if len(x.input) % ctx.num_ranks:
            raise UnavailableError(f"{ctx.num_ranks} ranks cannot own equal parts of {len(x.input)} rows")
        layout, residual = "sharded", residual.chunk(ctx.num_ranks)[ctx.cur_rank]
    narrows = library in (FP8, SHARDED_FP8)
    out, scales = (x.narrow, x.row_scales) if narrows else (x.out, None)
    return lambda: ctx.ops.all_reduce_rms_norm(
        out, x.input, x.weight, EPS, residual=residual, row_scales=scales, residual_layout=layout
    )


def check(ctx: Iris, x: Rows, library: str, call: Callable[[], object]) -> Checked:
    """What is wrong with the result of a call on this rank. Collective over the world."""
    # Of a seed that no rank's input has.
    x.residual.normal_(generator=torch.Generator(ctx.device).manual_seed(len(x.residual) + ctx.num_ranks))
    sums = x.input.double()
    dist.all_reduce(sums)
    if library not in ("iris", "vendor"):
        sums += x.residual
    exact = torch.nn.functional.rms_norm(sums, x.weight.shape, x.weight.double(), EPS)
    # Nothing of what another library has left there.
    for written in (x.out, x.narrow, x.row_scales):
        written.zero_()
    ctx.barrier()
    call()
    ctx.barrier()
    result, allowed = x.out.double(), 0.02
    if library in (FP8, SHARDED_FP8):
        # The largest of a row is 448, where fp8 has steps of 32.
        result, allowed = x.narrow.double() * x.row_scales[:, None], 0.04
    if reason := differs("result", result, exact, allowed):
        return Checked(reason)
    if library in OF_IRIS[1:]:
        # Of a residual that is sharded, a rank's own rows.
        owns = library in (SHARDED, SHARDED_FP8)
        kept, of_rank = ((y.chunk(ctx.num_ranks)[ctx.cur_rank] if owns else y) for y in (x.residual, sums))
        if reason := differs("residual", kept, of_rank, 0.02):
            return Checked(reason)
    return Checked("", relative_error(result, exact))


def differs(what: str, found: torch.Tensor, exact: torch.Tensor, allowed: float) -> str:
    """What is wrong, in words, if an error is more than so much of the largest number."""
    worst = (found.double() - exact).abs().max().item()
    return "" if worst <= allowed * exact.abs().max().item() else f"wrong {what}: differs by {worst:.3g}"
