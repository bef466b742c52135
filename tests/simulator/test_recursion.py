"""A device function may call itself, with other constants, as it may when it is compiled."""

import torch
import triton
import triton.language as tl

from iris.simulator import ACTIVE

assert ACTIVE


@triton.jit
def powers(x, COUNT: tl.constexpr):
    if COUNT == 1:
        return (x,)
    else:
        return powers(x, COUNT - 1) + (powers(x, COUNT - 1)[COUNT - 2] * x,)


@triton.jit
def cube(out, x):
    tl.store(out, powers(x, 3)[2])


def test_a_function_that_calls_itself():
    out = torch.zeros(1, dtype=torch.int32)
    cube[(1,)](out, 5)
    assert out.item() == 125
