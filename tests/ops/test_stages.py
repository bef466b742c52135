"""Stages of a product's groups: few, each half as large as the one before it, and counted tile by tile."""

from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from iris.experts.memory import STAGES
from iris.ops.grouped import launch, on_hopper
from iris.ops.grouped.call import GroupedCall
from iris.ops.grouped.stages import MOST_STAGES, PROGRESS_WORDS, UNITS, progress_of, stage_of, stages_of, tiles_of_stage
from ops.groups import DEVICE, random


@triton.jit
def find(counts, stages, tiles, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """The stage of each group, and the tiles of each stage, two side by side with 128 rows each."""
    group = tl.arange(0, BLOCK)
    tl.store(stages + group, stage_of(group, STAGES), mask=group < STAGES.GROUPS)
    for stage in range(STAGES.NUMBER):
        tl.store(tiles + stage, tiles_of_stage(counts, stage, 128, 2, GROUPS=BLOCK, STAGES=STAGES))


def stages_from_the_end(groups):
    """Of each group, counted by hand."""
    size, stage, found = -(-groups // UNITS), 0, []
    while len(found) < groups:
        found += [stage] * size
        size, stage = 2 * size, stage + 1
    return found[:groups][::-1]


@pytest.mark.parametrize("groups", [1, 2, 3, 31, 32, 33, 128, 1000])
def test_the_stages_of_groups(groups):
    stages, block = stages_of(groups), 1 << (groups - 1).bit_length()
    counts = (torch.arange(groups, dtype=torch.int32) * 37 % 300).to(DEVICE)
    found = torch.full((groups,), -1, dtype=torch.int32, device=DEVICE)
    tiles = torch.full((MOST_STAGES,), -1, dtype=torch.int32, device=DEVICE)
    find[(1,)](counts, found, tiles, block, stages)
    expected = torch.tensor(stages_from_the_end(groups))
    assert torch.equal(found.cpu().long(), expected) and stages.NUMBER == expected[0] + 1 <= MOST_STAGES == STAGES
    for stage in range(stages.NUMBER):
        assert tiles[stage] == 2 * ((counts.cpu()[expected == stage] + 127) // 128).sum()


SIZES = {"many": [300, 0, 64, 1, 129], "few": [0, 3, 0, 0, 0], "none": [0, 0, 0, 0, 0], "one": [700, 0, 0, 0, 0]}


@pytest.mark.skipif(not on_hopper.hopper.is_hopper(), reason="the kernel is for Hopper")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("leaving", [2, 4, 8])
def test_a_product_counts_its_tiles_though_programs_leave(sizes, leaving):
    """Two of four programs, one, and none; whatever the number of tiles is."""
    E, K, N = 5, 64, 320
    counts = torch.tensor(SIZES[sizes], dtype=torch.int32, device=DEVICE)
    offs = counts.cumsum(0).to(torch.int32)
    a = random(900, K, seed=1).bfloat16().to(DEVICE)
    b = random(E, N, K, seed=2).bfloat16().to(DEVICE)
    given = {"offs": offs, "counts": counts, "scale_a": None, "scale_b": None, "activation": None}
    words = torch.zeros(PROGRESS_WORDS, dtype=torch.int32, device=DEVICE)
    outs = []
    for progress in (None, progress_of(words)):
        out = torch.full((900, N), 7.0, dtype=torch.bfloat16, device=DEVICE)
        call = GroupedCall(out, a, b.transpose(1, 2), **given, progress=progress)
        with mock.patch.multiple(launch, LEAVING=leaving, programs=lambda config: 4), mock.patch.dict(launch._prepared):
            launch.enqueue(call, on_hopper.hopper_tiles(call))
        outs.append(out)
    assert torch.equal(*outs)
    stages, columns = stages_from_the_end(E), -(-N // on_hopper.hopper_tiles(call).block_size_n)
    expected = [0] * MOST_STAGES
    for stage, count in zip(stages, SIZES[sizes], strict=True):
        expected[stage] += -(-count // 128) * columns
    assert words[0] == 1 and words[8:].tolist() == expected
