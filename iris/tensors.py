"""torch's factories, with the result on the symmetric heap.

Every factory allocates, so all ranks must make the same calls in the same order; apart from that it is local, and runs
on the current stream. What is put into the tensor may differ between ranks. Arguments mean what they mean in torch,
with three differences: the device can only be the heap's, the layout only strided, and the result is always contiguous
and starts at a multiple of 1024 bytes.
"""

import math
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from iris.errors import (
    InvalidDtypeError,
    InvalidLayoutError,
    InvalidOutputError,
    NotATensorError,
    WrongDeviceError,
)
from iris.heap import SymmetricHeap
from iris.untraced import untraced_methods

Size = int | Sequence["Size"]
Number = int | float | complex | bool

# As torch reads Python's types.
_PYTHON_TYPES = {float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128}
_FORMATS = (torch.contiguous_format, torch.preserve_format)


@untraced_methods("the symmetric heap is the host's, and graphs know no addresses")
class Factories:
    """The factories, for a class that has a ``heap``.

    Parameters that all of them share are those of torch:

    out
        A tensor of the right number of elements on the heap, to be filled instead of a new one.
    dtype
        As in torch: by default the default dtype, or what the values ask for, or that of ``out``.
    layout
        `torch.strided`.
    device
        The heap's device, or None.
    requires_grad
        Whether autograd follows the result, which is a leaf.
    generator
        Where random numbers come from; by default the device's generator.

    Raises
    ------
    InvalidLayoutError (ValueError)
        A layout other than strided.
    WrongDeviceError (RuntimeError)
        A device that is not the heap's.
    InvalidOutputError (RuntimeError)
        ``out`` has the wrong size or dtype, or is not on the heap.
    HeapOutOfMemoryError (MemoryError)
        The heap is full.
    """

    heap: SymmetricHeap

    def empty(
        self,
        *sizes: Size,
        size: Size | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> torch.Tensor:
        """A tensor with undefined content, as `torch.empty`."""
        self._check(layout, device, pin_memory, memory_format)
        return _finish(self._place(_shape(sizes, size), dtype or torch.get_default_dtype(), dtype, out), requires_grad)

    def zeros(
        self,
        *sizes: Size,
        size: Size | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """Zeros, as `torch.zeros`."""
        return self._filled(0, _shape(sizes, size), out, dtype, layout, device, requires_grad, pin_memory)

    def ones(
        self,
        *sizes: Size,
        size: Size | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """Ones, as `torch.ones`."""
        return self._filled(1, _shape(sizes, size), out, dtype, layout, device, requires_grad, pin_memory)

    def full(
        self,
        size: Size,
        fill_value: Number | torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """``fill_value`` everywhere, as `torch.full`."""
        self._check(layout, device, pin_memory)
        target = self._place(flatten((size,)), dtype or _dtype_of(_scalar(fill_value)), dtype, out)
        return _finish(target, requires_grad, lambda: target.fill_(fill_value))

    def arange(
        self,
        *args: Number,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
        **bounds: Number,
    ) -> torch.Tensor:
        """``arange(end)``, ``arange(start, end)`` or ``arange(start, end, step)``, as `torch.arange`."""
        self._check(layout, device, pin_memory)
        if len(args) == 1 and "end" not in bounds:
            args, bounds = (), {"end": args[0], **bounds}
        values = _bounds(*args, **bounds)
        whole = all(isinstance(value, numbers.Integral) for value in values)
        inferred = torch.int64 if whole else torch.get_default_dtype()
        filled = _known(dtype) or (inferred if out is None else out.dtype)
        target = self._place((_length(*values, filled),), filled, dtype, out)
        return _finish(target, requires_grad, lambda: torch.arange(*values, out=target, device=target.device))

    def linspace(
        self,
        start: Number | torch.Tensor,
        end: Number | torch.Tensor,
        steps: Size,
        *,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """``steps`` values from ``start`` to ``end``, both included, as `torch.linspace`."""
        self._check(layout, device, pin_memory)
        (count,) = flatten((steps,))
        ends = (_scalar(start), _scalar(end), count)
        inferred = dtype or _dtype_of(1j if any(isinstance(value, complex) for value in ends) else 1.0)
        target = self._place((count,), inferred, dtype, out)
        return _finish(target, requires_grad, lambda: torch.linspace(*ends, out=target, device=target.device))

    def rand(
        self,
        *sizes: Size,
        size: Size | None = None,
        generator: torch.Generator | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """Uniform in [0, 1), as `torch.rand`: the same numbers from the same generator."""
        self._check(layout, device, pin_memory)
        target = self._place(_shape(sizes, size), dtype or torch.get_default_dtype(), dtype, out)
        return _finish(target, requires_grad, _filler(torch.rand, target, generator))

    def randn(
        self,
        *sizes: Size,
        size: Size | None = None,
        generator: torch.Generator | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """Normal with mean 0 and variance 1, as `torch.randn`: the same numbers from the same generator."""
        self._check(layout, device, pin_memory)
        target = self._place(_shape(sizes, size), dtype or torch.get_default_dtype(), dtype, out)
        return _finish(target, requires_grad, _filler(torch.randn, target, generator))

    def randint(
        self,
        *args: Any,
        low: int | None = None,
        high: int | None = None,
        size: Size | None = None,
        generator: torch.Generator | None = None,
        out: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        layout: torch.layout = torch.strided,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> torch.Tensor:
        """Integers in [low, high): ``randint(high, size)`` or ``randint(low, high, size)``, as `torch.randint`."""
        self._check(layout, device, pin_memory)
        given = {"low": low, "high": high, "size": size}
        unnamed = [name for name, value in given.items() if value is None]
        if len(args) == len(unnamed) - 1 and low is None:
            given["low"] = 0
            unnamed.remove("low")
        if len(args) != len(unnamed):
            raise TypeError(f"randint() takes (high, size) or (low, high, size); it was given {args} and {given}.")
        given |= dict(zip(unnamed, args, strict=True))
        bounds, shape = (given["low"], given["high"]), flatten((given["size"],))
        target = self._place(shape, dtype or torch.int64, dtype, out)
        return _finish(target, requires_grad, _filler(torch.randint, target, generator, *bounds))

    def uniform(
        self, size: Size, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float
    ) -> torch.Tensor:
        """Uniform in [low, high)."""
        target = self._place(flatten((size,)), dtype, dtype, None)
        return _finish(target, False, lambda: target.uniform_(low, high))

    def allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """``num_elements`` elements in one dimension, with undefined content."""
        return self.empty(num_elements, dtype=dtype)

    def empty_like(self, input: torch.Tensor, **options: Any) -> torch.Tensor:
        """`empty` with the shape and dtype of ``input``, as `torch.empty_like`."""
        return self._like(self.empty, input, **options)

    def zeros_like(self, input: torch.Tensor, **options: Any) -> torch.Tensor:
        """`zeros` with the shape and dtype of ``input``, as `torch.zeros_like`."""
        return self._like(self.zeros, input, **options)

    def ones_like(self, input: torch.Tensor, **options: Any) -> torch.Tensor:
        """`ones` with the shape and dtype of ``input``, as `torch.ones_like`."""
        return self._like(self.ones, input, **options)

    def full_like(self, input: torch.Tensor, fill_value: Number | torch.Tensor, **options: Any) -> torch.Tensor:
        """`full` with the shape and dtype of ``input``, as `torch.full_like`."""
        return self._like(lambda size, **rest: self.full(size, fill_value, **rest), input, **options)

    def rand_like(self, input: torch.Tensor, **options: Any) -> torch.Tensor:
        """`rand` with the shape and dtype of ``input``, as `torch.rand_like`."""
        return self._like(self.rand, input, **options)

    def randn_like(self, input: torch.Tensor, **options: Any) -> torch.Tensor:
        """`randn` with the shape and dtype of ``input``, as `torch.randn_like`."""
        return self._like(self.randn, input, **options)

    def is_symmetric(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is in this rank's heap."""
        return self.heap.is_symmetric(tensor)

    def as_symmetric(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` itself if it is on the heap, else a contiguous copy there, of the same values, shape and dtype.

        Copying allocates: the tensors of all ranks must be on the heap, or none.
        """
        if self.heap.is_symmetric(tensor):
            return tensor
        return self.heap.empty(tensor.shape, tensor.dtype).copy_(tensor.detach())

    def free(self, tensor: torch.Tensor) -> None:
        """Give back the memory of ``tensor`` and of its views: see `SymmetricHeap.free`."""
        self.heap.free(tensor)

    def peer(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """A host tensor over ``rank``'s copy of ``tensor``: see `SymmetricHeap.peer`."""
        return self.heap.peer(tensor, rank)

    def _filled(self, value, shape, out, dtype, layout, device, requires_grad, pin_memory) -> torch.Tensor:
        self._check(layout, device, pin_memory)
        target = self._place(shape, dtype or torch.get_default_dtype(), dtype, out)
        return _finish(target, requires_grad, lambda: target.fill_(value))

    def _like(self, factory, input, memory_format=torch.preserve_format, dtype=None, **options) -> torch.Tensor:
        if not isinstance(input, torch.Tensor):
            raise NotATensorError(input)
        _check_format(memory_format)
        return factory(input.shape, dtype=dtype or input.dtype, **options)

    def _place(
        self, shape: Sequence[int], inferred: torch.dtype, wanted: torch.dtype | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Where the values go: a new tensor, or ``out`` in the right shape."""
        inferred, wanted = _known(inferred), _known(wanted)
        if out is None:
            return self.heap.empty(shape, inferred)
        if not isinstance(out, torch.Tensor):
            raise NotATensorError(out)
        count = torch.Size(shape).numel()
        if out.numel() != count:
            raise InvalidOutputError(f"The output tensor has {out.numel()} elements, but {count} are required")
        if wanted is not None and out.dtype != wanted:
            raise InvalidOutputError(f"The output tensor has dtype {out.dtype}, but {wanted} is required")
        if not self.heap.is_symmetric(out):
            raise InvalidOutputError("The output tensor is not on the symmetric heap")
        return out if out.shape == torch.Size(shape) else out.view(shape)

    def _check(self, layout, device, pin_memory=False, memory_format=torch.contiguous_format) -> None:
        if layout != torch.strided:
            raise InvalidLayoutError(f"Tensors on the symmetric heap have the layout torch.strided, not {layout}.")
        if pin_memory:
            raise InvalidLayoutError("Memory of the symmetric heap cannot be pinned: leave pin_memory out.")
        _check_format(memory_format)
        if device is None:
            return
        asked, own = torch.device(device), self.heap.device
        # torch's "cuda" means the current GPU.
        index = torch.cuda.current_device() if asked.type == "cuda" == own.type and asked.index is None else asked.index
        if asked.type != own.type or (own.type != "cpu" and index != own.index):
            raise WrongDeviceError(
                f"The symmetric heap is on {own}, so a tensor on it cannot be on {asked}: leave device out, or give "
                "ctx.device."
            )


def flatten(size: Sequence[Size]) -> tuple[int, ...]:
    """Sizes as torch takes them, ``(2, 3)`` or ``((2, 3),)``, and nested further, as one tuple."""
    shape: list[int] = []
    for extent in size:
        if isinstance(extent, Sequence) and not isinstance(extent, str):  # a letter of a string is a string
            shape += flatten(extent)
        else:
            shape.append(operator.index(extent))
    return tuple(shape)


def _shape(sizes: tuple[Size, ...], size: Size | None) -> tuple[int, ...]:
    """The shape of a factory's call: ``f(2, 3)``, ``f((2, 3))`` or ``f(size=(2, 3))``."""
    if bool(sizes) == (size is not None):
        raise TypeError(f"A size is needed once, as in (2, 3) or size=(2, 3); it was given as {sizes} and size={size}.")
    return flatten(sizes if size is None else (size,))


def _check_format(memory_format: torch.memory_format) -> None:
    if memory_format not in _FORMATS:
        raise InvalidLayoutError(f"Tensors on the symmetric heap are contiguous; {memory_format} is not possible.")


def _known(dtype: torch.dtype | type | None) -> torch.dtype | None:
    dtype = _PYTHON_TYPES.get(dtype, dtype)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise InvalidDtypeError(f"A dtype is one of torch's, such as torch.float32; {dtype!r} is none.")
    return dtype


def _scalar(value: Number | torch.Tensor) -> Number:
    return value.item() if isinstance(value, torch.Tensor) else value


def _dtype_of(value: Number) -> torch.dtype:
    return torch.full((), value, device="meta").dtype


def _bounds(
    start: Number | torch.Tensor = 0, end: Number | torch.Tensor | None = None, step: Number | torch.Tensor = 1
) -> tuple[Number, Number, Number]:
    if end is None:
        raise TypeError("arange() takes (end), (start, end) or (start, end, step); it was given no end.")
    return _scalar(start), _scalar(end), _scalar(step)


def _length(start: Number, end: Number, step: Number, dtype: torch.dtype) -> int:
    """The number of elements of torch.arange, which computes it in the dtype of the result."""
    if step == 0 or not 0 <= (end - start) * step < math.inf:
        torch.arange(start, end, step)  # raises torch's own error
    if dtype == torch.int64:
        return len(range(int(start), int(end), int(step)))
    return math.ceil((end - start) / step)


def _filler(
    factory: Callable[..., torch.Tensor], target: torch.Tensor, generator: torch.Generator | None, *bounds: int
) -> Callable[[], torch.Tensor]:
    return lambda: factory(*bounds, target.shape, generator=generator, out=target, device=target.device)


def _finish(target: torch.Tensor, requires_grad: bool, fill: Callable[[], torch.Tensor] | None = None) -> torch.Tensor:
    if fill is not None:
        with torch.no_grad():
            fill()
    return target.requires_grad_() if requires_grad else target
