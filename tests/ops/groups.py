"""A grouped GEMM by `iris.ops.grouped_mm` against float64, group by group."""

import torch

from iris.ops import grouped_mm
from iris.simulator import ACTIVE

FP8 = torch.float8_e4m3fn
DEVICE = torch.device("cpu" if ACTIVE else "cuda")
# How many rows each group has.
SIZES = {
    "uneven": [1, 0, 37, 3, 0, 16],
    "equal": [8, 8, 8],
    "one group": [21],
    "rows": [1] * 9,
    "empty at the ends": [0, 5, 0],
    "no row": [0, 0],
}
LAYOUTS = ("ends", "padded", "expanded", "whole")
ORDERS = ("rows", "columns", "sliced")
# Of A and B alike, or of each its own.
SCALES = ("none", "lines", "groups", "A by blocks", "blocks", "lines, blocks", "blocks, groups", "blocks, lines")
UNTOUCHED = 7.0


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def where_groups_lie(sizes, layout):
    """The shape of all rows, the places in it of each group's, and the offs and counts that say so."""
    if layout in ("expanded", "whole"):
        capacity = max(sizes) + (0 if layout == "whole" else 5)
        given = [capacity] * len(sizes) if layout == "whole" else sizes
        places = [(group, slice(0, count)) for group, count in enumerate(given)]
        return (len(sizes), capacity), places, None, None if layout == "whole" else torch.tensor(sizes)
    rooms = [-(-count // 8) * 8 if layout == "padded" else count for count in sizes]
    ends = torch.tensor(rooms).cumsum(0)
    begins = [end - room for end, room in zip(ends.tolist(), rooms, strict=True)]
    places = [(slice(begin, begin + count),) for begin, count in zip(begins, sizes, strict=True)]
    # After the last group are rows of none.
    return (sum(rooms) + 3,), places, ends, torch.tensor(sizes) if layout == "padded" else None


def weights(E, K, N, dtype, order, seed):
    """``[E, K, N]``; by columns as a weight ``[E, N, K]`` is read."""
    values = random(E, K, N, seed=seed)
    if order == "columns":
        return values.transpose(1, 2).contiguous().to(dtype).to(DEVICE).transpose(1, 2)
    if order == "sliced":
        around = torch.zeros(E, K + 1, N + 3, dtype=dtype, device=DEVICE)
        around[:, 1:, 2:-1] = values.to(dtype).to(DEVICE)
        return around[:, 1:, 2:-1]
    return values.to(dtype).to(DEVICE)


def scales(kind, rows, E, K, N, seed):
    """Of A and of B, as they are given."""
    deep, wide = -(-K // 128), -(-N // 128)
    shapes = {
        "none": (None, None),
        "lines": (rows, (E, N)),
        "groups": (None, (E,)),
        "A by blocks": ((*rows, deep), None),
        "blocks": ((*rows, deep), (E, wide, deep)),
        "lines, blocks": (rows, (E, wide, deep)),
        "blocks, groups": ((*rows, deep), (E,)),
        "blocks, lines": ((*rows, deep), (E, N)),
    }
    return [
        None if shape is None else (0.5 + random(*shape, seed=seed + i).abs()).float().to(DEVICE)
        for i, shape in enumerate(shapes[kind])
    ]


def scaled(a, b, scale_a, scale_b, place, group):
    """One group's A and B in float64, times their scales."""
    a, b = a[place].double(), b[group].double()
    K, N = b.shape
    if scale_a is not None:
        of_rows = scale_a[place].double()
        a = a * (of_rows[:, None] if of_rows.dim() == 1 else of_rows.repeat_interleave(128, 1)[:, :K])
    if scale_b is not None:
        of_group = scale_b[group].double()
        if of_group.dim() == 2:
            of_group = of_group.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K].t()
        b = b * of_group
    return a, b


def exactly(a, b, activation, precision):
    """The result of a group in float64, and how far from it each element may be that is formed in ``precision``."""
    product, allowed = a @ b, precision * (a.abs() @ b.abs())
    if activation is None:
        return product, allowed
    (gate, up), (of_gate, of_up) = product.chunk(2, 1), allowed.chunk(2, 1)
    # The slope of silu is 1.1 at most.
    gated = torch.nn.functional.silu(gate)
    return gated * up, 1.1 * of_gate * (up.abs() + of_up) + gated.abs() * of_up + precision * (gated * up).abs()


def check(sizes, layout, dtype, K, N, order, scale, activation=None, config=None, out_dtype=None, sliced=False):
    """Rows of no group are NaN, and are not touched in ``out``."""
    shape, places, offs, counts = where_groups_lie(sizes, layout)
    offs, counts = (None if each is None else each.to(torch.int32).to(DEVICE) for each in (offs, counts))
    E, columns = len(sizes), N if activation is None else N // 2
    a = torch.full((*shape, K), torch.nan, dtype=dtype, device=DEVICE)
    for group, place in enumerate(places):
        a[place] = random(*a[place].shape, seed=100 + group).to(dtype).to(DEVICE)
    b = weights(E, K, N, dtype, order, seed=7)
    scale_a, scale_b = scales(scale, shape, E, K, N, seed=50)
    out_dtype = out_dtype or (torch.bfloat16 if dtype.itemsize == 1 else dtype)
    around = torch.full((*shape, columns + 2 * sliced), UNTOUCHED, dtype=out_dtype, device=DEVICE)
    out = around[..., 1:-1] if sliced else around
    given = {"offs": offs, "counts": counts, "scale_a": scale_a, "scale_b": scale_b, "activation": activation}
    assert grouped_mm(a, b, **given, out=out, config=config) is out
    # Sums of so many bits: of fp8 on Hopper those of a step, and of float32 by TF32 on GPUs.
    precision = 2.0**-20 if ACTIVE or dtype.itemsize == 2 else 2.0**-9
    expected = torch.full(around.shape, UNTOUCHED, dtype=torch.float64, device=DEVICE)
    tolerance = torch.zeros_like(expected)
    rounding = torch.finfo(out_dtype)
    inner = slice(1, -1) if sliced else slice(None)
    for group, place in enumerate(places):
        of_group = scaled(a, b, scale_a, scale_b, place, group)
        exact, allowed = exactly(*of_group, activation, precision)
        expected[(*place, inner)] = exact
        tolerance[(*place, inner)] = allowed + rounding.eps * exact.abs().clamp(min=rounding.smallest_normal)
    wrong = ~((around.double() - expected).abs() <= tolerance)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, the first at {wrong.nonzero()[0].tolist()}"
