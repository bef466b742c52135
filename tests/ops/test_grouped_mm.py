"""Grouped GEMMs: every layout, dtype, order of B and scale, and groups of any sizes, against float64."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from covering import sample, thorough

from iris.errors import (
    InvalidCollectiveError,
    InvalidConfigError,
    InvalidValueError,
    NotATensorError,
    UnknownChoiceError,
)
from iris.ops import FusedConfig, grouped_mm
from iris.simulator import ACTIVE
from ops.groups import DEVICE, FP8, LAYOUTS, ORDERS, SCALES, SIZES, check

# Small tiles, so that small groups have several.
SMALL = FusedConfig(block_size_m=16, block_size_n=32, block_size_k=32, group_size_m=2)
CONFIGS = [None, SMALL, FusedConfig(block_size_m=16, block_size_n=16, num_sms=1, num_xcds=2, allow_tf32=False)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, FP8]
ACTIVATIONS = [None, "silu_and_mul"]
# Depths and columns: of whole tiles, and of none.
EXTENTS = [(64, 64), (45, 38), (1, 2)]
# With scales of blocks: within one, of whole ones, and neither.
OF_BLOCKS = [(64, 64), (256, 256), (150, 138)]


def exists(sizes, layout):
    return layout != "whole" or len(set(SIZES[sizes])) == 1 and sum(SIZES[sizes]) > 0


CASES = sample([*SIZES], LAYOUTS, together=2, where=exists)


@pytest.mark.parametrize(("sizes", "layout"), CASES)
def test_groups_of_any_sizes(sizes, layout):
    check(SIZES[sizes], layout, torch.bfloat16, 45, 38, "columns", "none", config=SMALL)


@pytest.mark.parametrize("dtype", [thorough(dtype) if dtype == torch.float16 else dtype for dtype in DTYPES], ids=str)
def test_every_dtype(dtype):
    axes = LAYOUTS[:3], EXTENTS, ORDERS, SCALES[:3], ACTIVATIONS, CONFIGS, [None, torch.float32], [False, True]
    for layout, extents, order, scale, activation, config, out_dtype, sliced in sample(*axes):
        check(SIZES["uneven"], layout, dtype, *extents, order, scale, activation, config, out_dtype, sliced)


@pytest.mark.parametrize("scale", [SCALES[3], *map(thorough, SCALES[4:])])
def test_scales_of_blocks(scale):
    axes = LAYOUTS[1:3], OF_BLOCKS, ORDERS, ACTIVATIONS, CONFIGS
    for layout, extents, order, activation, config in sample(*axes):
        check(SIZES["equal"], layout, FP8, *extents, order, scale, activation, config)


def test_many_groups_of_few_rows():
    """As in decoding: 256 experts, most of which have a row or none."""
    sizes = [(7 * group) % 3 % 2 + (group == 200) * 20 for group in range(256)]
    check(sizes, "padded", torch.bfloat16, 16, 16, "columns", "none", config=SMALL)


def test_numbers_of_int64_and_a_result_of_its_own():
    a, b = torch.ones(5, 16, device=DEVICE), torch.full((2, 16, 16), 2.0, device=DEVICE)
    out = grouped_mm(a, b, offs=torch.tensor([2, 4], device=DEVICE), counts=torch.tensor([1, 2], device=DEVICE))
    assert out.shape == (5, 16) and out.dtype == torch.float32
    assert (out[[0, 2, 3]] == 32).all()
    narrow = grouped_mm(a[None].to(FP8), b[:1].to(FP8), activation="silu_and_mul")
    assert narrow.shape == (1, 5, 8) and narrow.dtype == torch.bfloat16
    assert grouped_mm(a[:0], b, offs=torch.zeros(2, dtype=torch.int32, device=DEVICE)).shape == (0, 16)


def test_a_result_that_was_saved_for_a_gradient_may_not_be_written_over():
    out, weight = torch.ones(4, 16, device=DEVICE), torch.ones(16, device=DEVICE, requires_grad=True)
    loss = (weight * out).sum()
    ends = torch.tensor([4], dtype=torch.int32, device=DEVICE)
    grouped_mm(torch.ones(4, 16, device=DEVICE), torch.ones(1, 16, 16, device=DEVICE), offs=ends, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.skipif(not hasattr(torch.nn.functional, "grouped_mm"), reason="this torch has none")
def test_it_is_torchs_where_torch_has_it():
    a, b = torch.randn(7, 16).bfloat16().to(DEVICE), torch.randn(3, 24, 16).bfloat16().to(DEVICE).transpose(1, 2)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32, device=DEVICE)
    torchs = torch.nn.functional.grouped_mm(a, b, offs=ends)
    torch.testing.assert_close(grouped_mm(a, b, offs=ends), torchs, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(ACTIVE, reason="the simulator has no graphs")
@pytest.mark.parametrize("config", [None, SMALL], ids=["chosen", "Triton"])
def test_a_graph_is_replayed_with_other_groups(config):
    a, b = torch.randn(300, 64, device=DEVICE).bfloat16(), torch.randn(3, 64, 64, device=DEVICE).bfloat16()
    ends, out = torch.zeros(3, dtype=torch.int32, device=DEVICE), torch.empty(300, 64, dtype=a.dtype, device=DEVICE)

    def call():
        grouped_mm(a, b.transpose(1, 2), offs=ends, out=out, config=config)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for sizes in ([300, 0, 0], [1, 130, 7], [0, 0, 0], [100, 100, 100]):
        out.fill_(7)
        ends.copy_(torch.tensor(sizes).cumsum(0))
        graph.replay()
        expected = torch.full_like(out, 7)
        for group, end in enumerate(torch.tensor(sizes).cumsum(0).tolist()):
            rows = slice(end - sizes[group], end)
            expected[rows] = a[rows] @ b[group].t()
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(ACTIVE, reason="takes 5 GB and a GPU")
@pytest.mark.parametrize("config", [None, FusedConfig(block_size_m=128, block_size_n=128)], ids=["chosen", "Triton"])
def test_weights_of_more_than_2_31_elements(config):
    b = torch.zeros(33, 8192, 8192, dtype=torch.bfloat16, device=DEVICE)
    b[-1].normal_()
    a, counts = torch.randn(33, 2, 8192, device=DEVICE).bfloat16(), torch.ones(33, dtype=torch.int32, device=DEVICE)
    out = grouped_mm(a, b.transpose(1, 2), counts=counts, config=config)
    torch.testing.assert_close(out[-1, :1], a[-1, :1] @ b[-1].t(), rtol=2e-2, atol=1)
    assert not out[:-1, 0].count_nonzero()


def test_the_benchmark(tmp_path):
    """It compares results, and gives a time for all but what torch cannot do here."""
    main = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "grouped_mm.py"))["main"]
    file = tmp_path / "figures.json"
    main.callback(["2x8x128x128"], ["bfloat16", "fp8 blocks"], ["iris", "iris gated", "dense"], file)
    rows = json.loads(file.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["bfloat16", "fp8 blocks"]
    assert all(time > 0 for row in rows for time in row["us"].values())


A, B, ENDS = torch.zeros(6, 16), torch.zeros(2, 16, 8), torch.tensor([3, 6], dtype=torch.int32)
EXPANDED = torch.zeros(2, 4, 16)
WRITTEN = torch.zeros(6, 8)
MISTAKES = {
    "needs offs": dict(mat_a=A),
    "have counts|has counts": dict(mat_a=EXPANDED, offs=ENDS),
    "a matrix for each": dict(mat_a=torch.zeros(3, 4, 16)),
    "as many rows as mat_a has columns, 4": dict(mat_a=torch.zeros(6, 4), offs=ENDS),
    r"columns, 8; of weights \[E, N, K\] give": dict(mat_a=torch.zeros(6, 8), offs=ENDS),
    "one dtype": dict(mat_a=A.half(), offs=ENDS),
    r"mat_b \[E, K, N\]": dict(mat_a=A, mat_b=B[0], offs=ENDS),
    "offs is int32": dict(mat_a=A, offs=ENDS.float()),
    "counts is int32": dict(mat_a=EXPANDED, counts=ENDS[:1]),
    "out has to be": dict(mat_a=A, offs=ENDS, out=torch.zeros(6, 4)),
    "one place in memory": dict(mat_a=A, offs=ENDS, out=torch.zeros(1, 8).expand(6, 8)),
    "overlap": dict(mat_a=A, offs=ENDS, out=A[:, :8]),
    "out and scale_b overlap": dict(mat_a=A, offs=ENDS, out=WRITTEN, scale_b=WRITTEN[0, :2]),
    "other sign": dict(mat_a=torch.zeros(6, 16, dtype=torch.complex64).conj().imag, offs=ENDS),
    "even number": dict(mat_a=A, mat_b=B[:, :, :7], offs=ENDS, activation="silu_and_mul"),
    r"scale_a is float32, of shape \[6\] or \[6, 1\]": dict(mat_a=A, offs=ENDS, scale_a=torch.ones(2)),
    r"scale_b is float32, of shape \[2\] or \[2, 8\] or \[2, 1, 1\]": dict(mat_a=A, offs=ENDS, scale_b=torch.ones(8)),
    "groups at most": dict(mat_a=A, mat_b=torch.zeros(1025, 16, 1), offs=ENDS),
}


def to_device(given):
    return {name: each.to(DEVICE) if isinstance(each, torch.Tensor) else each for name, each in given.items()}


@pytest.mark.parametrize("words", MISTAKES)
def test_what_does_not_fit_together(words):
    given = {"mat_b": B, **MISTAKES[words]}
    # Views of one memory, and with the other sign, are made where they are.
    if not ACTIVE and ("sign" in words or "place" in words or "overlap" in words):
        pytest.skip("of tensors on the CPU")
    with pytest.raises(InvalidCollectiveError, match=words):
        grouped_mm(**to_device(given))


def test_other_mistakes():
    given = to_device({"mat_a": A, "mat_b": B, "offs": ENDS})
    with pytest.raises(NotATensorError, match=r"grouped_mm\(mat_a=\) takes a tensor, .* list"):
        grouped_mm(A.tolist(), given["mat_b"], offs=given["offs"])
    with pytest.raises(NotATensorError, match=r"grouped_mm\(offs=\) takes a tensor, .* list: \[3, 6\]"):
        grouped_mm(given["mat_a"], given["mat_b"], offs=[3, 6])
    with pytest.raises(UnknownChoiceError, match="silu_and_mul"):
        grouped_mm(**given, activation="gelu")
    with pytest.raises(InvalidConfigError, match="Leave out_dtype out"):
        grouped_mm(**given, out=torch.zeros(6, 8, device=DEVICE), out_dtype=torch.float16)
    for config in ("fast", FusedConfig(variant="vendor")):
        with pytest.raises(InvalidConfigError, match="FusedConfig"):
            grouped_mm(**given, config=config)


@pytest.mark.skipif(not ACTIVE, reason="on GPUs the host does not look at them")
@pytest.mark.parametrize(
    ("mat_a", "offs", "counts", "words"),
    [
        (A, [4, 3], None, r"offs\[1\] is 3.* 4 at least, .* and 6 at most"),
        (A, [-1, 3], None, r"offs\[0\] is -1"),
        (A, [3, 7], None, r"offs\[1\] is 7"),
        (A, [3, 6], [3, 4], r"counts\[1\] is 4.* room for 3 rows"),
        (EXPANDED, None, [5, 0], r"counts\[0\] is 5.* room for 4 rows"),
        (EXPANDED, None, [0, -2], r"counts\[1\] is -2"),
    ],
)
def test_numbers_that_are_wrong(mat_a, offs, counts, words):
    numbers = {"offs": offs, "counts": counts}
    given = {name: each and torch.tensor(each, dtype=torch.int32) for name, each in numbers.items()}
    with pytest.raises(InvalidValueError, match=words):
        grouped_mm(mat_a, B, **given)
