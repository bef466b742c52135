"""Aggregates: what makes them, and the marks by which Triton knows them.

Triton 3.8 and newer have `triton.aggregate`, older ones `triton.language.core._aggregate`. Both have the latter, which
the simulator replaces. Where both are gone, importing `iris` raises `MissingPartError`.
"""

from collections.abc import Callable
from typing import Any

import triton.language as tl

from iris.compat.parts import optional, required

_DECORATOR = "triton.language.core:_aggregate"

aggregate = optional("triton:aggregate") or required(_DECORATOR, "pass contexts to kernels")
"""The decorator ``@triton.aggregate``."""


def marks(fields: tuple[str, ...], defaults: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a class by which Triton knows that it is an aggregate, with what fields."""
    return {"__triton_aggregate__": True, "__aggregate_fields__": fields, "__aggregate_defaults__": defaults}


def replace_aggregate(new: Callable[[type], type]) -> None:
    """Put ``new`` in the place of the decorator, also for who has imported that under another name already."""
    decorator = required(_DECORATOR, "run kernels on the CPU")
    tl.core.__simulated_aggregate__ = new
    decorator.__code__ = _trampoline.__code__


def _trampoline(cls: Any) -> Any:
    # A global of the module whose function it becomes.
    return __simulated_aggregate__(cls)  # type: ignore[name-defined]  # noqa: F821
