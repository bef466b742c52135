"""Grouped GEMMs by the Gluon kernel for Hopper: whole and half tiles, both orders of B, fp8 with scales, activation."""

import pytest
import torch
from covering import sample, thorough

from iris.errors import InvalidConfigError
from iris.ops import FusedConfig, grouped_mm
from iris.simulator import ACTIVE
from ops.groups import DEVICE, FP8, LAYOUTS, SCALES, check

pytestmark = pytest.mark.skipif(
    not ACTIVE and torch.cuda.get_device_capability() != (9, 0), reason="the kernel is for Hopper"
)


def config(columns, depth=64, **options):
    return FusedConfig(use_gluon=True, block_size_m=128, block_size_n=columns, block_size_k=depth, **options)


# Groups of a tile and its half, of a row more than these, of one row, and of none.
SIZES = {"halves": [64, 0, 65, 1], "tiles": [128, 129], "several": [1, 300, 0, 2], "no row": [0, 0]}
NARROW = config(128, 128)


@pytest.mark.parametrize("layout", LAYOUTS[:3])
@pytest.mark.parametrize("sizes", SIZES)
def test_groups_of_any_sizes(sizes, layout):
    check(SIZES[sizes], layout, torch.bfloat16, 72, 136, "columns", "none", config=config(64, num_sms=3))


WIDE = sample(
    [torch.bfloat16, torch.float16],
    # Of B by rows, K is a multiple of 64; by columns any rows of whole 16 bytes will do.
    [(64, 64, "rows"), (192, 264, "rows"), (8, 8, "columns"), (200, 256, "columns")],
    ["none", "lines", "groups"],
    [64, 128, 256],
    [None, torch.float16],
)


@pytest.mark.parametrize("layout", ["padded", thorough("expanded")])
def test_fp16_and_bf16(layout):
    for dtype, (K, N, order), scale, columns, out_dtype in WIDE:
        check(SIZES["halves"], layout, dtype, K, N, order, scale, config=config(columns), out_dtype=out_dtype)


@pytest.mark.parametrize("layout", ["padded", "expanded"])
@pytest.mark.parametrize("scale", ["blocks", *map(thorough, (scale for scale in SCALES[:-1] if scale != "blocks"))])
def test_fp8(layout, scale):
    # A tile of scales of blocks may be of two blocks, of which the second may begin past B's last column.
    widths = [64, 128, 256] if "blocks" in scale else [64, 128]
    for (K, N), columns in sample([(128, 128), (16, 8), (272, 520), (400, 200)], widths):
        check(SIZES["halves"], layout, FP8, K, N, "columns", scale, config=config(columns, 128))


@pytest.mark.parametrize(
    ("dtype", "scale", "columns"),
    [
        (torch.bfloat16, "none", 256),
        thorough(torch.bfloat16, "lines", 128),
        (FP8, "lines", 128),
        (FP8, "A by blocks", 128),
        thorough(FP8, "blocks", 128),
        (FP8, "blocks", 256),
        thorough(FP8, "lines, blocks", 128),
    ],
    ids=str,
)
def test_activation(dtype, scale, columns):
    """Each half of B has a tile and a part of one; with scales of blocks whole blocks."""
    N = 512 if "blocks" in scale else 2 * 72
    for layout in ("ends", "expanded"):
        check(
            SIZES["halves"],
            layout,
            dtype,
            144,
            N,
            "columns",
            scale,
            "silu_and_mul",
            config(columns, 128 // dtype.itemsize),
        )


def test_many_groups_of_few_rows():
    """As in decoding, where groups are in all threads of a warp several times."""
    sizes = [(7 * group) % 3 % 2 for group in range(100)]
    check(sizes, "padded", torch.bfloat16, 8, 8, "columns", "none", config=config(64))


A, B, ENDS = torch.zeros(6, 64).bfloat16(), torch.zeros(2, 64, 128).bfloat16(), torch.tensor([3, 6])
A8, B8 = A.to(FP8), torch.zeros(2, 128, 64).to(FP8).transpose(1, 2)
LINES, BLOCKS = torch.ones(6), torch.ones(6, 1)
REFUSED = {
    "tiles of 128 rows": dict(config=FusedConfig(use_gluon=True, block_size_n=64)),
    "16384 elements at most": dict(mat_a=A8, mat_b=B8, config=config(256, 128)),
    "a block_size_k of 64": dict(config=config(64, 32)),
    "fp16, bf16 or fp8, and a result": dict(out_dtype=torch.float32),
    "not empty": dict(mat_a=A[:, :0], mat_b=B[:, :0]),
    "A whose rows are contiguous": dict(mat_a=torch.zeros(64, 6).bfloat16().t()),
    # Made where it is used, since a copy of it would begin anew.
    "A whose rows are contiguous, and begin at multiples": dict(
        mat_a=torch.zeros(6, 65, dtype=torch.bfloat16, device=DEVICE)[:, 1:]
    ),
    "B whose columns are contiguous": dict(mat_a=A8, mat_b=torch.zeros(2, 64, 128).to(FP8), config=NARROW),
    "of a K that block_size_k divides": dict(mat_a=A[:, :40], mat_b=B[:, :40]),
    "fp16 and bf16 without an activation": dict(activation="silu_and_mul", config=config(128)),
    "with fp8 alone": dict(scale_a=BLOCKS),
    "without scales of blocks of A": dict(
        mat_a=A8, mat_b=B8, scale_a=BLOCKS, scale_b=torch.ones(2, 128), config=NARROW
    ),
    "a multiple of 128": dict(mat_a=A8, mat_b=B8, scale_a=BLOCKS, activation="silu_and_mul", config=NARROW),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_cannot_do(words):
    given = {"mat_a": A, "mat_b": B, "offs": ENDS, "config": config(64), **REFUSED[words]}
    given = {name: each.to(DEVICE) if isinstance(each, torch.Tensor) else each for name, each in given.items()}
    with pytest.raises(InvalidConfigError, match=words):
        grouped_mm(**given)
