"""Whether experts of transformers are what `ctx.ops.experts_mlp` computes: ``down(silu(gate(x)) * up(x))``."""

from typing import Any

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
# The gate of classes that have none of their own is defined there.
GATES = "transformers.integrations.moe"


def has_usual_form(experts: Any) -> bool:
    """Whether their weights are ``gate_up_proj``, ``[E, 2 I, H]``, the gate first, and ``down_proj``, ``[E, H, I]``."""
    return (
        all(getattr(experts, name, None) is value for name, value in USUAL.items())
        and isinstance(experts.act_fn, SILU)
        and type(experts)._apply_gate.__module__ == GATES
    )
