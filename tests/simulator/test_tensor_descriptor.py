"""Triton's tensor descriptors, made by the host or in the kernel: what lies outside is filled, and not written."""

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from iris.simulator import ACTIVE

assert ACTIVE


@triton.jit
def copy_block(source, target, row, column):
    target.store([row, column], source.load([row, column]))


@triton.jit
def copy_block_of(source, target, rows, columns, row, column, R: tl.constexpr, C: tl.constexpr):
    block = tl.make_tensor_descriptor(source, [rows, columns], [columns, 1], [R, C])
    copy_block(block, tl.make_tensor_descriptor(target, [rows, columns], [columns, 1], [R, C]), row, column)


@triton.jit
def read_block(source, out, row, column, R: tl.constexpr, C: tl.constexpr):
    tl.store(out + tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :], source.load([row, column]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("made", ["by the host", "in the kernel"])
def test_only_the_tensor_is_written(dtype, made):
    source = (torch.arange(800) % 100 + 1).reshape(10, 80).to(dtype)
    target = torch.zeros(12, 80).to(dtype)
    if made == "by the host":
        blocks = [TensorDescriptor.from_tensor(tensor, [8, 32]) for tensor in (source, target[:10])]
        copy_block[(1,)](*blocks, 4, 64)
    else:
        copy_block_of[(1,)](source, target, 10, 80, 4, 64, 8, 32)
    expected = torch.zeros(12, 80)
    expected[4:10, 64:] = source.float()[4:, 64:]
    assert torch.equal(target.float(), expected)


@triton.jit
def write_block(source, target, columns, HOW: tl.constexpr, C: tl.constexpr):
    block = tl.make_tensor_descriptor(source, [4, C], [C, 1], [4, C]).load([0, 0])
    written = tl.make_tensor_descriptor(target, [4, columns], [C, 1], [4, C])
    if HOW == "store":
        written.store([0, 0], block)
    else:
        written.atomic_add([0, 0], block)


@pytest.mark.parametrize(
    "dtype, columns, written", [(torch.float16, 30, 32), (torch.int32, 13, 16), (torch.int32, 8, 8)]
)
@pytest.mark.parametrize("how", ["store", "add"])
def test_rows_are_written_by_16_bytes(how, dtype, columns, written):
    source, target = torch.arange(1, 129).view(4, 32).to(dtype), torch.zeros(4, 32, dtype=dtype)
    write_block[(1,)](source, target, columns, how, 32)
    source[:, written:] = 0
    assert torch.equal(target, source)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("padding", ["zero", "nan"])
def test_a_block_is_filled_outside_the_tensor(dtype, padding):
    source, out = torch.randn(10, 48).to(dtype), torch.zeros(8, 32).to(dtype)
    block = TensorDescriptor.from_tensor(source, [8, 32])
    block.padding = padding
    read_block[(1,)](block, out, -2, 32, 8, 32)
    expected = torch.full((8, 32), 0.0 if padding == "zero" else float("nan"))
    expected[2:, :16] = source.float()[:6, 32:]
    torch.testing.assert_close(out.float(), expected, equal_nan=True)


@pytest.mark.parametrize(
    "offset, width, column, message",
    [(1, 32, 0, "base or a stride"), (0, 33, 0, "base or a stride"), (0, 32, 3, "last")],
)
def test_what_tma_cannot_address_is_an_error(offset, width, column, message):
    memory, out = torch.zeros(1024), torch.zeros(8, 32)
    source = memory[offset : offset + 10 * width].view(10, width)
    with pytest.raises(ValueError, match=message):
        copy_block_of[(1,)](source, out, 10, width, 0, column, 8, 32)


@triton.jit
def store_zeros(target, row, column, HOW: tl.constexpr):
    block = tl.zeros([8, 32], tl.float32)
    if HOW == "store":
        target.store([row, column], block)
    else:
        target.atomic_add([row, column], block)


@pytest.mark.parametrize("row, column", [(-2, 0), (0, -32)])
@pytest.mark.parametrize("how", ["store", "add"])
def test_no_block_is_stored_before_the_tensor(how, row, column):
    block = TensorDescriptor.from_tensor(torch.zeros(10, 64), [8, 32])
    with pytest.raises(ValueError, match=rf"stored at \[{row}, {column}\]: .* begins before the tensor") as caught:
        store_zeros[(1,)](block, row, column, how)
    assert "store_zeros" in [frame.name for frame in caught.traceback]


@triton.jit
def combine(source, target, HOW: tl.constexpr):
    block = source.load([0, 0])
    if HOW == "add":
        target.atomic_add([0, 0], block)
    elif HOW == "min":
        target.atomic_min([0, 0], block)
    elif HOW == "max":
        target.atomic_max([0, 0], block)
    elif HOW == "and":
        target.atomic_and([0, 0], block)
    elif HOW == "or":
        target.atomic_or([0, 0], block)
    else:
        target.atomic_xor([0, 0], block)


@pytest.mark.parametrize(
    "how, combined, dtypes",
    [
        ("add", torch.add, [torch.float32, torch.float16, torch.bfloat16, torch.int32]),
        ("min", torch.minimum, [torch.bfloat16, torch.float16, torch.int32]),
        ("max", torch.maximum, [torch.bfloat16, torch.float16, torch.int32]),
        ("and", torch.bitwise_and, [torch.int32]),
        ("or", torch.bitwise_or, [torch.int32]),
        ("xor", torch.bitwise_xor, [torch.int32]),
    ],
)
def test_a_store_that_combines(how, combined, dtypes):
    for dtype in dtypes:
        generator = torch.Generator().manual_seed(1)
        source, target = (torch.randint(-99, 99, (12, 32), generator=generator).to(dtype) for _ in range(2))
        expected = combined(source, target)
        combine[(1,)](*(TensorDescriptor.from_tensor(tensor, [8, 32]) for tensor in (source, target[:5])), how)
        assert torch.equal(target[:5], expected[:5])
        assert not torch.equal(target[5:], expected[5:])
