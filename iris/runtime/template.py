"""Arguments of launches that differ from call to call in the addresses of a few tensors: all else is found once.

A host that is slower than the GPU makes what it does for a call the time of that call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from iris import simulator
from iris.runtime.launch import addresses

Argument = Callable[[Sequence[torch.Tensor]], Any]
Template = Callable[[Sequence[torch.Tensor]], tuple]
"""What a prepared launch takes, of a call's own tensors, which the caller keeps alive."""


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def tensor_keys(tensors: Sequence[torch.Tensor | None]) -> tuple | None:
    """What tensors have in common that are checked and launched alike; None where one has to be looked at each time.

    Alike are those of one dtype, shape, strides and device, whose addresses have the same remainders of 16. What is
    given as None is so in the result.
    """
    keys: list[tuple | None] = []
    try:
        for tensor in tensors:
            if tensor is None:
                keys.append(None)
                continue
            address = tensor.data_ptr()
            if tensor.__class__ not in _PLAIN or tensor.layout is not torch.strided or tensor.is_neg() or not address:
                return None
            keys.append((tensor.dtype, tensor.shape, tensor.stride(), tensor.device, address & 15))
    except (AttributeError, RuntimeError, ValueError):  # of what is no tensor, or has no memory
        return None
    return tuple(keys)


def template_of(arguments: tuple, own: Sequence[torch.Tensor]) -> Template | None:
    """That of calls like the one whose ``arguments`` these are, with tensors of the same `tensor_keys` as ``own``.

    All tensors of ``arguments`` that are not ``own`` have to be there in later calls, too. None where tensors cannot be
    told from each other by their addresses, or where one is no argument itself, as where a kernel is given a copy.
    """
    places = {tensor.data_ptr(): number for number, tensor in enumerate(own)}
    used: set[int] = set()
    slots = [_slot(each, places, used) for each in arguments]
    if 0 in places or not len(own) == len(places) == len(used):
        return None
    # Those of this call have no place here, which would keep them alive.
    fixed = addresses(tuple([None if slot else each for each, slot in zip(arguments, slots, strict=True)]))
    changing = [(index, slot) for index, slot in enumerate(slots) if slot is not None]

    def fill(own: Sequence[torch.Tensor]) -> tuple:
        given = [*fixed]
        for index, slot in changing:
            given[index] = slot(own)
        return tuple(given)

    return fill


def _slot(argument: Any, places: dict[int, int], used: set[int]) -> Argument | None:
    """What makes an argument of a call's tensors; None if it has none of them. Adds those that it has to ``used``."""
    if isinstance(argument, tuple):
        return _slot_of_tuple(argument, [_slot(field, places, used) for field in argument])
    tensor = argument.base if isinstance(argument, TensorDescriptor) else argument
    number = places.get(tensor.data_ptr()) if isinstance(tensor, torch.Tensor) else None
    if number is None:
        return None
    used.add(number)
    if tensor is not argument:
        return _slot_of_map(argument, number)
    return (lambda own: own[number]) if simulator.ACTIVE else (lambda own: own[number].data_ptr())


def _slot_of_map(argument: TensorDescriptor, number: int) -> Argument:
    # To make one, with all that Triton checks of it, takes the host as long as a launch.
    kind, fields = type(argument), {**vars(argument), "base": None}

    def fill(own: Sequence[torch.Tensor]) -> TensorDescriptor:
        made = object.__new__(kind)
        made.__dict__.update(fields)
        made.base = own[number]
        return made

    return fill


def _slot_of_tuple(argument: tuple, slots: list[Argument | None]) -> Argument | None:
    if not any(slots):
        return None
    fixed = addresses(tuple([None if slot else field for field, slot in zip(argument, slots, strict=True)]))
    # Triton's launchers read the fields of a tuple in their order, whatever its type; the simulator's kernels by name.
    make: Callable[[list], tuple] = getattr(type(argument), "_make", tuple) if simulator.ACTIVE else tuple

    def fill(own: Sequence[torch.Tensor]) -> tuple:
        return make([constant if slot is None else slot(own) for constant, slot in zip(fixed, slots, strict=True)])

    return fill
