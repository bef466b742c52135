"""Arithmetic on every floating-point type: in float32, rounded to nearest even after each operation."""

import pytest
import torch
import triton
import triton.language as tl

import iris.simulator

assert iris.simulator.ACTIVE

NARROW = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
FLOATS = [torch.float16, *NARROW]
N = 64


def values(dtype: torch.dtype, seed: int, positive: bool = False) -> torch.Tensor:
    x = torch.randn(N, generator=torch.Generator().manual_seed(seed)) * 3
    return (x.abs() + 0.25 if positive else x).to(dtype)


def saturated(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    return (x.clamp(-limit, limit) if dtype.itemsize == 1 else x).to(dtype)


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@triton.jit
def arithmetic(x, y, out, OP: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    if OP == "add":
        c = a + b
    elif OP == "sub":
        c = a - b
    elif OP == "mul":
        c = a * b
    elif OP == "scale":
        c = a * 2.0 + 1.5
    elif OP == "minimum":
        c = tl.minimum(a, b)
    elif OP == "maximum":
        c = tl.maximum(a, b)
    elif OP == "where":
        c = tl.where(a > b, a, b)
    elif OP == "neg":
        c = -a
    elif OP == "abs":
        c = tl.abs(a)
    tl.store(out + i, c)


REFERENCE = {
    "add": lambda a, b, r: a + b,
    "sub": lambda a, b, r: a - b,
    "mul": lambda a, b, r: a * b,
    "scale": lambda a, b, r: r(a * 2.0).float() + 1.5,
    "minimum": lambda a, b, r: torch.minimum(a, b),
    "maximum": lambda a, b, r: torch.maximum(a, b),
    "where": lambda a, b, r: torch.where(a > b, a, b),
    "neg": lambda a, b, r: 0 - a,
    "abs": lambda a, b, r: a.abs(),
}


@pytest.mark.parametrize("dtype", FLOATS)
def test_arithmetic(dtype):
    """Of fp8 nothing but absolute values: for no GPU does the rest compile (`tests/codegen/test_generated_code.py`)."""
    x, y = values(dtype, 0), values(dtype, 1)
    for op, reference in REFERENCE.items():
        out = torch.zeros(N).to(dtype)
        if dtype.itemsize == 1 and op != "abs":
            with pytest.raises(TypeError, match="Arithmetic on fp8.* does not compile.*: convert to fp32 first"):
                arithmetic[(1,)](x, y, out, op, N)
            continue
        arithmetic[(1,)](x, y, out, op, N)
        expected = reference(x.float(), y.float(), lambda t: t.to(dtype))
        assert torch.equal(out.float(), expected.to(dtype).float()), op


@triton.jit
def convert(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


WIDE = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    ("source", "target"),
    [(source, target) for source in [torch.float32, *FLOATS] for target in WIDE]
    + [(source, target) for source in WIDE for target in FLOATS if target not in WIDE],
)
def test_conversion_rounds_to_nearest_even_and_saturates_in_eight_bits(source, target):
    special = torch.tensor([0.0, 1e9, -1e9, float("nan"), 448.0, 460.0, 480.0, 1 + 2**-8, 1 + 3 * 2**-8, 2.0**-9, 0.3])
    x = saturated(torch.cat([special, torch.linspace(-70, 70, N - len(special))]), source)
    out = torch.zeros(N).to(target)
    convert[(1,)](x, out, N)
    torch.testing.assert_close(out.float(), saturated(x.float(), target).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float8_e4m3fn, torch.float8_e5m2),
        (torch.float8_e5m2, torch.float8_e4m3fn),
        (torch.float64, torch.float8_e5m2),
        (torch.float8_e4m3fn, torch.float64),
    ],
)
def test_a_conversion_that_does_not_compile_is_refused(source, target):
    with pytest.raises(TypeError, match="does not compile: convert to fp32 first"):
        convert[(1,)](torch.ones(N).to(source), torch.zeros(N).to(target), N)


@triton.jit
def truncate(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty, fp_downcast_rounding="rtz"))


def test_conversion_toward_zero():
    x, out = values(torch.float32, 2), torch.zeros(N, dtype=torch.bfloat16)
    truncate[(1,)](x, out, N)
    assert torch.equal(out.view(torch.uint16), (x.view(torch.int32) >> 16).to(torch.uint16))


def test_infinity_toward_zero_stays_infinite():
    x, out = torch.tensor([float("inf"), 1e9, -float("inf"), 60_000.0]), torch.zeros(4).to(torch.float8_e5m2)
    truncate[(1,)](x, out, 4)
    assert out.float().tolist() == [float("inf"), 57344, -float("inf"), 57344]


@pytest.mark.parametrize(("source", "target"), [(torch.float64, torch.float16), (torch.float32, torch.float8_e4m3fn)])
def test_rounding_toward_zero_that_does_not_compile_is_refused(source, target):
    with pytest.raises(TypeError, match="rtz.* does not compile"):
        truncate[(1,)](torch.ones(N, dtype=source), torch.zeros(N).to(target), N)


NAN, INF = float("nan"), float("inf")
HIGHEST_BIT = -(2**63)


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (torch.float32, torch.int32, [2**31 - 1, -(2**31), 65504, 0, 5]),
        (torch.float32, torch.int64, [2**63 - 1, HIGHEST_BIT, 65504, HIGHEST_BIT, 5]),
        (torch.float64, torch.int32, [2**31 - 1, -(2**31), 65504, -(2**31), 5]),
        (torch.bfloat16, torch.int16, [2**15 - 1, -(2**15), 2**15 - 1, 0, 5]),
        (torch.float32, torch.uint16, [2**16 - 1, 0, 65504, 0, 5]),
        # By 16 bits: of 32767, of -32768 and of 65504 what the lower byte holds.
        (torch.float16, torch.int8, [-1, 0, -1, 0, 5]),
        (torch.float32, torch.uint8, [255, 0, 224, 0, 5]),
    ],
)
def test_a_number_that_an_integer_does_not_reach_becomes_the_nearest(source, target, expected):
    x, out = torch.tensor([INF, -INF, 65504.0, NAN, 5.9]).to(source), torch.zeros(5, dtype=target)
    for n in range(5):
        convert[(1,)](x[n:], out[n:], 1)
    assert out.tolist() == expected


@triton.jit
def copy(x, out, n, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i, mask=i < n), mask=i < n)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float64, *FLOATS]
)
def test_copy_keeps_every_bit(dtype):
    x = torch.randint(0, 2 if dtype == torch.bool else 256, (N * dtype.itemsize,), dtype=torch.uint8).view(dtype)
    out = torch.zeros_like(x)
    copy[(1,)](x, out, N - 1, N)
    assert same(out[:-1], x[:-1]) and same(out[-1:], torch.zeros_like(x[-1:]))


@triton.jit
def reductions(x, total, largest, smallest, where_largest, running, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(total, tl.sum(a))
    tl.store(largest, tl.max(a, 0))
    tl.store(smallest, tl.min(a, 0))
    tl.store(where_largest, tl.argmax(a, 0))
    tl.store(running + i, tl.cumsum(a, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reductions_and_scans(dtype):
    x = torch.arange(N).sub(20).mul(0.5).to(dtype).roll(7)  # sums of halves that all types hold exactly
    total, largest, smallest = (torch.zeros(1, dtype=dtype) for _ in range(3))
    where_largest, running = torch.zeros(1, dtype=torch.int32), torch.zeros(N, dtype=dtype)
    reductions[(1,)](x, total, largest, smallest, where_largest, running, N)
    assert largest == x.max() and smallest == x.min() and where_largest == x.float().argmax()
    torch.testing.assert_close(total, x.float().sum().to(dtype).reshape(1), rtol=2**-6, atol=0)
    torch.testing.assert_close(running, x.float().cumsum(0).to(dtype), rtol=2**-6, atol=2**-3)


@triton.jit
def sums(x, out, N: tl.constexpr):
    tl.store(out, tl.sum(tl.load(x + tl.arange(0, N))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sum_rounds_after_every_addition(dtype):
    step = torch.finfo(dtype).eps / 2  # 1 + step rounds to 1, so adding them first or last must show
    x = torch.tensor([1.0, step, step, step], dtype=dtype)
    out = torch.zeros(1, dtype=dtype)
    sums[(1,)](x, out, 4)
    assert out == ((x[0] + x[1]) + (x[2] + x[3]))


@triton.jit
def maximum_of_columns(x, out, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    tile = tl.load(x + rows * N + columns)
    tl.store(out + tl.arange(0, N), tl.max(tile, axis=0))
    tl.store(out + N + columns, tl.sum(tile, axis=0, keep_dims=True))


def test_reduction_along_an_axis():
    x, out = torch.randn(8, 16).bfloat16(), torch.zeros(2, 16, dtype=torch.bfloat16)
    maximum_of_columns[(1,)](x, out, 8, 16)
    assert torch.equal(out[0], x.amax(0))
    torch.testing.assert_close(out[1], x.sum(0), rtol=0.02, atol=0.05)


@triton.jit
def matmul(a, b, out, N: tl.constexpr, PRECISION: tl.constexpr = None):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    product = tl.dot(tl.load(a + i * N + j), tl.load(b + i * N + j), input_precision=PRECISION)
    tl.store(out + i * N + j, product)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int8])
def test_dot(dtype):
    accumulated = torch.int32 if dtype == torch.int8 else torch.float32
    a, b = (torch.randint(-8, 8, (32, 32), generator=torch.Generator().manual_seed(s)).to(dtype) for s in (0, 1))
    out = torch.zeros(32, 32, dtype=accumulated)
    matmul[(1,)](a, b, out, 32)
    assert torch.equal(out, (a.double() @ b.double()).to(accumulated))


@pytest.mark.parametrize("precision", ["tf32", "tf32x3", "ieee", "bf16x3", "bf16x6"])
def test_dot_of_float32_is_exact_in_every_precision(precision):
    a, b, out = torch.randn(32, 32), torch.randn(32, 32), torch.zeros(32, 32)
    matmul[(1,)](a, b, out, 32, precision)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)


@triton.jit
def accumulate(a, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    left = tl.load(a + at)
    tl.store(out + at, tl.dot(left, left, tl.load(out + at)))


@pytest.mark.parametrize(
    ("dtype", "accumulated", "right"),
    [
        (torch.float64, torch.float32, "fp64"),
        (torch.float16, torch.float64, "fp32"),
        (torch.bfloat16, torch.float16, "fp32"),
        (torch.int8, torch.float32, "int32"),
    ],
)
def test_dot_into_a_type_that_its_sums_are_not_of(dtype, accumulated, right):
    """Triton calls the result what the factors say, whatever the sums are in: it compiles for no GPU."""
    # Of factors of 16 bits Triton up to 3.7 asserts it itself, without a word.
    asserted = triton.__version__.startswith(("3.6", "3.7")) and dtype.itemsize == 2
    refused = (AssertionError, None) if asserted else (TypeError, f"Give an accumulator of {right}")
    with pytest.raises(refused[0], match=refused[1]):
        accumulate[(1,)](torch.ones(16, 16, dtype=dtype), torch.zeros(16, 16, dtype=accumulated), 16)


@triton.jit
def nan_and_logic(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(out + i, tl.minimum(a, 1.0))
    tl.store(out + N + i, tl.maximum(a, 1.0, propagate_nan=tl.PropagateNan.ALL))
    both = i > 1 and i < 4
    tl.store(out + 2 * N + i, tl.where(both or i == 6, 1.0, 0.0))
    tl.store(out + 3 * N + i, tl.where(not both, 1.0, 0.0))


def test_minimum_ignores_nan_and_logic_is_elementwise():
    x = torch.tensor([float("nan"), -2.0, 3.0, 0.5] * 2)
    out = torch.zeros(4, 8)
    nan_and_logic[(1,)](x, out, 8)
    assert out[0].tolist() == [1.0, -2.0, 1.0, 0.5] * 2
    assert out[1, 0].isnan() and out[1, 1:4].tolist() == [1.0, 3.0, 1.0]
    assert out[2].tolist() == [0, 0, 1, 1, 0, 0, 1, 0] and out[3].tolist() == [1, 1, 0, 0, 1, 1, 1, 1]


@triton.jit
def loops(n64, out):
    total = 0
    for i in range(3):
        total += i.to(tl.int64).to(tl.int32)
    for i in range(n64, n64 + 2):
        tl.store(out + 1, i * 2)
    for i in tl.static_range(2):
        total += i
    tl.store(out, total + min(n64, 5).to(tl.int32) + max(3, 4))


def test_loop_variables_are_tensors_of_the_bounds_type():
    out = torch.zeros(2, dtype=torch.int64)
    loops[(1,)](2**31, out)
    assert out.tolist() == [3 + 1 + 5 + 4, (2**31 + 1) * 2]
