"""Every example that has a folder runs on small data, which it validates itself, and one as a program."""

import contextlib
import importlib
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import UNDER_TORCHRUN, import_path
from covering import EVERYTHING
from hesitation import hesitant
from preloaded import LIMIT_S, python

EXAMPLES = Path(__file__).parent.parent / "examples"
sys.path.append(str(EXAMPLES))

from workload import SIMULATED, Workload, check, size_of_sums  # noqa: E402

# m, n and k, which are no whole number of tiles.
SIZES = {
    "07_gemm_all_scatter": (150, 90 * 12, 70),
    "07_gemm_all_scatter/gluon": (150, 136 * 6, 72),
    "08_gemm_all_reduce_atomics": (300, 310, 70 * 6),
    "09_gemm_one_shot_all_reduce": (300, 310, 70 * 6),
    "10_gemm_all_scatter_wg_specialization": (150, 90 * 12, 70),
    "11_gemm_all_scatter_producer_consumer": (150, 90 * 12, 70),
    "12_gemm_all_scatter_bulk_synchronous": (150, 90 * 12, 70),
    "13_flash_decode": (3, 37 * 6, 24),
    "14_all_gather_gemm": (70 * 6, 270, 70),
    "15_ring_attention": (3, 9 * 12, 24) if EVERYTHING else (2, 6 * 12, 24),
    "16_moe_dispatch_combine": (37, 50, 12),
    "17_tensor_parallel_mlp": (13 * 6, 17 * 6, 44),
}
BF16, FP32 = torch.bfloat16, torch.float32
# Tensor cores by hand, which have no float32.
HALF_PRECISION = {"07_gemm_all_scatter/gluon"}


@contextlib.contextmanager
def imported(folder):
    """The example's benchmark, whose neighbours have the names that those of other examples have."""
    mine = {"kernel", "wrapper", "benchmark", "autograd"}
    for name in mine & set(sys.modules):
        del sys.modules[name]
    sys.path.insert(0, str(EXAMPLES / folder))
    try:
        yield importlib.import_module("benchmark")
    finally:
        sys.path.remove(str(EXAMPLES / folder))


def run_example(ctx, folder, sizes, dtype):
    """Rounds with no meeting of the hosts between them, of programs that stop now and then."""
    generator = random.Random(f"{folder} {ctx.get_rank()}")
    with imported(folder) as example, hesitant(ctx, generator, chance=0.002):
        example.main(ctx, Workload(*sizes, dtype, validate=True, rounds=6 if EVERYTHING else 3))


@pytest.mark.ranks(1, 2, 3) if EVERYTHING else pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [BF16, FP32] if EVERYTHING else [BF16], ids=str)
@pytest.mark.parametrize("folder", SIZES)
def test_example(ranks, folder, dtype):
    if dtype == FP32 and folder in HALF_PRECISION:
        dtype = torch.float16
    ranks.run(run_example, folder, SIZES[folder], dtype)


def few_numbers(ctx, folder, sizes):
    with imported(folder) as example:
        example.main(ctx, Workload(*sizes, BF16, rounds=21))


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize(
    "folder, sizes", [("09_gemm_one_shot_all_reduce", (1, 1, 2)), ("17_tensor_parallel_mlp", (2, 2, 1))]
)
def test_results_of_few_numbers_are_right(ranks, folder, sizes):
    """Among so many rounds are some where torch's own error is next to nothing, and the terms of a sum cancel."""
    ranks.run(few_numbers, folder, sizes)


def refused(ctx, folder, sizes, dtype, words, options):
    with imported(folder) as example, pytest.raises(SystemExit, match=words):
        example.main(ctx, Workload(*sizes, dtype, validate=True), **options)


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize(
    "folder, sizes, dtype, words, options",
    [
        ("07_gemm_all_scatter/gluon", (8, 24, 8), BF16, "give multiples of 16 and 8", {}),
        ("07_gemm_all_scatter/gluon", (8, 16, 12), BF16, "give multiples of 16 and 8", {}),
        ("07_gemm_all_scatter/gluon", (8, 16, 8), FP32, "fp16 and bf16", {}),
        ("13_flash_decode", (1, 7, 16), BF16, "give a multiple of 2", {}),
        ("13_flash_decode", (1, 8, 16), BF16, "give a multiple of these", {"heads": 5, "kv_heads": 2}),
    ],
)
def test_sizes_that_an_example_cannot_take(ranks, folder, sizes, dtype, words, options):
    ranks.run(refused, folder, sizes, dtype, words, options)


def zeros(*size, dtype=BF16):
    return torch.zeros(size, dtype=dtype)


def decode(ctx, wrapper):
    flash_decode = wrapper.FlashDecode(ctx, 2, 4, 2, 16, 8, BF16)
    yield flash_decode, dict(
        out=zeros(2, 4, 16), q=zeros(2, 4, 16), k=zeros(2, 2, 8, 16), v=zeros(2, 2, 8, 16),
        lengths=zeros(2, dtype=torch.int32),
    )  # fmt: skip


def ring(ctx, wrapper):
    for form in (wrapper.RingAttention, wrapper.GatherThenAttend, wrapper.SendAndAttend):
        yield form(ctx, 2, 8, 16, BF16), {name: zeros(2, 2, 8, 16) for name in ("out", "q", "k", "v")}


def experts(ctx, wrapper):
    layer = wrapper.ExpertParallel(ctx, 4, 8, 6, 2, BF16)
    chosen = zeros(4, 2, dtype=torch.int32)
    yield layer.dispatch, dict(x=zeros(4, 8), experts=chosen)
    yield layer.apply, dict(weights=zeros(6, 8, 8))
    layer.dispatch(zeros(4, 8), chosen)
    yield layer.combine, dict(out=zeros(4, 8), experts=chosen, gates=zeros(4, 2, dtype=FP32))


def refuse_tensors(ctx, folder, calls):
    spoiled = {
        r"has strides .* Give a contiguous tensor": lambda x: x.new_zeros(*x.shape, 2)[..., 0],
        r"is .* Give .* of torch\.(bfloat16|float32|int32)": lambda x: x.to(torch.float64),
        r"is .* Give \[": lambda x: x[..., 1:].contiguous(),
    }
    with imported(folder):
        for call, given in calls(ctx, importlib.import_module("wrapper")):
            for name, tensor in given.items():
                for words, spoil in spoiled.items():
                    with pytest.raises(ValueError, match=f"^{name}.* {words}"):
                        call(**given | {name: spoil(tensor)})


@pytest.mark.skipif(not SIMULATED, reason="of tensors on the CPU")
@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("folder", "calls"),
    [("13_flash_decode", decode), ("15_ring_attention", ring), ("16_moe_dispatch_combine", experts)],
)
def test_tensors_that_a_kernel_would_misread(ranks, folder, calls):
    """Kernels that take no strides are given contiguous tensors, of the dtypes and shapes that they are made for."""
    ranks.run(refuse_tensors, folder, calls)


def refuse_products(ctx, folder, name, symmetric):
    with imported(folder):
        multiply = getattr(importlib.import_module("wrapper"), name)
        a, b, c = zeros(16, 32), zeros(32, 24), zeros(16, 24)
        for wrong, given in (("b", (c, a, b[1:])), ("b", (c, a, b.float())), ("c", (c[:, 1:], a, b))):
            with pytest.raises(ValueError, match=f"^{wrong} is .* Give "):
                multiply(ctx, *given)
        with pytest.raises(ValueError, match=f"^{symmetric} is not on the symmetric heap"):
            multiply(ctx, c, a, b)


@pytest.mark.skipif(not SIMULATED, reason="of tensors on the CPU")
@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("folder", "name", "symmetric"),
    [
        ("07_gemm_all_scatter", "matmul_all_scatter", "c"),
        ("07_gemm_all_scatter/gluon", "matmul_all_scatter", "c"),
        ("10_gemm_all_scatter_wg_specialization", "matmul_all_scatter", "c"),
        ("11_gemm_all_scatter_producer_consumer", "matmul_all_scatter", "c"),
        ("12_gemm_all_scatter_bulk_synchronous", "matmul_all_scatter", "c"),
        ("14_all_gather_gemm", "all_gather_matmul_by_pull", "a"),
    ],
)
def test_matrices_that_do_not_fit_together(ranks, folder, name, symmetric):
    """Nor with the kernel, which reaches the peers' copies of one of them."""
    ranks.run(refuse_products, folder, name, symmetric)


def refuse_unaligned_rows(ctx):
    with imported("07_gemm_all_scatter/gluon"):
        multiply = importlib.import_module("wrapper").matmul_all_scatter
        a, b, c = zeros(16, 32), zeros(32, 24), ctx.zeros(16, 24, dtype=BF16)
        by_columns, odd, one_behind = zeros(32, 16).t(), zeros(32, 25)[:, :24], zeros(32, 32)[:, 1:25]
        for wrong, given in (("a", (by_columns, b)), ("b", (a, odd)), ("b", (a, one_behind))):
            with pytest.raises(ValueError, match=f"^{wrong} is not by rows that begin at multiples of 16 bytes"):
                multiply(ctx, c, *given)


@pytest.mark.skipif(not SIMULATED, reason="of tensors on the CPU")
@pytest.mark.ranks(1)
def test_matrices_that_tma_cannot_fetch(ranks):
    ranks.run(refuse_unaligned_rows)


def all_reduce_by(wrapper, ctx, *dtype):
    workspace = wrapper.Workspace(ctx, 4, 4, *dtype)
    return lambda c, a, b: wrapper.matmul_all_reduce(ctx, c, a, b, workspace)


def push_by(wrapper, ctx, *dtype):
    workspace = wrapper.Workspace(ctx, 4, 4, *dtype)
    return lambda c, a, b: wrapper.all_gather_matmul_by_push(ctx, c, b, workspace)


def refuse_for_a_workspace(ctx, folder, make, dtype, cases):
    with imported(folder):
        multiply = make(importlib.import_module("wrapper"), ctx, *dtype)
        for words, *given in cases:
            with pytest.raises(ValueError, match=words):
                multiply(*given)


SQUARE, LOW = zeros(4, 4), zeros(3, 4)
ANOTHER_SHAPE = (r"workspace is for results of \[4, 4\], and this is of \[3, 4\]", LOW, LOW, SQUARE)


@pytest.mark.skipif(not SIMULATED, reason="of tensors on the CPU")
@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("folder", "make", "dtype", "cases"),
    [
        ("08_gemm_all_reduce_atomics", all_reduce_by, (), [ANOTHER_SHAPE, ("^b is ", SQUARE, SQUARE, LOW)]),
        (
            "09_gemm_one_shot_all_reduce",
            all_reduce_by,
            (BF16,),
            # Which would be rounded to what the parts travel in.
            [ANOTHER_SHAPE, (r"^c is .*float32.* Give .*bfloat16", SQUARE.float(), SQUARE, SQUARE)],
        ),
        ("14_all_gather_gemm", push_by, (BF16,), [("^b is ", SQUARE, SQUARE, LOW), ("^c is ", LOW, SQUARE, SQUARE)]),
    ],
)
def test_matrices_that_a_workspace_is_not_for(ranks, folder, make, dtype, cases):
    ranks.run(refuse_for_a_workspace, folder, make, dtype, cases)


def refuse_other_tokens(ctx):
    with imported("16_moe_dispatch_combine"):
        layer = importlib.import_module("wrapper").ExpertParallel(ctx, 4, 8, 6, 2, BF16)
        chosen, gates = zeros(4, 2, dtype=torch.int32), zeros(4, 2, dtype=FP32)
        with pytest.raises(ValueError, match=r"^x has 5 tokens, and there is room for 4"):
            layer.dispatch(zeros(5, 8), zeros(5, 2, dtype=torch.int32))
        layer.dispatch(zeros(3, 8), chosen[:3])
        with pytest.raises(ValueError, match=r"^out is \[4, 8\].* Give \[3, 8\]"):
            layer.combine(zeros(4, 8), chosen, gates)


@pytest.mark.skipif(not SIMULATED, reason="of tensors on the CPU")
@pytest.mark.ranks(1)
def test_more_tokens_than_there_is_room_for_or_than_were_dispatched(ranks):
    """Of the latter nobody has said where the results are."""
    ranks.run(refuse_other_tokens)


def drop_tokens(ctx):
    """Of three tokens the first is dropped, the second has its second expert alone, the third its first, on each rank.

    Experts multiply by 2, and by 3, and so on.
    """
    with imported("16_moe_dispatch_combine"):
        W, rank, H, device = ctx.num_ranks, ctx.cur_rank, 64, ctx.device
        in_front = ctx.full((8, H), 5, dtype=BF16)
        layer = importlib.import_module("wrapper").ExpertParallel(ctx, 3, H, 2 * W, 2, BF16)
        for memory in (layer.inbox, layer.results):
            memory.fill_(torch.nan)
        ctx.barrier()
        x = 1 + torch.arange(3, device=device)[:, None].expand(3, H).to(BF16).contiguous()
        chosen = torch.tensor([[-1, -1], [-1, 2 * W - 1], [0, -1]], dtype=torch.int32, device=device)
        gates = torch.where(chosen < 0, torch.nan, 1.0)
        factors = 2.0 + 2 * rank + torch.arange(2, device=device)
        layer.dispatch(x, chosen)
        layer.apply((factors[:, None, None] * torch.eye(H, device=device)).to(BF16))
        layer.combine(out := torch.empty_like(x), chosen, gates)
        ctx.barrier()
        assert out.tolist() == [[0] * H, [2.0 * (2 * W + 1)] * H, [3.0 * 2] * H]
        assert in_front.eq(5).all()


def test_tokens_that_no_expert_gets(ranks):
    ranks.run(drop_tokens)


def run_wide_heads(ctx):
    with imported("13_flash_decode") as example:
        example.main(ctx, Workload(1, 34, 576, BF16, rounds=2), heads=32, kv_heads=1)


@pytest.mark.ranks(2, exactly=True)
def test_more_heads_than_a_program_has_room_for(ranks):
    """Of one head of keys and values: they are dealt out to several."""
    ranks.run(run_wide_heads)


def refuse_sizes(ctx, folder, make, words):
    with imported(folder), pytest.raises(ValueError, match=words):
        make(importlib.import_module("wrapper"), ctx)


def wide_decode(wrapper, ctx):
    wrapper.FlashDecode(ctx, 1, 1, 1, 576, 8, FP32)


def wide_ring(wrapper, ctx):
    wrapper.RingAttention(ctx, 1, 8, 576, FP32)


def uneven_heads(wrapper, ctx):
    wrapper.FlashDecode(ctx, 1, 5, 2, 16, 8, BF16)


def uneven_experts(wrapper, ctx):
    wrapper.ExpertParallel(ctx, 4, 8, 7, 2, BF16)


def many_experts(wrapper, ctx):
    wrapper.ExpertParallel(ctx, 4, 8, 1026, 2, BF16)


def uneven_layer(wrapper, ctx):
    wrapper.TensorParallelMLP(ctx, 4, 7, BF16)


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize(
    ("folder", "make", "words"),
    [
        ("13_flash_decode", wide_decode, "Give a dim of up to 512, or a narrower dtype"),
        ("15_ring_attention", wide_ring, "Give a dim of up to 512, or a narrower dtype"),
        ("13_flash_decode", uneven_heads, "5 heads, which is no multiple of 2 heads of keys and values"),
        ("16_moe_dispatch_combine", uneven_experts, "7 experts cannot be dealt out evenly to 2 ranks"),
        ("16_moe_dispatch_combine", many_experts, "1026 experts, and dispatch takes up to 1024"),
        ("17_tensor_parallel_mlp", uneven_layer, "A width of 7 .* Give a multiple of 2"),
    ],
)
def test_sizes_that_a_wrapper_cannot_take(ranks, folder, make, words):
    ranks.run(refuse_sizes, folder, make, words)


def all_scatter_of(dtype, wrapper, ctx):
    wrapper.matmul_all_scatter(ctx, *[zeros(4, 4, dtype=dtype)] * 3)


def all_reduce_of(dtype, wrapper, ctx):
    wrapper.matmul_all_reduce(ctx, *[zeros(4, 4, dtype=dtype)] * 3, workspace=None)


def pull_of(dtype, wrapper, ctx):
    wrapper.all_gather_matmul_by_pull(ctx, *[zeros(4, 4, dtype=dtype)] * 3)


def push_of(dtype, wrapper, ctx):
    wrapper.Workspace(ctx, 4, 4, dtype)


def decode_of(dtype, wrapper, ctx):
    wrapper.FlashDecode(ctx, 1, 4, 2, 16, 8, dtype)


def ring_of(dtype, wrapper, ctx):
    wrapper.RingAttention(ctx, 2, 8, 16, dtype)


def experts_of(dtype, wrapper, ctx):
    wrapper.ExpertParallel(ctx, 4, 8, 6, 2, dtype)


@pytest.mark.skipif(not SIMULATED, reason="of tensors on the CPU")
@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("folder", "call"),
    [
        ("07_gemm_all_scatter", all_scatter_of),
        ("07_gemm_all_scatter/gluon", all_scatter_of),
        ("08_gemm_all_reduce_atomics", all_reduce_of),
        ("09_gemm_one_shot_all_reduce", all_reduce_of),
        ("10_gemm_all_scatter_wg_specialization", all_scatter_of),
        ("11_gemm_all_scatter_producer_consumer", all_scatter_of),
        ("12_gemm_all_scatter_bulk_synchronous", all_scatter_of),
        ("13_flash_decode", decode_of),
        ("14_all_gather_gemm", pull_of),
        ("14_all_gather_gemm", push_of),
        ("15_ring_attention", ring_of),
        ("16_moe_dispatch_combine", experts_of),
    ],
)
def test_a_dtype_that_a_kernel_does_not_multiply(ranks, folder, call):
    """Sums are in float32: of float64 they would be less than was asked for."""
    words = r"multiplies .*float16.*, and was given torch\.float64"
    ranks.run(refuse_sizes, folder, partial(call, torch.float64), words)


def run_gradients(ctx):
    with imported("07_gemm_all_scatter/gluon"):
        from wrapper import MatmulAllScatter

        rank, W, (M, N, K) = ctx.get_rank(), ctx.get_num_ranks(), (40, 24, 16)
        on_ranks = [torch.Generator(ctx.device).manual_seed(peer) for peer in range(W)]

        def everyones(*size):
            return [torch.randn(size, generator=one, device=ctx.device).to(BF16) for one in on_ranks]

        a, b, weights = everyones(M, K), everyones(K, N), everyones(M, W * N)
        mine = a[rank].requires_grad_(), b[rank].requires_grad_()
        (MatmulAllScatter.apply(*mine, ctx) * weights[rank]).sum().backward()
        # The loss is the sum of all ranks', and this rank's columns are in each.
        a, b, weights = ([x.detach().double() for x in each] for each in (a, b, weights))
        of_columns = sum(weights)[:, rank * N :][:, :N]
        torch.testing.assert_close(mine[0].grad.double(), of_columns @ b[rank].t(), rtol=0.02, atol=0.3)
        torch.testing.assert_close(mine[1].grad.double(), a[rank].t() @ of_columns, rtol=0.02, atol=0.3)


@pytest.mark.ranks(3)
def test_gradients(ranks):
    ranks.run(run_gradients)


def without_a_product(ctx):
    """An example whose operation does nothing, and results that are wrong in one place."""
    compare = importlib.import_module("gemm_all_scatter").compare
    with pytest.raises(AssertionError, match=f"Wrong data on rank {ctx.get_rank()} in round 0"):
        compare(ctx, Workload(40, 24, 16, BF16), "nothing", lambda *_: None)
    exact = torch.arange(1.0, 101, dtype=torch.float64)
    for wrong in (-exact[50], torch.nan, torch.inf):
        result = exact.to(FP32)
        check(result, exact, exact.to(FP32), "a right result")
        result[50] = wrong
        with pytest.raises(AssertionError, match="Wrong data on one element"):
            check(result, exact, exact.to(FP32), "one element")
    # One sum whose terms nearly cancel, which torch has by chance as it is: rounded on the way, and without a term.
    a, b = torch.tensor([[1.0, -0.99]]), torch.ones(2, 1)
    exact = a.double() @ b.double()
    result = (a.to(BF16) @ b.to(BF16)).to(BF16)
    check(result, exact, exact, "a right sum", size_of_sums(a, b))
    for wrong in (a[:, :1], a[:, 1:]):
        with pytest.raises(AssertionError, match="Wrong data on one sum"):
            check(wrong.to(BF16), exact, exact, "one sum", size_of_sums(a, b))


@pytest.mark.usefixtures("mistaken")
def test_wrong_data_are_noticed(ranks):
    ranks.run(without_a_product)


def test_every_folder_is_tested():
    assert set(SIZES) == {str(file.parent.relative_to(EXAMPLES)) for file in EXAMPLES.rglob("benchmark.py")}


def run_program(folder, *arguments):
    result = subprocess.run(
        [*python(), EXAMPLES / folder / "benchmark.py", "-r", "2", *arguments],
        env={**os.environ, "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own")
def test_program():
    arguments = ["-m", "64", "-n", "64", "-k", "32", "--validate", "--benchmark"]
    output = run_program("12_gemm_all_scatter_bulk_synchronous", *arguments)
    assert "3 rounds of 64 x 64 x 32 among 2 ranks are right" in output
    assert "vendor's GEMM alone" in output and ("simulator" in output) == SIMULATED


@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own")
@pytest.mark.parametrize("folder", SIZES if EVERYTHING else ["07_gemm_all_scatter/gluon", "16_moe_dispatch_combine"])
def test_benchmark_alone(folder):
    """Times, and not a word of data, which nobody has compared."""
    sizes = SIZES[folder]
    output = run_program(folder, "--benchmark", *(f"-{name}{size}" for name, size in zip("mnk", sizes, strict=True)))
    assert "of the first's time" in output and ("simulator" in output) == SIMULATED
    assert "right" not in output and "validated" not in output
