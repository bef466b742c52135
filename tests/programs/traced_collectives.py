"""Each way of each collective, traced with IRIS_TRACE=1: what went between the ranks is what it says it moves.

Argument: the number of ranks, 4 at most: of more, whole blocks are more than one hop carries.
"""

import sys
from collections import defaultdict

import torch

import iris
from iris.ccl import Config
from iris.spawn import launch
from iris.tracing.summary import moves, waiting

# Elements of the largest block of any way, and bytes of one.
BLOCK, WORD = 4096, 4
# Words that carry their own arrival are twice as wide. Of a rank without a piece there are two a block, of 4 KiB or 1.
STAMPED, REPLIES = 2, (1 / 256, 1 / 64)


def sent(collective, way, size, a, b):
    """What the bytes may be that rank ``a`` sends to rank ``b``, or that ``b`` fetches there. Rank 0 is the root."""
    piece = WORD * BLOCK * (size - 1)
    if collective == "broadcast":
        whole, part = size * piece, size * piece // (size - 1)
        if way == "one_hop":
            return {STAMPED * whole} if a == 0 else {whole * share for share in REPLIES}
        if way == "exchange":
            return {whole if a == 0 else 0}
        return {0 if b == 0 else part}
    if collective == "all_reduce" and way == "ring":
        # A block of each rank's goes round at once, by turns one way and the other, W - 1 in all: forward first.
        forward, backward = size // 2 * ((b - a) % size == 1), (size - 1) // 2 * ((a - b) % size == 1)
        return {2 * (size - 1) * WORD * BLOCK * (forward + backward)}
    if collective == "all_reduce":
        return {size * piece if way == "one_shot" else 2 * piece}
    return {STAMPED * piece if way == "one_hop" else piece}


def call(ctx, collective, way, rank, size):
    """One call on data that tell ranks and places apart: yields before it, then whether the result is right."""
    # Whole blocks, also for the W - 1 ranks that a broadcast deals out to.
    n = BLOCK * (size - 1)
    whole = torch.arange(size * n, dtype=torch.float32, device=ctx.device)
    given = ctx.empty(whole.shape)
    given.copy_(whole + 0.5 * rank)
    out = ctx.zeros(whole.shape)
    pieces = [(whole + 0.5 * r).chunk(size) for r in range(size)]
    total = size * whole + 0.25 * size * (size - 1)
    mine = ctx.zeros(n)
    yield
    if collective == "all_reduce":
        config = Config(all_reduce_variant="ring") if way == "ring" else None
        ctx.ccl.all_reduce(out, given, config=config)
        yield torch.equal(out, total)
    elif collective == "reduce_scatter":
        ctx.ccl.reduce_scatter(mine, given)
        yield torch.equal(mine, total.chunk(size)[rank])
    elif collective == "all_gather":
        ctx.ccl.all_gather(out, given[:n])
        yield torch.equal(out, torch.cat([each[0] for each in pieces]))
    elif collective == "all_to_all":
        ctx.ccl.all_to_all(out, given)
        yield torch.equal(out, torch.cat([each[rank] for each in pieces]))
    else:
        ctx.ccl.broadcast(given)
        yield torch.equal(given, whole)


WAYS = {
    "all_reduce": ["one_shot", "two_shot_push", "two_shot_direct", "two_shot", "pull", "ring"],
    "reduce_scatter": ["one_shot", "two_shot", "pull"],
    "all_gather": ["one_hop", "exchange"],
    "all_to_all": ["one_hop", "exchange"],
    "broadcast": ["one_hop", "exchange", "deal", "pull"],
}


def worker():
    with iris.iris(8 << 20) as ctx:
        rank, size = ctx.get_rank(), ctx.get_num_ranks()
        comm = ctx.ccl.communicator()
        table = comm.table
        # Two ranks have nobody to pass a part on to.
        pairs = [(collective, way) for collective, each in WAYS.items() for way in each]
        ways = [pair for pair in pairs if size > 2 or pair not in (("broadcast", "deal"), ("broadcast", "pull"))]
        for collective, way in ways:
            row = table[collective][0]._replace(limit=None, variant=way, programs=None)
            comm.table = table | ({} if way == "ring" else {collective: [row]})
            comm.forget()
            # The first call makes what the second one uses.
            for _ in range(2):
                steps = call(ctx, collective, way, rank, size)
                next(steps)
                ctx.barrier()
                ctx.tracing.reset()
                ctx.barrier()
                right = next(steps)
                timeline = ctx.tracing.timeline()
            assert right, f"rank {rank}: {collective} by {way} is wrong"
            found = defaultdict(int)
            for event in moves(timeline):
                if event.form == "move":
                    ends = (event.target, event.rank) if event.name == "load" else (event.rank, event.target)
                    found[ends] += event.bytes
            for a in range(size):
                for b in range(size):
                    wanted = sent(collective, way, size, a, b) if a != b else {0}
                    message = f"{collective} by {way}: {found[a, b]} bytes from {a} to {b}, not {wanted}"
                    assert found[a, b] in wanted, message
            # A root may have nothing to wait for.
            wait = {each.rank for each in waiting(timeline)}
            assert wait >= set(range(collective == "broadcast", size)), f"{collective} by {way}: {wait} wait"
        if rank == 0:
            print(f"{len(ways)} ways among {size} ranks move what they say.")


if __name__ == "__main__":
    launch(worker, int(sys.argv[1]))
