"""Programs of a cluster tell each other numbers, and who does not come is named."""

import pytest
import torch
import triton
import triton.language as tl

from iris.errors import IrisTimeoutError
from iris.language.cluster import cluster_all_reduce, enter, open_meeting
from iris.simulator import grid

PROGRAMS, BLOCK = 4, 32


@triton.jit
def add_up(numbers, sums, largest, absent, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, PEAKS: tl.constexpr):
    meeting = open_meeting(PROGRAMS, PEAKS)
    entered = enter(meeting, PROGRAMS, PEAKS)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    own = tl.load(numbers + program * BLOCK + tl.arange(0, BLOCK))
    if program != absent:
        total, peak = cluster_all_reduce(meeting, entered, own, -own, PROGRAMS, PEAKS)
        tl.store(sums + program, total)
        tl.store(largest + program, peak)


def run(numbers, absent=-1, peaks=True):
    """What each program of each cluster has heard; ``numbers``: ``[clusters, PROGRAMS, BLOCK]``."""
    sums, largest = torch.zeros(2, numbers.shape[0] * PROGRAMS)
    add_up[(len(sums) // 2, 2)](numbers, sums, largest, absent, PROGRAMS, BLOCK, peaks)
    return sums.view(-1, PROGRAMS), largest.view(-1, PROGRAMS)


@pytest.mark.parametrize("peaks", [False, True])
def test_each_cluster_adds_up_its_own(peaks):
    numbers = torch.arange(6 * PROGRAMS * BLOCK, dtype=torch.float32).view(6, PROGRAMS, BLOCK) % 97
    for _ in range(2):  # a launch knows nothing of the one before it
        sums, largest = run(numbers, peaks=peaks)
        of_clusters = numbers.flatten(1)
        assert torch.equal(sums, of_clusters.sum(1, keepdim=True).expand_as(sums))
        wanted = (-of_clusters).amax(1, keepdim=True) if peaks else torch.zeros(6, 1)
        assert torch.equal(largest, wanted.expand_as(largest))


def test_a_nan_is_in_the_sum_and_the_peak_of_its_cluster():
    numbers = torch.ones(2, PROGRAMS, BLOCK)
    numbers[0, 1, 2] = torch.nan
    sums, largest = run(numbers)
    assert sums[0].isnan().all() and largest[0].isnan().all()
    assert (sums[1] == PROGRAMS * BLOCK).all() and (largest[1] == -1).all()


def test_who_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(grid, "limit_s", 0.25)
    with pytest.raises(IrisTimeoutError, match="programs 2 of its cluster of 4"):
        run(torch.ones(2, PROGRAMS, BLOCK), absent=PROGRAMS + 2)
