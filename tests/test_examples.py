"""Every example runs on small data, which it validates itself; two run as programs, one by each launcher."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import UNDER_TORCHRUN, import_path

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
MESSAGES = EXAMPLES / "06_message_passing"

BENCHMARKS = ["00_load", "01_store", "02_all_load", "03_all_store", "04_atomic_add", "05_atomic_xchg"]
FORMS = ["load_store", "put", "triton_context", "gluon_context", "signal_wait"]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(MESSAGES)


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
def test_wrong_data_are_noticed(ranks):
    ranks.run(without_effect)


@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own")
@pytest.mark.parametrize(
    ("launcher", "program", "printed"),
    [
        ([], EXAMPLES / "01_store.py", "store: 65536 bytes from each rank to each"),
        (
            ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
            MESSAGES / "signal_wait.py",
            "from rank 0 to rank 1 are right",
        ),
    ],
    ids=["alone", "torchrun"],
)
def test_program(launcher, program, printed):
    result = subprocess.run(
        [sys.executable, *launcher, program],
        env={**os.environ, "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert printed in result.stdout
