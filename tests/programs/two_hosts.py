"""Ranks of two hosts that multiply and reduce: all that moves is the library's. For a trace.

    torchrun --nproc-per-node 2 -m iris trace tests/programs/two_hosts.py 4096

runs it on two GPUs of one machine, each of which counts as a host: with matrices of so many rows in all, twice.
"""

import os
import sys

import torch

if "IRIS_HOST" not in os.environ:
    host = f"host{2 * int(os.environ['RANK']) // int(os.environ['WORLD_SIZE'])}"
    os.environ.update(IRIS_HOST=host, NCCL_HOSTID=host, NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo")

import iris

n = int(sys.argv[1]) if len(sys.argv) > 1 else 32
with iris.iris(1 << 30 if torch.cuda.is_available() else 1 << 22) as ctx:
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    rows, size = n // ctx.num_ranks, ctx.num_ranks
    a, b = ctx.ones(rows, n, dtype=dtype), torch.ones(n, n // 2, dtype=dtype, device=ctx.device)
    product = ctx.empty(n, n // 2, dtype=dtype)
    for _ in range(2):
        ctx.ops.all_gather_matmul(product, a, b)
    total = ctx.zeros(n, dtype=torch.int32) + ctx.cur_rank
    ctx.ccl.all_reduce(total, total)
    assert product.eq(n).all() and total.tolist() == [sum(range(size))] * n
