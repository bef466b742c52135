"""Measuring the figures of fused operations: what is timed, and how a figure follows from it, on a made-up machine."""

import contextlib
import io
import json
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import iris
from iris import simulator
from iris.bench import ceilings, figures, operations, tune
from iris.ccl.collectives import Collectives
from iris.errors import InvalidTableError
from iris.machine import tables
from iris.machine.figures import TILE_COLUMNS, find
from iris.ops import FusedConfig
from iris.ops.call import Call
from iris.ops.choose import VENDOR, Case, choose, figures_for, plan, tiles_of
from iris.ops.hopper import arguments as hopper
from iris.ops.hopper.arguments import Plan
from iris.ops.operations import Operations

# None of its figures is that of an H200.
MADE_UP = {
    "tile_ns_per_k": {"2": {"256": 9.5, "128": 5.25, "64": 4.125}, "1": {"128": 3.25, "64": 2.25}},
    "gemm_TFLOPS": {"2": 500.0, "1": 900.0},
    "collective_GBps": 210.0,
    "staged_collective_GBps": 140.0,
    "copy_engine_GBps": 333.0,
    "stores_GBps": 310.0,
    "copy_us": 7.5,
    "memory_GBps": 4000.0,
    "fp8_round_ns_per_k": 2.5,
}
PROGRAMS = 12
WORD_BYTES = 4


def made_up(ctx, spent):
    """Calls that a timer is given say here what they take on the made-up machine."""

    def matmul_reduce_scatter(self, out, a, b, bias=None, *, scale_a, scale_b, config):
        call = Call("matmul_reduce_scatter", out, a, b, bias, scale_a, scale_b)
        call.check(ctx.device, ctx.num_ranks, config)
        assert hopper.problem(call, config) is None
        assert tiles_of(Case(call, ctx.num_ranks, PROGRAMS, None), config) == PROGRAMS
        tile = MADE_UP["tile_ns_per_k"][str(a.itemsize)][str(config.block_size_n)]
        # Besides its tile, a meeting and what is sent.
        spent.append(tile * a.shape[1] / 1e3 + 12 + out.nbytes / 1e6)

    def multiply(self, a, out):
        assert self.b.is_contiguous() == (a.itemsize == 2)
        if a.shape == self.b.shape == out.shape == (figures.GEMM_SIZE, figures.GEMM_SIZE):
            spent.append(2 * figures.GEMM_SIZE**3 / MADE_UP["gemm_TFLOPS"][str(a.itemsize)] / 1e6)
        else:
            assert a.itemsize == 1 and out.numel() == 128 * 128 * PROGRAMS
            spent.append(1.9 + MADE_UP["fp8_round_ns_per_k"] * a.shape[1] / 1e3)

    def all_gather(self, out, part):
        assert out.nbytes == ctx.num_ranks * part.nbytes and not ctx.is_symmetric(part)
        rate = MADE_UP["collective_GBps" if ctx.is_symmetric(out) else "staged_collective_GBps"]
        spent.append((ctx.num_ranks - 1) * part.nbytes / rate / 1e3)

    copy = torch.Tensor.copy_

    def copy_(self, other, non_blocking=False):
        word = self.nbytes == WORD_BYTES
        spent.append(MADE_UP["copy_us"] if word else self.nbytes / MADE_UP["copy_engine_GBps"] / 1e3)
        return copy(self, other, non_blocking)

    def store(context_tensor, source, target, n, num_ranks, block, num_warps):
        assert source.nbytes == target.nbytes == 2 * n * num_ranks
        spent.append(2 * n * (num_ranks - 1) / MADE_UP["stores_GBps"] / 1e3)

    stack = contextlib.ExitStack()
    for target, name, stand_in in (
        (Operations, "matmul_reduce_scatter", matmul_reduce_scatter),
        (operations.Operands, "multiply", multiply),
        (Collectives, "all_gather", all_gather),
        (ceilings, "store_to_all", {(ceilings.PROGRAMS,): store}),
        (figures, "get_dram_gbps", lambda: MADE_UP["memory_GBps"]),
        (figures, "programs", lambda ctx: PROGRAMS),
        (figures, "LINK_BYTES", 3 << 12),
        (figures, "GEMM_SIZE", 96),
        (figures, "DEPTHS", (64, 256)),
    ):
        stack.enter_context(mock.patch.object(target, name, stand_in))

    def time(call):
        spent.clear()
        with mock.patch.object(torch.Tensor, "copy_", copy_):
            call()
        return sum(spent)

    return stack, time


def measured(ctx):
    stack, time = made_up(ctx, [])
    times = []

    def noted(call):
        times.append(time(call))
        return times[-1]

    with stack:
        found = figures.measure(ctx, noted)
    return found, times


@pytest.mark.ranks(2, 3)
@pytest.mark.skipif(not simulator.ACTIVE, reason="of a machine that is made up")
def test_figures_follow_from_bytes_operations_and_times(ranks):
    for found, times in ranks.run(measured):
        assert found == MADE_UP
        # Two depths of each kind of tile and of a round of fp8; two GEMMs, two all-gathers, a copy and stores; and the
        # same bytes by one copy and by many.
        assert len(times) == 2 * (5 + 1) + 2 + 2 + 2 + 2


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("programs", [132, 114, 78])
@pytest.mark.parametrize("nbytes, columns", [(n, columns) for n, tiles in TILE_COLUMNS.items() for columns in tiles])
def test_what_a_tile_takes_is_of_one_round_that_is_not_split(nbytes, columns, programs, size):
    rows, tiles = figures.grid(programs, size)
    config = FusedConfig(use_gluon=True, block_size_m=128, block_size_n=columns, block_size_k=128 // nbytes)
    for depth in figures.DEPTHS:
        shapes = (128 * rows, depth), (depth, columns * tiles), (128 * rows // size, columns * tiles)
        a, b, out = (torch.empty(shape, dtype=figures.DTYPES[nbytes], device="meta") for shape in shapes)
        call = Call("matmul_reduce_scatter", out, a, b, None, None, None)
        gpu = find("NVIDIA H200").figures
        assert 0.9 * programs < tiles_of(Case(call, size, programs, gpu), config) <= programs
        assert plan(call, size, programs, config, gpu) == Plan()


def test_a_time_that_cannot_be_is_told():
    before = find("NVIDIA H200")
    with pytest.raises(InvalidTableError, match="cannot be: copy_us is -0.5, .*Measure again"):
        figures.entry(MADE_UP | {"copy_us": -0.5}, before, 2)


def test_where_nothing_is_measured(monkeypatch):
    gpu, none = SimpleNamespace(type="cuda"), SimpleNamespace(type="cpu")
    for hopper_here, device, size, words in (
        (True, none, 2, "the simulator"), (False, gpu, 2, "for Hopper"), (True, gpu, 1, "two ranks"),
        (True, gpu, 2, None),
    ):  # fmt: skip
        monkeypatch.setattr(figures, "is_hopper", lambda hopper_here=hopper_here: hopper_here)
        problem = figures.problem(SimpleNamespace(device=device, num_ranks=size))
        assert problem is None if words is None else words in problem


# By which the vendor's GEMM and a collective are always faster.
FAST_VENDOR = {"collective_GBps": 1e5, "gemm_TFLOPS": {"2": 1e5, "1": 1e5}}


def tuned(ctx, folder):
    a, b, out = (torch.empty(shape, dtype=torch.bfloat16, device="meta")
                 for shape in ((8192, 2048), (2048, 8192), (8192 // ctx.num_ranks, 8192)))  # fmt: skip
    call = Call("matmul_reduce_scatter", out, a, b, None, None, None)

    def chosen():
        with iris.iris(1 << 20) as own:
            return choose(call, own.num_ranks, 132, figures_for(own), True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        patch.setattr(tune, "tune", lambda ctx, sizes, report: {"broadcast": [("none", "exchange", None)]})
        patch.setattr(figures, "problem", lambda ctx: None)
        patch.setattr(figures, "HEAP_BYTES", 1 << 20)
        patch.setattr(figures, "measure", lambda ctx, time: MADE_UP | FAST_VENDOR)
        before = chosen()
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            assert tune.run([1 << 10], None) == []
        ctx.barrier()
        return before, chosen(), printed.getvalue(), find("simulator")


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.skipif(not simulator.ACTIVE, reason="of a machine that is made up")
def test_the_choice_is_by_what_was_measured(ranks, tmp_path):
    (before, after, printed, found), (_, other, nothing, _) = ranks.run(tuned, tmp_path)
    assert before.use_gluon and after == other == VENDOR
    file = tmp_path / "iris" / tables.OPERATIONS
    assert "copy_us: 7.5\nmemory_GBps: 4000.0" in printed and f"Written to {file}" in printed and not nothing
    made = json.loads(file.read_text())["simulator"]
    assert made["measured"]["num_ranks"] == 2 and made["measured"]["figures"] == list(MADE_UP)
    assert made["kept"]["from"] == "NVIDIA H200, as shipped"
    # Each figure is one that was measured, or one that was kept.
    assert sorted(made["measured"]["figures"] + made["kept"]["figures"]) == sorted(made["figures"])
    shipped = json.loads((tables.SHIPPED / tables.OPERATIONS).read_text())["NVIDIA H200"]["figures"]
    assert made["figures"] == shipped | MADE_UP | FAST_VENDOR
    assert found.figures.copy_us == 7.5 and found.figures.meeting_us == shipped["meeting_us"]
