"""Trains a transformer whose parameters are sharded along one dimension of a mesh, and its products along the other."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from transformers import LlamaConfig, LlamaForCausalLM

import iris
import iris.distributed  # noqa: F401 (registers the backend)

# The dimension of tokens, of [sequences, tokens, hidden].
TOKENS = 1

# Steps in which the learning rate rises. The first ones of AdamW change all parameters by as much, so that losses would
# jump, and with them what rounding has made of them.
WARM_UP = 20


def make_mesh(device: torch.device, sharding: int, tensor: int, by_iris: bool) -> DeviceMesh:
    """``[sharding, tensor]``; where these are fewer than all ranks, each so many have a mesh of their own. Collective.

    ``by_iris``: its groups have Iris' backend, and otherwise that of the default group.
    """
    own = torch.distributed.get_world_size() // (sharding * tensor)
    names = ("own", "sharding", "tensor")
    backends = {"sharding": "cuda:iris", "tensor": "cuda:iris"} if by_iris else None
    mesh = init_device_mesh(device.type, (own, sharding, tensor), mesh_dim_names=names, backend_override=backends)
    return mesh["sharding", "tensor"]


def split_products(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    """Tensor parallelism: between products a rank has its tokens' rows, and in them its columns or heads."""
    by_token, all_tokens = Shard(TOKENS), Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=all_tokens, output_layouts=by_token),
            "model.norm": SequenceParallel(sequence_dim=TOKENS),
            # Logits stay split by columns, and `loss_parallel` adds up what the loss is made of.
            "lm_head": ColwiseParallel(input_layouts=by_token, output_layouts=Shard(-1), use_local_output=False),
        },
    )
    # A collective's result that nobody has waited for is a tensor of another type, and torch.compile (2.13) loses the
    # gradient of such an input of a layer. A copy is none.
    model.model.embed_tokens.register_forward_hook(lambda module, args, rows: rows.clone())
    of_layer = {
        "input_layernorm": SequenceParallel(sequence_dim=TOKENS),
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": by_token},
            desired_input_kwarg_layouts={"hidden_states": all_tokens},
        ),
        **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
        "self_attn.o_proj": RowwiseParallel(output_layouts=by_token),
        "post_attention_layernorm": SequenceParallel(sequence_dim=TOKENS),
        "mlp": PrepareModuleInput(input_layouts=(by_token,), desired_input_layouts=(all_tokens,)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=by_token),
    }
    for layer in model.model.layers:
        parallelize_module(layer, mesh, of_layer)


class Trainer:
    """AdamW for a model with random weights, the same whatever the mesh is. Its learning rate rises in the first steps.

    All ranks of the mesh make the same calls with the same tokens.

    Parameters
    ----------
    config : LlamaConfig
        Whose heads, intermediate size and vocabulary the mesh's second dimension divides.
    mesh : DeviceMesh
        Of `make_mesh`.
    dtype : torch.dtype
        Of products and activations. Parameters, sums of gradients and the optimizer's state are float32.
    by_iris : bool
        Fused operations in compiled layers, and memory of Iris for what FSDP2 moves.
    compiled : bool
        Each layer by ``torch.compile``.
    """

    def __init__(
        self, config: LlamaConfig, mesh: DeviceMesh, dtype: torch.dtype, *, by_iris: bool, compiled: bool
    ) -> None:
        self.mesh, device = mesh, torch.device(mesh.device_type)
        torch.manual_seed(0)
        with device:
            self.model = LlamaForCausalLM(config)
        if mesh["tensor"].size() > 1:
            split_products(self.model, mesh["tensor"])
        layers = self.model.model.layers
        if compiled:
            # What iris.accelerate() does for all that the process compiles, for this model alone. The same options for
            # all layers, so that one is compiled, and the others take what was made of it.
            options = iris.inductor.compile_options() if by_iris else {}
            for layer in layers:
                layer.compile(fullgraph=True, options=options)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for module in (*layers, self.model):
            fully_shard(module, mesh=mesh["sharding"], mp_policy=policy)
        for module in self.model.modules():
            if isinstance(module, FSDPModule) and by_iris:
                module.set_allocate_memory_from_process_group_for_comm(True)
        # A row's changes add up in what is multiplied by it, so they are smaller the longer it is.
        rate = 0.1 / config.hidden_size
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, fused=device.type == "cuda")
        rises = {"start_factor": 1 / WARM_UP, "total_iters": WARM_UP - 1}
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, **rises)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss over all tokens before the step, on all ranks.

        ``tokens``: int64 ``[B, T + 1]``, the last of each only to be predicted. The mesh's first dimension divides B,
        and the second one T.
        """
        data = self.mesh["sharding"]
        mine = tokens.chunk(data.size())[data.get_local_rank()]
        inputs, targets = mine[:, :-1], mine[:, 1:]
        positions = torch.arange(inputs.shape[1], device=tokens.device)[None]
        self.optimizer.zero_grad()
        with loss_parallel():
            logits = self.model(inputs, position_ids=positions, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
            loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return self._mean(loss.detach())

    def _mean(self, loss: torch.Tensor) -> torch.Tensor:
        loss = loss.full_tensor() if isinstance(loss, torch.distributed.tensor.DTensor) else loss
        torch.distributed.all_reduce(loss, torch.distributed.ReduceOp.SUM, group=self.mesh["sharding"].get_group())
        return loss / self.mesh["sharding"].size()
