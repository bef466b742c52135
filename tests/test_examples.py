"""Every example runs on small data, which it validates itself; two run as programs, one by each launcher."""

import importlib
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import UNDER_TORCHRUN, import_path
from covering import thorough
from preloaded import LIMIT_S, python

import iris

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
MESSAGES = EXAMPLES / "06_message_passing"
COLLECTIVES = EXAMPLES / "collectives"

BENCHMARKS = ["00_load", "01_store", "02_all_load", "03_all_store", "04_atomic_add", "05_atomic_xchg"]
MOVES = ["all_gather", "all_to_all", "all_to_all_v", "broadcast", "gather", "scatter", "send_recv"]
SUMS = ["all_reduce", "reduce", "reduce_scatter"]
# Bytes that examples/collectives move if they are not told otherwise.
SIZE = 20000 if iris.simulator.ACTIVE else 16 << 20
FORMS = ["load_store", "put", "triton_context", "gluon_context", "signal_wait"]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(MESSAGES)
    monkeypatch.syspath_prepend(COLLECTIVES)


def run_main(ctx, module, size):
    importlib.import_module(module).main(ctx, size)


# More ranks than the two of a pair: the others must not be touched. Sizes that are no whole number of blocks.
@pytest.mark.ranks(3)
@pytest.mark.parametrize("example", BENCHMARKS)
def test_benchmark(ranks, example):
    ranks.run(run_main, example, 18_000)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("example", FORMS)
def test_message_passing(ranks, example):
    ranks.run(run_main, example, 10_000)


def run_collective(ctx, module, use_gluon):
    importlib.import_module(module).main(ctx, 4_000, iris.ccl.Config(use_gluon=use_gluon))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("use_gluon", [False, True], ids=["triton", "gluon"])
@pytest.mark.parametrize("example", MOVES + SUMS)
def test_collective(ranks, example, use_gluon):
    if use_gluon and example == "all_to_all_v":
        pytest.skip("all_to_all_v has no Gluon form")
    ranks.run(run_collective, example, use_gluon)


def without_a_collective(ctx):
    """Examples whose collectives do nothing."""
    real = ctx.ccl
    ctx.ccl = SimpleNamespace(**dict.fromkeys(["all_gather", "reduce_scatter"], lambda *_, **__: None))
    try:
        for module in ("all_gather", "reduce_scatter"):
            with pytest.raises(AssertionError, match=f"Wrong data on rank {ctx.get_rank()}"):
                importlib.import_module(module).main(ctx, 4_000, iris.ccl.Config())
    finally:
        ctx.ccl = real


@pytest.mark.usefixtures("mistaken")
def test_wrong_data_of_a_collective_are_noticed(ranks):
    ranks.run(without_a_collective)


def without_effect(ctx):
    """A kernel that moves nothing."""
    microbenchmark = importlib.import_module("microbenchmark")

    class Nothing:
        __name__ = "nothing"

        def __getitem__(self, grid):
            return lambda *args: None

    with pytest.raises(AssertionError, match=f"Wrong data on rank {ctx.get_rank()}"):
        microbenchmark.every_pair(ctx, Nothing(), lambda mine, theirs: (theirs, mine), 4096)
    with pytest.raises(AssertionError, match=f"Wrong data on rank {ctx.get_rank()}"):
        microbenchmark.everyone(ctx, Nothing(), 4096)


@pytest.mark.skipif(UNDER_TORCHRUN, reason="what is validated first depends on the number of ranks")
@pytest.mark.usefixtures("mistaken")
def test_wrong_data_are_noticed(ranks):
    ranks.run(without_effect)


@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own")
@pytest.mark.parametrize(
    ("launcher", "program", "printed"),
    [
        # What is said to have moved is what moves, whole words.
        thorough([], [EXAMPLES / "01_store.py", "--size=65539"], "store: 65536 bytes from each rank to each"),
        (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
            [MESSAGES / "signal_wait.py", "--size=16003"],
            "messages of 16000 bytes from rank 0 to rank 1 are right",
        ),
        ([], [COLLECTIVES / "all_reduce.py"], f"all_reduce: 3 rounds of {SIZE} bytes among 2 ranks are right"),
    ],
    ids=["alone", "torchrun", "collective"],
)
def test_program(launcher, program, printed):
    result = subprocess.run(
        [*python(), *launcher, *program],
        env={**os.environ, "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr
    assert printed in result.stdout
