"""Which elements of a tensor an operation of torch accesses if it takes indices or a mask."""

from typing import Any

import numpy as np
import torch

from iris.compat.dispatch import arguments_of, index_put_impl_

aten = torch.ops.aten

READS = {
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
    aten.take.default,
    aten.embedding.default,
    aten.masked_select.default,
}
REPLACES = {
    aten.index_fill_.int_Scalar,
    aten.index_fill_.int_Tensor,
    aten.index_copy_.default,
    aten.scatter_.src,
    aten.scatter_.value,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.masked_scatter_.default,
}
ADDS = {aten.index_add_.default, aten.scatter_add_.default}
REPLACES_OR_ADDS = {aten.index_put_.default, index_put_impl_, aten.put_.default}
"""Their fourth argument, ``accumulate``, decides."""

WRITES = REPLACES | ADDS | REPLACES_OR_ADDS

# The names, in schemas, of the arguments whose values these operations write.
_VALUES = ("value", "values", "source", "src")


def replaces(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether ``func`` writes without regard to what was there."""
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    return func in REPLACES or (func in REPLACES_OR_ADDS and not accumulates)


def addresses(func: Any, args: tuple, kwargs: dict) -> np.ndarray:
    """The addresses of those elements of its first argument that ``func``, of `READS` or `WRITES`, accesses.

    They are found by experiment: a read is done on a tensor of the elements' numbers, a write of ones on zeros.
    """
    tensor, *rest = args
    if func in READS:
        numbers = torch.arange(tensor.numel()).view(tensor.shape)
        touched = func(numbers, *rest, **kwargs).reshape(-1).unique()
    else:
        zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
        for place, argument in enumerate(arguments_of(func)[1 : len(args)]):
            if argument.name in _VALUES:
                rest[place] = torch.ones_like(rest[place]) if isinstance(rest[place], torch.Tensor) else 1
        touched = func(zeros, *rest, **kwargs).reshape(-1).nonzero().reshape(-1)
    offsets = np.zeros(touched.numel(), dtype=np.int64)
    for index, stride in zip(np.unravel_index(touched.numpy(), tuple(tensor.shape)), tensor.stride(), strict=True):
        offsets += index * stride
    return tensor.data_ptr() + offsets * tensor.element_size()
