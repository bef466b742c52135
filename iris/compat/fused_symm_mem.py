"""torch's own `torch.ops.symm_mem.fused_*`: what carries them, for calls that Iris leaves to it.

Each has two Python functions in `torch.distributed._symmetric_memory` from torch 2.9 to 2.13: one for CUDA, on torch's
symmetric memory, and one of single collectives and products, which torch uses for shapes. Where one is gone, a call
that needs it raises `MissingPartError`. The module takes long to import.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch.library import Library

from iris.compat.parts import late, required

_REPLACES = "run torch's fused operators"

_all_gather_matmul = late("torch.distributed._symmetric_memory:_fused_all_gather_matmul", _REPLACES)
_all_gather_matmul_in_steps = late("torch.distributed._symmetric_memory:_fused_all_gather_matmul_fallback", _REPLACES)
_all_gather_scaled = late("torch.distributed._symmetric_memory:_fused_all_gather_scaled_matmul", _REPLACES)
_all_gather_scaled_in_steps = late(
    "torch.distributed._symmetric_memory:_fused_all_gather_scaled_matmul_fallback", _REPLACES
)
_reduce_scatter = late("torch.distributed._symmetric_memory:_fused_matmul_reduce_scatter", _REPLACES)
_reduce_scatter_in_steps = late("torch.distributed._symmetric_memory:_fused_matmul_reduce_scatter_fallback", _REPLACES)
_scaled_reduce_scatter = late("torch.distributed._symmetric_memory:_fused_scaled_matmul_reduce_scatter", _REPLACES)
_scaled_reduce_scatter_in_steps = late(
    "torch.distributed._symmetric_memory:_fused_scaled_matmul_reduce_scatter_fallback", _REPLACES
)

TORCHS = {
    "fused_all_gather_matmul": (_all_gather_matmul, _all_gather_matmul_in_steps),
    "fused_all_gather_scaled_matmul": (_all_gather_scaled, _all_gather_scaled_in_steps),
    "fused_matmul_reduce_scatter": (_reduce_scatter, _reduce_scatter_in_steps),
    "fused_scaled_matmul_reduce_scatter": (_scaled_reduce_scatter, _scaled_reduce_scatter_in_steps),
}

dtypes_of = late("torch.distributed._symmetric_memory:_maybe_convert_scalar_types_to_dtypes", _REPLACES)
"""The dtypes of a list that an operator got: as torch's numbers of them, or as they are."""


def by_torch(name: str, in_steps: bool, *args: Any, **options: Any) -> Any:
    """What the operator of this name returns without Iris. ``in_steps``: by what it uses for shapes, on any device."""
    return TORCHS[name][in_steps](*args, **options)


def replace(kernels: Mapping[str, Callable[..., Any]], key: str) -> Library:
    """Let these carry the operators of these names for a dispatch key, as long as the result lasts."""
    required("torch.distributed._symmetric_memory:lib", _REPLACES)
    library = Library("symm_mem", "IMPL")
    with warnings.catch_warnings():
        # That there was a kernel before.
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, kernel in kernels.items():
            library.impl(name, kernel, key, allow_override=True)
    return library
