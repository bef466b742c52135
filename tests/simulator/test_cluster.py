"""Programs of a cluster tell each other numbers, and who does not come is named."""

import pytest
import torch
import triton
import triton.language as tl

from iris.errors import IrisTimeoutError
from iris.language.cluster import meet, open_meeting
from iris.simulator import grid

PROGRAMS = 4


@triton.jit
def add_up(numbers, sums, largest, absent, PROGRAMS: tl.constexpr):
    meeting = open_meeting(PROGRAMS)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    number = tl.load(numbers + program)
    if program != absent:
        total, peak = meet(meeting, number, -number, PROGRAMS)
        tl.store(sums + program, total)
        tl.store(largest + program, peak)


def run(numbers, absent=-1):
    sums, largest = torch.zeros_like(numbers), torch.zeros_like(numbers)
    add_up[(len(numbers) // 2, 2)](numbers, sums, largest, absent, PROGRAMS)
    return sums.view(-1, PROGRAMS), largest.view(-1, PROGRAMS)


def test_each_cluster_adds_up_its_own():
    numbers = 1.5 ** torch.arange(3 * PROGRAMS * 2)
    for _ in range(2):  # a launch knows nothing of the one before it
        sums, largest = run(numbers)
        of_clusters = numbers.view(-1, PROGRAMS)
        torch.testing.assert_close(sums, of_clusters.sum(1, keepdim=True).expand_as(sums))
        assert torch.equal(largest, -of_clusters[:, :1].expand_as(largest))


def test_a_nan_is_in_the_sum_and_the_peak_of_its_cluster():
    numbers = torch.ones(2 * PROGRAMS)
    numbers[1] = torch.nan
    sums, largest = run(numbers)
    assert sums[0].isnan().all() and largest[0].isnan().all()
    assert (sums[1] == PROGRAMS).all() and (largest[1] == -1).all()


def test_who_does_not_come_is_named(monkeypatch):
    monkeypatch.setattr(grid, "limit_s", 0.25)
    with pytest.raises(IrisTimeoutError, match="programs 2 of its cluster of 4"):
        run(torch.ones(2 * PROGRAMS), absent=PROGRAMS + 2)
