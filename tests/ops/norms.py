"""all_reduce_rms_norm against float64: data of all ranks, what they become, and by which way."""

import contextlib

import torch
from covering import EVERYTHING

from iris.ccl.lamport_channel import SLOTS
from iris.language.target import largest_cluster

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EPS = 1e-5
# Programs of a cluster at most: 1 is for GPUs without.
CLUSTERS = sorted({1, largest_cluster()})


def data(seed, shape, dtype):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=FP32).to(dtype)


def inputs(ctx, round, shape, dtype):
    """Of every rank."""
    return [data(1000 * round + rank, shape, dtype) for rank in range(ctx.num_ranks)]


def expected(total, residual, weight):
    """``x`` and its normalised rows, in float64."""
    x = total.double() + (0 if residual is None else residual.double())
    return x, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


@contextlib.contextmanager
def by(ctx, variant, cluster=CLUSTERS[-1]):
    """All sums by one variant of the all-reduce, and with so many programs in a cluster."""
    comm, norms = ctx.ccl.communicator(), ctx.ops._all_reduce_rms_norm
    table, largest = comm.table, comm.largest_cluster
    comm.largest_cluster = cluster
    comm.table = table | {"all_reduce": [table["all_reduce"][0]._replace(limit=None, variant=variant, programs=None)]}
    norms._variant = lambda call: variant
    comm.forget()
    norms._launches.clear()
    try:
        yield
    finally:
        comm.table, comm.largest_cluster = table, largest
        del norms._variant
        comm.forget()
        norms._launches.clear()


def tolerance(dtype, scale):
    """Relative and absolute: half a unit of the last place, what float32 adds, and the least numbers of fp8."""
    least = {E4M3: 2**-10, E5M2: 2**-17}.get(dtype, 0)
    return torch.finfo(dtype).eps / 2 + 1e-5, least * scale + 1e-6


def rounds(ctx, variant, shape, dtype, out_dtype, scaling, adds, cluster, layout="replicated"):
    out = torch.empty(shape, dtype=out_dtype, device=ctx.device)
    weight = data(99, shape[1:], dtype)
    scale = torch.tensor([0.25], device=ctx.device) if scaling == "given" else None
    row_scales = torch.empty(shape[0], device=ctx.device) if scaling == "by row" else None
    with by(ctx, variant, cluster):
        # Each slot, and one again; calls that follow each other are a test of their own, too.
        for round in range(SLOTS.value + 1 if EVERYTHING else 2):
            everyone = inputs(ctx, round, shape, dtype)
            residual = data(77 + round, shape, dtype) if adds else None
            given = everyone[ctx.cur_rank].to(ctx.device)
            kept = slice(None)
            if layout == "sharded":
                own = shape[0] // ctx.num_ranks
                kept = slice(ctx.cur_rank * own, (ctx.cur_rank + 1) * own)
            x = residual[kept].clone().to(ctx.device) if adds else None
            options = dict(residual=x, scale=scale, row_scales=row_scales, residual_layout=layout)
            ctx.ops.all_reduce_rms_norm(out, given, weight.to(ctx.device), EPS, **options)
            # The sum is rounded as an all-reduce's is.
            total = sum(each.to(FP32) for each in everyone).to(dtype)
            wanted_x, wanted = expected(total, residual, weight)
            if adds:
                torch.testing.assert_close(x.cpu().double(), wanted_x[kept], rtol=torch.finfo(dtype).eps, atol=1e-6)
            factor = 1.0
            if scale is not None:
                factor = 0.25
            if row_scales is not None:
                factor = row_scales.cpu().double()[:, None]
                # A row of zeros has a scale that divides.
                largest = (wanted.abs().amax(-1, keepdim=True) / torch.finfo(out_dtype).max).clamp(min=1e-12)
                torch.testing.assert_close(factor, largest, rtol=1e-5, atol=0)
            rtol, atol = tolerance(out_dtype, float(torch.as_tensor(factor).max()))
            torch.testing.assert_close(out.cpu().double() * factor, wanted, rtol=rtol, atol=atol)
