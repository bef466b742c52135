"""combine waits for each stage of a product that runs beside it, and for nothing else: here both are one launch."""

import random
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl
from covering import EVERYTHING, thorough
from experts.layers import done_with

from iris.experts import ExpertsConfig
from iris.language.ordering import signal
from iris.ops.combine_in_stages import arguments_of, combine_in_stages
from iris.ops.grouped.call import GroupedCall
from iris.ops.grouped.stages import PROGRESS_WORDS, progress_of, stages_of, tiles_of_stage
from iris.simulator import grid

E_EACH, H, M, K = 9, 48, 70, 3
# More than a stage has blocks of tokens, so that programs are in several stages at once.
PROGRAMS, COPIED = 9, tl.constexpr(256)


@triton.jit(do_not_specialize=["tiles_n"])
def product_and_combine(
    made,
    slot,
    staged,
    y,
    layout,
    out,
    progress,
    tiles_n,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHTS: tl.constexpr,
    EXTENTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program 0 copies ``made`` to ``y``, of each two stages the later one first; the others combine."""
    if tl.program_id(0) == 0:
        signal(progress.begun, 1, "set")
        for turn in range(STAGES.NUMBER):
            stage = STAGES.NUMBER - 1 - (turn ^ 1)
            end = STAGES.GROUPS - STAGES.UNIT * ((1 << stage) - 1)
            begin = tl.maximum(end - (STAGES.UNIT << stage), 0)
            last = tl.load(layout.offsets + end) * EXTENTS.H
            for first in range(tl.load(layout.offsets + begin) * EXTENTS.H, last, COPIED):
                at = first + tl.arange(0, COPIED)
                tl.store(y + at, tl.load(made + at, mask=at < last), mask=at < last)
            tiles = tiles_of_stage(layout.counts, stage, BLOCK_M, tiles_n, GROUPS=EXTENTS.LOCALS, STAGES=STAGES)
            signal(progress.finished + stage, tiles, "add")
    else:
        combine_in_stages(
            slot,
            staged,
            y,
            layout=layout,
            out=out,
            progress=progress,
            tiles_n=tiles_n,
            BLOCK_M=BLOCK_M,
            BLOCK=BLOCK,
            WEIGHTS=WEIGHTS,
            EXTENTS=EXTENTS,
            STAGES=STAGES,
        )


def inputs(ctx, round):
    """Small whole numbers, and weights that are eighths, so that sums are exact. Some choices are none, some twice."""
    generator = torch.Generator().manual_seed(100 * round + ctx.cur_rank)
    tokens = [M, 0, 33, 5][(round + ctx.cur_rank) % 4]
    x = torch.randint(-4, 5, (tokens, H), generator=generator).float()
    ids = torch.randint(-1, E_EACH * ctx.num_ranks, (tokens, K), generator=generator)
    weights = torch.randint(1, 9, (tokens, K), generator=generator).float() / 8
    return x.to(ctx.device), ids.to(ctx.device), weights.to(ctx.device)


def rounds(ctx, weighted):
    assert stages_of(E_EACH).NUMBER == 4
    config = ExpertsConfig(layouts=("compact",), alignment=8, low_latency=False)
    sizes = {"num_experts": E_EACH * ctx.num_ranks, "hidden": H, "max_tokens": M, "top_k": K}
    ep = ctx.experts(**sizes, dtype=torch.float32, config=config)
    weight = torch.empty(E_EACH, H, H, device=ctx.device)
    # In the simulator it is left to chance which program goes on.
    with mock.patch.object(grid, "chance", random.Random(ctx.cur_rank)):
        for round in range(4 if ctx.device.type == "cpu" else 40):
            x, ids, weights = inputs(ctx, round)
            received = ep.dispatch(x, ids, weights if weighted else None, layout="compact")
            number = torch.arange(len(received.rows), dtype=torch.int32, device=ctx.device)
            expert = torch.searchsorted(received.offsets[1:].contiguous(), number, right=True).clamp(max=E_EACH - 1)
            made = received.rows * (1 + ep.first_expert + expert)[:, None]
            y, out = received.rows.fill_(torch.nan), torch.full_like(x, torch.nan)
            progress = progress_of(torch.zeros(PROGRESS_WORDS, dtype=torch.int32, device=ctx.device))
            product = GroupedCall(y, made, weight, None, None, None, None, None, progress)
            given = arguments_of(ep, received._slot, weighted, product, out)
            product_and_combine[(PROGRAMS,)](made, *given, num_warps=8)
            ep._calls.end(received, "combine_in_stages()")
            factors = (ids >= 0) * (1 + ids) * (weights if weighted else 1)
            assert torch.equal(out, x * factors.sum(dim=1, keepdim=True))
    done_with(ctx, ep)


@pytest.mark.ranks(*((1, 2, 3) if EVERYTHING else (2,)))
@pytest.mark.parametrize("weighted", [True, thorough(False)])
def test_rounds(ranks, weighted):
    ranks.run(rounds, weighted)
