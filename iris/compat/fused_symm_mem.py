"""torch's own kernels of the operators `torch.ops.symm_mem.fused_*`, and how to put others in their place.

Iris replaces these operators, and leaves some calls to torch. torch 2.9 to 2.13 has two Python functions for each in
`torch.distributed._symmetric_memory`: one for CUDA, on torch's symmetric memory, and one that makes a collective and a
product one after the other, which torch uses to infer shapes. Where one is gone, a call that needs it raises
`MissingPartError`. The module takes long to import, so it is imported at the first call.
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

# By operator: torch's function for CUDA, and the one in steps.
TORCHS = {
    "fused_all_gather_matmul": (_all_gather_matmul, _all_gather_matmul_in_steps),
    "fused_all_gather_scaled_matmul": (_all_gather_scaled, _all_gather_scaled_in_steps),
    "fused_matmul_reduce_scatter": (_reduce_scatter, _reduce_scatter_in_steps),
    "fused_scaled_matmul_reduce_scatter": (_scaled_reduce_scatter, _scaled_reduce_scatter_in_steps),
}

dtypes_of = late("torch.distributed._symmetric_memory:_maybe_convert_scalar_types_to_dtypes", _REPLACES)
"""The dtypes in a list of an operator's arguments. There they may be torch's numbers for dtypes, or dtypes."""


def by_torch(name: str, in_steps: bool, *args: Any, **options: Any) -> Any:
    """What the operator of this name returns without Iris. ``in_steps``: by the function in steps, on any device."""
    return TORCHS[name][in_steps](*args, **options)


def replace(kernels: Mapping[str, Callable[..., Any]], key: str) -> Library:
    """Register these kernels for the operators of these names and a dispatch key, as long as the result lives."""
    required("torch.distributed._symmetric_memory:lib", _REPLACES)
    library = Library("symm_mem", "IMPL")
    with warnings.catch_warnings():
        # The warning that the operator had a kernel before.
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, kernel in kernels.items():
            library.impl(name, kernel, key, allow_override=True)
    return library
