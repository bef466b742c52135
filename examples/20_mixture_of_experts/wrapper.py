"""A model of transformers with a mixture of experts, cut among the ranks: to serve it, and to train it."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded; read when transformers is imported

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, StaticCache
from transformers.distributed import DistributedConfig

import iris
from iris.distributed.contexts import context_of
from iris.integrations.transformers import register, tp_plan
from iris.simulator import ACTIVE as SIMULATED

# Of Qwen3-30B-A3B, from its checkpoint's config.json; and one for the simulator, which 1, 2, 3 or 6 ranks can share.
CONFIGS = {
    "qwen3-30b-a3b": Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        rope_theta=1e6,
        max_position_embeddings=40960,
    ),
    "tiny": Qwen3MoeConfig(
        vocab_size=60,
        hidden_size=48,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=8,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        max_position_embeddings=64,
    ),
}


def whole(config: Qwen3MoeConfig, dtype: torch.dtype, device: torch.device, **options) -> torch.nn.Module:
    """Random weights, the same on all ranks."""
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **options)


def by_one_process(config: Qwen3MoeConfig, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """To compare with: the same model, whose experts compute one by one."""
    return whole(config, dtype, device, experts_implementation="eager")


def to_serve(model: torch.nn.Module, num_ranks: int, communication: str) -> torch.nn.Module:
    """Its attention by heads and its experts among the ranks, which have the same sequences."""
    ways = {
        "iris": {"tp_plan": tp_plan(model.config), "ep_implementation": "iris"},
        "nccl": {"tp_plan": "auto", "ep_implementation": "auto"},
    }
    return cut(model, tp_size=num_ranks, ep_size=num_ranks, **ways[communication]).eval()


def to_train(model: torch.nn.Module, num_ranks: int, communication: str) -> torch.nn.Module:
    """Its experts among the ranks, which have sequences of their own; the rest by FSDP2."""
    ways = {"iris": "iris", "nccl": "all_to_all"}
    return cut(model, fsdp_size=num_ranks, ep_size=num_ranks, ep_implementation=ways[communication])


def cut(model: torch.nn.Module, **parallel) -> torch.nn.Module:
    """What ``from_pretrained(..., distributed_config=...)`` does, without a file. Collective."""
    if max(size for name, size in parallel.items() if name.endswith("_size")) == 1:
        return model  # of one process
    register()
    config, _, mesh = model.prepare_distribute_model(DistributedConfig(**parallel))
    return model.maybe_distribute_model(model, config, mesh)


def context_of_experts(model: torch.nn.Module) -> iris.Iris:
    """By which tokens reach the experts of a model that was cut with Iris. The first call is collective."""
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    return context_of(weight.device_mesh.get_group(), weight.device)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """All of it, where the ranks have parts. Collective then."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Server:
    """Sequences of up to ``length`` tokens, which go on with the likeliest token each.

    A step is one CUDA graph. The static cache has its own position on the device, so the host only says that it runs.
    All ranks make the same calls in the same order, with the same prompts.

    Attributes
    ----------
    tokens : torch.Tensor
        The last token of each sequence, int64 ``[sequences, 1]``.
    logits : torch.Tensor
        Of which this is the largest, ``[sequences, vocabulary]``.
    """

    def __init__(self, model: torch.nn.Module, sequences: int, length: int) -> None:
        self.model, place = model, {"device": next(model.parameters()).device}
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.tokens = torch.zeros(sequences, 1, dtype=torch.int64, **place)
        self.logits = torch.zeros(sequences, model.config.vocab_size, dtype=model.dtype, **place)
        self.step = self.enqueue_step

    def start(self, prompts: torch.Tensor) -> None:
        """Take in prompts, int64 ``[sequences, T]``, and find the first token after each."""
        self.cache.reset()
        self._take_in(prompts)

    def enqueue_step(self) -> None:
        """Take in the last token of each sequence, and find the next one: what a graph holds."""
        self._take_in(self.tokens)

    def capture(self) -> None:
        """After a start, which has made the cache; `start` anew afterwards."""
        # Nothing may be used for the first time in a graph, and memory for tokens is set aside by a first forward.
        self.enqueue_step()
        if SIMULATED:
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.enqueue_step()
        self.step = graph.replay

    def rewind(self, length: int) -> None:
        """Forget all but the first ``length`` tokens of each sequence, after which a step goes on."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)

    @torch.no_grad()
    def _take_in(self, tokens: torch.Tensor) -> None:
        found = self.model(tokens, cache=self.cache, use_cache=True, logits_to_keep=1)
        self.logits.copy_(local(found.logits)[:, -1])
        self.tokens.copy_(self.logits.argmax(dim=1, keepdim=True))


class Trainer:
    """Steps of AdamW, whose state has the dtype of the parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model.train()
        # One by one, since experts and the rest lie on other meshes.
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of this rank's sequences, int64 ``[B, T]``: the loss before the step. Gradients stay until the next."""
        self.optimizer.zero_grad()
        loss = self.model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of all parameters, by name. Collective."""
        return {name: local(each.grad) for name, each in self.model.named_parameters() if each.grad is not None}
