"""all_reduce_rms_norm in CUDA graphs whose data change from replay to replay: a residual in whole, or by owners."""

import pytest
import torch

import iris
from iris.ops import norm_call, normalisation
from ops.norms import BF16, E4M3, EPS, by, tolerance

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no CUDA graphs without a GPU")

CALLS, REPLAYS = 2, 60
LATE = 500_000  # cycles


class Rows:
    """``[M, N]`` of a replay, which the graph itself makes from the replay's ``number``, an int64 on the device.

    Whole numbers, and so few that sums of all ranks and a residual are exact in bf16. They differ at each position, on
    each rank and in each call. ``weight``: ``[N]``.
    """

    def __init__(self, ctx, shape):
        M, N = shape
        self.number = torch.zeros((), dtype=torch.int64, device=ctx.device)
        self._place = 7 * torch.arange(M, device=ctx.device)[:, None] + torch.arange(N, device=ctx.device)
        self.weight = (1 + torch.arange(N, device=ctx.device) % 3).to(BF16)

    def of(self, call, who):
        """What rank ``who`` gives, or the residual if it is -1."""
        return ((self._place * (1 + call) + 5 * who + 3 * self.number) % 13 - 6).to(BF16)


class Results:
    """Of one call: ``out``, ``residual`` and, of fp8, ``row_scales``."""

    def __init__(self, ctx, shape, out_dtype, kept):
        self.out = torch.empty(shape, dtype=out_dtype, device=ctx.device)
        self.residual = torch.empty(shape, dtype=BF16, device=ctx.device)[kept]
        self.row_scales = torch.empty(shape[0], device=ctx.device) if out_dtype == E4M3 else None

    def wrong(self, x, weight, kept):
        """How many elements are not what becomes of the sums and residuals ``x``; ``kept``: of the own residual."""
        wanted = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * weight.double()
        rtol, least = tolerance(self.out.dtype, 1)
        got, wrong = self.out.float().double(), (self.residual != x[kept]).sum()
        if self.row_scales is not None:
            factor = self.row_scales.double()[:, None]
            largest = wanted.abs().amax(-1, keepdim=True) / torch.finfo(self.out.dtype).max
            wrong += (~((factor - largest).abs() <= 1e-5 * largest)).sum()
            got, least = got * factor, least * factor
        # What was not written is NaN, of which no comparison is true.
        return wrong + (~((got - wanted).abs() <= rtol * wanted.abs() + least)).sum()


def replay(ctx, shape, out_dtype, layout):
    """Calls of a graph that follow each other, with eager calls and late ranks between the replays."""
    own = shape[0] // ctx.num_ranks
    kept = slice(ctx.cur_rank * own, (ctx.cur_rank + 1) * own) if layout == "sharded" else slice(None)
    rows = Rows(ctx, shape)
    results = [Results(ctx, shape, out_dtype, kept) for _ in range(CALLS)]

    def calls():
        for call, each in enumerate(results):
            # The second goes on with the residual that the first one left.
            each.residual.copy_(rows.of(0, -1)[kept] if call == 0 else results[call - 1].residual)
            options = dict(residual=each.residual, row_scales=each.row_scales, residual_layout=layout)
            given = rows.of(call, ctx.cur_rank)
            ctx.ops.all_reduce_rms_norm(each.out, given, rows.weight, EPS, **options)

    calls()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for turn in range(1, REPLAYS + 1):
        rows.number.fill_(turn)
        for each in results:
            each.out.view(torch.uint8).fill_(0xFF)  # NaNs
        if turn % 20 == ctx.cur_rank:
            torch.cuda._sleep(LATE)
        if turn % 7 == 0:
            calls()
        else:
            graph.replay()
        x = rows.of(0, -1)
        for call, each in enumerate(results):
            x = x + sum(rows.of(call, rank) for rank in range(ctx.num_ranks))
            wrong += each.wrong(x, rows.weight, kept)
    found = wrong.item()
    # While a graph lives its group does not end.
    graph.reset()
    assert found == 0


@pytest.mark.parametrize("out_dtype", [BF16, E4M3], ids=["bf16", "fp8 by row"])
@pytest.mark.parametrize("layout", norm_call.LAYOUTS)
@pytest.mark.parametrize("rows, columns", [(1, 4096), (6, 1153), (130, 2048), (128, 7168)])
def test_replays(ranks, rows, columns, layout, out_dtype):
    ranks.run(replay, (rows * ranks.num_ranks, columns), out_dtype, layout)


def replay_some_at_a_time(ctx, shape, out_dtype, layout):
    """More rows than one launch has memory for, so that a call is several launches."""
    launched, one_kernel = [], normalisation.AllReduceRmsNorm._in_one_kernel

    def counting(self, call, variant, line):
        launch = one_kernel(self, call, variant, line)
        launched.append((call.rows, launch is not None))
        return launch

    with iris.iris(64 << 20) as own, pytest.MonkeyPatch.context() as patch:
        patch.setattr(normalisation.AllReduceRmsNorm, "_in_one_kernel", counting)
        with by(own, "one_shot"):
            replay(own, shape, out_dtype, layout)
        own.barrier()
    rows = shape[0] // (ctx.num_ranks if layout == "sharded" else 1)
    assert any(ready and some < rows for some, ready in launched), launched


@pytest.mark.ranks(2)
@pytest.mark.parametrize("out_dtype", [BF16, E4M3], ids=["bf16", "fp8 by row"])
@pytest.mark.parametrize("layout", norm_call.LAYOUTS)
def test_replays_of_many_rows(ranks, layout, out_dtype):
    ranks.run(replay_some_at_a_time, (2400, 8192), out_dtype, layout)
