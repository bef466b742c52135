"""``python -m iris bench``: its commands and their options. What they measure is imported when they run."""

from pathlib import Path

import click

from iris import requirements
from iris.bench.options import DTYPES, MATRIX_DTYPES, Floors, Numbers, Sizes, num_ranks


@click.group()
def bench() -> None:
    """Measure Iris on this machine, beside NCCL, torch and others."""


@bench.command()
@click.option(
    "--collective", "collectives", multiple=True, help="One of the collectives. May be repeated; all if not given."
)
@click.option(
    "--library",
    "libraries",
    multiple=True,
    help="May be repeated. iris, 'iris steps' (over several hosts, where 'iris' may leave a call to NCCL), 'iris "
    "gluon', nccl, 'nccl windows', torch. For all_reduce also flashinfer, 'flashinfer one shot', 'flashinfer two shot' "
    "and sglang. If not given: those up to torch that can span the hosts and, on one host, flashinfer and sglang where "
    "they are installed.",
)
@click.option("--dtype", type=DTYPES, default="bfloat16", show_default=True)
@click.option(
    "--sizes",
    type=Sizes(),
    help="In KiB, such as 1,1.5. If not given, 1, 8, 32 and 128, and on GPUs also 512, 2048, 8192, 65536 and 262144.",
)
@click.option(
    "--sms",
    type=Numbers(",", 0),
    default="0",
    show_default=True,
    help="Multiprocessors to use at most. 0: each library chooses. Over several hosts only nccl takes another number.",
)
@click.option("--floors", type=Floors(), help="Fail below the figures of this file, which are of bf16.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for CSV, JSON and pictures.")
@num_ranks()
def ccl(
    collectives: tuple[str, ...],
    libraries: tuple[str, ...],
    dtype: str,
    sizes: tuple[int, ...] | None,
    sms: tuple[int, ...],
    floors: Path | None,
    out: Path | None,
    num_ranks: int | None,
) -> None:
    """Collectives of Iris, NCCL or RCCL, torch and others.

    It starts the ranks itself, or runs under torchrun.

    Exit status 1 if a figure misses its floor, or a result of Iris is wrong.
    """
    requirements.check()
    from iris.bench import ccl_command

    ccl_command.run(collectives, libraries, dtype, sizes, sms, floors, out, num_ranks)


@bench.command()
@click.option(
    "--operation", "operations", multiple=True, help="One of the fused operations. May be repeated; all if not given."
)
@click.option(
    "--library",
    "libraries",
    multiple=True,
    help="May be repeated. iris, 'iris triton', vendor, torch, gemm ... For all_reduce_rms_norm also 'iris residual', "
    "'iris fp8' (with a residual, and a scale for each row), 'iris sharded' and 'iris sharded fp8' (the residual "
    "sharded by rows), flashinfer, 'flashinfer one shot', 'flashinfer two shot' and sglang. Over several hosts also "
    "'iris beside rails' and 'iris in turn'. If not given, all of these; flashinfer and sglang where they "
    "are installed.",
)
@click.option("--dtype", type=MATRIX_DTYPES, default="bfloat16", show_default=True)
@click.option(
    "--shape",
    "shapes",
    type=Numbers("x", 0, count=3),
    multiple=True,
    help="May be repeated. MxNxK of a product, MxNx0 of rows to normalise. If not given, those of large models.",
)
@click.option("--sweep", is_flag=True, help="Also M from 16 to 16384, with N = K = 8192.")
@click.option("--floors", type=Floors(), help="Fail below the figures of this file, which are of bf16.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for CSV, JSON and pictures.")
@num_ranks()
def ops(
    operations: tuple[str, ...],
    libraries: tuple[str, ...],
    dtype: str,
    shapes: tuple[tuple[int, int, int], ...],
    sweep: bool,
    floors: Path | None,
    out: Path | None,
    num_ranks: int | None,
) -> None:
    """Fused operations, beside cuBLAS with NCCL, torch and others.

    It starts the ranks itself, or runs under torchrun.

    Exit status 1 if a figure misses its floor, or a result of Iris is wrong.
    """
    requirements.check()
    from iris.bench import ops_command

    ops_command.run(operations, libraries, dtype, shapes, sweep, floors, out, num_ranks)


@bench.command()
@click.option(
    "--tokens",
    type=Numbers(",", 1),
    default="1,8,32,128,512,1024,4096,8192",
    show_default=True,
    help="Tokens of each rank.",
)
@click.option("--hidden", type=click.IntRange(1), default=7168, show_default=True, help="Elements of a token's row.")
@click.option(
    "--experts", "num_experts", type=click.IntRange(1), default=256, show_default=True, help="Experts of all ranks."
)
@click.option("--top-k", type=click.IntRange(1), default=8, show_default=True, help="Experts of a token.")
@click.option("--layout", "layouts", multiple=True, help="expanded or compact. Both if not given.")
@click.option(
    "--library",
    "libraries",
    multiple=True,
    help="May be repeated. iris, 'iris fp8' (dispatch sends fp8), or torch (all_to_all_single with exact counts). All "
    "if not given.",
)
@click.option("--dtype", type=DTYPES, default="bfloat16", show_default=True)
@click.option(
    "--sms",
    type=Numbers(",", 0),
    default="0",
    show_default=True,
    help="Multiprocessors that Iris may use at most. 0: it chooses.",
)
@click.option(
    "--low-latency/--no-low-latency",
    default=None,
    help="Whether to use the kernels for few tokens. If neither is given, the number of tokens decides.",
)
@click.option("--floors", type=Floors(), help="Fail below the figures of this file, which are of bf16.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for CSV, JSON and a picture.")
@num_ranks()
def experts(
    tokens: tuple[int, ...],
    hidden: int,
    num_experts: int,
    top_k: int,
    layouts: tuple[str, ...],
    libraries: tuple[str, ...],
    dtype: str,
    sms: tuple[int, ...],
    floors: Path | None,
    out: Path | None,
    num_ranks: int | None,
    low_latency: bool | None,
) -> None:
    """Dispatch and combine of tokens for experts, beside torch.

    It starts the ranks itself, or runs under torchrun.

    Exit status 1 if a figure misses its floor, or a result is wrong.
    """
    requirements.check()
    from iris.bench import experts_command

    shape = tokens, hidden, num_experts, top_k
    experts_command.run(*shape, layouts, libraries, dtype, sms, floors, out, num_ranks, low_latency)


@bench.command()
@click.option(
    "--model",
    help="llama-8b, llama-70b, qwen3-moe, deepseek-like, tiny or tiny-moe. If not given, llama-8b, and in the "
    "simulator tiny.",
)
@click.option("--layers", type=click.IntRange(1), help="Number of layers. All of the model's if not given.")
@click.option(
    "--mode",
    "modes",
    multiple=True,
    help="May be repeated. decode, prefill or train. If not given, decode and prefill. No H200 has room to train "
    "deepseek-like: two layers, with which gradients are compared, have 180 GB of weights and gradients in float32.",
)
@click.option(
    "--batch",
    "batches",
    type=Numbers(",", 1),
    default="1,8,32,128",
    show_default=True,
    help="Sequences that are decoded at once.",
)
@click.option(
    "--context",
    type=click.IntRange(1),
    help="Tokens of a prompt, and of a sequence that is decoded. If not given, 1024, and in the simulator 12.",
)
@click.option(
    "--prompts", type=click.IntRange(1), default=8, show_default=True, help="Prompts of a prefill or a training step."
)
@click.option(
    "--way",
    "ways",
    multiple=True,
    help="May be repeated. How ranks communicate: nccl, 'iris backend' (of torch.distributed), 'iris fused' (ctx.ops), "
    "'nccl compiled' and 'iris fused compiled' (torch.compile), 'nccl all-to-all' (experts, with counts that the host "
    "reads; train alone), 'iris accelerate' (iris.accelerate), or none, the floor. All if not given; in the simulator "
    "without 'iris accelerate', and with Gloo for nccl.",
)
@click.option("--dtype", type=DTYPES, default="bfloat16", show_default=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), help="Folder for CSV, JSON and a picture.")
@num_ranks()
def model(
    model: str | None,
    layers: int | None,
    modes: tuple[str, ...],
    batches: tuple[int, ...],
    context: int | None,
    prompts: int,
    ways: tuple[str, ...],
    dtype: str,
    out: Path | None,
    num_ranks: int | None,
) -> None:
    """A tensor-parallel decoder: decoding, prompts and training.

    Its weights are random. It starts the ranks itself, or runs under torchrun. Logits and gradients are compared with
    those of one process.

    Exit status 1 if a result is wrong, or a way fails.
    """
    requirements.check()
    from iris.bench import model_command

    model_command.run(model, layers, modes, batches, context, prompts, ways, dtype, out, num_ranks)


@bench.command()
@click.option("--groups", type=click.IntRange(1), default=8, show_default=True, help="Further groups of each kind.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures as JSON.")
@num_ranks()
def memory(groups: int, out: Path | None, num_ranks: int | None) -> None:
    """GPU memory that process groups take.

    It measures the first use of a group, each further group, and groups of one rank. It starts the ranks itself, or
    runs under torchrun. Nothing else may use the GPUs meanwhile.
    """
    requirements.check()
    from iris.bench import memory, ranks

    ranks.run(ranks.number(num_ranks), memory.run_on_rank, groups, out)
