"""Functions of the device libraries, by their portable and by the vendor's names."""

import pytest
import torch
import triton
import triton.language as tl

from iris.errors import NotInSimulatorError
from iris.simulator import ACTIVE

from triton.language.extra import libdevice  # isort: skip
from triton.language.extra.cuda import libdevice as nvidia  # isort: skip
from triton.language.extra.hip import libdevice as amd  # isort: skip

assert ACTIVE


@triton.jit
def functions(x, y, exponent, B: tl.constexpr):
    at = tl.arange(0, B)
    value = tl.load(x + at)
    tl.store(y + at, libdevice.tanh(value))
    tl.store(y + B + at, nvidia.pow(value, tl.load(exponent)))
    tl.store(y + 2 * B + at, amd.erf(value))
    tl.store(y + 3 * B + at, libdevice.isnan(libdevice.log1p(-1 - value)).to(value.dtype))
    tl.store(y + 4 * B + at, libdevice.rint(value * 10))
    tl.store(y + 5 * B + at, libdevice.exp(tl.load(exponent)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions_have_torchs_values(dtype):
    x, y = torch.linspace(0.1, 2, 16, dtype=dtype), torch.zeros(6, 16, dtype=dtype)
    exponent = torch.tensor([1.7], dtype=dtype)
    functions[(1,)](x, y, exponent, 16)
    one = torch.ones_like(x)
    expected = [x.tanh(), x**exponent, x.erf(), one, (x * 10).round(), exponent.exp() * one]
    torch.testing.assert_close(y, torch.stack(expected))


@triton.jit
def bessel(x):
    tl.store(x, libdevice.j0(tl.load(x)))


def test_a_function_without_a_namesake_is_named():
    with pytest.raises(NotInSimulatorError, match="^__nv_j0f of a device library is not available"):
        bessel[(1,)](torch.ones(1))
