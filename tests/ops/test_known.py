"""Products like an earlier one are launched without another look, and are right for whatever tensors they are given."""

import ctypes
from unittest import mock

import pytest
import torch
from covering import thorough

import iris
from iris.errors import GroupAbortedError, HeapClosedError, InvalidCollectiveError
from iris.ops import FusedConfig
from iris.ops.call import Call
from iris.ops.grouped import launch as grouped
from iris.ops.grouped.call import GroupedCall
from ops.plans import short_chunks
from ops.products import CONFIGS, matrix, place, result_of

BF16 = torch.bfloat16
ROUNDS = 4


def arguments(ctx, name, call, biased):
    """Everyone's A and B of a call, and what this rank gives. All are other memory in each call."""
    W, rank, (M, N, K) = ctx.num_ranks, ctx.cur_rank, (8 * ctx.num_ranks, 16, 32)
    a, b = (
        [matrix(*shape, BF16, "rows", 1000 * call + 10 * r + which, ctx.device) for r in range(W)]
        for which, shape in enumerate([(M, K), (K, N)])
    )
    rows = {"all_gather_matmul": W * M, "matmul_reduce_scatter": M // W}[name]
    out = torch.full((rows, N), torch.nan, dtype=BF16, device=ctx.device)
    bias = matrix(1, N, BF16, "rows", 5 + call, ctx.device)[0] if biased else None
    options = {"gathered": torch.empty(W * M, K, dtype=BF16, device=ctx.device)} if rows == W * M and biased else {}
    return a, b, (out, a[rank], b[rank], bias), options


def repeat(ctx, name, way, biased):
    given = [arguments(ctx, name, call, biased) for call in range(ROUNDS)]
    ctx.ops._known.forget()
    with mock.patch.object(Call, "check", autospec=True, side_effect=Call.check) as looked:
        for _, _, tensors, options in given:
            getattr(ctx.ops, name)(*tensors, **options, config=CONFIGS[way])
    assert looked.call_count == 1
    for a, b, (out, _, _, bias), options in given:
        expected = result_of(name, a, b, ctx.cur_rank) + (0 if bias is None else bias.double())
        torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.1)
        assert not options or torch.equal(options["gathered"], torch.cat(a))
    # A result that overlaps is noticed, and other memory is found.
    _, _, (out, a, b, bias), options = given[-1]
    where = torch.zeros(a.numel() + out.numel(), dtype=BF16, device=ctx.device)
    with pytest.raises(InvalidCollectiveError, match="out and A overlap"):
        overlapping = where[: out.numel()].view_as(out), where[: a.numel()].view_as(a)
        getattr(ctx.ops, name)(*overlapping, b, bias, **options, config=CONFIGS[way])
    with mock.patch.object(ctx.ops._abort_flag, "check", side_effect=GroupAbortedError((0, 1), "It is broken.")):
        with pytest.raises(GroupAbortedError, match="It is broken"):
            getattr(ctx.ops, name)(out, a, b, bias, **options, config=CONFIGS[way])
    before = out.clone()
    ctx.barrier()
    ctx.ops.close()
    out.zero_()
    getattr(ctx.ops, name)(out, a, b, bias, **options, config=CONFIGS[way])
    assert torch.equal(out, before)
    ctx.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "name, way, biased",
    [
        ("all_gather_matmul", "Hopper", True),
        ("matmul_reduce_scatter", "Hopper", False),
        thorough("all_gather_matmul", "fused", True),
        thorough("matmul_reduce_scatter", "fused", True),
    ],
)
def test_calls_like_an_earlier_one(ranks, name, way, biased):
    if torch.version.hip and way == "Hopper":
        pytest.skip("Hopper's kernel")
    ranks.run(repeat, name, way, biased)


def by_driver(ctx):
    """As on a GPU, where the copies around the kernel are made by the driver: here ``memmove``, at once."""
    W, rank, (M, N, K) = ctx.num_ranks, ctx.cur_rank, (140, 8, 24)
    b = matrix(K, N, BF16, "rows", 77, ctx.device)
    a = [[matrix(M, K, BF16, "rows", 100 * call + r, ctx.device) for r in range(W)] for call in range(ROUNDS)]
    kept = [place(W * M, K, BF16, "rows", ctx.device, None) for _ in range(ROUNDS)]
    outs = [torch.empty(W * M, N, dtype=BF16, device=ctx.device) for _ in range(ROUNDS)]
    # Whose rows have gaps between them.
    wide = torch.full((M, 2 * K), torch.nan, dtype=BF16, device=ctx.device)
    wide[:, :K] = a[-1][rank]
    ctx.ops._known.forget()
    with short_chunks():
        ctx.ops.all_gather_matmul(outs[0], a[0][rank], b, gathered=kept[0][0], config=CONFIGS["Hopper"])
    (known,) = ctx.ops._known._known.values()
    again, current, gpu = known.by_stream[None], mock.Mock(cuda_stream=1), mock.Mock()
    gpu.senders.cuda_stream = 2
    gpu.copy.side_effect = lambda to, begin, size, stream: ctypes.memmove(to, begin, size)
    copy, sender = gpu.copy, again._sender
    events = {"_stream": gpu.senders, "_begun": gpu.begun, "_sent": gpu.sent, "_copy_on_stream": copy}
    with (
        mock.patch.multiple(sender, **events, create=True),
        mock.patch.object(again, "_copy", copy),
        mock.patch.object(torch.cuda, "current_stream", return_value=current),
    ):
        for call in range(1, ROUNDS - 1):
            again(Call("all_gather_matmul", outs[call], a[call][rank], b, None, None, None, kept[call][0]), 1)
        # The copies are of these rows without the gaps.
        with short_chunks():
            ctx.ops.all_gather_matmul(outs[-1], wide[:, :K], b, gathered=kept[-1][0], config=CONFIGS["Hopper"])
    # What is copied is there when the sender's stream begins, and the product may wait for that to end. A word says
    # that the chunk before it has arrived.
    made = [(name, args) for name, args, _ in gpu.mock_calls[: 4 + 4 * (W - 1) + 1]]
    sent = [
        ("copy", (to, mock.ANY, size, 2))
        for _, place, nbytes, word in sender._moves
        for to, size in ((place, nbytes), (word, 4))
    ]
    waited = [("begun.record", (current,)), ("senders.wait_event", (gpu.begun,))]
    own = ("copy", (kept[1][0][rank * M].data_ptr(), a[1][rank].data_ptr(), a[1][rank].nbytes, 2))
    assert made[: len(waited + sent) + 2] == [*waited, *sent, own, ("sent.record", (gpu.senders,))]
    # To each peer two chunks and a word after each; own rows to where they are kept and, of known calls, the peers'.
    assert copy.call_count == (ROUNDS - 1) * (4 * (W - 1) + 1) + (ROUNDS - 2) * (W - 1)
    for out, given, (gathered, around) in zip(outs, a, kept, strict=True):
        assert torch.equal(gathered, torch.cat(given)) and around.count_nonzero() == gathered.count_nonzero()
        torch.testing.assert_close(out.double(), torch.cat(given).double() @ b.double(), rtol=0.02, atol=0.1)
    ctx.barrier()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the driver makes them itself")
@pytest.mark.ranks(2)
def test_copies_by_the_driver(ranks):
    ranks.run(by_driver)


def after_the_end(_):
    """Of a context of its own, whose memory is gone."""
    with iris.iris(1 << 20) as ctx:
        given = [arguments(ctx, "all_gather_matmul", call, False)[2] for call in range(2)]
        for tensors in given:
            ctx.ops.all_gather_matmul(*tensors, config=CONFIGS["fused"])
    with pytest.raises(HeapClosedError):
        ctx.ops.all_gather_matmul(*given[0], config=CONFIGS["fused"])


@pytest.mark.ranks(2, exactly=True)
def test_a_known_call_of_a_closed_context(ranks):
    ranks.run(after_the_end)


def square(ctx):
    """One tensor as both operands first, and then two."""
    config = FusedConfig(block_size_m=16, block_size_n=16, block_size_k=32)
    x, y = (matrix(32, 32, BF16, "rows", seed, ctx.device) for seed in (1, 2))
    out = torch.empty(16, 32, dtype=BF16, device=ctx.device)
    for other in (x, y):
        ctx.ops.matmul_reduce_scatter(out, x, other, config=config)
        expected = ctx.num_ranks * (x.double() @ other.double())
        rows = slice(16 * ctx.cur_rank, 16 * (ctx.cur_rank + 1))
        torch.testing.assert_close(out.double(), expected[rows], rtol=0.02, atol=0.1)
    ctx.barrier()


@pytest.mark.ranks(2, exactly=True)
def test_one_tensor_in_two_places(ranks):
    ranks.run(square)


def test_grouped_products_like_an_earlier_one():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    grouped._known.clear()
    looks = set()
    with mock.patch.object(GroupedCall, "form", autospec=True, side_effect=GroupedCall.form) as looked:
        for round in range(3):
            generator = torch.Generator().manual_seed(round)
            a, b = (torch.randn(*shape, generator=generator).to(device, BF16) for shape in ((24, 32), (3, 32, 16)))
            offs, counts = ([8, 8, 24], [3 + round, 0, 16])
            numbers = [torch.tensor(each, dtype=torch.int32, device=device) for each in (offs, counts)]
            out = torch.full((24, 16), 7, dtype=BF16, device=device)
            grouped.enqueue(GroupedCall(out, a, b, *numbers), None)
            looks.add(looked.call_count)
            for begin, count, each in zip([0, 8, 8], counts, b, strict=True):
                rows = slice(begin, begin + count)
                torch.testing.assert_close(out[rows], a[rows] @ each, rtol=0.02, atol=0.1)
            assert (out[3 + round : 8] == 7).all()
    assert len(looks) == 1
