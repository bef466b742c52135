"""Two ranks of torchrun, of which one ends, or comes late, before anybody knows its process.

    torchrun --nproc-per-node 2 end_unknown.py end|late

They use a backend that does not connect the ranks, as NCCL does not.
"""

import os
import sys
import time

import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 (registers the backend "fake")

import iris
from iris.world import strangers


def main(how):
    # Two processes have been started long before they have imported torch.
    strangers.ALL_STARTED_S = 0.0
    if int(os.environ["RANK"]) and how == "late":
        time.sleep(2.5)
    store, rank, ranks = next(dist.rendezvous("env://"))
    dist.init_process_group("fake", store=store, rank=rank, world_size=ranks)
    if dist.get_rank() and how == "end":
        os._exit(0)
    with iris.iris(1 << 20) as ctx:
        ctx.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
