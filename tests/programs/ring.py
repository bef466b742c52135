"""Some all-reduces by the ring, of data that tell ranks, places and rounds apart. Argument: the number of ranks."""

import sys

import torch

import iris
from iris.ccl import Config
from iris.spawn import launch


def worker():
    with iris.iris(1 << 20) as ctx:
        size = ctx.get_num_ranks()
        for round in range(3):
            mine = torch.arange(3000.0, device=ctx.device) * (round + 1) + ctx.get_rank()
            total = torch.empty_like(mine)
            ctx.ccl.all_reduce(total, mine, config=Config(all_reduce_variant="ring"))
            ctx.barrier()
            assert torch.equal(total, size * (mine - ctx.get_rank()) + size * (size - 1) / 2)


if __name__ == "__main__":
    launch(worker, int(sys.argv[1]))
