"""Whether experts of transformers are what `ctx.ops.experts_mlp` computes: ``down(silu(gate(x)) * up(x))``."""

import inspect
from typing import Any

import torch
from transformers.activations import ACT2FN

# What transformers says of a class of experts (``use_experts_implementation``).
USUAL = {
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
    "has_post_expert_norm": False,
}
SILU = tuple({type(ACT2FN[name]) for name in ("silu", "swish")})


def has_usual_form(experts: Any) -> bool:
    """Whether their weights are ``gate_up_proj``, ``[E, 2 I, H]``, the gate first, and ``down_proj``, ``[E, H, I]``."""
    return (
        all(getattr(experts, name, None) is value for name, value in USUAL.items())
        and isinstance(experts.act_fn, SILU)
        and not has_methods_of_its_own(type(experts))
    )


def has_methods_of_its_own(kind: type) -> bool:
    """Whether a class of experts defines more than ``__init__`` and ``forward``: another gate, as a rule."""
    return any(
        inspect.isfunction(method) and method.__module__ == each.__module__ and name not in ("__init__", "forward")
        for each in kind.__mro__[: kind.__mro__.index(torch.nn.Module)]
        for name, method in vars(each).items()
    )
