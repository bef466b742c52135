"""Triton's aggregates: the decorator, and the attributes by which Triton recognises a class that it has made.

Triton 3.8 and newer have the public `triton.aggregate`. All releases have `triton.language.core._aggregate`, which the
simulator replaces. Where both are gone, importing `iris` raises `MissingPartError`.
"""

from collections.abc import Callable
from typing import Any

import triton.language as tl

from iris.compat.parts import optional, required

_DECORATOR = "triton.language.core:_aggregate"

aggregate = optional("triton:aggregate") or required(_DECORATOR, "pass contexts to kernels")
"""The decorator ``@triton.aggregate``."""


def marks(fields: tuple[str, ...], defaults: dict[str, Any]) -> dict[str, Any]:
    """The attributes by which Triton recognises a class as an aggregate, and knows its fields."""
    return {"__triton_aggregate__": True, "__aggregate_fields__": fields, "__aggregate_defaults__": defaults}


def replace_aggregate(new: Callable[[type], type]) -> None:
    """Put ``new`` in the place of the decorator, also for modules that have imported the decorator already."""
    decorator = required(_DECORATOR, "run kernels on the CPU")
    tl.core.__simulated_aggregate__ = new
    decorator.__code__ = _trampoline.__code__


def _trampoline(cls: Any) -> Any:
    # Its code becomes that of the decorator, and so finds the name below among the globals of `triton.language.core`.
    return __simulated_aggregate__(cls)  # type: ignore[name-defined]  # noqa: F821
