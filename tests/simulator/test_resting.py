"""While all programs of a launch wait, they are looked after at little cost, and nothing that ends a wait is missed."""

import threading

import pytest
import torch
import triton
import triton.language as tl

from iris.simulator import grid
from simulator.test_grid import work

SET_AFTER_S = 0.5


@pytest.fixture
def polls(monkeypatch):
    """How often programs have polled in vain."""
    counted, let_others_run = [], grid.Launch.let_others_run

    def count(self, task, *given):
        counted.append(task.index)
        let_others_run(self, task, *given)

    monkeypatch.setattr(grid.Launch, "let_others_run", count)
    return counted


def set_later(flags, *places):
    """Set these flags, one after the other."""
    for number, place in enumerate(places, 1):
        threading.Timer(SET_AFTER_S * number / len(places), flags[place].fill_, (1,)).start()


@triton.jit
def wait_for_one(flags):
    while tl.load(flags, volatile=True) != 1:
        pass


@pytest.mark.parametrize("programs", [1, 32])
def test_programs_that_wait_poll_rarely(programs, polls):
    flags = torch.zeros(1, dtype=torch.int32)
    set_later(flags, 0)
    wait_for_one[(programs,)](flags)
    # A round in 5 ms, besides those at first.
    assert len(polls) <= programs * (SET_AFTER_S / 5e-3 + 10)


@triton.jit
def wait_for_both(flags):
    while (tl.load(flags, volatile=True) == 0) | (tl.load(flags + 1, volatile=True) == 0):
        pass


@pytest.mark.parametrize("places", [(0, 1), (1, 0)])
def test_each_of_several_flags_is_looked_at(places):
    flags = torch.zeros(2, dtype=torch.int32)
    set_later(flags, *places)
    wait_for_both[(3,)](flags)


@triton.jit
def give_up(flags, out, MOST: tl.constexpr):
    polls = 0
    while (tl.load(flags, volatile=True) == 0) & (polls < MOST):
        polls += 1
    tl.store(out, polls)


def test_a_program_that_works_is_not_slowed_down_by_flags_that_stay(monkeypatch):
    slept = []
    monkeypatch.setattr(grid.time, "sleep", slept.append)
    flags = torch.zeros(2, dtype=torch.int32)
    work[(2,)](flags, 200)
    assert flags.tolist() == [200, 1] and max(slept, default=0) < grid.LONGEST_SLEEP_S


def test_a_loop_that_counts_its_rounds_ends_though_nothing_changes():
    out = torch.zeros(1, dtype=torch.int32)
    give_up[(1,)](torch.zeros(1, dtype=torch.int32), out, 50)
    assert out.item() == 50
