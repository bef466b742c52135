"""torch's factories, with the result on the symmetric heap.

Every factory allocates, so all ranks must make the same calls in the same order; apart from that it is local, and runs
on the current stream. What is put into the tensor may differ between ranks. Arguments mean what they mean in torch,
with three differences: the device can only be the heap's, the layout only strided, and the result is always contiguous
and starts at a multiple of 1024 bytes.
"""

import numbers
from collections.abc import Callable
from typing import Any

import torch

from iris.arg_parser import (
    Number,
    Size,
    ask,
    bounds_of_arange,
    check_flag,
    check_generator,
    check_random,
    dtype_of,
    dtype_of_full,
    length_of_arange,
    scalar,
    shape_of,
)
from iris.errors import (
    InvalidArgumentError,
    InvalidLayoutError,
    InvalidOutputError,
    InvalidValueError,
    NotATensorError,
    WrongDeviceError,
    short_repr,
)
from iris.heap import SymmetricHeap
from iris.operators.graph_break import methods_break_graph

_FORMATS = (None, torch.contiguous_format, torch.preserve_format)


@methods_break_graph("the symmetric heap is the host's, and graphs know no addresses")
class Factories:
    """The factories, for a class that has a ``heap``.

    Every rank must make the same allocations in the same order. Each call is local and runs on the current stream; it
    meets the other ranks only when the heap is full. Parameters that all of them share are those of torch:

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
    InvalidArgumentError (TypeError), InvalidValueError, InvalidShapeError (RuntimeError), InvalidDtypeError (TypeError)
        An argument is of another type, or has a value, that torch does not take either.
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
        self._check(layout, device, pin_memory, requires_grad)
        _check_format(memory_format)
        return _finish(self._place(shape_of("empty", sizes, size), dtype, out), requires_grad)

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
        return self._filled(0, shape_of("zeros", sizes, size), out, dtype, layout, device, requires_grad, pin_memory)

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
        return self._filled(1, shape_of("ones", sizes, size), out, dtype, layout, device, requires_grad, pin_memory)

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
        self._check(layout, device, pin_memory, requires_grad)
        inferred = dtype_of_full("full", "fill_value", fill_value, dtype_of(dtype))
        target = self._place(shape_of("full", (), size), dtype, out, inferred)
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
        self._check(layout, device, pin_memory, requires_grad)
        values = bounds_of_arange(*args, **bounds)
        whole = all(isinstance(value, numbers.Integral) for value in values)
        inferred = torch.int64 if whole else torch.get_default_dtype()
        filled = dtype_of(dtype) or (out.dtype if isinstance(out, torch.Tensor) else inferred)
        target = self._place((length_of_arange(*values, filled),), dtype, out, inferred)
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
        self._check(layout, device, pin_memory, requires_grad)
        shape = shape_of("linspace", (), steps)
        if len(shape) != 1:
            raise InvalidArgumentError(f"linspace() takes one number of steps, and got steps={short_repr(steps)}.")
        ends, wanted = (scalar(start), scalar(end)), dtype_of(dtype)
        inferred = ask(
            f"linspace(start={short_repr(start)}, end={short_repr(end)})",
            "start and end are numbers",
            lambda: torch.linspace(*ends, 1, dtype=wanted, device="cpu"),
        ).dtype
        target = self._place(shape, dtype, out, inferred)
        return _finish(target, requires_grad, lambda: torch.linspace(*ends, *shape, out=target, device=target.device))

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
        self._check(layout, device, pin_memory, requires_grad)
        target = self._random("rand", shape_of("rand", sizes, size), dtype, out, generator)
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
        self._check(layout, device, pin_memory, requires_grad)
        target = self._random("randn", shape_of("randn", sizes, size), dtype, out, generator)
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
        self._check(layout, device, pin_memory, requires_grad)
        given = {"low": low, "high": high, "size": size}
        unnamed = [name for name, value in given.items() if value is None]
        if len(args) == len(unnamed) - 1 and low is None:
            given["low"] = 0
            unnamed.remove("low")
        if len(args) != len(unnamed):
            raise InvalidArgumentError(
                f"randint() takes (high, size) or (low, high, size); it was given {args} and {given}."
            )
        given |= dict(zip(unnamed, args, strict=True))
        bounds, shape = {"low": given["low"], "high": given["high"]}, shape_of("randint", (), given["size"])
        target = self._random("randint", shape, dtype, out, generator, torch.int64, **bounds)
        values = map(scalar, bounds.values())
        return _finish(target, requires_grad, _filler(torch.randint, target, generator, *values))

    def uniform(
        self, size: Size, low: float = 0.0, high: float = 1.0, dtype: torch.dtype = torch.float
    ) -> torch.Tensor:
        """Random numbers, uniform in [low, high): a tensor of shape ``size``."""
        target = self._random("uniform", shape_of("uniform", (), size), dtype, None, low=low, high=high)
        return _finish(target, False, lambda: target.uniform_(scalar(low), scalar(high)))

    def allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of ``num_elements`` elements in one dimension, with undefined content."""
        return self._place(shape_of("allocate", (), num_elements), dtype, None)

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

    def _filled(
        self,
        value: Any,
        shape: tuple[int, ...],
        out: torch.Tensor | None,
        dtype: torch.dtype | type | None,
        layout: torch.layout | None,
        device: Any,
        requires_grad: bool,
        pin_memory: bool,
    ) -> torch.Tensor:
        self._check(layout, device, pin_memory, requires_grad)
        target = self._place(shape, dtype, out)
        return _finish(target, requires_grad, lambda: target.fill_(value))

    def _random(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype | type | None,
        out: torch.Tensor | None,
        generator: torch.Generator | None = None,
        inferred: torch.dtype | None = None,
        **bounds: Any,
    ) -> torch.Tensor:
        """Room for random numbers, which torch draws: of such a dtype, between such bounds."""
        check_generator(generator, self.heap.device)
        drawn = dtype_of(dtype) or (out.dtype if isinstance(out, torch.Tensor) else inferred)
        check_random(name, drawn or torch.get_default_dtype(), **bounds)
        return self._place(shape, dtype, out, inferred)

    def _like(
        self,
        factory: Callable[..., torch.Tensor],
        input: torch.Tensor,
        memory_format: torch.memory_format = torch.preserve_format,
        dtype: torch.dtype | type | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if not isinstance(input, torch.Tensor):
            raise NotATensorError(input)
        _check_format(memory_format)
        return factory(input.shape, dtype=input.dtype if dtype is None else dtype, **options)

    def _place(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype | type | None,
        out: torch.Tensor | None,
        inferred: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Where the values go: a new tensor of ``dtype``, else ``inferred``, else the default; or ``out``, shaped."""
        wanted = dtype_of(dtype)
        if out is None:
            return self.heap.empty(shape, wanted or inferred or torch.get_default_dtype())
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

    def _check(
        self, layout: torch.layout | None, device: Any, pin_memory: bool = False, requires_grad: bool = False
    ) -> None:
        check_flag("requires_grad", requires_grad)
        check_flag("pin_memory", pin_memory)
        if layout is not None and layout is not torch.strided:
            raise InvalidLayoutError(f"Tensors on the symmetric heap have the layout torch.strided, not {layout}.")
        if pin_memory:
            raise InvalidLayoutError("Memory of the symmetric heap cannot be pinned: leave pin_memory out.")
        if device is None:
            return
        takes = "a device is a torch.device, or its name"
        asked, own = ask(f"device={short_repr(device)}", takes, lambda: torch.device(device)), self.heap.device
        # torch's "cuda" means the current GPU.
        index = torch.cuda.current_device() if asked.type == "cuda" == own.type and asked.index is None else asked.index
        if asked.type != own.type or (own.type != "cpu" and index != own.index):
            raise WrongDeviceError(
                f"The symmetric heap is on {own}, so a tensor on it cannot be on {asked}: leave device out, or give "
                "ctx.device."
            )


def _check_format(memory_format: torch.memory_format) -> None:
    if not any(memory_format is each for each in _FORMATS):
        raise InvalidLayoutError(f"Tensors on the symmetric heap are contiguous; {memory_format} is not possible.")


def _filler(
    factory: Callable[..., torch.Tensor], target: torch.Tensor, generator: torch.Generator | None, *bounds: int
) -> Callable[[], torch.Tensor]:
    return lambda: factory(*bounds, target.shape, generator=generator, out=target, device=target.device)


def _finish(target: torch.Tensor, requires_grad: bool, fill: Callable[[], torch.Tensor] | None = None) -> torch.Tensor:
    if requires_grad and not (target.is_floating_point() or target.is_complex()):
        raise InvalidValueError(
            f"requires_grad=True is not possible for {target.dtype}: only floating-point and complex numbers have "
            "gradients."
        )
    if fill is not None:
        with torch.no_grad():
            fill()
    return target.requires_grad_() if requires_grad else target
