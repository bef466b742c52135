"""A flag that a program has not raised for 2^31 steps, as others served all tokens, is waited for all the same."""

import random

import pytest
import torch
from hesitation import hesitant

from iris.experts import ExpertsConfig
from iris.experts.dispatch import calls_between_refreshes

MAX_TOKENS, HIDDEN = 8, 8


def wrapped(value):
    """As int32 has it."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def call(ctx, ep, tokens, number, weighted):
    """A dispatch to the next rank and its combine. How many elements came that are not of this call."""
    size, rank = ctx.num_ranks, ctx.cur_rank

    def data_of(source):
        elements = torch.arange(tokens * HIDDEN, device=ctx.device).view(tokens, HIDDEN)
        return (1000.0 * number + 100 * source + elements).float()

    weights = torch.full((tokens, 1), 2.0 + rank, device=ctx.device)
    ids = torch.full((tokens, 1), (rank + 1) % size, dtype=torch.int32, device=ctx.device)
    received = ep.dispatch(data_of(rank), ids, layout="compact")
    wrong = (received.rows[:tokens] != data_of((rank - 1) % size)).sum()
    out = ep.combine(received.rows.clone(), received, topk_weights=weights if weighted else None)
    return wrong + (out != data_of(rank) * (2 + rank if weighted else 1)).sum()


def after_many_calls_with_a_token(ctx, wrap):
    """Between refreshes the words that every call raises are set to where they would be: ahead by as many calls."""
    config = ExpertsConfig(in_flight=1, low_latency=False)
    ep = ctx.experts(num_experts=ctx.num_ranks, hidden=HIDDEN, max_tokens=MAX_TOKENS, top_k=1,
                     dtype=torch.float32, config=config)  # fmt: skip
    extents, slot = ep._calls.extents, ep._calls._memory.slots[0]
    between = calls_between_refreshes(extents.STEPS)
    assert between * extents.STEPS <= 1 << 30 and (1 << 32) % between == 0
    with hesitant(ctx, random.Random(ctx.cur_rank), chance=0.1):
        wrong = call(ctx, ep, MAX_TOKENS, 0, weighted=True)
        number = 1
        # Until flags of the first call are 3 * 2^30 behind.
        for refresh in range(1, (3 << 30) // (between * extents.STEPS) + 1):
            before = wrap + refresh * between - 2
            ctx.barrier()
            slot.calls.fill_(wrapped(before))
            slot.routed.fill_(wrapped(before * extents.PROGRAMS))
            slot.returned.fill_(wrapped(before * extents.STEPS + extents.STEPS - 1))
            if refresh == 1:
                slot.sent.add_(wrapped(wrap * extents.STEPS))
                slot.weighed.add_(wrapped(wrap))
            ctx.barrier()
            for _ in range(4):
                wrong += call(ctx, ep, 1, number, weighted=False)
                number += 1
            ctx.barrier()
            # In int32, as kernels compare them: what the next call waits for is to come.
            coming = before + 5
            assert (slot.sent - wrapped(coming * extents.STEPS + 1) < 0).all()
            assert (slot.weighed - wrapped(coming) < 0).all()
        for _ in range(3):
            wrong += call(ctx, ep, MAX_TOKENS, number, weighted=True)
            number += 1
    assert wrong.item() == 0
    ctx.barrier()
    ep.close()


@pytest.mark.parametrize("wrap", [0, 1 << 31])
def test_a_burst_of_tokens_after_many_calls_with_one(ranks, wrap):
    ranks.run(after_many_calls_with_a_token, wrap)
