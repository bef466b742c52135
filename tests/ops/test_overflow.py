"""The counts of fused operations, which only rise: calls on their way past the largest number, and past all 32 bits."""

import random
import time

import pytest
import torch
from covering import EVERYTHING, SAMPLED
from hesitation import hesitant

from ops.test_rounds import CASES, CONFIGS, LATE, OPERANDS, Round, with_its_plan

# The vendor's products have no counts, and those of fp8 count as others do.
OTHERS = ("vendor", *(["triton, chiplets", "triton, few programs"] if SAMPLED else []))
COUNTED = [(name, config) for name, config in CASES if config not in OTHERS and (EVERYTHING or "fp8" not in config)]
CALLS = 3  # short of the overflow, up to it, and past it


def overflows(rises):
    """Numbers of calls that take a count, of those that rise by so much in each, to 2^31, and all of them back to 0."""
    return sorted({(1 << 31) // (rise & -rise) for rise in rises if rise} | {1 << 32})


def play_past_overflows(ctx, name, config):
    on_gpu = ctx.device.type == "cuda"
    data = Round(ctx, name, **OPERANDS.get(config, {}))
    call, preamble = (getattr(ctx.ops, each) for each in (name, f"{name}_preamble"))
    out, b = ctx.zeros(*data.expected(0).shape, dtype=torch.bfloat16), data.b[ctx.cur_rank]
    workspace = preamble(out, data.a(0, ctx.cur_rank), b, config=CONFIGS[config])

    def wrong(number):
        # One rank is late, and programs hesitate: who does not wait for them goes on without what they send.
        if number % ctx.num_ranks == ctx.cur_rank:
            torch.cuda._sleep(LATE) if on_gpu else time.sleep(0.02)
        with hesitant(ctx, random.Random(ctx.cur_rank)):
            call(out, data.a(number, ctx.cur_rank), b, config=CONFIGS[config], workspace=workspace)
        return (out.float() != data.expected(number)).sum()

    assert wrong(0).item() == 0
    ctx.barrier()
    # Every count rises by the same in each call: after n calls it is n times what it is after one.
    rises = workspace.counts.long()
    found = ctx.broadcast(overflows(rises.unique().tolist()), 0)
    # Numbers with a sign overflow at 2^31; that 0 comes round is seen where calls take no time, or all is tested.
    for calls in found if EVERYTHING or on_gpu else found[:-1]:
        ctx.barrier()
        workspace.counts.copy_(((calls - 2) * rises).int())
        ctx.barrier()
        assert sum(wrong(number) for number in range(1, 1 + CALLS)).item() == 0, f"near call {calls}"
    # Nobody stores to the workspace, or to the result, any more.
    ctx.barrier()
    workspace.close()


@pytest.mark.parametrize("name, config", COUNTED)
def test_counts_overflow(ranks, name, config):
    ranks.run(with_its_plan, play_past_overflows, name, config)
