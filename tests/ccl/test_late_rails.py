"""Collectives and operations over hosts whose rails are late, on each rank another time: the same bits at any seed."""

import contextlib
import random
import time
from unittest import mock

import pytest
import torch
from covering import EVERYTHING, SAMPLED, thorough
from ops.products import OPERATIONS
from ops.test_over_hosts import gather_columns, multiply, normalise
from rank_pool import HOSTS, Hosts, needs_gloo

import iris
from ccl.calls import Case
from ccl.test_chunks_over_hosts import in_chunks
from ccl.test_over_hosts import COMBINES, MOVES, combine, move, repeat
from iris.ccl import ReduceOp
from iris.world import late_rails

pytestmark = needs_gloo


@contextlib.contextmanager
def on_late_rails(ctx, seed):
    """A context of all ranks whose rails are late."""
    before, late_rails.chance = late_rails.chance, random.Random(f"{seed} of rank {ctx.cur_rank}")
    try:
        delays = []
        # Of the rails that are late: how many transfers, and by what.
        begin = late_rails.DelayedTransfer.begin

        def begin_noted(transfer):
            delays.append(transfer._delay_s)
            begin(transfer)

        with mock.patch.object(late_rails.DelayedTransfer, "begin", begin_noted), iris.iris(1 << 26) as other:
            yield other
            assert any(delays), "no transfer was late"
    finally:
        late_rails.chance = before


def call_in_rounds(ctx, hosts, seed, number):
    """In each round other data, and another rank that is late. Calls are made in so many chunks."""
    with on_late_rails(ctx, seed) as ctx, in_chunks(ctx, number):
        for turn in range(1 if SAMPLED else 3):
            time.sleep(0.02 * (turn == ctx.cur_rank))
            root, dtype = (seed + turn) % ctx.num_ranks, (torch.bfloat16, torch.int32, torch.float32)[turn]
            move(ctx, [Case(collective, (7, 33 + turn), dtype, root=root) for collective in MOVES])
            combine(ctx, hosts, [(each, (7, 33 + turn), dtype, ReduceOp.SUM, "plain") for each in COMBINES])
            ctx.device_barrier()
        repeat(ctx, hosts)


def multiply_in_rounds(ctx, seed):
    with on_late_rails(ctx, seed) as ctx:
        for operation in OPERATIONS:
            time.sleep(0.02 * (len(operation) % ctx.num_ranks == ctx.cur_rank))
            for config in ("chosen", "fused", "copies"):
                for shape, dtype in (((5, 7, 9), torch.float32), ((11, 40, 24), torch.bfloat16)):
                    multiply(ctx, operation, [(shape, dtype, config, "rows", "rows", "rows", False, False, False)])
        gather_columns(ctx)
        normalise(ctx)


@pytest.mark.ranks(*(HOSTS if EVERYTHING else (Hosts(2, 2),)))
@pytest.mark.parametrize("seed", [1, thorough(2)])
@pytest.mark.parametrize("number", [thorough(1), 4])
def test_collectives(ranks, seed, number):
    ranks.run(call_in_rounds, ranks.hosts, seed, number)


@pytest.mark.ranks(*(HOSTS if EVERYTHING else (Hosts(2, 2, dealt=True),)))
@pytest.mark.parametrize("seed", [1, thorough(2)])
def test_operations(ranks, seed):
    ranks.run(multiply_in_rounds, seed)
