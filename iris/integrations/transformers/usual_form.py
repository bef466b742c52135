"""Experts of the usual form, ``down(silu(gate(x)) * up(x))``: whether a module has it, and its products for training.

What `ctx.ops.experts_mlp` computes has no gradients. Those here are torch's, with gradients, of rows as they lie.
"""

import inspect
from typing import Any

import torch
from torch.nn.functional import silu
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


def has_grouped_products(dtype: torch.dtype) -> bool:
    """Whether torch multiplies groups of rows without the host: from 2.10 on, in the type that its kernels are for."""
    return dtype is torch.bfloat16 and hasattr(torch.nn.functional, "grouped_mm")


def products(rows: torch.Tensor, ends: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """``[R, H]`` → ``[R, H]``: each expert's rows end where ``ends``, int32 ``[E]``, says.

    Rows after the last of all are left as they are, whatever that is, and so are their gradients: nobody reads them.
    """
    grouped_mm = torch.nn.functional.grouped_mm
    gate, other = grouped_mm(rows, up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    return grouped_mm(silu(gate) * other, down.transpose(1, 2), offs=ends)
