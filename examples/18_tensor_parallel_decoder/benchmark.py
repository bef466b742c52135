"""A tensor-parallel decoder: see README.md. -m: most sequences, -n: tokens of a prompt, -k: tokens generated."""

import sys
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from profiled import record  # noqa: E402
from workload import SIMULATED, Workload, command, report, share, trace, validated  # noqa: E402
from wrapper import Server  # noqa: E402

import iris  # noqa: E402
from iris.bench.model.cases import WIDER, compare  # noqa: E402
from iris.bench.model.communication import Alone  # noqa: E402
from iris.bench.model.decoder import rotations  # noqa: E402
from iris.bench.model.dimensions import MODELS, Share  # noqa: E402
from iris.bench.model.ways import WAYS  # noqa: E402
from iris.bench.model.weights import Maker  # noqa: E402

# Those without experts, which example 20 has.
DENSE = [name for name, dimensions in MODELS.items() if not dimensions.experts]
MODEL = "tiny" if SIMULATED else "llama-8b"
# What the ranks communicate with: NCCL (Gloo in the simulator), Iris as torch's backend, or Iris' fused operations.
WITH = {"nccl": "nccl", "iris": "iris backend", "fused": "iris fused"}


def main(
    ctx: iris.Iris, workload: Workload, model: str = MODEL, layers: int | None = None, communication: str = "fused"
) -> None:
    most, length, count, dtype = workload.m, workload.n, workload.k, workload.dtype
    share(length, ctx, "-n")
    if workload.trace and communication != "fused":
        raise SystemExit("A trace has what Iris' kernels do: record it --with fused, or a --profile with any.")
    dimensions = MODELS[model]._replace(**({"layers": layers} if layers else {}))
    if problem := dimensions.problem(ctx.num_ranks):
        raise SystemExit(f"{model}: {problem}.")
    batch_sizes = [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]
    maker = Maker(dimensions, Share(ctx.get_rank(), ctx.num_ranks), dtype, dtype, ctx.device)
    server = Server(maker, WAYS[WITH[communication]].communication(ctx), batch_sizes, length + count)
    server.capture()

    def prompts(round: int, sequences: int) -> torch.Tensor:
        """The same on all ranks."""
        generator = torch.Generator(ctx.device).manual_seed(round)
        return torch.randint(dimensions.vocabulary, (sequences, length), generator=generator, device=ctx.device)

    @torch.no_grad()
    def alone(tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The logits after sequences of tokens, of one process that computes all of the model, layer by layer."""
        whole = maker.of(share=Share(), dtype=dtype)
        rotation = rotations(dimensions, tokens.shape[1], dtype, ctx.device)
        caches = whole.empty_caches(*tokens.shape)
        return whole.one_by_one().prefill(tokens, caches=caches, rotation=rotation, by=Alone())

    def check(tokens: torch.Tensor, where: str) -> None:
        of_one, exact = (alone(tokens, each) for each in (dtype, WIDER[dtype]))
        if reason := compare(server.logits[: len(tokens)], of_one, exact).reason:
            raise AssertionError(f"Wrong data on rank {ctx.get_rank()}, {where}: {reason}.")

    if workload.validate:
        for round in range(workload.rounds):
            # All numbers of sequences come by, those that fill a graph and those that do not.
            sequences = most - round % most
            tokens = prompts(round, sequences)
            server.start(tokens)
            check(tokens, f"after the prompts of round {round}")
            for _ in range(count):
                tokens = torch.cat((tokens, server.tokens[:sequences, None]), dim=1)
                server.step(sequences)
            check(tokens, f"after {count} more tokens of round {round}")
        validated(ctx, f"Tensor-parallel decoder, {communication}", workload)
    if workload.trace:

        def one_step() -> None:
            server.rewind(length)
            server.enqueue_step(most)

        server.start(prompts(0, most))
        trace(ctx, workload, one_step)
    if workload.profile:
        server.start(prompts(0, most))
        record(ctx, workload.profile, lambda: (server.rewind(length), server.step(most)))
    if workload.benchmark:
        measure(ctx, server, prompts(0, most), f"{model}, {dimensions.layers} layers, {communication}")


def measure(ctx: iris.Iris, server: Server, prompts: torch.Tensor, title: str) -> None:
    length = prompts.shape[1]
    name = "a step of {}"

    def step_again(sequences: int) -> None:
        server.rewind(length)
        server.step(sequences)

    server.start(prompts)
    calls = {name.format(size): lambda size=size: step_again(size) for size in server.batch_sizes}
    calls["prompts"] = lambda: server.start(prompts)
    times = report(ctx, f"{title}, prompts of {length}, {ctx.num_ranks} ranks", calls, eager=True)
    if ctx.get_rank() == 0:
        for size in server.batch_sizes:
            print(f"steps of {size}: {1e6 * size / times[name.format(size)]:.0f} tokens a second")
        print(f"prompts: {1e6 * prompts.numel() / times['prompts']:.0f} tokens a second")


def room(workload: Workload, num_ranks: int) -> int:
    """Nothing: the library has memory of its own."""
    return 0


OPTIONS = (
    click.option("--model", type=click.Choice(DENSE), default=MODEL, show_default=True),
    click.option("--layers", type=click.IntRange(1), help="How many; all of the model's if not given."),
    click.option(
        "--with", "communication", type=click.Choice(list(WITH)), default="fused", show_default=True,
        help="nccl (Gloo in the simulator), iris as torch's backend, or Iris' fused operations.",
    ),
)  # fmt: skip

if __name__ == "__main__":
    command(main, on_gpus=(8, 512, 32), simulated=(3, 6, 3), room=room, options=OPTIONS, profiles=True)
