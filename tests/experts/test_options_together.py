"""A number of tokens on the device, halves, biases and statistics in the same calls, in every form of rows.

What comes of them is, bit by bit, what calls without these make of as many tokens, and of the sum that they add to.
"""

import pytest
import torch

from experts.layers import E_EACH, Layer, both_forms, done_with, experts, there
from iris.experts import ExpertsConfig

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
# How rows travel in a round, by its number. In rounds 5, 6 and 7 a rank has no tokens, each another one.
FORMS = ({0: None, 6: "fp8_block128", 7: "given by row"}, {5: "fp8_row", 1: "given by block"})


def together(ctx, low_latency, forms, layout, async_op):
    layer = Layer(ctx.num_ranks, BF16, ctx.device, hidden=256)
    plain = experts(ctx, layer, low_latency=low_latency)
    ep = experts(ctx, layer, ExpertsConfig(statistics=True), low_latency=low_latency)
    M, generator = layer.max_tokens, torch.Generator().manual_seed(ctx.cur_rank)
    count = torch.zeros(1, dtype=torch.int32, device=ctx.device)
    expected_rows = torch.zeros(E_EACH, dtype=torch.int64, device=ctx.device)

    def numbers(*shape, dtype=BF16):
        return torch.randn(*shape, generator=generator).to(ctx.device, dtype)

    for round, form in forms.items():
        tokens = layer.tokens(round, ctx.cur_rank)
        x, first, second = (numbers(M, layer.hidden) for _ in range(3))
        ids, weights = layer.route("random", round, round, M).to(ctx.device), numbers(M, 3, dtype=torch.float32)
        scales = numbers(M, 2 if form == "given by block" else 1, dtype=torch.float32).abs()
        given = {"layout": layout}
        if form in ("given by row", "given by block"):
            x = x.to(FP8)
        else:
            given["quantize"] = form

        def dispatch(made, tokens, **more):
            factors = {"x_scales": scales[:tokens]} if x.dtype == FP8 else {}  # noqa: B023
            return made.dispatch(x[:tokens], ids[:tokens], weights[:tokens], **given, **factors, **more)  # noqa: B023

        wanted = dispatch(plain, tokens)
        count.fill_(tokens)
        received = dispatch(ep, M, num_tokens=count, async_op=async_op)
        received = received.wait() if async_op else received
        assert torch.equal(received.counts, wanted.counts) and torch.equal(received.offsets, wanted.offsets)
        rows = there(wanted)
        assert torch.equal(received.rows[rows].view(torch.uint8), wanted.rows[rows].view(torch.uint8))
        assert form is None or torch.equal(received.scales[rows], wanted.scales[rows])
        expected_rows += wanted.counts
        assert torch.equal(ep.statistics().rows, expected_rows)

        made = torch.where(rows[..., None], wanted.rows.float(), torch.nan).to(BF16)
        sums = plain.combine(made, wanted, bias=(first[:tokens], second[:tokens]))
        out = ep.combine(made, received, bias=(first, second), out=first, async_op=async_op)
        out = out.wait() if async_op else out
        assert torch.equal(out[:tokens], sums)
    done_with(ctx, ep)
    plain.close()


@pytest.mark.ranks(2, 3)
@both_forms
@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("layout", ["expanded", "compact"])
@pytest.mark.parametrize("async_op", [False, True])
def test_they_are_as_each_alone(ranks, low_latency, forms, layout, async_op):
    ranks.run(together, low_latency, forms, layout, async_op)
