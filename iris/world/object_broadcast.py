"""``ctx.broadcast``: a value of one rank goes to all, by the process group. Tensors go as they are, others pickled."""

import operator
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from iris import observer
from iris.arg_parser import index
from iris.errors import InvalidArgumentError, RankOutOfRangeError
from iris.operators.stand_ins import stand_in
from iris.world import Group


def broadcast_object(group: Group, device: torch.device, value: Any, src: int, drain: Callable[[], None]) -> Any:
    """The ``value`` of rank ``src``, on every rank of ``group``: the body of `iris.Iris.broadcast`.

    Collective; blocks the host. ``drain`` waits for this rank's kernels, and raises the errors they have recorded.
    """
    is_source = group.rank == index(src)
    buffer: torch.Tensor | None = None
    # Tensors of other layouts, as sparse ones, are pickled like any other object.
    is_tensor = isinstance(value, torch.Tensor) and value.layout == torch.strided

    def offer() -> tuple[bool, Any]:
        """On the source: fill ``buffer``. Returns whether it is a tensor, and its form, or else its size in bytes."""
        nonlocal buffer
        if index(src) not in range(group.size):
            raise observer.reported(RankOutOfRangeError(src, group.size))
        # Before `drain`, which reads values of a tensor: in a transform of torch.func that fails, with another error.
        problem = is_tensor and stand_in(value)
        if problem:
            raise InvalidArgumentError(f"broadcast() sends tensors with memory of their own, and got {problem}")
        drain()
        if not is_source or group.size == 1:
            return False, None
        if not is_tensor:
            # A pickle can run code, so it never goes through the store, where anybody can write (`iris.world.wire`).
            buffer = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
            return False, len(buffer)
        buffer = value.detach().to(device).resolve_conj().resolve_neg().contiguous()
        return True, (list(value.shape), str(value.dtype).removeprefix("torch."), value.device.type)

    is_tensor, sent = group.agree(offer, f"broadcast from rank {src}")[operator.index(src)]
    if group.size == 1:
        return value
    shape, dtype, device_type = sent if is_tensor else ([sent], "uint8", device.type)

    def make_room() -> None:
        nonlocal buffer
        if not is_source:
            buffer = torch.empty(shape, dtype=getattr(torch, dtype), device=device)

    group.agree(make_room, f"make room for what rank {src} broadcasts")
    assert buffer is not None
    if buffer.numel():
        # Bytes, since not every backend has every dtype.
        try:
            dist.broadcast(buffer.reshape(-1).view(torch.uint8), group=group.process_group, group_src=src)
        except RuntimeError as error:
            raise group.cause_of(error, f"broadcast from rank {src}") from error
    if is_source:
        return value
    if not is_tensor:
        return pickle.loads(buffer.cpu().numpy().data)
    return buffer.cpu() if device_type == "cpu" else buffer
