"""Small models of transformers with random weights, which no test downloads; and what is shared by tests of them."""

import contextlib
import functools
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import pytest
import torch
import torch.distributed as dist

transformers = pytest.importorskip("transformers", "5.24", reason="transformers is not installed, or older than 5.24")

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

import iris.distributed  # noqa: F401 (registers the backend)
from iris.integrations.transformers import register

SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    # With experts that are not gated by SiLU, so that transformers' own compute.
    "qwen3_moe": Qwen3MoeConfig(
        **SMALL, head_dim=8, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=16, hidden_act="gelu"
    ),
}


def by_one_process(name, dtype=torch.float32, device="cpu"):
    """The model that all ranks hold by themselves: the same weights everywhere, biases among them."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(device)


def distributed(name, dtype=torch.float32, device="cpu", **sizes):
    """The same model, cut as ``DistributedConfig(**sizes)`` says: what ``from_pretrained`` does, without a file."""
    model = by_one_process(name, dtype, device)
    config, _, mesh = model.prepare_distribute_model(DistributedConfig(**sizes))
    return model.maybe_distribute_model(model, config, mesh)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def token_ids(shape, seed, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, SMALL["vocab_size"], shape, generator=generator).to(device)


@contextlib.contextmanager
def registered(**options):
    """``register(**options)``, for models made inside."""
    register(**options)
    try:
        yield
    finally:
        register()


def mesh_of(ctx, ranks, name, backend):
    """A mesh of one dimension over ``ranks``, and its group, of this backend: collective over all ranks."""
    group = dist.new_group(ranks, backend=backend)
    return DeviceMesh.from_group(group, ctx.device.type, mesh_dim_names=(name,)) if ctx.cur_rank in ranks else None


def alone(ctx, backend):
    """The mesh of this rank alone."""
    meshes = [mesh_of(ctx, [rank], "tp", backend) for rank in range(ctx.num_ranks)]
    return next(mesh for mesh in meshes if mesh is not None)


close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
