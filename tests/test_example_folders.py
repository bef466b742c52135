"""Every example that has a folder runs on small data, which it validates itself, and one as a program."""

import contextlib
import importlib
import json
import os
import random
import re
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import torch
from conftest import UNDER_TORCHRUN, import_path
from covering import EVERYTHING, SAMPLED, thorough
from example_folders import EXAMPLES, OF_TRANSFORMERS, imported, skip_without_packages
from hesitation import hesitant
from preloaded import LIMIT_S, python
from profiled import CALL, OTHERS, Call, Kernel, draw, show
from workload import SIMULATED, Workload, check, size_of_sums

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
    "16_moe_dispatch_combine": (5, 48, 12) if SAMPLED else (13, 48, 12),
    "17_tensor_parallel_mlp": (13 * 6, 17 * 6, 44),
    "18_tensor_parallel_decoder": (2, 4, 2) if SAMPLED else (3, 6, 2),
    "19_fsdp_tensor_parallel_training": (2, 12, 2),
    "20_mixture_of_experts": (6, 5, 1),
}
BF16, FP32 = torch.bfloat16, torch.float32
# Tensor cores by hand, which have no float32.
HALF_PRECISION = {"07_gemm_all_scatter/gluon"}


def run_example(ctx, folder, sizes, dtype):
    """Rounds with no meeting of the hosts between them, of programs that stop now and then."""
    generator = random.Random(f"{folder} {ctx.get_rank()}")
    with imported(folder) as example, hesitant(ctx, generator, chance=0.002):
        example.main(ctx, Workload(*sizes, dtype, validate=True, rounds=6 if EVERYTHING else 2))


@pytest.mark.ranks(1, 2, 3) if EVERYTHING else pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [BF16, FP32] if EVERYTHING else [BF16], ids=str)
@pytest.mark.parametrize("folder", [thorough(each) if each in OF_TRANSFORMERS else each for each in SIZES])
def test_example(ranks, folder, dtype):
    skip_without_packages(folder)
    if dtype == FP32 and folder in HALF_PRECISION:
        dtype = torch.float16
    ranks.run(run_example, folder, SIZES[folder], dtype)


def run_decoder(ctx, communication):
    with imported("18_tensor_parallel_decoder") as example:
        example.main(ctx, Workload(2, 6, 2, FP32, rounds=2), communication=communication)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("communication", ["nccl", thorough("iris")])
def test_a_decoder_is_compared_with_others(ranks, communication):
    ranks.run(run_decoder, communication)


def run_mixture(ctx, communication, part, profile):
    with imported("20_mixture_of_experts") as example:
        workload = Workload(2, 4, 1, FP32, validate=profile is None, rounds=2, profile=profile)
        example.main(ctx, workload, communication=communication, part=part)


@pytest.mark.thorough
@pytest.mark.ranks(2)
@pytest.mark.parametrize("communication, part", [("nccl", "both"), ("iris", "training")])
def test_a_mixture_is_compared_with_others(ranks, communication, part):
    skip_without_packages("20_mixture_of_experts")
    ranks.run(run_mixture, communication, part, None)


@pytest.mark.thorough
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "communication, by", [("nccl", "_c10d_functional::all_to_all_single"), ("iris", "iris::experts_dispatch")]
)
def test_a_training_step_of_a_mixture_is_recorded(ranks, communication, by, tmp_path):
    skip_without_packages("20_mixture_of_experts")
    file = tmp_path / "step.json"
    ranks.run(run_mixture, communication, "training", file)
    if int(os.environ.get("RANK", "0")) == 0:
        assert by in {each.get("name") for each in json.loads(file.read_text())["traceEvents"]}


def test_where_the_time_of_a_call_goes(tmp_path, capsys):
    """Kernels at once and one after the other, and one before the call."""
    events = [
        {"name": CALL, "cat": "user_annotation", "ts": 1000, "dur": 500},
        {"name": CALL, "cat": "gpu_user_annotation", "ts": 2000, "dur": 9000},
        {"name": "_barrier_kernel", "cat": "kernel", "ts": 900, "dur": 50},
        {"name": "ncclDevKernel_AllGather", "cat": "kernel", "ts": 2000, "dur": 3000},
        {"name": "nvjet_tst_128x256", "cat": "kernel", "ts": 3000, "dur": 1000},
        {"name": "all_gather_matmul", "cat": "kernel", "ts": 3500, "dur": 1500},
        {"name": "triton_poi_fused_add_0", "cat": "kernel", "ts": 7000, "dur": 2000},
        {"name": "cudaLaunchKernel", "cat": "cuda_runtime", "ts": 1100, "dur": 5},
    ]
    file = tmp_path / "step.json"
    file.write_text(json.dumps({"traceEvents": [{"ph": "X", **each} for each in events]}))
    assert Call.load(file).rows() == {
        "NCCL": "3.00 in 1",
        "Iris: fused products": "1.50 in 1",
        "products": "1.00 in 1",
        OTHERS: "2.00 in 1",
        "communication beside other kernels": "2.00",
        "communication alone": "1.00",
        "nothing on the GPU": "3.00",
        "from the first call to the last kernel's end": "8.00",
        "the host enqueued for": "0.50",
    }
    show([file, file])
    assert capsys.readouterr().out.count("3.00 in 1") == 2
    draw([file, file], tmp_path / "steps.svg", 3000)
    assert "Iris: fused products" in (tmp_path / "steps.svg").read_text()


def test_every_kernel_has_a_kind():
    """Those that the digests have of what a model calls."""
    digests = Path(__file__).parent / "codegen" / "digests"
    names = {name.split()[0] for file in digests.iterdir() for name in json.loads(file.read_text())}
    kernels = [name.partition(":")[2] for name in names if re.match("iris/(ccl|ops|experts)/", name)]
    assert {"one_shot", "pull", "sharded_rms_norm", "dispatch"} <= set(kernels)
    assert not [name for name in kernels if not Kernel(name, 0, 0).kind.startswith("Iris")]


TRAINING = "19_fsdp_tensor_parallel_training"


def run_training(ctx, options):
    with imported(TRAINING) as example:
        for sizes, tensor, words in (
            ((2, 4, 2), 3, "does not divide 2 ranks"),
            ((2, 5, 2), 2, "-n is 5, .* multiple of 2"),
        ):
            with pytest.raises(SystemExit, match=words):
                example.main(ctx, Workload(*sizes, BF16), tensor=tensor)
        example.main(ctx, Workload(2, 4, 2, FP32), **options)
        losses = torch.linspace(5, 4, 9)
        example.compare(losses, losses, losses, "right losses")
        with pytest.raises(AssertionError, match="Wrong losses on a rank"):
            example.compare(losses + 0.01, losses, losses + 0.001, "a rank")
        # NCCL's differ from one process' by more and more; Iris' from NCCL's by that, or by something in a late step.
        parting, late = torch.linspace(0, 0.01, 9), torch.arange(9) == 7
        for terms, found, alike, wrong in (
            (2, losses, losses, None),
            (2, losses + 0.001 * late, losses, "by 0.001 in step 7"),
            (2, losses + 0.001 * late, losses + 1e-6, None),
            (2, losses + 0.1 * late, losses + 1e-6, "by 0.1 in step 7"),
            (3, losses + parting, losses, None),
            (3, losses + 4 * parting, losses, "by 0.02 in step 4"),
            (3, losses.where(~late, torch.nan), losses, "by nan in step 7"),
        ):
            with pytest.raises(AssertionError, match=f"from NCCL's {wrong}") if wrong else contextlib.nullcontext():
                example.compare_with_nccl(ctx, found, [losses, alike], losses + parting, losses, terms)


@pytest.mark.thorough
@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize(
    "options",
    [{"communication": "nccl"}, {"tensor": 1}, {"compiled": True}, {"compiled": True, "communication": "nccl"}],
    ids=str,
)
def test_a_transformer_is_trained(ranks, options):
    skip_without_packages(TRAINING)
    ranks.run(run_training, options)


def train_wrongly(ctx):
    """With Iris, a rank has no gradient of its part of one weight."""
    with imported(TRAINING) as example:

        class Wrong(example.Trainer):
            def __init__(self, *args, by_iris, **options):
                super().__init__(*args, by_iris=by_iris, **options)
                if by_iris:
                    self.optimizer.register_step_pre_hook(self.forget)

            def forget(self, *_):
                if ctx.cur_rank == 1:
                    self.model.model.layers[0].self_attn.o_proj.weight.grad.to_local().zero_()

        with mock.patch.object(example, "Trainer", Wrong), pytest.raises(AssertionError, match="[Ll]osses"):
            example.main(ctx, Workload(2, 12, 12, BF16))


@pytest.mark.thorough
@pytest.mark.ranks(2, 3)
def test_a_wrong_gradient_shows_in_losses(ranks):
    skip_without_packages(TRAINING)
    ranks.run(train_wrongly)


def few_numbers(ctx, folder, sizes):
    with imported(folder) as example:
        example.main(ctx, Workload(*sizes, BF16, rounds=21))


@pytest.mark.thorough
@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize(
    "folder, sizes", [("09_gemm_one_shot_all_reduce", (1, 1, 2)), ("17_tensor_parallel_mlp", (2, 2, 1))]
)
def test_results_of_few_numbers_are_right(ranks, folder, sizes):
    """Among so many rounds are some where torch's own error is next to nothing, and the terms of a sum cancel."""
    ranks.run(few_numbers, folder, sizes)


def run_wide_heads(ctx):
    with imported("13_flash_decode") as example:
        example.main(ctx, Workload(1, 34, 576, BF16, rounds=2), heads=32, kv_heads=1)


@pytest.mark.ranks(2, exactly=True)
def test_more_heads_than_a_program_has_room_for(ranks):
    """Of one head of keys and values: they are dealt out to several."""
    ranks.run(run_wide_heads)


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


@pytest.mark.thorough
@pytest.mark.skipif(UNDER_TORCHRUN, reason="starts ranks of its own")
@pytest.mark.parametrize("folder", SIZES)
def test_benchmark_alone(folder):
    """Times, and not a word of data, which nobody has compared."""
    skip_without_packages(folder)
    sizes = SIZES[folder]
    output = run_program(folder, "--benchmark", *(f"-{name}{size}" for name, size in zip("mnk", sizes, strict=True)))
    assert "of the first's time" in output and ("simulator" in output) == SIMULATED
    assert "right" not in output and "validated" not in output
