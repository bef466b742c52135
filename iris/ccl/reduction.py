"""What ``op`` may be, and of which elements: this library's `ReduceOp`, or torch's, with the factor of PREMUL_SUM."""

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from iris.ccl.config import ReduceOp
from iris.errors import UnsupportedReductionError, WrongDeviceError, short_repr


class PremulSum:
    """A sum into which each rank's input goes times the rank's factor: torch's and NCCL's PREMUL_SUM."""

    name, value = "PREMUL_SUM", "premul_sum"

    def __str__(self) -> str:
        return "ReduceOp.PREMUL_SUM"


PREMUL_SUM = PremulSum()

Op = ReduceOp | PremulSum

Factor = float | torch.Tensor

INSTEAD = "Gather with all_gather() and combine what every rank then has; of booleans, MIN is 'and' and MAX is 'or'."

# Dtypes that kernels can combine.
ARITHMETIC = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
}

_OF_TORCH = {getattr(dist.ReduceOp, op.name): op for op in ReduceOp}
# By number: comparing torch's constants takes a microsecond each, and every call of the backend brings one.
_OF_NUMBER = {torchs.value: op for torchs, op in _OF_TORCH.items()}
_NAMES_OF_NUMBERS = {number: op.value for number, op in _OF_NUMBER.items()}


def reduction(op: Any) -> tuple[ReduceOp | PremulSum, Factor | None]:
    """The operation that ``op`` names, and PREMUL_SUM's factor.

    Raises
    ------
    UnsupportedReductionError
        It is none of those that there are, or PREMUL_SUM without a factor.
    """
    if isinstance(op, ReduceOp):
        return op, None
    # By the class, since isinstance() takes torch's constants for both of torch's classes.
    if op.__class__ is dist.ReduceOp:
        op = cast(Any, op)
        ours = _OF_NUMBER.get(op.op.value)
        if ours is not None:
            return ours, None
        # What torch makes of its constants for a backend, and PREMUL_SUM, whose factor only pickling shows.
        if op.op == dist.ReduceOp.PREMUL_SUM:
            return PREMUL_SUM, op.__getstate__()[1]
        op = op.op
    if op.__class__ is not dist.ReduceOp.RedOpType:
        raise UnsupportedReductionError(
            f"op={short_repr(op)} is not one of iris.ccl.ReduceOp ({', '.join(each.name for each in ReduceOp)}), nor "
            "of torch.distributed.ReduceOp."
        )
    if op == dist.ReduceOp.PREMUL_SUM:
        raise UnsupportedReductionError(
            "ReduceOp.PREMUL_SUM needs a factor: torch.distributed._make_nccl_premul_sum(factor), or, where torch has "
            "it, ReduceOp.PREMUL_SUM(factor)."
        )
    if op not in _OF_TORCH:
        raise UnsupportedReductionError(
            f"Iris has no ReduceOp.{op.name}: it has {', '.join(each.name for each in ReduceOp)} and PREMUL_SUM. "
            + INSTEAD
        )
    return _OF_TORCH[op], None


def name_of(op: Any) -> str:
    """What the operators of `iris.ccl.functional` call it; a name itself may be one."""
    if isinstance(op, str):
        return op
    if isinstance(op, ReduceOp):
        return op.value
    # By number: torch.compile of torch 2.11 follows that, but neither hashes nor compares torch's constants.
    if op.__class__ is dist.ReduceOp.RedOpType and op.value in _NAMES_OF_NUMBERS:
        return _NAMES_OF_NUMBERS[op.value]
    if reduction(op)[0] is PREMUL_SUM:
        raise UnsupportedReductionError(
            "op=PREMUL_SUM is for torch.distributed and ctx.ccl. Multiply the input by the factor and use 'sum'."
        )
    return name_of(op.op)


def own_factor(factor: Factor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """PREMUL_SUM's factor of this rank for elements of ``dtype``: one element on ``device``, of the sums' type."""
    check_op(PREMUL_SUM, dtype)
    dtype = accumulator_dtype(elements(dtype, PREMUL_SUM).dtype)
    if not isinstance(factor, torch.Tensor):
        return torch.full((1,), factor, dtype=dtype, device=device)
    if factor.is_complex():
        raise UnsupportedReductionError(f"The factor of PREMUL_SUM is a real number, and not of {factor.dtype}.")
    if factor.device not in (device, torch.device("cpu")):
        raise WrongDeviceError(
            f"The factor of PREMUL_SUM is on {factor.device}, and this context works on {device}. Move it there first."
        )
    if factor.device.type == "cuda":
        # A stream of the group's own may be reading it when the caller lets go of it.
        factor.record_stream(torch.cuda.current_stream(device))
    return factor.detach().to(device, dtype, copy=True).reshape(1)


class Elements(NamedTuple):
    """What kernels take the elements of a tensor for.

    ``each``: how many of ``dtype`` an element is. ``op``: the operation on them.
    """

    dtype: torch.dtype
    each: int
    op: str

    def number_in(self, tensor: torch.Tensor) -> int:
        return self.each * tensor.numel()


def check_op(op: Op, dtype: torch.dtype) -> None:
    """Raise `UnsupportedReductionError` unless ``op`` has a meaning for ``dtype``."""
    if dtype not in ARITHMETIC:
        raise UnsupportedReductionError(f"{dtype} cannot be combined: convert it, or move it as it is.")
    if dtype.is_complex and op not in (ReduceOp.SUM, ReduceOp.AVG, PREMUL_SUM):
        why = "" if op is ReduceOp.PRODUCT else ", which has no order"
        raise UnsupportedReductionError(
            f"Iris has no {op} of {dtype}{why}: there are SUM, AVG and PREMUL_SUM. Gather with all_gather() and "
            "combine what every rank then has."
        )
    if op in (ReduceOp.AVG, PREMUL_SUM) and not (dtype.is_floating_point or dtype.is_complex):
        instead = "divide the sum" if op is ReduceOp.AVG else "multiply before"
        raise UnsupportedReductionError(
            f"{op} of {dtype} would not be of that type: use SUM and {instead}, or a float type."
        )


def elements(dtype: torch.dtype, op: Op) -> Elements:
    """As what kernels combine elements of ``dtype``."""
    if dtype.is_complex:
        return Elements({8: torch.float32, 16: torch.float64, 4: torch.float16}[dtype.itemsize], 2, op.value)
    if dtype == torch.bool:
        # Any and all: what sum, product, largest and smallest of booleans are.
        return Elements(torch.uint8, 1, "max" if op in (ReduceOp.SUM, ReduceOp.MAX) else "min")
    return Elements(dtype, 1, op.value)


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """What `iris.ccl.combine.accumulator` says, on the host."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize <= 4 else dtype
