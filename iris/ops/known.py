"""Calls of fused operations like an earlier one: they cost the host a look into a dictionary, and a launch.

A training step makes the same calls again and again, with other tensors. What was checked, chosen and prepared for the
first depends on dtypes, shapes, strides, devices and alignment. What else may differ is looked at in each: whether the
context is open and its group whole (by the caller), the stream and its memory, and whether results overlap operands.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from iris.ops.call import Call, span
from iris.ops.config import FusedConfig
from iris.ops.workspaces import Workspaces
from iris.runtime.launch import remember
from iris.runtime.template import tensor_keys

Relaunch = Callable[[Call, int | None], None]
"""Enqueues a call on the current stream, whose handle is given: None in the simulator."""


class Known(NamedTuple):
    """Of calls of one `call_key`.

    ``lengths``: bytes from the first element of each tensor to the last's end. ``by_stream``: None where each call has
    to be looked at, as where an operand is copied.
    """

    lengths: tuple[int, ...]
    by_stream: dict[int | None, Relaunch | None]

    def apart(self, call: Call) -> bool:
        """Whether what is written surely overlaps with nothing else."""
        begins = [tensor.data_ptr() for tensor in _tensors(call)]
        ends = [begin + length for begin, length in zip(begins, self.lengths, strict=True)]
        written = 1 if call.gathered is None else 2
        return all(
            ends[one] <= begins[other] or ends[other] <= begins[one]
            for one in range(written)
            for other in range(one + 1, len(begins))
        )


class KnownCalls:
    """Of one `iris.ops.products.Products`."""

    def __init__(self, workspaces: Workspaces) -> None:
        self._workspaces, self._revision = workspaces, workspaces.revision
        self._known: dict[tuple, Known] = {}

    def find(self, call: Call, key: tuple | None, stream: int | None, apart: bool = False) -> Relaunch | None:
        """What enqueues the call, if one of the same ``key`` has been enqueued on this stream.

        ``apart``: whether what is written is known to overlap with nothing else.
        """
        if self._revision != self._workspaces.revision:
            # Other memory, for which launches are made anew.
            self.forget()
        known = self._known.get(key) if key is not None else None
        relaunch = None if known is None else known.by_stream.get(stream)
        return None if known is None or relaunch is None or not (apart or known.apart(call)) else relaunch

    def has(self, key: tuple, stream: int | None) -> bool:
        """Whether a call of this ``key`` was remembered for this stream."""
        return key in self._known and stream in self._known[key].by_stream

    def remember(self, call: Call, key: tuple, stream: int | None, relaunch: Relaunch | None) -> None:
        """For later calls of this ``key`` on this stream; ``relaunch`` uses the memory that these have now."""
        if self._revision != self._workspaces.revision:
            self.forget()
        if key not in self._known:
            spans = [span(tensor) for tensor in _tensors(call)]
            remember(self._known, key, Known(tuple([end - begin for begin, end in spans]), {}))
        self._known[key].by_stream[stream] = relaunch

    def forget(self) -> None:
        self._known.clear()
        self._revision = self._workspaces.revision


def call_key(call: Call, config: object) -> tuple | None:
    """What is the same in calls that are checked, chosen and launched alike; None where each has to be looked at."""
    keys = tensor_keys((call.out, call.a, call.b, call.gathered, call.bias))
    # Of scales copies may have to be made. A program may change the precision of products of float32 between calls.
    if keys is None or None in keys[:3] or call.scaled or call.a.dtype is torch.float32:
        return None
    return (call.name, config, keys) if config is None or config.__class__ is FusedConfig else None


def _tensors(call: Call) -> tuple[torch.Tensor, ...]:
    """What is written comes first."""
    written = (call.out,) if call.gathered is None else (call.out, call.gathered)
    return (*written, call.a, call.b) if call.bias is None else (*written, call.a, call.b, call.bias)
