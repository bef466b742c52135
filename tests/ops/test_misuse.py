"""What a fused operation cannot do is said before anything is enqueued, on the rank that asked for it."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

import iris
from iris.errors import (
    HeapClosedError,
    HeapTooLargeError,
    InvalidCollectiveError,
    InvalidConfigError,
    MismatchedCollectiveError,
    NotATensorError,
    WorkspaceTooSmallError,
    WrongDeviceError,
)
from iris.heap import mapping
from iris.ops import FusedConfig, normalisation, products, workspaces
from ops.products import OPERATIONS

OUT, A, B = (8, 4), (8, 6), (6, 4)


def ask(ctx, error, words, arguments, options, name):
    given = {"out": OUT, "A": A, "B": B} | arguments
    given = {role: torch.zeros(value) if isinstance(value, tuple) else value for role, value in given.items()}
    given, options = (
        {role: value.to(ctx.device) if isinstance(value, torch.Tensor) else value for role, value in each.items()}
        for each in (given, options)
    )
    with pytest.raises(error, match=words):
        getattr(ctx.ops, name)(*given.values(), **options)


HALVES = {role: torch.zeros(shape, dtype=torch.float16) for role, shape in (("out", OUT), ("A", A), ("B", B))}
ALIGNED = {
    role: torch.zeros(shape, dtype=torch.float16) for role, shape in (("out", (8, 8)), ("A", (8, 16)), ("B", (16, 8)))
}
CASES = {
    "no tensor": (NotATensorError, r"matmul_all_reduce\(A=\) takes a tensor, .* NoneType", {"A": None}, {}),
    "a number as scale": (NotATensorError, r"\(scale_b=\) takes a tensor, .* float: 2.0", {}, {"scale_b": 2.0}),
    "a sparse tensor": (InvalidCollectiveError, r"x.to_dense\(\)", {"A": torch.zeros(A).to_sparse()}, {}),
    "dimensions": (InvalidCollectiveError, "two dimensions", {"A": (2, 8, 6)}, {}),
    "inner size": (InvalidCollectiveError, "as many rows as A has columns, 6", {"B": (5, 4)}, {}),
    "a weight": (InvalidCollectiveError, "columns, 6; of a weight .* give weight.t", {"B": (4, 6)}, {}),
    "result": (InvalidCollectiveError, r"out has to be \[8, 4\]", {"out": (4, 4)}, {}),
    "integers": (InvalidCollectiveError, "fp8, fp16, bf16 or fp32", {"A": torch.zeros(A, dtype=torch.int32)}, {}),
    "dtypes": (InvalidCollectiveError, "one dtype", {"A": torch.zeros(A, dtype=torch.float16)}, {}),
    "dtype of the result": (
        InvalidCollectiveError,
        "out is fp16, bf16 or fp32",
        {"out": torch.zeros(OUT, dtype=torch.int32)},
        {},
    ),
    "bias": (InvalidCollectiveError, "the bias has 4 elements", {"bias": (8,)}, {}),
    "dtype of the bias": (
        InvalidCollectiveError,
        "bias has 4 elements",
        {"bias": torch.zeros(4, dtype=torch.int32)},
        {},
    ),
    "scale": (InvalidCollectiveError, "scale_a is float32, of 1 or 8 elements", {}, {"scale_a": torch.ones(3)}),
    "dtype of a scale": (
        InvalidCollectiveError,
        "scale_b is float32, of 1 or 4 elements",
        {},
        {"scale_b": torch.ones(1, dtype=torch.float64)},
    ),
    "scales by the vendor": (
        InvalidConfigError,
        "vendor's GEMM: scales are for fp8",
        {},
        {"scale_a": torch.ones(1), "config": FusedConfig(variant="vendor")},
    ),
    "another bias by the vendor": (
        InvalidConfigError,
        "the bias needs the dtype of out",
        {},
        {"bias": torch.ones(4, dtype=torch.float16), "config": FusedConfig(variant="vendor")},
    ),
    "the same by a collective": (
        InvalidConfigError,
        r"FusedConfig\(all_reduce_variant='ring'\) cannot",
        {"bias": torch.ones(4, dtype=torch.float16)},
        {"config": FusedConfig(all_reduce_variant="ring")},
    ),
    "copies and a collective": (
        InvalidConfigError,
        r"variant='copies'\) is for all_gather_matmul and",
        {},
        {"config": FusedConfig(variant="copies", all_reduce_variant="ring")},
    ),
    "no Gluon": (InvalidConfigError, "one dtype, fp16 or bf16", {}, {"config": FusedConfig(use_gluon=True)}),
    "Gluon and the vendor": (
        InvalidConfigError,
        r"use_gluon=True\): the kernel is in Gluon, and variant='vendor' takes the vendor's GEMM",
        {},
        {"config": FusedConfig(use_gluon=True, variant="vendor")},
    ),
    "no columns": (
        InvalidConfigError,
        "A has no columns",
        {role: ALIGNED[role][:, :0] for role in "A"} | {"out": ALIGNED["out"], "B": ALIGNED["B"][:0]},
        {"config": FusedConfig(use_gluon=True)},
    ),
    "odd rows": (InvalidConfigError, "a multiple of 16 bytes", HALVES, {"config": FusedConfig(use_gluon=True)}),
    "low tiles": (
        InvalidConfigError,
        "tiles of 128 or 256 rows, and 64, 128 or 256 columns",
        ALIGNED,
        {"config": FusedConfig(use_gluon=True, block_size_m=64)},
    ),
    "large tiles": (
        InvalidConfigError,
        "32768 elements",
        ALIGNED,
        {"config": FusedConfig(use_gluon=True, block_size_n=256)},
    ),
    "deep tiles": (
        InvalidConfigError,
        "no room for two",
        ALIGNED,
        {"config": FusedConfig(use_gluon=True, block_size_m=128, block_size_n=256, block_size_k=128)},
    ),
    "config": (InvalidConfigError, "config='fast' is not possible: it is an iris.ops", {}, {"config": "fast"}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit(ranks, case):
    ranks.run(ask, *CASES[case], "matmul_all_reduce")


def ask_with_another_sign(ctx):
    # Made on the device: on its way there it would get its own sign back.
    out = torch.zeros(OUT, dtype=torch.cfloat, device=ctx.device).conj().imag
    ask(ctx, InvalidCollectiveError, "the other sign", {"out": out}, {}, "matmul_all_reduce")


def test_a_result_with_another_sign(ranks):
    ranks.run(ask_with_another_sign)


def tiles_of_fp8(ctx, words, tile):
    given = ALIGNED | {role: torch.zeros(ALIGNED[role].shape, dtype=torch.float8_e4m3fn) for role in "AB"}
    config = FusedConfig(use_gluon=True, block_size_m=128, **tile)
    ask(ctx, InvalidConfigError, words, given, {"config": config}, "matmul_all_reduce")


@pytest.mark.skipif(torch.version.hip is not None, reason="Hopper's kernel")
@pytest.mark.parametrize(
    "words, tile",
    [("16384 elements", {"block_size_n": 256}), ("less than a product takes; 32", {"block_size_k": 16})],
)
def test_tiles_of_fp8(ranks, words, tile):
    ranks.run(tiles_of_fp8, words, tile)


def test_rows_that_cannot_be_shared(ranks):
    arguments = {"out": (4, 4), "A": (9, 6)}
    ranks.run(ask, InvalidCollectiveError, "rows of A is a multiple of 2", arguments, {}, "matmul_reduce_scatter")


def overlapping(ctx):
    whole = torch.zeros(64, device=ctx.device)
    with pytest.raises(InvalidCollectiveError, match="elements of out are one place in memory"):
        ctx.ops.matmul_all_reduce(whole[:4].expand(8, 4), whole[16:64].view(8, 6), torch.zeros(B, device=ctx.device))
    with pytest.raises(InvalidCollectiveError, match="out and A overlap"):
        ctx.ops.matmul_all_reduce(whole[:32].view(8, 4), whole[16:64].view(8, 6), torch.zeros(B, device=ctx.device))
    with pytest.raises(InvalidCollectiveError, match="out and B overlap"):
        ctx.ops.matmul_all_reduce(whole[:32].view(8, 4), torch.zeros(A, device=ctx.device), whole[16:40].view(6, 4))
    given = [torch.zeros(shape, device=ctx.device) for shape in (OUT, A, B)]
    for role, length in (("bias", 4), ("scale_a", 8), ("scale_b", 4)):
        with pytest.raises(InvalidCollectiveError, match=f"out and {role} overlap"):
            ctx.ops.matmul_all_reduce(*given, **{role: given[0].flatten()[-length:]}, config=FusedConfig())
    whole = torch.rand(8, 12, device=ctx.device)
    for columns_of_out, columns_of_a in ((slice(5, 9), slice(6)), (slice(4), slice(3, 9))):
        with pytest.raises(InvalidCollectiveError, match="out and A overlap"):
            ctx.ops.matmul_all_reduce(
                whole[:, columns_of_out], whole[:, columns_of_a], torch.zeros(B, device=ctx.device)
            )
    # Columns beside those of A are others.
    ctx.ops.matmul_all_reduce(whole[:, 6:10], whole[:, :6], torch.ones(B, device=ctx.device))
    own = whole[:, :6].sum(1, keepdim=True).expand(8, 4)
    total = torch.empty(8, 4, device=ctx.device)
    ctx.ccl.all_reduce(total, own.contiguous())
    torch.testing.assert_close(whole[:, 6:10], total)


def test_a_result_over_an_operand(ranks):
    ranks.run(overlapping)


def elsewhere(ctx):
    out, a, b = (torch.zeros(shape, device=ctx.device) for shape in (OUT, A, B))
    with pytest.raises(WrongDeviceError, match="B of matmul_all_reduce.. is on meta, and this context works on"):
        ctx.ops.matmul_all_reduce(out, a, b.to("meta"))
    with pytest.raises(WrongDeviceError, match="weight of all_reduce_rms_norm.. is on meta"):
        ctx.ops.all_reduce_rms_norm(a, a, torch.ones(6, device="meta"))


def test_tensors_on_another_device(ranks):
    ranks.run(elsewhere)


def too_many(ctx):
    """Ranks have so many words among the counts; after these are others."""
    given = [torch.zeros(shape, device=ctx.device) for shape in (OUT, A, B)]
    most, workspaces.MOST_RANKS = workspaces.MOST_RANKS, ctx.num_ranks - 1
    try:
        with pytest.raises(InvalidCollectiveError, match=f"for up to 1 ranks, and there are {ctx.num_ranks}"):
            ctx.ops.matmul_all_reduce_preamble(*given, config=FusedConfig())
    finally:
        workspaces.MOST_RANKS = most


@pytest.mark.ranks(2, exactly=True)
def test_more_ranks_than_there_are_counts_for(ranks):
    ranks.run(too_many)


def of_a_closed_context(ctx):
    out, a, b = (torch.zeros(shape, device=ctx.device) for shape in (OUT, A, B))
    with iris.iris(heap_size=1 << 16) as other:
        pass
    for call in (
        lambda: other.ops.matmul_all_reduce(out, a, b),
        lambda: other.ops.matmul_all_reduce_preamble(out, a, b),
        lambda: other.ops.all_reduce_rms_norm(a, a, a[0]),
    ):
        with pytest.raises(HeapClosedError, match="closed"):
            call()


def test_a_closed_context(ranks):
    ranks.run(of_a_closed_context)


def other_workspace(ctx):
    out, a, b = (torch.zeros(shape, device=ctx.device) for shape in (OUT, A, B))
    config = FusedConfig(block_size_m=16, block_size_n=16, block_size_k=16)
    assert ctx.ops.matmul_all_reduce_preamble(out, a, b) is None
    workspace = ctx.ops.matmul_all_reduce_preamble(out, a, b, config=config)
    # The precision of products is each rank's own choice.
    for carried in (config, replace(config, allow_tf32=False)):
        ctx.ops.matmul_all_reduce(out, a + 1, b + 1, config=carried, workspace=workspace)
        assert (out == 6 * ctx.num_ranks).all()
    with pytest.raises(WorkspaceTooSmallError, match="prepared for matmul_all_reduce.8, 4, 6"):
        ctx.ops.matmul_all_reduce(out[:4], a[:4], b, config=config, workspace=workspace)
    for carried in (config, None):
        with pytest.raises(InvalidCollectiveError, match="workspace=5 is not what matmul_all_reduce_preamble"):
            ctx.ops.matmul_all_reduce(out, a, b, config=carried, workspace=5)
    with pytest.raises(WorkspaceTooSmallError, match="by the vendor's GEMM, which needs none"):
        ctx.ops.matmul_all_reduce(out, a, b, workspace=workspace)
    with iris.iris(heap_size=1 << 16) as other, pytest.raises(InvalidCollectiveError, match="by another context"):
        other.ops.matmul_all_reduce(out, a, b, config=config, workspace=workspace)
    ctx.barrier()
    workspace.close()
    with pytest.raises(HeapClosedError, match="matmul_all_reduce.8, 4, 6. was closed"):
        ctx.ops.matmul_all_reduce(out, a, b, config=config, workspace=workspace)


def test_a_workspace_is_for_calls_like_the_one_it_was_prepared_for(ranks):
    ranks.run(other_workspace)


def differ(ctx, what):
    """In debug mode ranks that call something else are told so, before a kernel waits or stores."""
    first, heap = ctx.cur_rank == 0, ctx.zeros(16, 4)
    a, b, out = (torch.ones(shape, device=ctx.device) for shape in (A, B, OUT))
    x, config = torch.ones(4, device=ctx.device), FusedConfig(block_size_m=16, block_size_n=16, block_size_k=16)
    calls = {
        "rows": lambda: ctx.ops.matmul_all_reduce(out[: 8 - ctx.cur_rank], a[: 8 - ctx.cur_rank], b, config=config),
        "place": lambda: ctx.ops.matmul_all_reduce(heap[8 * ctx.cur_rank :][:8], a, b, config=config),
        "heap": lambda: ctx.ops.matmul_all_reduce(heap[:8] if first else out, a, b, config=config),
        "bias": lambda: ctx.ops.matmul_all_reduce(out, a, b, x if first else None, config=config),
        "norm": lambda: ctx.ops.all_reduce_rms_norm(a, a, torch.ones(6, device=ctx.device), 1e-6 * (1 + ctx.cur_rank)),
    }
    said = {
        "rows": [r"A \[8, 6\]", r"A \[7, 6\]"],
        "place": [r"at offset 0x\w+ of the heap", r"at offset 0x\w+ of the heap"],
        "heap": ["at offset 0x", ""],
        "bias": [r"bias \[4\]", ""],
        "norm": ["eps=1e-06", "eps=2e-06"],
    }
    products.DEBUGGING = normalisation.DEBUGGING = True
    try:
        with pytest.raises(MismatchedCollectiveError, match=f"rank 0 .*{said[what][0]}.*rank 1 .*{said[what][1]}"):
            calls[what]()
        ctx.ops.matmul_all_reduce(out, a, b, config=config)
        assert (out == 6 * ctx.num_ranks).all()
    finally:
        products.DEBUGGING = normalisation.DEBUGGING = False


def without_room(ctx):
    out, a, b = (torch.ones(shape, device=ctx.device) for shape in (OUT, A, B))
    ctx.ops.close()
    words = (
        r"matmul_all_reduce\(8, 4, 6.* needs a workspace.* larger than the memory of .*variant='vendor'\) it needs none"
    )
    with mock.patch.object(mapping, "total_memory", lambda device: 1 << 20):
        with pytest.raises(HeapTooLargeError, match=words):
            ctx.ops.matmul_all_reduce(out, a, b, config=FusedConfig())
    ctx.ops.matmul_all_reduce(out, a, b, config=FusedConfig(variant="vendor"))
    assert (out == 6 * ctx.num_ranks).all()


def test_a_workspace_that_has_no_room_is_told(ranks):
    ranks.run(without_room)


def differ_in_size(ctx, name, earlier):
    """Of a first call, or of one that is larger than what there is: what ranks ask for is all that is compared."""
    rank, b = ctx.cur_rank, torch.ones(16, 16, device=ctx.device)
    config = FusedConfig(block_size_m=16, block_size_n=16, block_size_k=16)

    def call(rows):
        results = {"matmul_all_gather": 2 * rows, "all_gather_matmul": 2 * rows, "matmul_reduce_scatter": rows // 2}
        a = torch.ones(rows, 16, device=ctx.device)
        out = torch.empty(results.get(name, rows), 16, device=ctx.device)
        getattr(ctx.ops, name)(out, a, b, config=config)
        assert (out == 16 * (1 if "gather" in name else ctx.num_ranks)).all()

    ctx.ops.close()
    if earlier:
        call(32)
    calls = rf"rank 0 {name}\(512, 16, 16.*; rank 1 {name}\(1024, 16, 16"
    with pytest.raises(MismatchedCollectiveError, match=f"{calls}.*Give all ranks matrices of equal shapes"):
        call(512 * (1 + rank))
    # Nothing was enqueued.
    call(64)
    ctx.barrier()
    ctx.ops.close()


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize("earlier", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_calls_that_need_memory_of_other_sizes(ranks, name, earlier):
    ranks.run(differ_in_size, name, earlier)


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize("what", ["rows", "place", "heap", "bias", "norm"])
def test_calls_that_differ_in_debug_mode(ranks, mistaken, what):
    ranks.run(differ, what)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("block_size_m", 48, "power of two"), ("block_size_n", 2048, "to 1024"), ("block_size_k", 8, "from 16"),
     ("num_sms", 0, "at least 1"), ("cache_modifier_a", ".xx", "one of"),
     ("all_reduce_variant", "tree", "two_shot"), ("allow_tf32", 1, "True or False"), ("num_warps", 64, "from 1 to 32")],
)  # fmt: skip
def test_configurations(field, value, words):
    with pytest.raises(InvalidConfigError, match=rf"FusedConfig\({field}={value!r}\) cannot work: .*{words}"):
        FusedConfig(**{field: value})


def test_the_order_of_a_configurations_fields():
    assert FusedConfig(128, 32, 16, 4, 7, 2, 3, ".ca", ".cg", False, "two_shot") == FusedConfig(
        block_size_m=128, block_size_n=32, block_size_k=16, group_size_m=4, num_sms=7, num_xcds=2, chunk_size=3,
        cache_modifier_a=".ca", cache_modifier_b=".cg", allow_tf32=False, all_reduce_variant="two_shot",
    )  # fmt: skip
