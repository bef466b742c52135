"""Test data that differ at every position, rank and call, so that misplaced, stale and repeated values show."""

import torch


def pattern(shape, dtype, rank, call=0):
    """Random bits of ``dtype`` on the CPU, the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(1000003 * call + rank + 1)
    count = torch.Size(shape).numel()
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).to(torch.bool).view(shape)
    data = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(shape)


def fill(tensor, rank, call=0):
    """Overwrite ``tensor`` with the pattern of ``rank`` and ``call``."""
    _bits(tensor).copy_(_bits(pattern(tensor.shape, tensor.dtype, rank, call)))


def assert_same_bits(actual, expected):
    """Equal bit by bit: NaN payloads and the sign of zero count."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    # Copies, as bits can be viewed where elements lie side by side.
    bits = [_bits(each.cpu().clone(memory_format=torch.contiguous_format)) for each in (actual, expected)]
    torch.testing.assert_close(*bits, rtol=0, atol=0)


def _bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)
