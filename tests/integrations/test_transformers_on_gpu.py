"""Models of transformers in CUDA graphs: experts with other data in each replay, and generation with a static cache."""

import random

import pytest
import torch

from integrations.models import (
    CONFIGS,
    MOST,
    CompileConfig,
    Meshes,
    distributed,
    experts_of,
    inputs,
    registered,
    share_out,
    token_ids,
)
from iris.errors import FirstUseInCaptureError
from iris.integrations.transformers import tp_plan

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there are no graphs without a GPU"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

HIDDEN = 256
LATE = 2_000_000  # cycles: about a millisecond
BF16 = torch.bfloat16


def capture(call):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


def replay(ctx, kind, batch, backend):
    experts, meshes = experts_of(kind, ctx.num_ranks, HIDDEN).to(ctx.device, BF16), Meshes(ctx, batch, backend)
    with registered(max_tokens=MOST):
        own = share_out(experts, meshes)
    tokens = MOST - meshes.number  # another number on each rank
    x, ids, weights = (each.to(ctx.device) for each in inputs(0, 0, ctx.num_ranks, tokens, HIDDEN))
    x = x.to(BF16)
    chosen = random.Random(ctx.cur_rank)
    with torch.no_grad():
        with pytest.raises(FirstUseInCaptureError):
            capture(lambda: own(x, ids, weights))
        own(x, ids, weights)
        graph, out = capture(lambda: own(x, ids, weights))
        for round in range(200):
            given = inputs(round, meshes.number, ctx.num_ranks, tokens, HIDDEN)
            for to, data in zip((x, ids, weights), given, strict=True):
                to.copy_(data)
            if chosen.random() < 0.05:
                torch.cuda._sleep(LATE)
            graph.replay()
            if round % 20 == 0:
                # Eager forwards between replays, on the same stream, use the same memory.
                assert torch.equal(own(x, ids, weights), out)
            expected = experts.float()(x.float(), ids, weights)
            error = torch.linalg.vector_norm(out.float() - expected) / torch.linalg.vector_norm(expected)
            assert error < 0.02, (round, error.item())
            experts.to(BF16)
    ctx.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", [None, "iris"], ids=["torch", "iris"])
@pytest.mark.parametrize("batch", ["shared", "different"])
@pytest.mark.parametrize("kind", ["usual", "unusual"])
def test_replays_of_a_layer_of_experts(ranks, kind, batch, backend):
    ranks.run(replay, kind, batch, backend)


def generate(ctx, name):
    torch._dynamo.reset()
    sizes = {"tp_size": ctx.num_ranks, "tp_plan": tp_plan(CONFIGS[name])}
    if name != "llama":
        sizes |= {"ep_size": ctx.num_ranks, "ep_implementation": "iris"}
    # In bf16 the compiler rounds elsewhere, and a token of many experts may go to another one whose turn it nearly was.
    dtype = torch.float32 if name == "qwen3_moe" else BF16
    with registered():
        model = distributed(name, dtype=dtype, device=ctx.device, **sizes).eval()
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    options |= {"return_dict_in_generate": True, "output_logits": True}

    def rounds(**how):
        prompts = [token_ids((2, 6), round, ctx.device) for round in range(3)]
        return [model.generate(ids, attention_mask=torch.ones_like(ids), **options, **how) for ids in prompts]

    called = rounds(disable_compile=True)
    compiled, graphs = (rounds(compile_config=CompileConfig(mode=mode)) for mode in ("default", "reduce-overhead"))
    for eager, same, replayed in zip(called, compiled, graphs, strict=True):
        # Graphs replay what the compiler has made.
        assert torch.equal(same.sequences, replayed.sequences)
        assert all(map(torch.equal, same.logits, replayed.logits))
        # Up to the first token that differs, since the compiler may round elsewhere: of two that are nearly as likely,
        # either may come.
        alike = (eager.sequences == replayed.sequences).all(dim=0)[6:]
        steps = int(alike.int().cumprod(0).sum().item())
        assert steps >= 4
        for one, other in zip(eager.logits[:steps], replayed.logits[:steps], strict=True):
            error = torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(one)
            assert error < (0.03 if dtype is BF16 else 0.003), error.item()
    assert_recorded(ctx.device.index)
    ctx.barrier()
    torch._dynamo.reset()


def assert_recorded(device):
    """That there were graphs: torch goes without them where it finds a reason to."""
    from torch._inductor.cudagraph_trees import get_manager

    assert get_manager(device, create_if_none_exists=False).roots


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize("name", CONFIGS)
def test_generation_in_graphs(ranks, name):
    ranks.run(generate, name)
