"""The table of what each algorithm can do is complete, and a launch gives a kernel the arguments that it has."""

import re
from types import SimpleNamespace

import pytest
import torch

from iris.ccl import algorithms, pull, select
from iris.ccl.algorithms import ALGORITHMS, candidates
from iris.ccl.atomic import atomic
from iris.ccl.call import Call
from iris.ccl.config import ALL_REDUCE_VARIANTS, DEFAULT, Config
from iris.ccl.kernel_arguments import BlockTiling
from iris.ccl.kernel_launch import kernel_launch

CARRIED = {(each.name, collective) for each in ALGORITHMS for collective in each.collectives}


def test_the_docstring_has_each_row():
    documented, names = set(), []
    for name, collectives in re.findall(r"^\| (.*?) ?\| (.*?) \|", algorithms.__doc__, re.MULTILINE):
        names = re.findall(r"`(\w+)`", name) or names
        documented |= {(each, collective) for each in names for collective in collectives.split(", ")}
    assert documented == CARRIED


def test_no_algorithm_is_in_the_table_twice():
    assert len(CARRIED) == sum(len(each.collectives) for each in ALGORITHMS)


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("collective", sorted({collective for _, collective in CARRIED}))
def test_each_collective_of_any_size_is_carried(size, collective):
    workspace = SimpleNamespace(limit=1 << 30)
    comm = SimpleNamespace(size=size, num_sms=132, workspace=workspace, programs=lambda wanted: wanted or 128)
    for nbytes in (0, 1 << 10, 1 << 40):
        found = candidates(comm, collective, nbytes)
        # Those that are chosen without a table are the only ones.
        assert found if collective in select.ELSEWHERE else len(found) == 1
    assert all(each.fits is None for each in found.values())


def test_tables_and_configurations_name_algorithms_that_there_are():
    assert {(row.variant, name) for name, rows in select.ELSEWHERE.items() for row in rows} <= CARRIED
    asked_for = {(name, "all_reduce") for name in ALL_REDUCE_VARIANTS if name != "auto"}
    assert asked_for == {(name, collective) for name, collective in CARRIED if collective == "all_reduce"}


def test_a_launch_gives_a_kernel_no_other_arguments():
    one = torch.zeros(1)
    call = Call("all_reduce", SimpleNamespace(size=2), one, one, DEFAULT, None)
    needed = {name: 0 for name in atomic.arg_names if name not in ("input", "output", "factors")}
    with pytest.raises(TypeError, match=r"atomic\(\) has no parameters BLOCKS"):
        kernel_launch(call, atomic, 1, 1, torch.float32, **needed, BLOCKS=1)
    needed.pop("n")
    with pytest.raises(KeyError, match="'n'"):
        kernel_launch(call, atomic, 1, 1, torch.float32, **needed)


@pytest.mark.parametrize(
    ("asked", "programs", "halves", "warps"), [(None, 128, 2, 2), (None, 127, 1, 4), (1, 128, 2, 4)]
)
def test_programs_that_claim_half_blocks_have_half_the_warps(monkeypatch, asked, programs, halves, warps):
    """Unless their number was asked for: it is at least what the assembler needs, which is 4 here."""
    one = torch.zeros(1)
    call = Call("all_reduce", SimpleNamespace(size=2), one, one, None, config=Config(num_warps=asked))
    shared = {"TILING": BlockTiling(16384, 16384), "dtype": torch.int8, "programs": programs, "num_warps": 4}
    monkeypatch.setattr(pull, "shared_arguments", lambda call, max_programs: dict(shared))
    monkeypatch.setattr(pull, "kernel_launch", lambda call, kernel, **arguments: arguments)
    launched = pull.launch(call, None)
    assert (launched["HALVES"], launched["num_warps"]) == (halves, warps)


@pytest.mark.parametrize(
    ("asked", "elements", "itemsize", "warps"),
    [(None, 4096, 8, 16), (None, 32768, 1, 16), (None, 64, 4, 1), (2, 4096, 8, 2), (2, 16384, 2, 4), (2, 32768, 1, 8)],
)
def test_no_thread_moves_so_much_that_the_assembler_takes_half_a_minute(asked, elements, itemsize, warps):
    assert Config(num_warps=asked).warps(elements, itemsize) == warps
