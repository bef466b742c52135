"""What examples refuse: sizes, tensors and dtypes that their kernels would misread."""

import importlib
from functools import partial

import pytest
import torch
from covering import thorough
from example_folders import imported, skip_without_packages
from workload import SIMULATED, Workload

from iris.bench.model.communication import Alone
from iris.bench.model.dimensions import MODELS, Share
from iris.bench.model.weights import Maker

BF16, FP32 = torch.bfloat16, torch.float32


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
        ("16_moe_dispatch_combine", (4, 32, 7), BF16, "-k is 7, .* give a multiple of 2", {}),
        ("16_moe_dispatch_combine", (4, 32, 4), BF16, "a token goes to 5 experts", {"top": 5}),
        ("16_moe_dispatch_combine", (4, 40, 4), BF16, "-n is 40, .* a multiple of 16", {}),
        ("18_tensor_parallel_decoder", (2, 5, 2), BF16, "-n is 5, .* give a multiple of 2", {}),
        thorough("20_mixture_of_experts", (3, 4, 2), BF16, "-m is 3, .* give a multiple of 2", {}),
    ],
)
def test_sizes_that_an_example_cannot_take(ranks, folder, sizes, dtype, words, options):
    skip_without_packages(folder)
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
    [("13_flash_decode", decode), ("15_ring_attention", ring)],
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
        by_columns, odd, shifted = zeros(32, 16).t(), zeros(32, 25)[:, :24], zeros(32, 32)[:, 1:25]
        for wrong, given in (("a", (by_columns, b)), ("b", (a, odd)), ("b", (a, shifted))):
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


def refuse_sizes(ctx, folder, make, words):
    with imported(folder), pytest.raises(ValueError, match=words):
        make(importlib.import_module("wrapper"), ctx)


def wide_decode(wrapper, ctx):
    wrapper.FlashDecode(ctx, 1, 1, 1, 576, 8, FP32)


def wide_ring(wrapper, ctx):
    wrapper.RingAttention(ctx, 1, 8, 576, FP32)


def uneven_heads(wrapper, ctx):
    wrapper.FlashDecode(ctx, 1, 5, 2, 16, 8, BF16)


def uneven_layer(wrapper, ctx):
    wrapper.TensorParallelMLP(ctx, 4, 7, BF16)


def server(wrapper, ctx):
    maker = Maker(MODELS["tiny"], Share(ctx.cur_rank, 2), BF16, BF16, ctx.device)
    return wrapper.Server(maker, Alone(2), [2], 4)


def many_prompts(wrapper, ctx):
    server(wrapper, ctx).start(torch.zeros(3, 2, dtype=torch.int64, device=ctx.device))


def uneven_prompts(wrapper, ctx):
    server(wrapper, ctx).start(torch.zeros(1, 3, dtype=torch.int64, device=ctx.device))


def long_sequences(wrapper, ctx):
    serving = server(wrapper, ctx)
    serving.start(torch.zeros(1, 4, dtype=torch.int64, device=ctx.device))
    serving.step(1)


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize(
    ("folder", "make", "words"),
    [
        ("13_flash_decode", wide_decode, "Give a dim of up to 512, or a narrower dtype"),
        ("15_ring_attention", wide_ring, "Give a dim of up to 512, or a narrower dtype"),
        ("13_flash_decode", uneven_heads, "5 heads, which is no multiple of 2 heads of keys and values"),
        ("17_tensor_parallel_mlp", uneven_layer, "A width of 7 .* Give a multiple of 2"),
        ("18_tensor_parallel_decoder", many_prompts, "3 prompts of 2 tokens .* up to 2 sequences of up to 4 tokens"),
        ("18_tensor_parallel_decoder", uneven_prompts, "1 prompts of 3 tokens cannot be dealt out evenly to 2 ranks"),
        ("18_tensor_parallel_decoder", long_sequences, "have 4 tokens, .* no room for more"),
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
    ],
)
def test_a_dtype_that_a_kernel_does_not_multiply(ranks, folder, call):
    """Sums are in float32: of float64 they would be less than was asked for."""
    words = r"multiplies .*float16.*, and was given torch\.float64"
    ranks.run(refuse_sizes, folder, partial(call, torch.float64), words)
