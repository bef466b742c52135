"""Lamport-style elements that go to memory which nobody has cleared are an error, also if no reader comes early."""

import pytest
import torch
import triton
import triton.language as tl

from iris.language.lamport import lamport_clear, lamport_send


@triton.jit
def send(ptr, values, n, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    lamport_send(ptr, tl.load(values + k, mask=k < n), n)


@triton.jit
def clear(ptr, n, BLOCK: tl.constexpr):
    k = tl.arange(0, BLOCK)
    lamport_clear(ptr + k, k < n)


@pytest.mark.parametrize(
    "dtype, bits, left",
    [
        (torch.float8_e4m3fn, torch.int8, "2 of 8"),
        (torch.bfloat16, torch.int16, "4 of 16"),
        (torch.float64, torch.int64, "8 of 32"),
    ],
)
def test_words_that_were_left_are_found(dtype, bits, left):
    memory, values = torch.zeros(32, dtype=bits), torch.arange(1, 33).to(dtype)
    send[(1,)](memory, values, 9, 32)
    clear[(1,)](memory, 16, 32)  # whole vectors of 16 bytes have been sent
    send[(1,)](memory, values, 32, 32)
    clear[(1,)](memory, 24, 32)
    with pytest.raises(RuntimeError, match=f"{left} words go to memory that holds older ones"):
        send[(1,)](memory, values, 32, 32)


@pytest.mark.parametrize(
    "dtype, bits", [(torch.float8_e5m2, torch.uint8), (torch.float16, torch.int16), (torch.float32, torch.int32)]
)
def test_no_element_travels_as_zero(dtype, bits):
    """All ones become another NaN, and the elements beside them keep their bits."""
    ones = torch.iinfo(bits).max if bits == torch.uint8 else -1
    values = torch.tensor([ones, 0, 1, ones, 5, ones, 7, 8] * 4, dtype=bits)
    memory = torch.zeros(32, dtype=bits)
    send[(1,)](memory, values.view(dtype), 32, 32)
    arrived = ~memory
    changed = values == ones
    assert (memory != 0).all() and (arrived[~changed] == values[~changed]).all()
    assert arrived[changed].view(dtype).to(torch.float32).isnan().all()
