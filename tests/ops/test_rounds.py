"""Round after round on one workspace: other data each time, no meeting of hosts in between, a rank that comes late."""

import time
from dataclasses import replace

import pytest
import torch
from covering import EVERYTHING, covering

from iris.ops import FusedConfig
from iris.ops.copies import COPIED
from iris.ops.hopper.arguments import Plan
from ops.plans import planned, short_chunks
from ops.products import OPERATIONS

# Of all_gather_matmul several slabs of rows, in several strips each, which several programs send.
TRITON = FusedConfig(block_size_m=32, block_size_n=32, block_size_k=16, comm_sms=2)
GLUON = FusedConfig(use_gluon=True, block_size_m=128, block_size_n=64)
CONFIGS = {
    "triton": TRITON,
    # Of which each has a count of tiles: for programs that are dealt out unevenly, and for fewer programs.
    "triton, chiplets": replace(TRITON, num_sms=3, num_xcds=2, block_size_k=256),
    "triton, few programs": replace(TRITON, num_sms=2, num_xcds=3),
    "gluon": GLUON,
    "split": GLUON,
    "copies": FusedConfig(variant="copies"),
    "copies of fp8": FusedConfig(variant="copies"),
    "gluon of fp8": GLUON,
    # What small M gets by default.
    "vendor": FusedConfig(variant="vendor"),
}
FP8 = {"dtype": torch.float8_e4m3fn}
# Strips are sent in pieces of 1024 columns.
OPERANDS = {"triton, chiplets": {"K": 1100}, "split": {"K": 192}, "copies of fp8": FP8, "gluon of fp8": FP8}
# What only some operations have.
ONLY = {
    **dict.fromkeys(["triton, chiplets", "triton, few programs"], ["all_gather_matmul"]),
    "copies": COPIED,
    "copies of fp8": COPIED,
    "split": ("all_gather_matmul", "matmul_all_gather"),
}
CASES = covering(OPERATIONS, CONFIGS, where=lambda name, config: name in ONLY.get(config, OPERATIONS))
M, N = 48, 96  # a rank's rows, in whole
LATE = 2_000_000  # cycles: about a millisecond


def digits(numbers):
    """Whole numbers from -1 to 1, of which sums are exact; those of two series of numbers have nothing in common."""
    # Multiplied and folded twice, within 32 bits: once would give neighbouring series equal digits.
    for factor in (0x9E3779B1, 0x85EBCA6B):
        numbers = (numbers * factor) & 0xFFFFFFFF
        numbers = numbers ^ (numbers >> 15)
    return (numbers % 3 - 1).float()


class Round:
    """The operands of all ranks in a round, other ones at each position, rank and round."""

    def __init__(self, ctx, name, K=16, dtype=torch.bfloat16, M=M):
        self.name, self.rank, self.size, self.dtype = name, ctx.cur_rank, ctx.num_ranks, dtype
        rows = M * ctx.num_ranks if name == "matmul_reduce_scatter" else M
        positions = torch.arange(rows * K, device=ctx.device).view(rows, K)
        self.positions = [positions + rank * rows * K for rank in range(self.size)]
        lines = torch.arange(K * N, device=ctx.device).view(K, N)
        self.b = [digits(lines + (rank + 1) * 1_000_003).to(self.dtype) for rank in range(self.size)]

    def a(self, number, rank):
        return digits(self.positions[rank] + number * 100_003).to(self.dtype)

    def expected(self, number):
        everyone = [self.a(number, rank).float() for rank in range(self.size)]
        if self.name == "all_gather_matmul":
            return torch.cat(everyone) @ self.b[self.rank].float()
        products = [a @ b.float() for a, b in zip(everyone, self.b, strict=True)]
        if self.name == "matmul_all_gather":
            return torch.cat(products)
        total = sum(products)
        return total.chunk(self.size)[self.rank] if self.name == "matmul_reduce_scatter" else total


def with_its_plan(ctx, worker, name, config):
    # All two tiles of a rank, each split into three.
    with planned(ctx, Plan(3, 2, paced=True) if config == "split" else None):
        worker(ctx, name, config)


def play(ctx, name, config, **sizes):
    on_gpu = ctx.device.type == "cuda"
    data = Round(ctx, name, **OPERANDS.get(config, {}) | sizes)
    out = ctx.zeros(*data.expected(0).shape, dtype=torch.bfloat16)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for number in range(2000 if on_gpu else 2 * ctx.num_ranks if EVERYTHING else 3):
        if on_gpu and number % 40 == ctx.cur_rank:
            torch.cuda._sleep(LATE)
        elif not on_gpu and number % ctx.num_ranks == ctx.cur_rank:
            time.sleep(0.02)
        getattr(ctx.ops, name)(out, data.a(number, ctx.cur_rank), data.b[ctx.cur_rank], config=CONFIGS[config])
        wrong += (out.float() != data.expected(number)).sum()
    assert wrong.item() == 0
    # A result on the heap is not written by peers any more.
    ctx.barrier()


@pytest.mark.parametrize("name, config", CASES)
def test_rounds(ranks, name, config):
    ranks.run(with_its_plan, play, name, config)


def play_with_chunks(ctx):
    # Of three tiles of a rank's rows one comes at a time, or two of a rank that has another one after it.
    with planned(ctx, Plan(together=2)), short_chunks():
        play(ctx, "all_gather_matmul", "gluon", M=257)


@pytest.mark.ranks(3)
def test_rounds_of_rows_that_come_in_chunks(ranks):
    ranks.run(play_with_chunks)


def replay(ctx, name, config):
    """A graph of a call, whose input the graph itself makes from the number of the round."""
    data = Round(ctx, name, **OPERANDS.get(config, {}))
    out = ctx.zeros(*data.expected(0).shape, dtype=torch.bfloat16)
    number = torch.zeros((), dtype=torch.int64, device=ctx.device)
    own = data.b[ctx.cur_rank]

    def call():
        getattr(ctx.ops, name)(out, data.a(number, ctx.cur_rank), own, config=CONFIGS[config])

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        number += 1
        call()
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for turn in range(1, 501):
        if turn % 40 == ctx.cur_rank:
            torch.cuda._sleep(LATE)
        graph.replay()
        wrong += (out.float() != data.expected(turn)).sum()
    assert wrong.item() == 0
    ctx.barrier()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are for GPUs")
@pytest.mark.parametrize("name, config", CASES)
def test_replays(ranks, name, config):
    ranks.run(with_its_plan, replay, name, config)
