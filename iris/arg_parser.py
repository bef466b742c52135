"""Sizes, numbers and dtypes that are given to the host's calls: what torch takes, and errors that say what was wrong.

A size may also be nested. Whether torch takes a value is asked of torch itself, with one element on the CPU, and with a
generator of random numbers that nobody else draws from.
"""

import math
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from iris.errors import InvalidArgumentError, InvalidDtypeError, InvalidShapeError, InvalidValueError, short_repr

Size = int | Sequence["Size"]
Number = int | float | complex | bool
Real = int | float
T = TypeVar("T")

# As torch reads Python's types.
_PYTHON_TYPES = {float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128}
_LARGEST = 2**63 - 1
# The caller's generators must not notice a trial.
_TRIALS = torch.Generator()


def index(value: object) -> int | None:
    """``value`` as Python's integer if it is one, numpy's or a tensor's included; None for anything else."""
    if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def count(value: object, least: int = 1) -> int | None:
    """``value`` as an integer that counts something, ``least`` or more; None for anything else, such as True."""
    number = None if isinstance(value, bool) else index(value)
    return number if number is not None and least <= number <= _LARGEST else None


def shape_of(call: str, sizes: tuple[Size, ...], size: Size | None = None) -> tuple[int, ...]:
    """The shape of a call such as ``f(2, 3)``, ``f((2, 3))``, ``f((2, (3,)))`` or ``f(size=(2, 3))``.

    Raises
    ------
    InvalidArgumentError (TypeError)
        There is no size, or two, or it has something else than integers.
    InvalidShapeError (RuntimeError)
        An extent is negative, or there are more elements than a tensor can have.
    """
    if bool(sizes) == (size is not None):
        given = "none" if size is None else f"{sizes} and size={short_repr(size)}"
        raise InvalidArgumentError(f"{call}() takes one size, as in (2, 3) or size=(2, 3), and got {given}.")
    shape: list[int] = []
    for extent in _flat(sizes if size is None else (size,)):
        number = index(extent)
        # As in torch: a bool may be an extent, but not the first one, where it is more likely to be a misplaced option.
        misplaced = isinstance(extent, bool) and not shape
        if number is None or misplaced:
            raise InvalidArgumentError(
                f"{call}() takes a size of integers, as in (2, 3), and got {short_repr(extent)}, of type "
                f"{type(extent).__name__}."
            )
        shape.append(number)
    if min(shape, default=0) < 0:
        raise InvalidShapeError(f"{call}() cannot make the shape {shape}: an extent is negative.")
    # Strides are counted as if no extent were 0.
    if math.prod(max(extent, 1) for extent in shape) > _LARGEST:
        raise InvalidShapeError(f"{call}() cannot make the shape {shape}: it is larger than tensors can be.")
    return tuple(shape)


def dtype_of(dtype: torch.dtype | type | None) -> torch.dtype | None:
    """The dtype that is meant, which may be one of Python's types; InvalidDtypeError for anything else."""
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, type) and dtype in _PYTHON_TYPES:
        return _PYTHON_TYPES[dtype]
    raise InvalidDtypeError(f"A dtype is one of torch's, such as torch.float32; {short_repr(dtype)} is none.")


def check_flag(name: str, value: object) -> None:
    """Raise `InvalidArgumentError` unless ``value`` is True, False or None, which stands for False in torch."""
    if value is not None and not isinstance(value, bool):
        raise InvalidArgumentError(f"{name}={short_repr(value)} is not possible: it is True or False.")


def check_callable(name: str, value: object) -> None:
    """Raise `InvalidArgumentError` unless ``value`` can be called."""
    if not callable(value):
        raise InvalidArgumentError(f"{name}={short_repr(value)} is not possible: it is a function, which is called.")


def real(name: str, value: object) -> float:
    """A real number as a float; InvalidArgumentError for anything else, such as its text."""
    number = scalar(value)
    if not isinstance(number, numbers.Real):
        raise InvalidArgumentError(f"{name}={short_repr(value)} is not possible: it is a real number.")
    return float(number)


def scalar(value: Any) -> Any:
    """A tensor without dimensions as the number in it, and anything else as it is."""
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def ask(call: str, takes: str, trial: Callable[[], T]) -> T:
    """What torch's ``trial`` returns.

    If torch refuses, raises `InvalidDtypeError`, `InvalidArgumentError` (a type) or `InvalidValueError` (a value).
    ``call``: the user's call with its arguments, for the message; ``takes``: of which types these have to be.
    """
    try:
        return trial()
    except NotImplementedError:
        raise InvalidDtypeError(f"{call} is not possible: torch has no such values of this dtype.") from None
    except TypeError:
        raise InvalidArgumentError(f"{call} is not possible: {takes}.") from None
    except (RuntimeError, ValueError, OverflowError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidValueError(f"{call} is not possible: {reason}.") from None


def dtype_of_full(call: str, name: str, value: Any, dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype of a tensor that is ``value`` everywhere. Raises, as `ask` does, unless it is a number that fits."""
    takes = f"{name} is a number, or a tensor with one and no dimensions"

    def trial() -> torch.dtype:
        return torch.full((1,), scalar(value), dtype=dtype, device="cpu").dtype

    return ask(f"{call}({name}={short_repr(value)})", takes, trial)


def bounds_of_arange(*args: Any, **given: Any) -> tuple[Real, Real, Real]:
    """Start, end and step of a call of arange()."""
    names = ("end",) if len(args) == 1 and "end" not in given else ("start", "end", "step")
    named = dict(zip(names, args, strict=False))
    bounds = {"start": 0, "end": None, "step": 1} | named | given
    if len(args) > 3 or bounds.keys() - {"start", "end", "step"} or named.keys() & given.keys():
        raise InvalidArgumentError(f"arange() takes (end), (start, end) or (start, end, step); it got {args}, {given}.")
    for name, value in bounds.items():
        if dtype_of_full("arange", name, value).is_complex:
            raise InvalidArgumentError(f"arange({name}={value}) is not possible: complex numbers have no order.")
    return cast(tuple[Real, Real, Real], tuple(map(scalar, bounds.values())))


def length_of_arange(start: Real, end: Real, step: Real, dtype: torch.dtype) -> int:
    """The number of elements of torch.arange, which computes it in the dtype of the result."""
    given = start, end, step
    if dtype == torch.int64 and all(map(math.isfinite, given)):
        start, end, step = map(int, given)
    if step == 0 or not 0 <= (end - start) * step < math.inf:
        call = "arange(start={}, end={}, step={}, dtype={})".format(*given, dtype)
        if step == 0 and given[2] != 0:
            # Asked, torch 2.11 would divide by it and end the process.
            raise InvalidValueError(
                f"{call} is not possible: in integers its step must be nonzero, and it is cut to 0."
            )
        takes = "start, end and step are numbers"
        ask(call, takes, lambda: torch.arange(*given, dtype=dtype, device="cpu"))
    # In integers, as a float cannot hold every one of 64 bits.
    return -((start - end) // step) if dtype == torch.int64 else math.ceil((end - start) / step)  # type: ignore[return-value]


def check_random(name: str, dtype: torch.dtype, **bounds: Any) -> None:
    """Raise, as `ask` does, unless torch can draw values of ``dtype`` between these bounds.

    ``name``: "rand", "randn", "randint" or "uniform".
    """
    given = "".join(f"{role}={short_repr(value)}, " for role, value in bounds.items())
    values = tuple(map(scalar, bounds.values()))

    def trial() -> None:
        if name == "uniform":
            torch.empty(1, dtype=dtype, device="cpu").uniform_(*values, generator=_TRIALS)
        else:
            getattr(torch, name)(*values, (1,), dtype=dtype, device="cpu", generator=_TRIALS)

    takes = "low and high are integers" if name == "randint" else "low and high are numbers"
    ask(f"{name}({given}dtype={dtype})", takes, trial)


def check_generator(generator: object, device: torch.device) -> None:
    """Raise `InvalidArgumentError` unless it is None, or a torch.Generator for ``device``'s type."""
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise InvalidArgumentError(f"generator={short_repr(generator)} is not possible: it is a torch.Generator.")
    if generator.device.type != device.type:
        raise InvalidArgumentError(
            f"generator is on {generator.device}, and the symmetric heap on {device}: make it with "
            "torch.Generator(ctx.device)."
        )


def _flat(size: Sequence[Size]) -> list[Any]:
    """The elements of nested lists and tuples, in order."""
    extents: list[Any] = []
    for extent in size:
        extents += _flat(extent) if isinstance(extent, list | tuple) else [extent]
    return extents
