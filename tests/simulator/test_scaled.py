"""Products of formats of 4 and 8 bits with shared factors: Triton's `dot_scaled`, and AMD's `mfma_scaled`."""

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd import cdna3

from iris.simulator import ACTIVE
from simulator import cdna_kernels

assert ACTIVE

M, N, K = 64, 32, 128
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}
generator = torch.Generator().manual_seed(0)


def decoded(nibbles):
    """E2M1 by its definition: a sign, two bits of exponent with bias 1, one bit of the fraction."""
    sign, exponent, fraction = nibbles >> 3, (nibbles >> 1 & 3).double(), (nibbles & 1).double()
    size = torch.where(exponent == 0, fraction / 2, 2 ** (exponent - 1) * (1 + fraction / 2))
    return size * (1 - 2 * sign.double())


def operand(name, rows, columns, axis):
    """What the kernel gets, and the numbers; two of 4 bits follow each other along ``axis``."""
    if name != "e2m1":
        stored = torch.randn(rows, columns, generator=generator).to(DTYPES[name])
        return stored, stored.double()
    nibbles = torch.randint(16, (rows, columns), generator=generator, dtype=torch.uint8)
    first, second = (nibbles.unflatten(axis, (-1, 2)).select(axis + 1, half) for half in (0, 1))
    return first | second << 4, decoded(nibbles)


def factors(rows, given):
    """The exponents that the kernel gets, and the factor of each number along K."""
    exponents = torch.randint(120, 134, (rows, K // 32), generator=generator, dtype=torch.uint8)
    return (exponents if given else None), (2.0 ** (exponents.double() - 127)).repeat_interleave(32, 1) ** given


@triton.jit
def dot_scaled(
    a, factors_a, b, factors_b, out, A: tl.constexpr, B: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    KA: tl.constexpr = K // 2 if A == "e2m1" else K
    KB: tl.constexpr = K // 2 if B == "e2m1" else K
    rows, columns, groups = tl.arange(0, M)[:, None], tl.arange(0, N), tl.arange(0, K // 32)[None, :]
    left = tl.load(a + rows * KA + tl.arange(0, KA)[None, :])
    right = tl.load(b + tl.arange(0, KB)[:, None] * N + columns[None, :])
    of_left = None
    if factors_a is not None:
        of_left = tl.load(factors_a + rows * (K // 32) + groups)
    of_right = None
    if factors_b is not None:
        of_right = tl.load(factors_b + columns[:, None] * (K // 32) + groups)
    product = tl.dot_scaled(left, of_left, A, right, of_right, B, tl.full((M, N), 1, tl.float32))
    tl.store(out + rows * N + columns[None, :], product)


@pytest.mark.parametrize("launch", [dot_scaled, cdna_kernels.mfma_scaled])
@pytest.mark.parametrize(
    "a, b, scaled",
    [("e4m3", "e5m2", (1, 1)), ("e2m1", "e2m1", (1, 1)), ("e2m1", "e4m3", (1, 0)), ("e5m2", "e2m1", (0, 1))],
)
def test_a_product_with_factors(launch, a, b, scaled):
    (left, numbers_a), (right, numbers_b) = operand(a, M, K, 1), operand(b, K, N, 0)
    (of_left, factors_a), (of_right, factors_b) = factors(M, scaled[0]), factors(N, scaled[1])
    out = torch.zeros(M, N)
    launch[(1,)](left, of_left, right, of_right, out, a, b, M, N, K)
    expected = (numbers_a * factors_a) @ (numbers_b * factors_b.T) + 1
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-3)


TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def upcast(x, scale, out, R: gl.constexpr, C: gl.constexpr, AXIS: gl.constexpr):
    RX: gl.constexpr = R // 2 if AXIS == 0 else R
    CX: gl.constexpr = C // 2 if AXIS == 1 else C
    i = gl.arange(0, RX, gl.SliceLayout(1, TILE))[:, None] * CX + gl.arange(0, CX, gl.SliceLayout(0, TILE))[None, :]
    j = gl.arange(0, R, gl.SliceLayout(1, TILE))[:, None] * C + gl.arange(0, C, gl.SliceLayout(0, TILE))[None, :]
    if scale is None:
        gl.store(out + j, gl.fp4_to_fp(gl.load(x + i), gl.bfloat16, AXIS))
    else:
        gl.store(out + j, cdna3.scaled_upcast(gl.load(x + i), gl.load(scale + j), gl.bfloat16, AXIS))


CASES = [("e2m1", 0, False), ("e2m1", 1, False)]
if hasattr(cdna3, "scaled_upcast"):  # Triton 3.6 has it not
    CASES += [("e2m1", 0, True), ("e2m1", 1, True), ("e4m3", None, True)]


@pytest.mark.parametrize("name, axis, scaled", CASES)
def test_numbers_of_few_bits_become_larger_ones(name, axis, scaled):
    x, numbers = operand(name, 16, 32, axis)
    exponents = torch.randint(120, 134, (16, 32), generator=generator, dtype=torch.uint8)
    out = torch.zeros(16, 32, dtype=torch.bfloat16)
    upcast[(1,)](x, exponents if scaled else None, out, 16, 32, axis)
    expected = numbers * 2.0 ** (exponents.double() - 127) if scaled else numbers
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0)
