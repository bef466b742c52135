"""Lamport-style elements that go to memory which nobody has cleared are an error, also if no reader comes early."""

import pytest
import torch
import triton
import triton.language as tl

from iris.language.lamport import lamport_clear, lamport_send


@triton.jit
def send(ptr, values, n, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    lamport_send(ptr + k, tl.load(values + k), k < n)


@triton.jit
def clear(ptr, n, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    lamport_clear(ptr + k, k < n)


@pytest.mark.parametrize(
    "dtype, bits", [(torch.float8_e4m3fn, torch.int8), (torch.bfloat16, torch.int16), (torch.float64, torch.int64)]
)
def test_elements_that_were_left_are_found(dtype, bits):
    memory, values = torch.zeros(16, dtype=bits), torch.arange(1, 17).to(dtype)
    send[(1,)](memory, values, 9, 16)
    clear[(1,)](memory, 9, 16)
    send[(1,)](memory, values, 12, 16)
    clear[(1,)](memory, 10, 16)
    with pytest.raises(RuntimeError, match="2 of 16 elements go to memory that holds older ones"):
        send[(1,)](memory, values, 16, 16)
