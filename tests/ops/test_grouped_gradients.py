"""What gradients of experts take of rows: rows of no group are left out, and what nobody computed is zero."""

import pytest
import torch

from iris import simulator
from iris.ops.grouped import sums
from iris.ops.grouped.activation_gradient import differentiate_activation
from iris.ops.grouped.sums import sums_of_groups

DEVICE = "cpu" if simulator.ACTIVE else "cuda"
# Rows that groups have room for, and how many they have: one is full, one empty, one of no room.
ROOMS, COUNTS, AFTER = (4, 8, 0, 4), (4, 5, 0, 0), 3


def numbers(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def there():
    """Of each row, whether a group has it; and whether it is in a group's room."""
    has = [row < count for room, count in zip(ROOMS, COUNTS, strict=True) for row in range(room)] + [False] * AFTER
    return torch.tensor(has, device=DEVICE), torch.arange(len(has), device=DEVICE) < sum(ROOMS)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("inner", "dtype"), [(24, torch.bfloat16), (7, torch.float32), (1100, torch.float16)])
def test_the_gradient_of_an_activation(inner, dtype, gated):
    has, in_room = there()
    generator = torch.Generator().manual_seed(inner)

    def rows(*shape):
        # Of what nobody has written there may be anything.
        made = torch.randn(len(has), *shape, generator=generator).to(DEVICE)
        return torch.where(has.view(-1, *[1] * len(shape)), made, torch.nan)

    hidden, to_down, factors = rows(inner * (1 + gated)).to(dtype), rows(inner).to(dtype), rows()
    offsets = numbers(ROOMS).cumsum(0, dtype=torch.int32)
    got = differentiate_activation(hidden, to_down, factors, offs=offsets, counts=numbers(COUNTS))
    h, w = hidden[has].double().requires_grad_(), factors[has].double()[:, None]
    gate, up = h.chunk(2, dim=1) if gated else (None, h)
    value = torch.nn.functional.silu(gate) * up if gated else up
    of_factors = (value * to_down[has].double()).sum(dim=1)
    (w[:, 0] * of_factors).sum().backward()
    error = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    for found, right in zip(got, (w * value.detach(), h.grad, of_factors.detach()), strict=True):
        torch.testing.assert_close(found[has].double(), right, rtol=error, atol=error * inner**0.5)
    for padded in got[:2]:
        assert not padded[in_room & ~has].any()


def test_groups_without_rows_have_zeros():
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(16, n, generator=generator).bfloat16().to(DEVICE) for n in (8, 24))
    offsets = numbers([0, 4, 4, 13, 13, 13, 16])
    made = sums_of_groups(left, right, offsets)
    # What a grouped product leaves in a group of no rows is undefined, and may be no number.
    spoilt = torch.where((offsets.diff() == 0)[:, None, None], torch.nan, made)
    sums._zero_empty(spoilt, offsets)
    ends = offsets.tolist()
    for group, (begin, end) in enumerate(zip(ends, ends[1:], strict=False)):
        right_sum = left[begin:end].float().t() @ right[begin:end].float()
        for found in (made, spoilt):
            torch.testing.assert_close(found[group].float(), right_sum, rtol=1e-2, atol=1e-2)
