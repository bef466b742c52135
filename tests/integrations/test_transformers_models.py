"""Whole models of transformers on Iris: logits, gradients and generated tokens are those of one process."""

import pytest
import torch
from covering import thorough
from torch.distributed.device_mesh import DeviceMesh

from integrations.models import (
    CONFIGS,
    CompileConfig,
    by_one_process,
    close,
    distributed,
    registered,
    token_ids,
    whole,
)
from iris.errors import InvalidCollectiveError
from iris.integrations.transformers import FusedColwiseParallel, FusedRowwiseParallel, tp_plan

# As users choose them. Of ranks with different batches, each has its own.
WAYS = {
    "tensor parallel": {"tp_size": 2, "tp_plan": "fused"},
    "experts": {"tp_size": 2, "ep_size": 2, "ep_implementation": "iris"},
    "tensor parallel, experts": {"tp_size": 2, "tp_plan": "fused", "ep_size": 2, "ep_implementation": "iris"},
    "data parallel, experts": {"fsdp_size": 2, "ep_size": 2, "ep_implementation": "iris"},
    "all of them": {"fsdp_size": 2, "tp_size": 2, "tp_plan": "fused", "ep_size": 4, "ep_implementation": "iris"},
}


def model_on(ctx, name, way):
    sizes = dict(WAYS[way])
    if sizes.get("tp_plan") == "fused":
        sizes["tp_plan"] = tp_plan(CONFIGS[name])
    with registered(max_tokens=16):
        return distributed(name, device=ctx.device, **sizes)


def compare(ctx, name, way):
    one, model = by_one_process(name, device=ctx.device), model_on(ctx, name, way)
    batches = range(WAYS[way].get("fsdp_size", 1))
    mine = ctx.cur_rank // WAYS[way].get("tp_size", 1)
    for number in batches:
        ids = token_ids((2, 5 + number), number, ctx.device)
        with torch.no_grad():
            logits = one(ids).logits
        # What parallel data have is the mean over ranks.
        (one(ids, labels=ids).loss / len(batches)).backward()
        if number == mine:
            with torch.no_grad():
                close(whole(model(ids).logits), logits)
            model(ids, labels=ids).loss.backward()
    for (name, expected), parameter in zip(one.named_parameters(), model.parameters(), strict=True):
        gradient = whole(parameter.grad)
        assert gradient.shape == expected.grad.shape, name
        close(gradient, expected.grad, msg=lambda text, name=name: f"{name}: {text}")
    if len(batches) == 1:
        options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        assert torch.equal(model.generate(**given, **options), one.generate(**given, **options))


@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize(
    ("name", "way"),
    [
        thorough("mixtral", "tensor parallel, experts"),
        thorough("llama", "tensor parallel"),
        thorough("qwen3_moe", "tensor parallel"),
        thorough("mixtral", "experts"),
        thorough("qwen3_moe", "tensor parallel, experts"),
        thorough("qwen3_moe", "data parallel, experts"),
    ],
)
def test_as_by_one_process(ranks, name, way):
    ranks.run(compare, name, way)


@pytest.mark.thorough
@pytest.mark.ranks(4, exactly=True)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_as_by_one_process_with_four_ranks(ranks, name):
    ranks.run(compare, name, "all of them")


def compiled(ctx, name):
    """In one graph: no operator of Iris breaks it. (What is in CUDA graphs is tested on GPUs.)"""
    one, model = by_one_process(name, device=ctx.device), model_on(ctx, name, "tensor parallel, experts")
    config = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    config._compile_all_devices = True
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    ids = token_ids((2, 5), 0, ctx.device)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    torch._dynamo.utils.counters.clear()
    got = model.generate(**given, **options, compile_config=config)
    assert torch.equal(got, one.generate(**given, **options, disable_compile=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.thorough
@pytest.mark.ranks(2, exactly=True)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_generation_is_compiled(ranks, name):
    ranks.run(compiled, name)


def test_the_plan_has_what_is_fused():
    """Keys stay as they are, since transformers asks for their style; so does what is no linear layer."""
    layer = "model.layers.*."
    fused = {"q_proj": "iris_colwise", "v_proj": "iris_colwise", "o_proj": "iris_rowwise"}
    expected = {f"{layer}self_attn.{name}": style for name, style in fused.items()}
    assert tp_plan(CONFIGS["mixtral"]) == expected
    mlp = {"gate_proj": "iris_colwise", "up_proj": "iris_colwise", "down_proj": "iris_rowwise"}
    assert tp_plan(CONFIGS["llama"]) == expected | {f"{layer}mlp.{name}": style for name, style in mlp.items()}


def misuse(ctx):
    mesh = DeviceMesh(ctx.device.type, range(ctx.num_ranks), mesh_dim_names=("tp",))
    for style, module, told in (
        (FusedRowwiseParallel(), torch.nn.Linear(5, 4), '"iris_rowwise" is for in_features that 2 ranks can share'),
        (FusedColwiseParallel(), torch.nn.Linear(4, 7), '"iris_colwise" is for out_features that 2 ranks can share'),
        (
            FusedRowwiseParallel(),
            torch.nn.Embedding(4, 4),
            'for torch.nn.Linear itself, .* to Embedding. Give that "rowwise"',
        ),
    ):
        with pytest.raises(InvalidCollectiveError, match=told):
            style.install_forward(module, mesh)


@pytest.mark.ranks(2, exactly=True)
def test_mistakes_are_told(ranks, mistaken):
    ranks.run(misuse)
