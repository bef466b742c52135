"""A layer of experts in one call gives what one process with all experts would, in float64, whatever the routing."""

import runpy
from itertools import cycle
from pathlib import Path

import pytest
import torch
from covering import EVERYTHING, SAMPLED, thorough
from experts.layers import E_EACH, ROUTINGS, Layer, done_with, experts

from iris.errors import (
    InvalidCollectiveError,
    InvalidConfigError,
    InvalidExpertsError,
    NotATensorError,
    UnknownChoiceError,
)
from iris.experts import ExpertsConfig
from iris.experts.checks import quantized_dtype
from iris.ops import FusedConfig, grouped_mm
from iris.ops.grouped import on_hopper
from iris.simulator import ACTIVE

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CONFIG = ExpertsConfig(layouts=("compact",), alignment=4)


class Weights:
    """Of all experts, and what becomes of a row that they multiply; ``inner``: elements of the activation.

    With ``scales`` they are fp8 that has these: one for each expert, column of the product, or block.
    """

    def __init__(self, layer, inner, activation="silu_and_mul", scales=None):
        generator = torch.Generator().manual_seed(3)
        shapes = [(inner * (2 if activation else 1), layer.hidden), (layer.hidden, inner)]
        self.activation, self.narrow = activation, scales is not None
        self.given, self.scales, self.exact = [], [], []
        for rows, columns in shapes:
            values = torch.randn(layer.num_experts, rows, columns, generator=generator) / columns**0.5
            values = values.to(layer.device, quantized_dtype() if scales else layer.dtype)
            self.given.append(values)
            values = values.double()
            if scales:
                extents = {"experts": (), "columns": (rows,), "blocks": (-(-rows // 128), -(-columns // 128))}[scales]
                scale = (0.5 + torch.rand(layer.num_experts, *extents, generator=generator)).to(layer.device)
                self.scales.append(scale)
                if scales == "blocks":
                    scale = scale.repeat_interleave(128, 1)[:, :rows].repeat_interleave(128, 2)[:, :, :columns]
                values = values * scale.double().view(*scale.shape, *(1,) * (3 - scale.dim()))
            self.exact.append(values)

    def of(self, ep):
        """Those of a rank, by the names that they are given by."""
        mine = slice(ep.first_expert, ep.first_expert + ep.num_local_experts)
        found = dict(zip(("w_up", "w_down"), (each[mine] for each in self.given), strict=True))
        return found | dict(zip(("scale_up", "scale_down"), (each[mine] for each in self.scales), strict=False))

    def apply(self, expert, rows):
        """In float64, but for the rounding of the activation, which is to bf16, before that to fp8."""
        made = rows @ self.exact[0][expert].t()
        if self.activation:
            gate, up = made.chunk(2, 1)
            made = torch.nn.functional.silu(gate) * up
        return (rounded(made.to(BF16).double()) if self.narrow else made) @ self.exact[1][expert].t()

    def expected(self, x, ids, weights):
        """float64, of ``x`` in float64."""
        out = torch.zeros_like(x)
        for expert in range(len(self.exact[0])):
            chosen = (ids == expert).double() * (1 if weights is None else weights.double())
            out += self.apply(expert, x) * chosen.sum(dim=1, keepdim=True)
        return out


def factors_of(x):
    """A factor for each row and 128 columns."""
    padded = torch.nn.functional.pad(x.abs(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    return (padded.amax(dim=2) / torch.finfo(quantized_dtype()).max).clamp(min=1e-12)


def rounded(x):
    """To fp8 with such factors, and back."""
    factors = factors_of(x).repeat_interleave(128, 1)[:, : x.shape[1]]
    return (x / factors).float().to(quantized_dtype()).double() * factors


def close(out, exact, error):
    """``error``: of the largest element, or of 1."""
    scale = torch.cat([exact.abs().flatten(), exact.new_ones(1)]).max()
    worst = (out.double() - exact).abs().max().item() if out.numel() else 0
    assert out.shape == exact.shape and worst <= error * scale, f"differs by {worst:.3g}, of up to {scale:.3g}"


# Of one rounding, several times; products of float32 on GPUs are those of TF32.
ERRORS = {F32: 1e-5 if ACTIVE else 5e-3, BF16: 0.02, F16: 0.003}


def results(ctx, routing, dtype, activation, weighted):
    layer = Layer(ctx.num_ranks, dtype, ctx.device, hidden=48)
    ep, weights = experts(ctx, layer, CONFIG), Weights(layer, 40, activation)
    for round in range(3):
        x, ids, factors = layer.inputs(routing, round, ctx.cur_rank)
        factors = factors if weighted else None
        out = torch.full_like(x, torch.nan)
        ctx.ops.experts_mlp(out, x, ids, factors, **weights.of(ep), activation=activation, experts=ep)
        close(out, weights.expected(x.double(), ids, factors), ERRORS[dtype])
    done_with(ctx, ep)


DTYPES = (F32, BF16, F16)
ACTIVATIONS = (("silu_and_mul", True), (None, False))


@pytest.mark.ranks(*((1, 2, 3) if EVERYTHING else (1, 3)))
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("activation", "weighted"), ACTIVATIONS)
def test_results(ranks, routing, dtype, activation, weighted):
    ranks.run(results, routing, dtype, activation, weighted)


SCALES = ("experts", "columns", "blocks")
GIVEN = ("rounded on the way", "by blocks", "by rows")


def narrow_results(ctx, routing, scales, given):
    """Rows of two blocks of 128 and a part of one; of the activation one block and a part."""
    layer = Layer(ctx.num_ranks, BF16, ctx.device, hidden=272)
    ep, weights = experts(ctx, layer, CONFIG), Weights(layer, 144, scales=scales)
    for round in range(2):
        x, ids, factors = layer.inputs(routing, round, ctx.cur_rank)
        # In each row and block other sizes.
        sizes = 1 + torch.arange(x.numel(), device=x.device).view(x.shape) % 41
        x = (x * sizes / 8).to(BF16)
        exact, out, x_scales = rounded(x.double()), torch.full_like(x, torch.nan), None
        if given != "rounded on the way":
            x_scales = factors_of(x.float()) if given == "by blocks" else x.float().abs().amax(1, keepdim=True) / 256
            wide = x_scales.clamp(min=1e-12).repeat_interleave(128 if given == "by blocks" else 272, 1)[:, :272]
            x = (x.float() / wide).to(quantized_dtype())
            exact = x.double() * wide.double()
        ctx.ops.experts_mlp(out, x, ids, factors, **weights.of(ep), x_scales=x_scales, experts=ep)
        # Hopper's tensor cores add products of fp8 up with some 14 bits, all 272 of a row where there are no blocks: an
        # error of a thousandth. Where the activation lies that near to the middle between two numbers of fp8, it may be
        # rounded to the other one, an eighth away at most. Of its 144 elements these are one or two. With errors of
        # 0.1 % drawn at random a row of the result was 3.2 % off by its norm, with 0.3 % 4.4 %. One of its 272 elements
        # is 6 % of that, so a wrong one is more: each row is looked at by itself.
        expected = weights.expected(exact, ids, factors)
        off, size = (torch.linalg.vector_norm(each, dim=1) for each in (out.double() - expected, expected))
        assert (off <= 0.05 * size).all(), (off / size).max()
        if ACTIVE:
            assert off.norm() <= 0.01 * size.norm()
    done_with(ctx, ep)


@pytest.mark.ranks(*((1, 2, 3) if EVERYTHING else (2,)))
@pytest.mark.parametrize("routing", [*ROUTINGS[::2], *map(thorough, ROUTINGS[1::2])])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("given", GIVEN)
def test_fp8(ranks, routing, scales, given):
    ranks.run(narrow_results, routing, scales, given)


# Each value, but not all combinations, which take too long on so many ranks.
@pytest.mark.thorough
@pytest.mark.ranks(8, exactly=True)
@pytest.mark.parametrize(("routing", "dtype", "activation"), list(zip(ROUTINGS, cycle(DTYPES), cycle(ACTIVATIONS))))
def test_eight_ranks(ranks, routing, dtype, activation):
    ranks.run(results, routing, dtype, *activation)


@pytest.mark.thorough
@pytest.mark.ranks(8, exactly=True)
@pytest.mark.parametrize(("routing", "scales", "given"), list(zip(ROUTINGS, SCALES, GIVEN, strict=False)))
def test_fp8_of_eight_ranks(ranks, routing, scales, given):
    ranks.run(narrow_results, routing, scales, given)


def beside(ctx, routing, narrow, weighted):
    """combine beside the second product, in the order of its stages: the same bits as after it."""
    # Rows of whole 16 bytes, as TMA wants them; more experts than the last stage has, and a stage that is not whole.
    layer = Layer(ctx.num_ranks, BF16, ctx.device, hidden=272, max_tokens=40)
    ep, weights = (
        experts(ctx, layer, CONFIG, low_latency=False),
        Weights(layer, 144, scales="blocks" if narrow else None),
    )
    given, of_few = weights.of(ep), experts(ctx, layer, CONFIG)
    for round in range(2 if SAMPLED else 3):
        x, ids, factors = layer.inputs(routing, round, ctx.cur_rank)
        factors = factors if weighted else None
        out = torch.full_like(x, torch.nan)
        with pytest.raises(InvalidConfigError, match="those for few tokens.*low_latency=False"):
            ctx.ops.experts_mlp(out, x, ids, factors, **given, experts=of_few, overlap=True)
        ctx.ops.experts_mlp(out, x, ids, factors, **given, experts=ep, overlap=True)
        exact = weights.expected(rounded(x.double()) if narrow else x.double(), ids, factors)
        close(out, exact, 0.02)
        if not narrow:
            received = ep.dispatch(x, ids, factors, layout="compact")
            groups = {"offs": received.offsets[1:], "counts": received.counts}
            up, down = (given[role].transpose(1, 2) for role in ("w_up", "w_down"))
            made = grouped_mm(received.rows, up, **groups, activation="silu_and_mul")
            tiles = FusedConfig(use_gluon=True, block_size_m=128, block_size_n=128, block_size_k=64)
            made = grouped_mm(made, down, **groups, config=tiles)
            assert torch.equal(ep.combine(made, received), out)
    done_with(ctx, ep)


ON_HOPPER = pytest.mark.skipif(
    not on_hopper.hopper.is_hopper(), reason="the product that tells what is done is for Hopper"
)


@ON_HOPPER
@pytest.mark.ranks(*((1, 2, 3) if EVERYTHING else (2,)))
@pytest.mark.parametrize("routing", ROUTINGS if EVERYTHING else ("uneven",))
@pytest.mark.parametrize(("narrow", "weighted"), [(False, True), thorough(False, False), thorough(True, True)])
def test_combine_beside_the_second_product(ranks, routing, narrow, weighted):
    ranks.run(beside, routing, narrow, weighted)


def in_place(ctx):
    """The result over the tokens; a handle; others in flight, which keep what they have."""
    layer = Layer(ctx.num_ranks, F32, ctx.device, hidden=48)
    ep, weights = experts(ctx, layer, CONFIG), Weights(layer, 40)
    x, ids, factors = layer.inputs("random", 0, ctx.cur_rank)
    expected = weights.expected(x.double(), ids, factors)
    received = ep.dispatch(x, ids, factors, layout="compact")
    out = x.clone()
    work = ctx.ops.experts_mlp(out, out, ids, factors, **weights.of(ep), experts=ep, async_op=True)
    work.wait()
    close(out, expected, ERRORS[F32])
    made = layer.through_experts(received, ep.first_expert)
    assert torch.equal(ep.combine(made, received).double(), layer.expected("random", 0, ctx.cur_rank, True))
    done_with(ctx, ep)


@pytest.mark.ranks(2)
def test_in_place_with_others_in_flight(ranks):
    ranks.run(in_place)


def replay(ctx, overlap):
    """A graph of a first call, whose tokens and choices are others in each replay, and ranks come late."""
    layer = Layer(ctx.num_ranks, BF16, ctx.device, hidden=256, max_tokens=300)
    ep, weights = experts(ctx, layer, CONFIG, low_latency=False if overlap else None), Weights(layer, 128)
    data = layer.inputs("random", 0, ctx.cur_rank)
    x, ids, factors = (each.new_zeros(layer.max_tokens, each.shape[1]) for each in data)
    out, graph, given = torch.empty_like(x), torch.cuda.CUDAGraph(), weights.of(ep)
    with torch.cuda.graph(graph):
        for _ in range(2):
            ctx.ops.experts_mlp(out, x, ids, factors, **given, experts=ep, overlap=overlap)
    for round in range(60):
        routing, tokens = ROUTINGS[round % len(ROUTINGS)], layer.tokens(7 * round, ctx.cur_rank)
        ids.fill_(-1)
        for whole, part in zip((x, ids, factors), layer.inputs(routing, 7 * round, ctx.cur_rank), strict=True):
            whole[:tokens] = part
        if round % 5 == ctx.cur_rank:
            torch.cuda._sleep(2_000_000)  # about a millisecond
        out.fill_(torch.nan)
        graph.replay()
        close(out, weights.expected(x.double(), ids, factors), ERRORS[BF16])
    done_with(ctx, ep)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are for GPUs")
@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=ON_HOPPER)])
def test_replays_of_a_first_call(ranks, overlap):
    ranks.run(replay, overlap)


L, T, H, INNER = E_EACH, 4, 48, 40
UP, DOWN = torch.zeros(L, 2 * INNER, H), torch.zeros(L, H, INNER)
FP8 = torch.float8_e4m3fn
MISTAKES = {
    "no tensor": (NotATensorError, r"experts_mlp\(w_up=\) takes a tensor", {"w_up": None}),
    "no experts": (InvalidExpertsError, "has made, and 3 is none", {"experts": 3}),
    "another activation": (UnknownChoiceError, "silu_and_mul", {"activation": "gelu"}),
    "one matrix": (InvalidCollectiveError, "three dimensions", {"w_down": DOWN[0]}),
    "half a w_up": (InvalidCollectiveError, r"w_up \[3, 2 I, 48\]", {"w_up": UP[:, INNER:]}),
    "too much of a w_up": (InvalidCollectiveError, r"without an activation", {"activation": None}),
    "weights by rows": (InvalidCollectiveError, r"w_down has to be", {"w_down": DOWN.transpose(1, 2)}),
    "fewer experts": (InvalidCollectiveError, r"w_down has to be \[3, 48", {"w_up": UP[1:], "w_down": DOWN[1:]}),
    "two dtypes": (InvalidCollectiveError, "have one dtype", {"w_up": UP.half()}),
    "another dtype": (InvalidCollectiveError, "torch.float32 or fp8", {"w_up": UP.half(), "w_down": DOWN.half()}),
    "x of another dtype": (InvalidCollectiveError, "x is so too", {"x": torch.zeros(T, H).half()}),
    "fp8 that rows are not rounded to": (
        InvalidCollectiveError,
        "of their dtype, with x_scales",
        {"w_up": UP.to(torch.float8_e5m2), "w_down": DOWN.to(torch.float8_e5m2)},
    ),
    "another overlap": (UnknownChoiceError, "overlap='yes'", {"overlap": "yes"}),
    "an overlap of float32": (InvalidConfigError, "fp16, bf16 or fp8", {"overlap": True}),
    "other scales": (InvalidCollectiveError, r"\[3\] or \[3, 80\] or \[3, 1, 1\]", {"scale_up": torch.ones(80)}),
    "a result of another shape": (InvalidCollectiveError, r"are \[tokens, 48\]", {"out": torch.zeros(3, H)}),
    "a result of another dtype": (InvalidCollectiveError, "out is of torch.float32", {"out": torch.zeros(T, H).half()}),
    "a result by columns": (InvalidCollectiveError, "out is contiguous", {"out": torch.zeros(H, T).T}),
    "a result over weights": (
        InvalidCollectiveError,
        "out and w_down overlap",
        {"out": DOWN.flatten()[: T * H].view(T, H)},
    ),
    "fewer choices": (InvalidExpertsError, "topk_ids of shape", {"topk_ids": torch.zeros(T, 2, dtype=torch.int64)}),
    "factors without fp8": (InvalidExpertsError, "x_scales given", {"x_scales": torch.ones(T, 1)}),
    "too many tokens": (
        InvalidExpertsError,
        "max_tokens=7",
        {"x": torch.zeros(8, H), "out": torch.zeros(8, H), "topk_ids": torch.zeros(8, 3, dtype=torch.int64)},
    ),
}


def mistakes(ctx):
    layer = Layer(ctx.num_ranks, F32, ctx.device, hidden=H)
    ep = experts(ctx, layer, CONFIG)
    right = {
        **{"out": torch.ones(T, H), "x": torch.ones(T, H), "topk_ids": torch.zeros(T, 3, dtype=torch.int64)},
        **{"topk_weights": None, "w_up": UP, "w_down": DOWN, "experts": ep},
    }

    def call(**given):
        # What is a part of another is moved with it.
        moved = {id(each): each.to(ctx.device) for each in (UP, DOWN)}
        given = right | given
        for role, value in given.items():
            if isinstance(value, torch.Tensor):
                base = value if value._base is None else value._base
                whole = moved.setdefault(id(base), base.to(ctx.device))
                given[role] = whole.as_strided(value.shape, value.stride(), value.storage_offset())
        ctx.ops.experts_mlp(**given)
        return given["out"]

    for case, (error, words, given) in MISTAKES.items():
        with pytest.raises(error, match=words):
            call(**given)
            pytest.fail(f"{case} is taken")
        # It has not begun.
        assert not any(ep._calls._in_use)
    expanded = experts(ctx, layer, ExpertsConfig(layouts=("expanded",)))
    with pytest.raises(InvalidExpertsError, match="Name it there"):
        call(experts=expanded)
    assert not call().any()
    done_with(ctx, ep)
    expanded.close()


@pytest.mark.ranks(1, 2)
def test_misuse(ranks):
    ranks.run(mistakes)


def measured(ctx):
    benchmark = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "experts_mlp.py"))
    rates = {"tflops": 1.0, "memory_tbps": 1.0, "link_gbps": 1.0}
    shape, overlap = benchmark["Shape"](5, 256, 6, 2), on_hopper.hopper.is_hopper()
    kinds = benchmark["KINDS"] if EVERYTHING else benchmark["KINDS"][-1:]
    return [benchmark["measure"](ctx, shape, 128, kind, 0, rates, overlap) for kind in kinds]


@pytest.mark.thorough
@pytest.mark.ranks(2)
def test_the_benchmark_compares_results_and_gives_each_a_time(ranks):
    for row in ranks.run(measured)[0]:
        assert all(time > 0 for time in [*row["us"].values(), *row["floors_us"].values()])
        assert row["of_parts"] == row["us"]["experts_mlp"] / row["us"]["parts"]
