"""Each fused operation by each kernel, traced with IRIS_TRACE=1: what went between the ranks is what it says it moves.

Argument: the number of ranks.
"""

import sys
from collections import defaultdict

import torch

import iris
from iris.ops import FusedConfig
from iris.spawn import launch
from iris.tracing.summary import moves

CONFIGS = {
    "Triton": FusedConfig(block_size_m=32, block_size_n=32, block_size_k=16, num_sms=3),
    "Gluon": FusedConfig(use_gluon=True, block_size_m=128, block_size_n=64, num_sms=3),
}
# Rows of a sum: the last rank's are fewer than a tile's, or there are none.
ROWS, N, K = (70, 1), 72, 8
OPERATIONS = ("all_gather_matmul", "matmul_all_gather", "matmul_reduce_scatter", "matmul_all_reduce")


def sent(name, M, size, a, b):
    """Bytes that rank ``a`` sends to rank ``b``: rows of A, of a product, of a part or of a sum."""
    if name == "matmul_all_reduce":
        share = -(-M // size)
        parts, sums = (max(0, min(share, M - rank * share)) for rank in (b, a))
        return 2 * N * (parts + sums)
    return 2 * M * (K if name == "all_gather_matmul" else N)


def call(ctx, name, M, config):
    """One call on data that tell ranks and places apart: whether the result is right."""
    size, rank = ctx.num_ranks, ctx.cur_rank
    rows = size * M if name == "matmul_reduce_scatter" else M
    generator = torch.Generator().manual_seed(M)
    # Small whole numbers, of which no sum is rounded.
    a = torch.randint(-1, 2, (size, rows, K), generator=generator)
    b = torch.randint(-1, 2, (size, K, N), generator=generator)
    given = [each[rank].to(torch.bfloat16).to(ctx.device) for each in (a, b)]
    if name == "all_gather_matmul":
        exact = a.reshape(-1, K) @ b[rank]
    elif name == "matmul_all_gather":
        exact = (a @ b).reshape(-1, N)
    else:
        exact = (a @ b).sum(0)
        exact = exact.chunk(size)[rank] if name == "matmul_reduce_scatter" else exact
    out = ctx.zeros(*exact.shape, dtype=torch.bfloat16)
    getattr(ctx.ops, name)(out, *given, config=config)
    return torch.equal(out.cpu().long(), exact)


def worker():
    with iris.iris(8 << 20) as ctx:
        rank, size = ctx.get_rank(), ctx.get_num_ranks()
        # The copy engine sends rows of A for the kernel in Gluon, which records what kernels do.
        ways = [(name, way) for name in OPERATIONS for way in CONFIGS if (name, way) != ("all_gather_matmul", "Gluon")]
        for name, way in ways:
            for M in ROWS:
                ctx.tracing.reset()
                ctx.barrier()
                right = call(ctx, name, M, CONFIGS[way])
                timeline = ctx.tracing.timeline()
                assert right, f"rank {rank}: {name} in {way} is wrong"
                found = defaultdict(int)
                for event in moves(timeline):
                    if event.form == "move":
                        found[event.rank, event.target] += event.bytes
                assert all(event.bytes >= 0 for event in timeline.events)
                for a in range(size):
                    for b in set(range(size)) - {a}:
                        wanted = sent(name, M, size, a, b)
                        message = f"{name} in {way}: {found[a, b]} bytes from {a} to {b}, not {wanted}"
                        assert found[a, b] == wanted, message
        if rank == 0:
            print(f"{len(ways)} ways among {size} ranks move what they say.")


if __name__ == "__main__":
    launch(worker, int(sys.argv[1]))
