"""A transformer trained by FSDP2 x tensor parallelism: see README.md. -m: sequences, -n: tokens of each, -k: steps."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import click
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from profiled import record  # noqa: E402
from transformers import LlamaConfig  # noqa: E402
from workload import SIMULATED, Workload, command, report  # noqa: E402
from wrapper import Trainer, make_mesh  # noqa: E402

import iris  # noqa: E402
from iris.bench.report import environment, numbers  # noqa: E402


class Sizes(NamedTuple):
    """Of a model of Llama's form."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int


SIZES = Sizes(2, 96, 48, 12, 6, 96) if SIMULATED else Sizes(4, 2048, 5632, 16, 8, 32000)

# So many tokens occur, all over the vocabulary.
KINDS = 64

# The largest of many steps' errors, of which each changes the steps after it, may be so many times another such.
CHANCE = 3

# So many steps show what rounding makes of a loss.
FEW = 5

# What rounding of float32 makes of a loss, as a part of it.
ROUNDING = 1e-5


def main(
    ctx: iris.Iris,
    workload: Workload,
    communication: str = "iris",
    tensor: int | None = None,
    compiled: bool = not SIMULATED,
    out: Path | None = None,
    **sizes: int,
) -> None:
    sequences, length, steps, dtype = workload.m, workload.n, workload.k, workload.dtype
    tensor = tensor or ctx.num_ranks
    model = SIZES._replace(**sizes)
    sharding = ctx.num_ranks // tensor
    if workload.trace:
        raise SystemExit("Each group of the mesh has its own context, and a trace is of one: record a --profile.")
    if problem := problem_of(workload, model, sharding, tensor, ctx.num_ranks):
        raise SystemExit(problem)
    config = LlamaConfig(
        vocab_size=model.vocabulary,
        hidden_size=model.hidden,
        intermediate_size=model.intermediate,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=length,
    )

    def trainer(way: str, compiled: bool = compiled) -> Trainer:
        mesh = make_mesh(ctx.device, sharding, tensor, way == "iris")
        # Of what comes from Inductor's cache the report has nothing.
        torch.compiler.config.force_disable_caches = way == "iris"
        return Trainer(config, mesh, dtype, by_iris=way == "iris", compiled=compiled)

    def batch(step: int) -> torch.Tensor:
        """Tokens that a model can learn to predict: each rises by as much as the one before. The same on all ranks."""
        generator = torch.Generator(ctx.device).manual_seed(step)
        firsts, rises = torch.randint(model.vocabulary, (2, sequences, 1), generator=generator, device=ctx.device)
        places = torch.arange(length + 1, device=ctx.device)
        return (firsts + (1 + rises % 8) * places) % KINDS * (model.vocabulary // KINDS)

    results = {"sequences": sequences, "tokens": length, "dtype": str(dtype), "compiled": compiled}
    results |= {"mesh": [sharding, tensor], "model": model._asdict(), "losses": {}}

    def save() -> None:
        if out and ctx.get_rank() == 0:
            out.write_text(json.dumps({**environment(), **numbers(ctx.num_ranks), **results}, indent=1) + "\n")

    def losses(name: str, trained: Trainer) -> torch.Tensor:
        """Those of all steps, float32 on the CPU."""
        found = torch.stack([trained.step(batch(step)) for step in range(steps)]).float().cpu()
        # A layer is compiled for so many meshes only.
        torch.compiler.reset()
        results["losses"][name] = found.tolist()
        if ctx.get_rank() == 0:
            print(f"{name}: {steps} steps, losses from {found[0]:.4f} to {found[-1]:.4f}", flush=True)
        return found

    def alone(dtype: torch.dtype, compiled: bool) -> torch.Tensor:
        """Of one process, which each rank is then."""
        mesh = make_mesh(ctx.device, 1, 1, by_iris=False)
        return losses(f"one process, {dtype}", Trainer(config, mesh, dtype, by_iris=False, compiled=compiled))

    title = f"Training by FSDP2 x tensor parallelism, {sharding} x {tensor}, {communication}"
    if workload.validate:
        exact, of_one = alone(torch.float32, compiled=False), alone(dtype, compiled)
        found = losses(communication, trainer(communication))
        alike = []
        if communication == "iris":
            results["fused"] = str(iris.inductor.fusion_report()).splitlines()
            alike = [losses(name, trainer("nccl")) for name in ("nccl", "nccl again")]
        save()  # also of wrong losses, for whoever looks why
        compare(found, exact, of_one, f"rank {ctx.get_rank()}")
        if alike:
            compare_with_nccl(ctx, found, alike, of_one, exact, most_terms=max(sharding, tensor))
        ctx.barrier()
        if ctx.get_rank() == 0:
            print(f"{title}: the losses of {steps} steps of {sequences} x {length} tokens are right")
    measured = ("nccl", "iris") if workload.benchmark else (communication,) if workload.profile else ()
    tokens, trainers = batch(0), {way: trainer(way) for way in measured}
    calls = {f"a step, {way}": lambda each=each: each.step(tokens) for way, each in trainers.items()}
    # What is compiled, and set aside, is not of the steps that are measured.
    for call in (*calls.values(),) * 3:
        call()
    for way, call in zip(measured, calls.values(), strict=True) if workload.profile else ():
        file = workload.profile
        record(ctx, file if len(measured) == 1 else file.with_stem(f"{file.stem}_{way}"), call)
    if workload.benchmark:
        times = report(ctx, f"{title.rpartition(',')[0]}, {model.layers} layers", calls, eager=True)
        results["milliseconds"] = {name: time / 1000 for name, time in times.items()}
        results["tokens_a_second"] = {name: 1e6 * sequences * length / time for name, time in times.items()}
        results.setdefault("fused", str(iris.inductor.fusion_report()).splitlines())
    if ctx.get_rank() == 0:
        for name, number in results.get("tokens_a_second", {}).items():
            print(f"{name}: {number:.0f} tokens a second")
        if compiled:
            print(*results.get("fused", []), sep="\n")
        save()


def problem_of(workload: Workload, model: Sizes, sharding: int, tensor: int, num_ranks: int) -> str:
    """Why the ranks cannot share it so, in words; empty if they can."""
    if sharding * tensor != num_ranks:
        return f"--tensor is {tensor}, which does not divide {num_ranks} ranks."
    if workload.m % sharding:
        return f"-m is {workload.m}, which {sharding} ranks cannot share: give a multiple of {sharding}."
    split = {"-n": workload.n, **{f"--{name.replace('_', '-')}": n for name, n in model._asdict().items()}}
    for name in ("-n", "--intermediate", "--heads", "--kv-heads", "--vocabulary"):
        if split[name] % tensor:
            return f"{name} is {split[name]}, which {tensor} ranks cannot share: give a multiple of {tensor}."
    if model.vocabulary < KINDS:
        return f"--vocabulary is {model.vocabulary}, and {KINDS} tokens occur."
    return ""


def furthest(some: torch.Tensor, others: torch.Tensor) -> float:
    return (some - others).abs().max().item()


def compare(found: torch.Tensor, exact: torch.Tensor, of_one: torch.Tensor, where: str) -> None:
    """Raise unless losses are as near those of one process in float32 as that process' own in the dtype.

    The largest error may be `CHANCE` times as large, since the order of sums differs, and what rounding of float32
    makes of it.
    """
    error, allowed = furthest(found, exact), CHANCE * furthest(of_one, exact) + ROUNDING * exact.max().item()
    if not error <= allowed:
        raise AssertionError(f"Wrong losses on {where}: off by {error:.3g}, where {allowed:.3g} is allowed.")


def compare_with_nccl(
    ctx: iris.Iris,
    found: torch.Tensor,
    alike: list[torch.Tensor],
    of_one: torch.Tensor,
    exact: torch.Tensor,
    most_terms: int,
) -> None:
    """Raise unless losses differ from NCCL's by no more than those of runs that differ by rounding. Says how much.

    ``alike``: of two runs with NCCL. ``most_terms``: of a sum over ranks. Of two it has no order: if alike losses are
    equal, Iris' are. They are not where a kernel adds up in another order each time, as that of gradients of attention
    may on GPUs, and with more terms NCCL and Iris round other partial sums. Up to each step losses may differ then by
    `CHANCE` times what NCCL's have differed by from one another, or from those of one process in the same dtype.
    """
    first, again = alike
    mine, elsewhere = (found - first).abs(), (again - first).abs()
    if most_terms > 2 or elsewhere.any():
        elsewhere = elsewhere.maximum((of_one - first).abs()).cummax(0).values
    # By chance there may be none in the first few steps.
    elsewhere = elsewhere.clamp(min=elsewhere[:FEW].max())
    allowed = CHANCE * elsewhere + ROUNDING * exact.max()
    if ctx.get_rank() == 0:
        print("The most that losses of a step differ by:")
        print(f"  from one process in float32: Iris {furthest(found, exact):.2e}, NCCL {furthest(first, exact):.2e}")
        print(f"  two runs with NCCL {furthest(first, again):.2e}, NCCL and one process {furthest(first, of_one):.2e}")
        print(f"  Iris and NCCL {mine.max():.2e}, of {allowed[-1]:.2e} that are allowed")
    if not (mine <= allowed).all():
        step = int((~(mine <= allowed)).nonzero()[0])
        raise AssertionError(
            f"Losses differ from NCCL's by {mine[step]:.3g} in step {step}, where {allowed[step]:.3g} is allowed."
        )


def room(workload: Workload, num_ranks: int) -> int:
    """Nothing: the library has memory of its own."""
    return 0


OPTIONS = (
    click.option(
        "--with", "communication", type=click.Choice(["iris", "nccl"]), default="iris", show_default=True,
        help="iris: fused operations in compiled layers, and torch's backend; or nccl (Gloo in the simulator).",
    ),
    click.option("--tensor", type=click.IntRange(1), help="Ranks that share a product; all if not given."),
    click.option(
        "--compiled/--called", default=not SIMULATED, show_default=True, help="Whether layers go through torch.compile."
    ),
    click.option(
        "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write losses, times and the report as JSON."
    ),
    *(
        click.option(f"--{name.replace('_', '-')}", type=click.IntRange(1), default=size, show_default=True)
        for name, size in SIZES._asdict().items()
    ),
)  # fmt: skip

if __name__ == "__main__":
    command(main, on_gpus=(8, 1024, 20), simulated=(4, 8, 3), room=room, options=OPTIONS, profiles=True)
