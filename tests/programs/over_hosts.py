"""Programs of the documentation, and a collective of each kind, on the ranks of two hosts.

over_hosts.py PROGRAM...    # under torchrun; those of the documentation, as they stand
"""

import runpy
import sys

import torch
from ccl.calls import Case
from ccl.test_over_hosts import COMBINES, MOVES, combine, move
from ops.products import OPERATIONS
from ops.test_over_hosts import multiply
from rank_pool import Hosts

import iris
from iris.ccl import ReduceOp


def main(*programs):
    for program in programs:
        runpy.run_path(program, run_name="__main__")
    with iris.iris(1 << 26) as ctx:
        hosts = Hosts(ctx.num_hosts, ctx.num_local_ranks)
        assert [ctx.is_local(rank) for rank in range(ctx.num_ranks)] == [
            hosts.host_of(rank) == ctx.host for rank in range(ctx.num_ranks)
        ]
        move(ctx, [Case(collective, (7, 33), torch.bfloat16, root=2) for collective in MOVES])
        combine(ctx, hosts, [(collective, (7, 33), torch.bfloat16, ReduceOp.SUM, "plain") for collective in COMBINES])
        for operation in OPERATIONS:
            rows = ("rows", "rows", "rows")
            multiply(ctx, operation, [((5, 7, 9), torch.float32, "chosen", *rows, False, False, False)])
        ctx.ccl.barrier()
        ctx.barrier()
        print(f"rank {ctx.cur_rank} of {ctx.num_ranks} on host {ctx.host} of {ctx.num_hosts}: ok", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
