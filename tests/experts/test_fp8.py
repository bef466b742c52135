"""Rows of fp8 travel with their factors, which are given, or by which rows are divided on the way."""

import pytest
import torch
from covering import EVERYTHING

from experts.layers import E_EACH, ROUTINGS, Layer, both_forms, digits, done_with, experts, there
from iris.errors import InvalidExpertsError
from iris.experts import ExpertsConfig
from iris.experts.checks import quantized_dtype

F32, BF16 = torch.float32, torch.bfloat16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# More than two blocks of 128, and rows that a program moves in one part and in several.
WIDTHS = {BF16: 272, F32: 4240}
# Elements and tokens, of which several programs share a row.
SHARED = (512, 2)


def of_experts(layer, ep, received, values, routing, round):
    """For each local expert what it has, of ``values``, rows or factors, and what it should have: (rank) -> values."""
    for local in range(E_EACH):
        begin, count = received.offsets[local].item(), received.counts[local].item()
        wanted = []
        for rank in layer.senders:
            ids = layer.inputs(routing, round, rank)[1]
            wanted.append(values(rank)[(ids == ep.first_expert + local).any(dim=1)])
        yield slice(begin, begin + count), torch.cat(wanted)


def dequantised(received):
    factors = received.scales.repeat_interleave(128, dim=-1) if received.scales.shape[-1] > 1 else received.scales
    return received.rows.float() * factors[..., : received.rows.shape[-1]]


def given(ctx, low_latency, shape, dtype, blocked, layout):
    layer = Layer(ctx.num_ranks, BF16, ctx.device, *shape)
    ep = experts(ctx, layer, ExpertsConfig(layouts=(layout,), alignment=2), low_latency=low_latency)
    blocks = -(-layer.hidden // 128) if blocked else 1
    for round, routing in enumerate(ROUTINGS):

        def rows(rank):
            return layer.inputs(routing, round, rank)[0].to(dtype)  # noqa: B023

        def factors(rank):
            exponents = digits((layer.tokens(round, rank), blocks), 70 * round + rank, -2, 2)  # noqa: B023
            return torch.exp2(exponents.float()).to(ctx.device)

        _, ids, weights = layer.inputs(routing, round, ctx.cur_rank)
        x, scales = rows(ctx.cur_rank), factors(ctx.cur_rank)
        if round % 2:
            # Not at a multiple of 16 bytes, as the scales of other rounds are.
            scales = torch.cat([scales.new_zeros(1), scales.flatten()])[1:].view_as(scales)
        received = ep.dispatch(x, ids, weights, x_scales=scales, layout=layout)
        assert received.rows.dtype == dtype and received.scales.shape == (*received.rows.shape[:-1], blocks)
        raw = received.rows.view(torch.uint8).flatten(0, -2)
        for place, wanted in of_experts(layer, ep, received, lambda rank: rows(rank).view(torch.uint8), routing, round):
            assert torch.equal(raw[place], wanted)
        for place, wanted in of_experts(layer, ep, received, factors, routing, round):
            assert torch.equal(received.scales.flatten(0, -2)[place], wanted)
        # Every expert returns what it has got.
        made = torch.where(there(received)[..., None], dequantised(received), torch.nan).to(BF16)
        out = ep.combine(made, received)
        factor = scales.repeat_interleave(128, dim=1)[:, : layer.hidden] if blocked else scales
        total = (weights * (ids >= 0)).sum(dim=1, keepdim=True)
        torch.testing.assert_close(out.float(), x.float() * factor * total, rtol=2**-6, atol=2**-6)
    done_with(ctx, ep)


@pytest.mark.ranks(*((1, 2, 3) if EVERYTHING else (2,)))
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("blocked", [False, True])
@pytest.mark.parametrize("layout", ["expanded", "compact"])
@pytest.mark.parametrize("shape", [(WIDTHS[BF16], 7), SHARED], ids=["whole", "shared"])
@both_forms
def test_factors_that_are_given(ranks, low_latency, shape, dtype, blocked, layout):
    ranks.run(given, low_latency, shape, dtype, blocked, layout)


def quantised(ctx, low_latency, quantize, dtype, shared):
    shape = SHARED if shared else (WIDTHS[dtype], 4)
    layer = Layer(ctx.num_ranks, dtype, ctx.device, *shape)
    ep = experts(ctx, layer, low_latency=low_latency)
    narrow = quantized_dtype()
    largest = torch.finfo(narrow).max
    group = layer.hidden if quantize == "fp8_row" else 128
    for round in range(2):

        def rows(rank):
            tokens = layer.tokens(round, rank)  # noqa: B023
            x = torch.randn(tokens, layer.hidden, generator=torch.Generator().manual_seed(9 * round + rank))  # noqa: B023
            x *= torch.logspace(-3, 3, layer.hidden)
            x[:, :100] = 0
            return x.to(ctx.device, dtype)

        def factors(rank):
            padded = torch.nn.functional.pad(rows(rank).float().abs(), (0, -layer.hidden % group))
            # A rank may have no tokens, of which -1 would say nothing.
            blocks = padded.view(len(padded), padded.shape[1] // group, group)
            return (blocks.amax(dim=2) / largest).clamp(min=1e-12)

        _, ids, weights = layer.inputs("random", round, ctx.cur_rank)
        received = ep.dispatch(rows(ctx.cur_rank), ids, weights, quantize=quantize)
        assert received.rows.dtype == narrow
        for place, wanted in of_experts(layer, ep, received, factors, "random", round):
            torch.testing.assert_close(received.scales.flatten(0, -2)[place], wanted, rtol=1e-6, atol=0)
        values = dequantised(received).flatten(0, -2)
        for place, wanted in of_experts(layer, ep, received, rows, "random", round):
            # Half a step of three bits; and of the smallest numbers, in which the factor counts.
            small = torch.cat([received.scales.flatten(0, -2)[place]] * group, dim=1).amax(dim=1, keepdim=True)
            error = (values[place] - wanted.float()).abs() - wanted.float().abs() / 16
            assert (error <= small * 2**-9).all()
        ep.combine(torch.zeros(received.rows.shape, dtype=dtype, device=ctx.device), received)
    done_with(ctx, ep)


@pytest.mark.ranks(*((1, 2, 4) if EVERYTHING else (1, 2)))
@pytest.mark.parametrize("quantize", ["fp8_row", "fp8_block128"])
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared"])
@both_forms
def test_rows_that_are_divided_on_the_way(ranks, low_latency, quantize, dtype, shared):
    ranks.run(quantised, low_latency, quantize, dtype, shared)


def other_factors(ctx):
    layer = Layer(ctx.num_ranks, BF16, ctx.device, hidden=WIDTHS[BF16])
    ep = experts(ctx, layer)
    x, ids, _ = layer.inputs("random", 0, ctx.cur_rank)
    for factors in (torch.ones(len(x), 2), torch.ones(len(x) + 1, 1), torch.ones(len(x), 3, dtype=torch.float64)):
        with pytest.raises(InvalidExpertsError, match="x_scales of shape"):
            ep.dispatch(x.to(E4M3), ids, x_scales=factors.to(ctx.device))
    done_with(ctx, ep)


def without_a_nan(ctx, low_latency):
    """Bytes of ones are numbers of these types, and no messages."""
    layer = Layer(ctx.num_ranks, BF16, ctx.device, hidden=32)
    ep = experts(ctx, layer, low_latency=low_latency)
    x, ids, _ = layer.inputs("random", 0, ctx.cur_rank)
    scales = torch.ones(len(x), 1, device=ctx.device)
    for dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        given = torch.full(x.shape, 0xFF, dtype=torch.uint8, device=ctx.device).view(dtype)
        if low_latency:
            # On this rank alone, before anything is enqueued.
            with pytest.raises(InvalidExpertsError, match=r"for few tokens.*low_latency=False"):
                ep.dispatch(given, ids, x_scales=scales)
        else:
            received = ep.dispatch(given, ids, x_scales=scales)
            assert (received.rows.view(torch.uint8)[there(received)] == 0xFF).all()
            received.release()
    ep.dispatch(x.to(E4M3), ids, x_scales=scales).release()
    done_with(ctx, ep)


@pytest.mark.ranks(2)
@both_forms
def test_fp8_without_a_nan_of_ones(ranks, low_latency):
    ranks.run(without_a_nan, low_latency)


@pytest.mark.ranks(1)
def test_factors_of_another_shape(ranks):
    ranks.run(other_factors)
