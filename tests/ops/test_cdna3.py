"""The fused operations' Gluon kernels for AMD CDNA3, in the simulator: against float64, and round after round."""

import pytest
import torch
from covering import EVERYTHING, sample

from iris.errors import InvalidConfigError
from iris.ops import FusedConfig
from iris.ops.call import Call
from iris.ops.cdna3.arguments import Cdna3Kernels
from iris.ops.operations import Operations
from ops.products import OPERATIONS, PLACES, check_product
from ops.test_rounds import Round

pytestmark = pytest.mark.skipif(torch.cuda.is_available() and not torch.version.hip, reason="this GPU is not AMD's")

RANKS = (1, 2, 3) if EVERYTHING else (2,)
CONFIGS = {
    "small": FusedConfig(use_gluon=True, block_size_m=64, block_size_n=64, block_size_k=64, num_sms=3),
    "wide": FusedConfig(use_gluon=True, block_size_m=64, block_size_n=256, block_size_k=64, group_size_m=1, num_sms=1),
    "deep, chiplets": FusedConfig(use_gluon=True, block_size_m=128, block_size_n=128, block_size_k=128, num_xcds=2),
    "shallow": FusedConfig(use_gluon=True, block_size_m=128, block_size_n=128, block_size_k=32),
}
# M (a share of a rank, where rows are shared), N, K: multiples of tiles, and of nothing.
SHAPES = [(64, 64, 64), (1, 1, 1), (70, 131, 97), (150, 200, 260)]
CASES = [
    ((64, 64, 64), torch.bfloat16, "small", "rows", "rows", "columns", False, False),
    ((1, 1, 1), torch.float16, "wide", "sliced", "columns", "rows", True, False),
    ((70, 131, 97), torch.bfloat16, "small", "columns", "rows", "sliced", True, True),
    ((150, 200, 260), torch.float16, "deep, chiplets", "rows", "columns", "columns", False, True),
    ((131, 70, 40), torch.bfloat16, "shallow", "columns", "sliced", "rows", True, False),
]
ROUNDS = 2 if EVERYTHING else 1


def operations(ctx):
    """With AMD's kernels, whatever this machine has."""
    made = Operations(ctx)
    made._algorithms["hopper"] = made._algorithms["cdna3"]
    return made


def check(ctx, name, cases):
    ops = operations(ctx)
    for case in cases:
        shape, dtype, config, *rest = case
        check_product(ctx, ops, ROUNDS, name, shape, dtype, CONFIGS[config], *rest)
    ctx.barrier()
    ops.close()


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_product(ranks, name):
    everything = sample(SHAPES, [torch.float16, torch.bfloat16], list(CONFIGS), *PLACES)
    ranks.run(check, name, everything if EVERYTHING else CASES)


def play(ctx, name):
    """Other data each time, no meeting of hosts in between."""
    data, ops = Round(ctx, name), operations(ctx)
    out = ctx.zeros(*data.expected(0).shape, dtype=torch.bfloat16)
    wrong = 0
    for number in range(4):
        getattr(ops, name)(out, data.a(number, ctx.cur_rank), data.b[ctx.cur_rank], config=CONFIGS["small"])
        wrong += (out.float() != data.expected(number)).sum().item()
    assert wrong == 0
    ctx.barrier()
    ops.close()


@pytest.mark.ranks(*RANKS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_rounds(ranks, name):
    ranks.run(play, name)


def refuse(ctx, name, words, config, result=torch.bfloat16, columns=64, depth=64):
    ops = operations(ctx)
    # Nobody touches their memory.
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device=ctx.device) for shape in ((64, depth), (depth, columns)))
    out = torch.empty(64 * ctx.num_ranks, columns, dtype=result, device=ctx.device)
    with pytest.raises(InvalidConfigError, match=words):
        getattr(ops, name)(out, a, b, config=FusedConfig(use_gluon=True, **config))


@pytest.mark.parametrize(
    ("name", "words", "config", "given"),
    [
        ("matmul_all_gather", "64, 128 or 256 rows and columns", {"block_size_m": 32}, ()),
        ("matmul_all_gather", "64 KiB of shared memory", {"block_size_n": 256, "block_size_k": 128}, ()),
        ("matmul_all_gather", "each of 512 threads", {"block_size_k": 32}, ()),
        ("matmul_all_gather", "one dtype, fp16 or bf16", {}, (torch.float32,)),
        ("matmul_all_gather", "A has no columns", {}, (torch.bfloat16, 64, 0)),
        ("matmul_all_gather", "of up to 2796202 columns", {}, (torch.bfloat16, 2796203)),
    ],
)
def test_what_the_kernels_cannot_do(ranks, name, words, config, given):
    ranks.run(refuse, name, words, config, *given)


def test_lines_that_begin_too_far_apart_are_copied():
    """Further than what the kernels' offsets reach."""
    far = torch.empty_strided((64, 64), (1 << 22, 1), dtype=torch.bfloat16, device="meta")
    call = Call("matmul_all_gather", torch.empty(128, 64, device="meta"), far, far.t(), None, None, None)
    fits = Cdna3Kernels(None).operands(call)
    assert fits.a.stride() == fits.b.stride() == (64, 1)
