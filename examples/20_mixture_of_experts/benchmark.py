"""A mixture of experts, served and trained: see README.md. -m: sequences, -n: tokens of a prompt, -k: generated."""

import copy
import sys
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from profiled import record  # noqa: E402
from workload import SIMULATED, Workload, command, report, share, trace, validated  # noqa: E402
from wrapper import CONFIGS, Server, Trainer, by_one_process, context_of_experts, to_serve, to_train, whole  # noqa: E402

import iris  # noqa: E402
from iris.bench.model.cases import WIDER, compared  # noqa: E402

MODEL, LAYERS = ("tiny", 2) if SIMULATED else ("qwen3-30b-a3b", 4)


def main(
    ctx: iris.Iris,
    workload: Workload,
    model: str = MODEL,
    layers: int = LAYERS,
    communication: str = "iris",
    part: str = "both",
) -> None:
    share(workload.m, ctx, "-m")
    if workload.trace and (part == "training" or communication != "iris" or ctx.num_ranks == 1):
        raise SystemExit(
            "A trace has what Iris' kernels do in a step of decoding: record it --with iris, of two ranks or more. A "
            "--profile is of either part, with any."
        )
    if workload.profile and part == "both":
        raise SystemExit("A --profile is of one step: say of which by --part serving or --part training.")
    config = copy.deepcopy(CONFIGS[model])
    config.num_hidden_layers = layers
    for name in ("num_attention_heads", "num_key_value_heads", "num_experts"):
        share(getattr(config, name), ctx, f"{name} of {model}")
    title = f"{model}, {layers} layers, {communication}"
    if part != "training":
        served = to_serve(whole(config, workload.dtype, ctx.device), ctx.num_ranks, communication)
        serve(ctx, workload, served, title)
    if part == "training" or (part == "both" and (workload.validate or workload.benchmark)):
        train(ctx, workload, config, communication, title)
    if part != "training" and workload.validate:
        generate(ctx, workload, served, title)


def random_tokens(ctx: iris.Iris, config, seed: int, *shape: int) -> torch.Tensor:
    """The same on all ranks."""
    generator = torch.Generator(ctx.device).manual_seed(seed)
    return torch.randint(config.vocab_size, shape, generator=generator, device=ctx.device)


def serve(ctx: iris.Iris, workload: Workload, model: torch.nn.Module, title: str) -> None:
    sequences, length, count = workload.m, workload.n, workload.k
    server = Server(model, sequences, length + count)
    server.start(random_tokens(ctx, model.config, 0, sequences, length))
    server.capture()
    if workload.validate:
        found = []
        for round in range(workload.rounds):
            tokens, logits = random_tokens(ctx, model.config, round, sequences, length), []
            server.start(tokens)
            for _ in range(count):
                logits.append(server.logits.clone())
                tokens = torch.cat((tokens, server.tokens), dim=1)
                server.step()
            found.append((tokens, torch.stack((*logits, server.logits.clone()), dim=1)))
        check(ctx, workload.dtype, model.config, found, "in graphs")
        validated(ctx, f"{title}, served", workload)
    prompts = random_tokens(ctx, model.config, 0, sequences, length)
    server.start(prompts)

    def step_again() -> None:
        server.rewind(length)
        server.step()

    if workload.trace:
        trace(context_of_experts(model), workload, lambda: (server.rewind(length), server.enqueue_step()))
    if workload.profile:
        record(ctx, workload.profile, step_again)
    if workload.benchmark:
        calls = {"a step": step_again, "prompts": lambda: server.start(prompts)}
        speeds(ctx, title, calls, {"a step": sequences, "prompts": prompts.numel()})


def generate(ctx: iris.Iris, workload: Workload, model: torch.nn.Module, title: str) -> None:
    """transformers' own loop, which on GPUs compiles steps and has them in CUDA graphs."""
    prompts = random_tokens(ctx, model.config, 0, workload.m, workload.n)
    found = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=workload.k + 1,
        do_sample=False,
        cache_implementation="static",
        output_logits=True,
        return_dict_in_generate=True,
    )
    found = found.sequences[:, :-1], torch.stack(found.logits, dim=1)
    check(ctx, workload.dtype, model.config, [found], "by generate()")
    validated(ctx, f"{title}, generate()", workload)


@torch.no_grad()
def check(ctx: iris.Iris, dtype: torch.dtype, config, found: list, where: str) -> None:
    """Of tokens ``[sequences, T]`` and the logits after the last few of them, ``[sequences, steps, vocabulary]``."""
    of_one, exact = (by_one_process(config, dtype, ctx.device).to(each).eval() for each in (dtype, WIDER[dtype]))
    for round, (tokens, logits) in enumerate(found):
        others = [one(tokens, logits_to_keep=logits.shape[1]).logits for one in (of_one, exact)]
        judge(ctx, dtype, f"after tokens {where}, round {round}", logits, *others)


def train(ctx: iris.Iris, workload: Workload, config, communication: str, title: str) -> None:
    sequences, length, dtype = workload.m, workload.n, workload.dtype
    trainer = Trainer(to_train(whole(config, dtype, ctx.device), ctx.num_ranks, communication))

    def batch(round: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of all ranks, and of this one."""
        tokens = random_tokens(ctx, config, 1000 + round, sequences, length)
        return tokens, tokens.chunk(ctx.num_ranks)[ctx.get_rank()].contiguous()

    if workload.validate:
        of_one, exact = (Trainer(by_one_process(config, dtype, ctx.device).to(each)) for each in (dtype, WIDER[dtype]))
        for round in range(workload.rounds):
            tokens, mine = batch(round)
            losses = [trainer.step(mine), of_one.step(tokens), exact.step(tokens)]
            # Each rank's is the mean over its own tokens, of which all have as many.
            every_rank = [ctx.broadcast(losses[0].item(), rank) for rank in range(ctx.num_ranks)]
            losses[0] = losses[0].new_tensor(sum(every_rank) / ctx.num_ranks)
            judge(ctx, dtype, f"the loss of round {round}", *losses)
            if round:
                continue  # Parameters differ in their last bits from here on.
            mine, *others = (each.gradients() for each in (trainer, of_one, exact))
            for name, gradient in mine.items():
                judge(ctx, dtype, f"the gradient of {name}", gradient, *(each[name] for each in others))
        del of_one, exact
        validated(ctx, f"{title}, trained", workload)
    tokens, mine = batch(0)
    if workload.profile:
        # What is set aside by the first steps is not of the one that is recorded.
        for _ in range(3):
            trainer.step(mine)
        record(ctx, workload.profile, lambda: trainer.step(mine))
    if workload.benchmark:
        speeds(ctx, f"{title}, training", {"a step": lambda: trainer.step(mine)}, {"a step": tokens.numel()})


def judge(
    ctx: iris.Iris, dtype: torch.dtype, where: str, result: torch.Tensor, of_one: torch.Tensor, exact: torch.Tensor
) -> None:
    """Raise `AssertionError` unless a result is as near the exact one as that of one process in ``dtype``.

    Both errors are relative to all that is compared, as a root of mean squares. Rounding may have a token choose
    another expert, in the one as in the other, so single elements may be far off.
    """
    error, error_of_one = (
        torch.linalg.vector_norm(each.to(exact.dtype) - exact).div(torch.linalg.vector_norm(exact)).item()
        for each in (result, of_one)
    )
    if reason := compared(error, error_of_one, dtype).reason:
        raise AssertionError(f"Wrong data on rank {ctx.get_rank()}, {where}: {reason}.")


def speeds(ctx: iris.Iris, title: str, calls: dict, tokens: dict[str, int]) -> None:
    """Time the calls, and print how many tokens a second each takes in."""
    times = report(ctx, f"{title}, {ctx.num_ranks} ranks", calls, eager=True)
    if ctx.get_rank() == 0:
        for name, number in tokens.items():
            print(f"{title}, {name}: {1e6 * number / times[name]:.0f} tokens a second")


def room(workload: Workload, num_ranks: int) -> int:
    """Nothing: the library has memory of its own."""
    return 0


OPTIONS = (
    click.option("--model", type=click.Choice(list(CONFIGS)), default=MODEL, show_default=True),
    click.option("--layers", type=click.IntRange(1), default=LAYERS, show_default=True),
    click.option(
        "--with",
        "communication",
        type=click.Choice(["iris", "nccl"]),
        default="iris",
        show_default=True,
        help="nccl: Gloo in the simulator, by transformers' own collectives.",
    ),
    click.option(
        "--part",
        type=click.Choice(["both", "serving", "training"]),
        default="both",
        show_default=True,
        help="What is done. --trace is of a step of decoding, and --profile of one of the part.",
    ),
)


if __name__ == "__main__":
    sizes = {"on_gpus": (16, 512, 32), "simulated": (6, 6, 2)}
    command(main, **sizes, room=room, options=OPTIONS, profiles=True)
