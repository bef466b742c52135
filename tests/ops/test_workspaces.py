"""Calls of all kinds on one stream share memory: it is that of the largest, and none finds what another left."""

import random
import time

import pytest
import torch
from covering import EVERYTHING

from iris import simulator
from iris.errors import FirstUseInCaptureError
from iris.heap.mapping import count_made, mappings
from iris.ops import FusedConfig, workspaces
from iris.ops.arena import Arena
from iris.ops.buffers import Needs
from iris.ops.copies import Copies
from ops.products import OPERATIONS
from ops.test_rounds import CASES, CONFIGS, LATE, OPERANDS, Round

ROWS = (48, 16, 33, 128)
SMALL, OPERATION = CONFIGS["triton"], "matmul_reduce_scatter"


def arenas():
    return [mapping for mapping in mappings() if mapping.memory is not None and isinstance(mapping.owner(), Arena)]


def call(ctx, name, config, rows, number, wrong):
    """One call, whose result is compared without waiting for it."""
    data = Round(ctx, name, M=rows, **OPERANDS.get(config, {}))
    expected = data.expected(number)
    out = torch.empty(expected.shape, dtype=torch.bfloat16, device=ctx.device)
    getattr(ctx.ops, name)(out, data.a(number, ctx.cur_rank), data.b[ctx.cur_rank], config=CONFIGS[config])
    wrong += (out.float() != expected).sum()


def in_turn(ctx):
    on_gpu = ctx.device.type == "cuda"
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    chosen = random.Random(1)
    kinds = [(*case, rows) for case in CASES if case[1] != "split" for rows in ROWS]
    if not on_gpu:
        kinds = chosen.sample(kinds, 12)
    largest = max(rows for *_, rows in kinds)
    for number, kind in enumerate(sorted(kinds, key=lambda kind: kind[2] != largest)):
        call(ctx, *kind, number, wrong)
    made, before = count_made(), len(arenas())
    for number in range(2000 if on_gpu else 12):
        if on_gpu and number % 40 == ctx.cur_rank:
            torch.cuda._sleep(LATE)
        call(ctx, *chosen.choice(kinds), number, wrong)
    assert wrong.item() == 0
    assert (count_made(), len(arenas())) == (made, before)


@pytest.mark.thorough
@pytest.mark.ranks(2, *([4] if EVERYTHING else []))
def test_kinds_in_turn(ranks):
    ranks.run(in_turn)


@pytest.mark.parametrize("field", ["parts", "tickets", "halves"])
def test_counts_have_room(field):
    kind = Needs(("kind",), 0, 0, torch.float32)
    assert kind._replace(**{field: 1024}).count_bytes == kind.count_bytes + 4 * 1024


def prepared(ctx, name):
    """Every operation takes what its preamble returned, call after call, and None where there is nothing to prepare."""
    W, preamble = ctx.num_ranks, getattr(ctx.ops, f"{name}_preamble")
    rows = {"all_gather_matmul": 4 * W * W, "matmul_all_gather": 4 * W * W, "matmul_reduce_scatter": 4}.get(name, 4 * W)
    shapes = (rows, 5), (4 * W, 6), (6, 5)
    out, a, b = (torch.ones(shape, device=ctx.device) for shape in shapes)
    of_ranks = 1 if "gather" in name else W
    config = FusedConfig(block_size_m=16, block_size_n=16, block_size_k=16)
    workspace = preamble(out, a, b, config=config)
    for factor in (1, 2, 3):
        work = getattr(ctx.ops, name)(out, factor * a, b, config=config, workspace=workspace, async_op=True)
        work.wait()
        assert (out == factor * 6 * of_ranks).all()
    ctx.barrier()
    workspace.close()
    assert preamble(out, a, b, config=FusedConfig(variant="vendor")) is None


@pytest.mark.parametrize("name", OPERATIONS)
def test_calls_with_a_workspace_of_their_own(ranks, name):
    ranks.run(prepared, name)


def overtake(ctx):
    """A rank that is late to fetch the rows of its peers finds them, whatever these call next."""
    handshake, wrong = Copies.handshake, torch.zeros((), dtype=torch.int64)
    number = 0

    def late(copies, what, peer=0):
        handshake(copies, what, peer)
        if what == "wait ready" and number // 4 % ctx.num_ranks == ctx.cur_rank:
            time.sleep(0.05)

    Copies.handshake = late
    try:
        for number in range(8 * ctx.num_ranks):
            # What follows 33 rows lies where those of rank 0 were.
            config, rows = ("copies", 33) if number % 2 == 0 else (("triton", "copies")[number // 2 % 2], 6)
            call(ctx, "all_gather_matmul", config, rows, number, wrong)
    finally:
        Copies.handshake = handshake
    assert wrong.item() == 0


@pytest.mark.ranks(2, *([4] if EVERYTHING else []))
@pytest.mark.skipif(not simulator.ACTIVE, reason="on a GPU the host does not take part in the copies")
def test_late_copies(ranks):
    ranks.run(overtake)


def grow(ctx):
    ctx.ops.close()
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    made = count_made()
    for rows in range(1, 65):
        call(ctx, OPERATION, "triton", rows, rows, wrong)
        (arena,) = arenas()
    # The smallest data have a KiB, and grow by half.
    needed = ctx.num_ranks * 64 * 96 * 2
    assert count_made() - made <= 10 and needed <= arena.owner().data_bytes < 1.5 * needed + 1024
    assert wrong.item() == 0


@pytest.mark.thorough
def test_memory_that_grows_with_the_largest_call(ranks):
    ranks.run(grow)


def count_up(ctx):
    ctx.ops.close()
    counts, workspaces.COUNT_BYTES = workspaces.COUNT_BYTES, 3 * 5120
    try:
        wrong, made = torch.zeros((), dtype=torch.int64, device=ctx.device), count_made()
        # None needs more data than the first, but the last: the three kinds before it move to larger memory with it.
        for number, rows in enumerate([*range(16, 0, -1), *range(1, 16), *[17, 13, 14, 15] * 2]):
            call(ctx, OPERATION, "triton", rows, number, wrong)
        assert count_made() - made >= 32 // 3 and len(arenas()) == 1 and wrong.item() == 0
    finally:
        workspaces.COUNT_BYTES = counts
        ctx.ops.close()


def test_more_kinds_than_there_are_counts_for(ranks):
    ranks.run(count_up)


def capture(ctx, name, config):
    """Graphs of one line share memory, those of others have their own, and so have calls beside them."""
    ctx.ops.close()
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    data = [Round(ctx, name, M=rows) for rows in ROWS]
    outs = [torch.empty(each.expected(0).shape, dtype=torch.bfloat16, device=ctx.device) for each in data]
    number = torch.zeros((), dtype=torch.int64, device=ctx.device)

    def calls():
        for each, out in zip(data, outs, strict=True):
            getattr(ctx.ops, name)(out, each.a(number, ctx.cur_rank), each.b[ctx.cur_rank], config=CONFIGS[config])

    def compare(turn):
        for each, out in zip(data, outs, strict=True):
            wrong.add_((out.float() != each.expected(turn)).sum())

    def record(stream=None):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            number.add_(1)
            calls()
        return graph

    with pytest.raises(FirstUseInCaptureError, match=f"{name}.* of this shape"):
        record()
    torch.cuda.synchronize()
    calls()
    # torch hands out 32 streams in turn, of which the one that it captures on is one.
    usual = torch.cuda.graph.default_capture_stream
    own = next(stream for stream in iter(torch.cuda.Stream, None) if stream != usual)
    graphs = [record(), record(), record(own)]
    assert len(arenas()) == 3
    number.zero_()
    for turn in range(1, 201):
        if turn % 40 == ctx.cur_rank:
            torch.cuda._sleep(LATE)
        graphs[turn % 3].replay()
        compare(turn)
        calls()
        compare(turn)
    assert wrong.item() == 0 and len(arenas()) == 3
    ctx.barrier()
    ctx.ops.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are for GPUs")
@pytest.mark.parametrize(
    "name, config",
    [("matmul_reduce_scatter", "triton"), ("all_gather_matmul", "gluon"), ("all_gather_matmul", "copies")],
)
def test_graphs(ranks, name, config):
    ranks.run(capture, name, config)


def capture_at_once(ctx, name, config):
    """A workspace that was prepared is all that a graph needs."""
    # Nothing that other calls have prepared is left.
    ctx.ops.close()
    data = Round(ctx, name, **OPERANDS.get(config, {}))
    out = ctx.zeros(*data.expected(0).shape, dtype=torch.bfloat16)
    a, b = data.a(0, ctx.cur_rank), data.b[ctx.cur_rank]
    given = (out, a, b), {"config": CONFIGS[config]}
    workspace = getattr(ctx.ops, f"{name}_preamble")(*given[0], **given[1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        getattr(ctx.ops, name)(*given[0], **given[1], workspace=workspace)
    for number in range(20):
        a.copy_(data.a(number, ctx.cur_rank))
        graph.replay()
        assert torch.equal(out.float(), data.expected(number))
    ctx.barrier()
    workspace.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are for GPUs")
@pytest.mark.parametrize("name, config", [case for case in CASES if case[1] not in ("split", "vendor")])
def test_a_graph_of_what_was_prepared_alone(ranks, name, config):
    ranks.run(capture_at_once, name, config)
