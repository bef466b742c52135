"""Calls that make no sense are refused before anything is enqueued: what was wrong, what was given, what to do."""

import time
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from iris.ccl import Config, ReduceOp, checks
from iris.errors import (
    InvalidCollectiveError,
    InvalidConfigError,
    InvalidGroupError,
    InvalidTableError,
    IrisError,
    MismatchedCollectiveError,
    NotATensorError,
    RankOutOfRangeError,
    UnsupportedReductionError,
    WorkspaceTooSmallError,
    WrongDeviceError,
)


def refused(ctx, call, error, builtin, message):
    """``call(ccl, tensors of a size)`` raises on every rank alike, and the next call of the group works."""
    with pytest.raises(error, match=message) as caught:
        call(ctx.ccl, ctx)
    assert isinstance(caught.value, IrisError) and isinstance(caught.value, builtin)
    everyone = ctx.empty(ctx.num_ranks)
    ctx.ccl.all_gather(everyone, torch.full((1,), float(ctx.cur_rank), device=ctx.device))
    assert everyone.tolist() == list(range(ctx.num_ranks))


def run_refused(ctx, name):
    refused(ctx, *REFUSED[name])


def overlapping(ctx):
    both = ctx.zeros(100)
    return both[:60], both[40:]


REFUSED = {
    "too short a result": (
        lambda ccl, ctx: ccl.all_gather(ctx.zeros(5), ctx.zeros(3)),
        InvalidCollectiveError, ValueError, r"all_gather\(\) among 2 ranks .*\[3\].* 6 elements.*\[5\]",
    ),
    "results of another size": (
        lambda ccl, ctx: ccl.all_reduce(ctx.zeros(4), ctx.zeros(3)),
        InvalidCollectiveError, ValueError, r"all_reduce\(\).*\[3\].*3 elements.*\[4\]",
    ),
    "parts that are not equal": (
        lambda ccl, ctx: ccl.reduce_scatter(ctx.zeros(2), ctx.zeros(5)),
        InvalidCollectiveError, ValueError, r"reduce_scatter\(\) among 2 ranks.*multiple of 2.*\[5\]",
    ),
    "columns that are not for all": (
        lambda ccl, ctx: ccl.all_to_all(ctx.zeros(4, 3), ctx.zeros(4, 3)),
        InvalidCollectiveError, ValueError, r"multiple of 2.*\[4, 3\]",
    ),
    "another dtype": (
        lambda ccl, ctx: ccl.all_reduce(ctx.zeros(4), ctx.zeros(4, dtype=torch.float16)),
        InvalidCollectiveError, ValueError, r"input's dtype.*float16.*float32",
    ),
    "no tensor": (
        lambda ccl, ctx: ccl.all_reduce([0.0], ctx.zeros(1)),
        NotATensorError, TypeError, r"all_reduce\(\) takes tensors, .* list: \[0.0\]",
    ),
    "a tensor without memory": (
        lambda ccl, ctx: ccl.all_reduce(*[FakeTensorMode().from_tensor(torch.zeros(4))] * 2),
        InvalidCollectiveError, ValueError, r"all_reduce\(\) takes tensors with memory.*FakeTensor.*functional",
    ),
    "a sparse tensor": (
        lambda ccl, ctx: ccl.all_reduce(*[ctx.zeros(4).to_sparse()] * 2),
        InvalidCollectiveError, ValueError, r"all_reduce\(\) takes tensors.*, and got .*sparse_coo.*to_dense\(\)",
    ),
    "another device after a good call": (
        lambda ccl, ctx: [ccl.all_reduce(x, x) for x in (ctx.zeros(4), torch.zeros(4, device="meta"))],
        WrongDeviceError, RuntimeError, r"all_reduce\(\) is on meta.*Move it",
    ),
    "scales": (
        lambda ccl, ctx: ccl.all_reduce(*[torch.zeros(4, device=ctx.device).to(torch.float8_e8m0fnu)] * 2),
        UnsupportedReductionError, TypeError, r"float8_e8m0fnu cannot be combined",
    ),
    "rows around the result": (
        lambda ccl, ctx: (lambda x: ccl.all_gather(x[1, :8], x[:, 8:10]))(ctx.zeros(2, 16)),
        InvalidCollectiveError, ValueError, r"all_gather\(\) overlap",
    ),
    "a root that is no number": (
        lambda ccl, ctx: ccl.broadcast(ctx.zeros(1), None),
        InvalidCollectiveError, ValueError, r"src=None is not a rank",
    ),
    "no group": (
        lambda ccl, ctx: ccl.broadcast(ctx.zeros(1), 0, group=[0, 1]),
        InvalidGroupError, ValueError, r"group=\[0, 1\] is not a process group",
    ),
    "no workspace": (
        lambda ccl, ctx: ccl.all_reduce(*[ctx.zeros(1)] * 2, workspace=ctx.zeros(1)),
        InvalidCollectiveError, ValueError, r"is not what all_reduce_preamble\(\) returned",
    ),
    "counts that are not whole": (
        lambda ccl, ctx: ccl.all_to_all_v(ctx.zeros(2), ctx.zeros(2), [1, 1.5], [0, 1], [1, 1], [0, 1]),
        InvalidCollectiveError, ValueError, r"send_counts takes 2 whole numbers.*1\.5",
    ),
    "another device": (
        lambda ccl, ctx: ccl.all_reduce(torch.zeros(4, device="meta"), torch.zeros(4, device="meta")),
        WrongDeviceError, RuntimeError, r"all_reduce\(\) is on meta.*Move it",
    ),
    "overlapping tensors of a sum": (
        lambda ccl, ctx: ccl.all_reduce(*overlapping(ctx)),
        InvalidCollectiveError, ValueError, r"Input and output of all_reduce\(\) overlap.*output of its own",
    ),
    "overlapping tensors": (
        lambda ccl, ctx: ccl.all_to_all(*overlapping(ctx)),
        InvalidCollectiveError, ValueError, r"all_to_all\(\) overlap",
    ),
    "the input inside the result, at another's place": (
        lambda ccl, ctx: (lambda x: ccl.all_gather(x, x[3:6] if ctx.cur_rank == 0 else x[:3]))(ctx.zeros(6)),
        InvalidCollectiveError, ValueError, r"all_gather\(\) overlap",
    ),
    "a root that is no rank": (
        lambda ccl, ctx: ccl.broadcast(ctx.zeros(1), 2),
        RankOutOfRangeError, ValueError, "2",
    ),
    "oneself": (
        lambda ccl, ctx: ccl.send(ctx.zeros(1), ctx.cur_rank),
        InvalidCollectiveError, ValueError, r"Rank \d calls send\(\) with itself",
    ),
    "averages of integers": (
        lambda ccl, ctx: ccl.all_reduce(*[ctx.zeros(4, dtype=torch.int32)] * 2, op=ReduceOp.AVG),
        UnsupportedReductionError, TypeError, r"AVG.*int32.*use SUM",
    ),
    "the order of complex numbers": (
        lambda ccl, ctx: ccl.reduce(*[ctx.zeros(4, dtype=torch.complex64)] * 2, op=ReduceOp.MAX),
        UnsupportedReductionError, TypeError, r"MAX of torch.complex64, which has no order: there are SUM",
    ),
    "products of complex numbers": (
        lambda ccl, ctx: ccl.all_reduce(*[ctx.zeros(4, dtype=torch.complex64)] * 2, op=ReduceOp.PRODUCT),
        UnsupportedReductionError, TypeError, r"no ReduceOp.PRODUCT of torch.complex64: there are SUM.*all_gather\(\)",
    ),
    "multiples of integers": (
        lambda ccl, ctx: ccl.all_reduce(*[ctx.zeros(4, dtype=torch.int32)] * 2, op=dist._make_nccl_premul_sum(0.5)),
        UnsupportedReductionError, TypeError, r"PREMUL_SUM of torch.int32.*use SUM and multiply before",
    ),
    "no operation": (
        lambda ccl, ctx: ccl.all_reduce(*[ctx.zeros(4)] * 2, op="sum"),
        UnsupportedReductionError, TypeError, r"'sum'.*SUM, AVG, MIN, MAX, PRODUCT",
    ),
    "no configuration": (
        lambda ccl, ctx: ccl.all_reduce(*[ctx.zeros(4)] * 2, config={"comm_sms": 4}),
        InvalidConfigError, ValueError, r"comm_sms.* is not possible: it is an iris.ccl.Config",
    ),
    **{
        f"{variant} of integers": (
            lambda ccl, ctx, variant=variant: ccl.all_reduce(
                *[ctx.zeros(4, dtype=torch.int32)] * 2, config=Config(all_reduce_variant=variant)
            ),
            InvalidConfigError, ValueError, rf"'{variant}'.*floating-point.*'two_shot'",
        )
        for variant in ("one_shot", "two_shot_push", "two_shot_direct")
    },
    "Gluon where there is none": (
        lambda ccl, ctx: ccl.all_to_all_v(
            ctx.zeros(2), ctx.zeros(2), [1, 1], [0, 1], [1, 1], [0, 1], config=Config(use_gluon=True)
        ),
        InvalidConfigError, ValueError, r"use_gluon=True.*no Gluon form",
    ),
    "the largest of what is added up": (
        lambda ccl, ctx: ccl.all_reduce(
            *[ctx.zeros(4)] * 2, op=ReduceOp.MAX, config=Config(all_reduce_variant="spinlock")
        ),
        UnsupportedReductionError, TypeError, r"all_reduce_variant='spinlock'.*SUM and AVG.*'two_shot'",
    ),
    "a ring whose sums do not depend on the place": (
        lambda ccl, ctx: ccl.all_reduce(
            *[ctx.zeros(4)] * 2, config=Config(all_reduce_variant="ring", batch_invariant=True)
        ),
        InvalidConfigError, ValueError, r"'ring', batch_invariant=True.*contradicts.*'one_shot' or 'two_shot_push' or",
    ),
    "a slice of a ring that is no power of two": (
        lambda ccl, ctx: ccl.all_reduce(
            *[ctx.zeros(4)] * 2, config=Config(all_reduce_variant="ring", all_reduce_ring_slice_n=100)
        ),
        InvalidConfigError, ValueError, r"all_reduce_ring_slice_n=100.*power of two.*\d+ at most",
    ),
    "a workspace for less": (
        lambda ccl, ctx: ccl.all_reduce(
            *[ctx.zeros(8)] * 2, workspace=ccl.all_reduce_preamble(*[ctx.zeros(4)] * 2)
        ),
        WorkspaceTooSmallError, ValueError, r"16 bytes.*32 bytes.*all_reduce_preamble",
    ),
    "a workspace for another dtype": (
        lambda ccl, ctx: ccl.all_reduce(
            *[ctx.zeros(4)] * 2, workspace=ccl.all_reduce_preamble(*[ctx.zeros(9, dtype=torch.float16)] * 2)
        ),
        WorkspaceTooSmallError, ValueError, r"float16.*float32",
    ),
    "counts beyond the input": (
        lambda ccl, ctx: ccl.all_to_all_v(ctx.zeros(9), ctx.zeros(4), [1, 4], [0, 1], [1, 4], [0, 1]),
        InvalidCollectiveError, ValueError, r"for rank 1 end at 5, and the input has 4",
    ),
    "counts beyond the output": (
        lambda ccl, ctx: ccl.all_to_all_v(ctx.zeros(4), ctx.zeros(9), [1, 4], [0, 1], [1, 4], [0, 1]),
        InvalidCollectiveError, ValueError, r"for rank 1 end at 5, and the output has 4",
    ),
    "negative counts": (
        lambda ccl, ctx: ccl.all_to_all_v(ctx.zeros(4), ctx.zeros(4), [1, -1], [0, 1], [1, 1], [0, 1]),
        InvalidCollectiveError, ValueError, r"send_counts takes 2 whole numbers.*\[1, -1\]",
    ),
    "counts of other ranks": (
        lambda ccl, ctx: ccl.all_to_all_v(ctx.zeros(4), ctx.zeros(4), [1], [0], [1], [0]),
        InvalidCollectiveError, ValueError, r"send_counts takes 2 whole numbers.*\[1\]",
    ),
    "gaps between what is counted": (
        lambda ccl, ctx: ccl.all_to_all_v(ctx.zeros(4), ctx.zeros(8)[::2], [1, 1], [0, 1], [1, 1], [0, 1]),
        InvalidCollectiveError, ValueError, r"must be contiguous.*\(2,\).*contiguous\(\)",
    ),
    **{
        f"an {role} of all_to_all_v that is a conjugate": (
            lambda ccl, ctx, role=role: (lambda x, y: ccl.all_to_all_v(
                *(y, x.conj()) if role == "input" else (y.conj(), x), [1, 1], [0, 1], [1, 1], [0, 1]
            ))(*(ctx.zeros(2, dtype=torch.complex64) for _ in range(2))),
            InvalidCollectiveError, ValueError, rf"its {role} is a view.*x\.conj\(\).*resolve_conj\(\)",
        )
        for role in ("input", "output")
    },
}  # fmt: skip


@pytest.mark.usefixtures("mistaken")
@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize("what", REFUSED)
def test_what_makes_no_sense_is_refused(ranks, what):
    ranks.run(run_refused, what)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("all_gather_variant", "best", "one of 'persistent', 'partitioned'"),
        (
            "all_reduce_variant",
            "tree",
            "'one_shot', 'two_shot_push', 'two_shot_direct', 'two_shot', 'pull', 'ring'",
        ),
        ("reduce_scatter_variant", "ring", "one of"),
        ("all_to_all_variant", "partitioned", "one of"),
        ("block_size_m", 0, "a power of two from 1"),
        ("block_size_n", 100, "a power of two"),
        ("num_warps", 64, "a power of two from 1 to 32"),
        ("num_warps", 4.0, "a whole number"),
        ("comm_sms", 0, "at least 1"),
        ("comm_sms", True, "a whole number"),
        ("all_reduce_distribution", 2, "0 .* or 1"),
        ("all_reduce_num_rings", 0, "at least 1"),
        ("threads_per_warp", 16, "32 .* or 64"),
        ("waves_per_eu", -1, "at least 0"),
        ("use_gluon", 1, "True or False"),
        ("batch_invariant", "yes", "True or False"),
    ],
)
def test_a_configuration_says_what_is_possible(field, value, message):
    with pytest.raises(InvalidConfigError, match=rf"{field}={value!r}.*{message}") as caught:
        Config(**{field: value})
    assert isinstance(caught.value, ValueError)


IDLE = {
    **dict.fromkeys(["swizzle_size", "num_xcds", "chunk_size", "num_stages", "waves_per_eu"], 1),
    "reduce_scatter_variant": "two_shot",
    "all_to_all_variant": "persistent",
}


@pytest.mark.parametrize("field", IDLE)
def test_a_field_without_effect_is_warned_of_once(field, monkeypatch):
    monkeypatch.setattr("iris.ccl.config._warned", set())
    with pytest.warns(UserWarning, match=rf"Config\({field}=.*no collective has a use"):
        Config(**{field: IDLE[field]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Config(**{field: IDLE[field]})


def test_a_block_has_a_limit():
    with pytest.raises(InvalidConfigError, match="block_size_m=2048, block_size_n=1024.*1048576"):
        Config(block_size_m=2048, block_size_n=1024)


def with_other_gpus(ctx):
    import iris

    with iris.iris(1 << 20) as own, mock.patch("iris.ccl.communicator.architecture", lambda: 80 + 10 * own.cur_rank):
        for use in (own.ccl.communicator, lambda: own.ccl.all_reduce(own.zeros(1), own.zeros(1))):
            with pytest.raises(InvalidGroupError, match="must have one architecture: rank 0 has 80, rank 1 has 90"):
                use()


def test_gpus_of_different_architectures(ranks):
    ranks.run(with_other_gpus)


def with_two_kinds(ctx):
    """Of which one has a table of its own, and the other has not."""
    import iris
    from iris.ccl import select

    def load(kind, size):
        return dict(select.ELSEWHERE) if kind == "kind 0" else {"all_reduce": [select.Choice(None, "two_shot", 1)]}

    with iris.iris(1 << 20) as own, pytest.MonkeyPatch.context() as patch:
        patch.setattr("iris.ccl.communicator.gpu_name", lambda device: f"kind {own.cur_rank}")
        patch.setattr("iris.ccl.communicator.load_table", load)
        own.ccl.all_reduce(total := own.zeros(3), torch.full((3,), 1.0 + own.cur_rank, device=own.device))
        assert own.ccl.communicator().table == select.ELSEWHERE and total.tolist() == [3] * 3
        # Of one kind they would have the same, if nobody had measured on one of them alone.
        patch.setattr("iris.ccl.communicator.gpu_name", lambda device: "one kind")
        patch.setattr("iris.ccl.communicator.load_table", lambda kind, size: load(f"kind {own.cur_rank}", size))
        with pytest.raises(InvalidTableError, match="different tables"):
            own.ccl.communicator(dist.new_group())


@pytest.mark.ranks(2, exactly=True)
def test_gpus_of_two_kinds_use_the_table_for_what_was_not_measured(ranks):
    ranks.run(with_two_kinds)


def after_the_end(ctx):
    import iris

    with iris.iris(1 << 20) as own:
        ccl = own.ccl
    with pytest.raises(IrisError, match="closed"):
        ccl.all_reduce(torch.zeros(1, device=ctx.device), torch.zeros(1, device=ctx.device))


def test_a_context_that_was_closed(ranks):
    ranks.run(after_the_end)


def different(ctx, what):
    """In debug mode every rank says who called what, and none waits for the others."""
    first = ctx.cur_rank == 0
    calls = {
        "shape": lambda: ctx.ccl.all_reduce(*[torch.zeros(4 if first else 5, device=ctx.device)] * 2),
        "dtype": lambda: ctx.ccl.all_reduce(
            *[torch.zeros(4, dtype=torch.float32 if first else torch.float16, device=ctx.device)] * 2
        ),
        "collective": lambda: (ctx.ccl.all_reduce if first else ctx.ccl.all_to_all)(
            torch.zeros(4, device=ctx.device), torch.zeros(4, device=ctx.device)
        ),
        "root": lambda: ctx.ccl.broadcast(torch.zeros(4, device=ctx.device), ctx.cur_rank),
        "operation": lambda: ctx.ccl.reduce(
            *[torch.zeros(4, device=ctx.device)] * 2, op=ReduceOp.MIN if first else ReduceOp.MAX
        ),
        "configuration": lambda: ctx.ccl.all_reduce(
            *[torch.zeros(4, device=ctx.device)] * 2, config=Config(comm_sms=2) if first else None
        ),
        "counts": lambda: ctx.ccl.all_to_all_v(
            torch.zeros(9, device=ctx.device), torch.zeros(9, device=ctx.device),
            [0, 5] if first else [3, 0], [0, 0], [0, 3] if first else [4, 0], [0, 0],
        ),
    }  # fmt: skip
    words = {
        "shape": [r"\[4\]", r"\[5\]"],
        "dtype": ["float32", "float16"],
        "collective": ["all_reduce", "all_to_all"],
        "root": ["broadcast.*src=0", "broadcast.*src=1"],
        "operation": ["MIN", "MAX"],
        "configuration": [r"Config\(comm_sms=2\);", r"SUM\."],
        "counts": ["sends 5 elements", "which expects 4"],
    }
    checks.DEBUGGING = True
    try:
        begin = time.monotonic()
        with pytest.raises(MismatchedCollectiveError, match=f"rank 0 .*{words[what][0]}.*rank 1.*{words[what][1]}"):
            calls[what]()
        assert time.monotonic() - begin < 35  # the process group would wait longer
        ctx.ccl.all_reduce(*[torch.zeros(4, device=ctx.device)] * 2)
        # What two ranks say to each other is no matter of the group's, and counts may differ if they fit.
        message = torch.full((7,), float(ctx.cur_rank), device=ctx.device)
        ctx.ccl.send(message, 1) if first else ctx.ccl.recv(message, 0)
        assert message.tolist() == [0.0] * 7
        given, result = torch.arange(9.0, device=ctx.device), torch.zeros(4, device=ctx.device)
        ctx.ccl.all_to_all_v(
            result, given, [1, 2] if first else [3, 0], [0, 1], [1, 3] if first else [2, 0], [0, 1] if first else [2, 0]
        )
        assert result.tolist() == [0, 0, 1, 2]
    finally:
        checks.DEBUGGING = False


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize("what", ["shape", "dtype", "collective", "root", "operation", "configuration", "counts"])
def test_debug_mode_names_what_differs_between_ranks(ranks, what):
    ranks.run(different, what)
