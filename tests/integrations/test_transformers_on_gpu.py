"""Models of transformers in CUDA graphs: experts with other data in each replay, and generation with a static cache."""

import random

import pytest
import torch

from integrations.models import (
    CONFIGS,
    MOST,
    CompileConfig,
    Meshes,
    by_one_process,
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
PROMPT = 6


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


def generate(ctx, name, dtype):
    torch._dynamo.reset()
    sizes = {"tp_size": ctx.num_ranks, "tp_plan": tp_plan(CONFIGS[name])}
    if name != "llama":
        sizes |= {"ep_size": ctx.num_ranks, "ep_implementation": "iris"}
    with registered():
        model = distributed(name, dtype=dtype, device=ctx.device, **sizes).eval()
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    options |= {"return_dict_in_generate": True, "output_logits": True}

    def rounds(**how):
        prompts = [token_ids((2, PROMPT), round, ctx.device) for round in range(3)]
        return [model.generate(ids, attention_mask=torch.ones_like(ids), **options, **how) for ids in prompts]

    called = rounds(disable_compile=True)
    compiled, graphs = (rounds(compile_config=CompileConfig(mode=mode)) for mode in ("default", "reduce-overhead"))
    for same, replayed in zip(compiled, graphs, strict=True):
        # Graphs replay what the compiler has made.
        assert torch.equal(same.sequences, replayed.sequences)
        assert all(map(torch.equal, same.logits, replayed.logits))
    if name != "llama" and dtype is BF16:
        # A token of many experts may go to another one whose turn it nearly was. The first step has the same tokens.
        for first, other in zip(called, graphs, strict=True):
            error = torch.linalg.vector_norm((first.logits[0] - other.logits[0]).float())
            assert error < 0.03 * torch.linalg.vector_norm(first.logits[0].float())
    else:
        reference = by_one_process(name, dtype, ctx.device).double()
        reference.set_experts_implementation("eager")  # torch's grouped products take no float64
        for generated in called + graphs:
            compare_logits(generated, reference, 0.03 if dtype is BF16 else 1e-5)
    assert_recorded(ctx.device.index)
    ctx.barrier()
    torch._dynamo.reset()


def compare_logits(generated, reference, bound):
    """With those in float64 of the same tokens: which come next may be decided otherwise of two nearly as likely."""
    with torch.no_grad():
        expected = reference(generated.sequences).logits[:, PROMPT - 1 : -1].unbind(1)
    for step, (got, right) in enumerate(zip(generated.logits, expected, strict=True)):
        error = torch.linalg.vector_norm(got - right) / torch.linalg.vector_norm(right)
        assert error < bound, (step, error.item())


def assert_recorded(device):
    """That there were graphs: torch goes without them where it finds a reason to."""
    from torch._inductor.cudagraph_trees import get_manager

    assert get_manager(device, create_if_none_exists=False).roots


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", BF16), ("mixtral", BF16), ("mixtral", torch.float32), ("qwen3_moe", torch.float32)],
    ids=str,
)
def test_generation_in_graphs(ranks, name, dtype):
    ranks.run(generate, name, dtype)
