"""Sees what the host does with torch: a torch dispatch mode, and functions in the place of some methods of tensors.

`HostAccesses` looks at each operation of torch, and at what its schema says of its arguments: which it reads, and which
it writes. It passes accesses to the recorder, and calls of ``torch.distributed`` to `Meetings`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import torch

from iris.compat.dispatch import ObservingMode, arguments_of, operation_name, results_of, to_copy
from iris.observer import READ, UPDATE, WRITE
from iris.operators.graph_break import breaks_graph
from iris.operators.stand_ins import has_memory
from iris.sanitizer import indexed
from iris.sanitizer.distributed_calls import MeetingRecorder, Meetings, flat
from iris.sanitizer.threads import Threads


class AccessRecorder(MeetingRecorder, Protocol):
    """The part of `iris.sanitizer.host_recorder.HostRecorder` to which accesses by the host are reported."""

    threads: Threads

    def numbered(self) -> contextlib.AbstractContextManager[int]: ...
    def may_be_flag(self, tensor: Any) -> bool: ...
    def host_accessed(self, addresses: np.ndarray, size: int, element: int, kind: int, blank: bool = False) -> None: ...
    def host_looked(self, number: int, tensor: torch.Tensor) -> None: ...
    def used(self, tensor: torch.Tensor, verb: str) -> None: ...
    def seen(self, tensor: torch.Tensor) -> None: ...
    def renewed(self, address: int, size: int) -> None: ...


class HostAccesses(ObservingMode):
    """The mode. It sees each operation of torch after that was broken down to those that access memory."""

    def __init__(self, recorder: AccessRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self.meetings = Meetings(recorder, self.touch)

    def __enter__(self) -> "HostAccesses":
        for name in _READ_METHODS:
            setattr(torch.Tensor, name, _observed(self, getattr(torch.Tensor, name)))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.meetings.close()
        for name, before in _READ_METHODS.items():
            if before is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, before)
        super().__exit__(*error)

    @breaks_graph("the sanitizer looks at what torch does")
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, operation_name(func)
        if func.namespace == "c10d" or (func.namespace == "_c10d_functional" and name != "wait_tensor"):
            given = list(zip(arguments_of(func), _given(func, args, kwargs), strict=False))
            return self.meetings.dispatch(func, args, kwargs, given)
        if name.endswith("_like") or name.startswith("new_"):
            # These read no values of their arguments, only the shape.
            return self._renewed(func, func(*args, **kwargs))
        if not all(map(has_memory, _tensors([*_given(func, args, kwargs)]))):
            # Torch traces: a tensor stands for another one, and nothing is accessed.
            return func(*args, **kwargs)
        if torch.Tag.inplace_view in func.tags:
            # It only changes the shape.
            return func(*args, **kwargs)
        flags = []
        for argument, value in zip(arguments_of(func), _given(func, args, kwargs), strict=False):
            # An argument that is returned, itself or as a view, is not read.
            alias = argument.alias_info
            if alias is None or alias.is_write:
                kind = READ if alias is None else WRITE if func in _OVERWRITE or argument.is_out else UPDATE
                if kind == READ and self._recorder.may_be_flag(value):
                    flags.append(value)
                else:
                    self._touch_argument(func, args, kwargs, value, kind)
        with self._looking_at(flags):
            return self._renewed(func, func(*args, **kwargs))

    def _touch_argument(self, func: Any, args: tuple, kwargs: dict, value: Any, kind: int) -> None:
        """Record that ``func`` accesses one of its arguments; an operation with indices, only the elements of these."""
        uses = _uses(func, args, kwargs, kind)
        if not (args and value is args[0] and (func in indexed.READS or func in indexed.WRITES)):
            self.touch(value, kind, uses, blank=func is _ZERO or (func is _FILL and args[1] == 0))
        elif _is_recorded(value):
            self._recorder.seen(value)
            where, size = indexed.addresses(func, args, kwargs), value.element_size()
            self._recorder.host_accessed(where, size, size if uses else 0, kind)

    @contextlib.contextmanager
    def _looking_at(self, flags: list[torch.Tensor]) -> Iterator[None]:
        """Around an operation that reads these tensors, which may hold flags."""
        if not flags:
            yield
            return
        with self._recorder.numbered() as number:
            yield
            for flag in flags:
                self._recorder.used(flag, "reads")
                self._recorder.host_looked(number, flag)

    def _renewed(self, func: Any, result: Any) -> Any:
        """``result``, after a note that its memory is new, if ``func`` has allocated it: it may have been another's."""
        if self._recorder.threads.several():
            values = result if isinstance(result, (list, tuple)) else [result]
            for returned, value in zip(results_of(func), values, strict=False):
                if returned.alias_info is None:
                    for tensor in filter(_is_recorded, _tensors(value)):
                        storage: Any = tensor.untyped_storage()
                        storage.iris_seen = True
                        self._recorder.renewed(storage.data_ptr(), storage.nbytes())
        return result

    def in_thread(self) -> "_InThread":
        """A mode that sees what another thread of Python does."""
        return _InThread(self)

    def touch(self, value: Any, kind: int, uses: bool, blank: bool = False) -> None:
        """Record an access to all tensors in ``value``. ``uses``: the values count. ``blank``: it writes zeros."""
        for tensor in _tensors(value):
            if _is_recorded(tensor):
                self._recorder.seen(tensor)
                self._recorder.used(tensor, "reads" if kind == READ else "writes")
                self._recorder.host_accessed(*runs(tensor), tensor.element_size() if uses else 0, kind, blank)


class _InThread(ObservingMode):
    """Passes the operations of one more thread to the process' `HostAccesses`. (Torch has its modes by thread.)"""

    def __init__(self, accesses: HostAccesses) -> None:
        super().__init__()
        self._accesses = accesses

    @breaks_graph("the sanitizer looks at what torch does")
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return HostAccesses.__torch_dispatch__(self._accesses, func, types, args, kwargs)


# Methods that read a whole tensor without an operation of torch. (`cpu` of a tensor on the CPU copies nothing.) With
# those that torch.Tensor itself has; None if it inherits it. What numpy does with the memory afterwards is not seen.
_READS = ("tolist", "__repr__", "__reduce_ex__", "numpy", "__array__", "cpu")
_READ_METHODS = {name: vars(torch.Tensor).get(name) for name in _READS}


def _observed(accesses: HostAccesses, method: Callable) -> Callable:
    """``method``, one of `_READS`, which is recorded as a read."""

    @functools.wraps(method)
    def look(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return method(tensor, *args, **kwargs)
        flags = [tensor] if accesses._recorder.may_be_flag(tensor) else []
        if not flags:
            # To print or copy what nobody has written does no harm.
            accesses.touch(tensor, READ, uses=method.__name__ in ("tolist", "__reduce_ex__"))
        with accesses._looking_at(flags):
            return method(tensor, *args, **kwargs)

    return look


_ZERO, _FILL = torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar
_COPIES = (
    torch.ops.aten.copy_.default,
    to_copy,
    torch.ops.aten.clone.default,
    torch.ops.aten.cat.default,
    torch.ops.aten.stack.default,
)
_OVERWRITE = (_ZERO, _FILL, torch.ops.aten.fill_.Tensor, torch.ops.aten.copy_.default)


def _uses(func: Any, args: tuple, kwargs: dict, kind: int) -> bool:
    """Whether the result depends on what was in memory that ``func`` reads, writes or updates."""
    if kind == READ:
        # A copy of what nobody has written does no harm before it is used.
        return func not in _COPIES
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    return kind == UPDATE and not is_random and not indexed.replaces(func, args, kwargs)


def _given(func: Any, args: tuple, kwargs: dict) -> Iterator[Any]:
    """The arguments in the order of the operation's schema."""
    for index, argument in enumerate(arguments_of(func)):
        yield args[index] if index < len(args) else kwargs.get(argument.name)


def _is_recorded(tensor: torch.Tensor) -> bool:
    """Whether accesses to this tensor are recorded."""
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel() > 0


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (each for each in flat(value) if isinstance(each, torch.Tensor))


def runs(tensor: torch.Tensor) -> tuple[np.ndarray, int]:
    """Where the tensor's elements lie: addresses of contiguous runs, and the bytes of each run."""
    size, outer = tensor.element_size(), []
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1 and stride * tensor.element_size() == size:
            size *= extent
        elif extent > 1 and stride:
            outer.append((stride * tensor.element_size(), extent))
    addresses = np.array([tensor.data_ptr()], dtype=np.int64)
    for step, extent in reversed(outer):
        addresses = (addresses[:, None] + step * np.arange(extent, dtype=np.int64)).reshape(-1)
    return addresses, size
