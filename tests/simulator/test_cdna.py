"""AMD's matrix cores, and the loads to shared memory that a kernel waits for."""

import pytest
import torch
from triton.experimental.gluon import language as gl

from iris.simulator import ACTIVE
from simulator import cdna_kernels as kernels

assert ACTIVE


def multiply(shape, dtype, *how, **options):
    M, N, K = shape
    generator = torch.Generator().manual_seed(M)
    a, b = (torch.randn(size, K, generator=generator).to(dtype) for size in (M, N))
    around = torch.full((M + 1, N), 7.0)
    kernel, grid, arguments, options = kernels.launch_matmul(a, b, around[:-1], *how, **options)
    kernel[grid](*arguments, **options)
    assert torch.all(around[-1] == 7)
    return around[:-1], a.float() @ b.float().T


@pytest.mark.parametrize("version, direct", [(3, False), (4, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(64, 64, 64), (100, 72, 208)])
def test_a_product(shape, dtype, version, direct):
    found, expected = multiply(shape, dtype, version, direct)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_load_that_is_not_waited_for_gives_wrong_numbers():
    found, expected = multiply((64, 64, 256), torch.bfloat16, 4, True, FORGET="copy")
    assert not torch.allclose(found, expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32])
def test_a_masked_buffer_load_finds_zeros(dtype):
    x, out = torch.ones(1024, dtype=dtype), torch.full((1024,), 7, dtype=dtype)
    kernels.load_past_the_end[(1,)](x, out, 1000, 1024)
    assert torch.equal(out, (torch.arange(1024) < 1000).to(dtype))


@pytest.mark.parametrize("forget", [False, True])
def test_a_copy_past_registers_is_there_when_it_has_been_waited_for(forget):
    x, out = torch.ones(1024), torch.full((1024,), 7.0)
    kernels.copy_past_registers[(1,)](x, out, 1000, 1024, forget)
    assert torch.equal(out, (torch.arange(1024) < 1000).float()) != forget


@pytest.mark.parametrize("other", [0.0, None])
def test_where_a_copy_past_registers_is_masked(other):
    """Without another value, what was there stays."""
    x, out = torch.ones(1024), torch.full((1024,), 7.0)
    kernels.copy_past_registers[(1,)](x, out, 1000, 1024, OTHER=other)
    assert torch.all(out[1000:] == (3.0 if other is None else other)) and torch.all(out[:1000] == 1)


@pytest.mark.skipif(not hasattr(gl.amd, "hint"), reason="this Triton has neither")
def test_a_slice_of_registers_and_a_hint():
    x, out = torch.randn(64, 32), torch.zeros(32, 32)
    kernels.lower_half[(1,)](x, out)
    assert torch.equal(out, x[32:])
