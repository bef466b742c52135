"""Small models of transformers with random weights, which no test downloads; and what is shared by tests of them."""

import contextlib
import copy
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import pytest
import torch
import torch.distributed as dist

# Test modules have this module's names of it, so that they are skipped where it is missing.
pytest.importorskip("transformers", "5.24", reason="transformers is not installed, or older than 5.24")

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    CompileConfig,  # noqa: F401 (for tests)
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.tensor_parallel import apply_tensor_parallelism  # noqa: F401 (for tests)
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

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


# Layers of experts ---------------------------------------------------------------------------------------------------

H, K, EACH = 16, 3, 2
# Tokens of a batch at most.
MOST = 8


def experts_of(kind, size, hidden=H):
    """Of so many ranks, with random weights. "usual": gated, by SiLU. "unusual": with biases, laid out otherwise."""
    sizes = {"hidden_size": hidden, "intermediate_size": hidden // 2, "num_local_experts": EACH * size}
    usual = kind == "usual"
    config = (MixtralConfig if usual else GptOssConfig)(**sizes)
    config._experts_implementation = "grouped_mm"
    module = (MixtralExperts if usual else GptOssExperts)(config)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) / hidden**0.5)
    return module


def inputs(round, number, size, tokens, hidden=H):
    """Tokens, choices and weights of the batch of this number: some tokens make a choice twice."""
    generator = torch.Generator().manual_seed(100 * round + number)
    x = torch.randn(tokens, hidden, generator=generator)
    ids = torch.rand(tokens, EACH * size, generator=generator).topk(K).indices
    ids[::3, 2] = ids[::3, 0]
    return x, ids, torch.rand(tokens, K, generator=generator)


class Meshes:
    """Of all ranks for the experts, and of those that share a batch: "shared", "different" or "mixed", by pairs."""

    def __init__(self, ctx, batch, backend):
        """``backend``: "iris", or None for torch's. Collective over all ranks."""
        size, rank = ctx.num_ranks, ctx.cur_rank
        self.device_type = ctx.device.type
        sharers = {"shared": size, "different": 1, "mixed": 2}[batch]
        self.number, self.batches = rank // sharers, range(size // sharers)
        backend = backend and f"{ctx.device.type}:{backend}"
        self.experts = self._mesh(dist.new_group(backend=backend), "ep")
        parts = [range(first, first + sharers) for first in range(0, size, sharers)]
        groups = [dist.new_group(list(part), backend=backend) for part in parts]
        self.sharers = self._mesh(groups[self.number], "tp")

    def _mesh(self, group, name):
        return DeviceMesh.from_group(group, self.device_type, mesh_dim_names=(name,))


def share_out(experts, meshes):
    """A copy of the experts of which each rank has its own, on ``ctx.experts``."""
    model = torch.nn.Module()
    model.experts = copy.deepcopy(experts)
    plan = {f"experts.{name}": "grouped_gemm" for name, _ in experts.named_parameters()}
    plan["experts"] = "ep_dispatch_experts"
    apply_expert_parallelism(model, meshes.experts, meshes.sharers, plan, ep_implementation="iris")
    return model.experts


def close(got, expected, **options):
    """GPUs may form products of float32 from fewer bits of each factor."""
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if got.is_cuda else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(got, expected, **tolerance, **options)


def near(got, expected, dtype):
    """``close``, or of computations in bf16 near enough."""
    if dtype is torch.float32:
        close(got, expected)
    else:
        error = torch.linalg.vector_norm(got.float() - expected)
        assert error <= 0.02 * torch.linalg.vector_norm(expected), error.item()
