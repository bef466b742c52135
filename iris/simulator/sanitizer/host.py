"""What the host does with torch to memory that ranks share, and where it meets others by ``torch.distributed``."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from iris.simulator.sanitizer import indexed, rooted
from iris.simulator.sanitizer.events import READ, UPDATE, WRITE
from iris.untraced import untraced

if TYPE_CHECKING:
    from iris.simulator.sanitizer.recorder import Recorder


class HostAccesses(TorchDispatchMode):
    """Sees each of torch's operations once it has been broken down to those that touch memory."""

    def __init__(self, recorder: "Recorder") -> None:
        super().__init__()
        self._recorder = recorder
        self._calls: Counter[tuple] = Counter()
        # By each handle of a call that has not ended: torch's, and futures of it.
        self._begun: dict[Any, _Call] = {}

    def __enter__(self) -> "HostAccesses":
        for name in _UNSEEN:
            setattr(torch.Tensor, name, _looking(self, getattr(torch.Tensor, name)))
        for (kind, name), method in _ENDS.items():
            setattr(kind, name, _ending(self, method))
        dist.Work.get_future = _promising(self, _GET_FUTURE)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        for name, before in _UNSEEN.items():
            if before is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, before)
        for (kind, name), method in _ENDS.items():
            setattr(kind, name, method)
        dist.Work.get_future = _GET_FUTURE
        super().__exit__(*error)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """It changes nothing, so programs may be compiled under it."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would import its compiler at the first operation to leave `__torch_dispatch__` out of graphs."""
        return False

    @untraced("the sanitizer looks at what torch does")
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d" or (func.namespace == "_c10d_functional" and func._opname != "wait_tensor"):
            return self._meet(func, args, kwargs)
        if func._opname.endswith("_like") or func._opname.startswith("new_"):
            # Only the shape of what they are given counts.
            return self._renewed(func, func(*args, **kwargs))
        if torch.Tag.inplace_view in func.tags:
            # A new shape for what stays as it is.
            return func(*args, **kwargs)
        flags = []
        for argument, value in zip(func._schema.arguments, _given(func, args, kwargs), strict=False):
            # What is returned as it was given, or as a view of it, has not been read.
            alias = argument.alias_info
            if alias is None or alias.is_write:
                kind = READ if alias is None else WRITE if func in _OVERWRITE or argument.is_out else UPDATE
                uses = _uses(func, args, kwargs, kind)
                if kind == READ and self._recorder.may_be_flag(value):
                    flags.append(value)
                elif args and value is args[0] and (func in indexed.READS or func in indexed.WRITES):
                    if _is_seen(value):
                        where, size = indexed.addresses(func, args, kwargs), value.element_size()
                        self._recorder.host_accessed(where, size, size if uses else 0, kind)
                else:
                    blank = func is _ZERO or (func is _FILL and args[1] == 0)
                    self._touch(value, kind, uses, blank)
        with self._looking_at(flags):
            return self._renewed(func, func(*args, **kwargs))

    @contextlib.contextmanager
    def _looking_at(self, flags: list[torch.Tensor]) -> Iterator[None]:
        """Around an operation that reads these."""
        if not flags:
            yield
            return
        with self._recorder.notes.numbered() as number:
            yield
            for flag in flags:
                self._recorder.used(flag, "reads")
                self._recorder.host_looked(number, flag)

    def _renewed(self, func: Any, result: Any) -> Any:
        """``result``, in which ``func`` has allocated memory, that others may have used before."""
        if self._recorder.threads.several():
            values = result if isinstance(result, (list, tuple)) else [result]
            for returned, value in zip(func._schema.returns, values, strict=False):
                if returned.alias_info is None:
                    for tensor in filter(_is_seen, _tensors(value)):
                        storage = tensor.untyped_storage()
                        self._recorder.renewed(storage.data_ptr(), storage.nbytes())
        return result

    def in_thread(self) -> "_InThread":
        """Around what another thread of Python does."""
        return _InThread(self)

    def _meet(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """A collective of torch's, or a message: a rank comes, or sends, here, and hears of the others in `wait`."""
        given = list(zip(func._schema.arguments, _given(func, args, kwargs), strict=False))
        group = next((g for argument, value in given if (g := _process_group(argument.name, value)) is not None), None)
        ranks, here = () if group is None else _ranks_of(group), dist.get_rank()
        name = _name_of(group)
        given_by_name = {argument.name: value for argument, value in given}
        told, takers = rooted.heard(func._opname, given_by_name, ranks, here) if ranks else (None, 0)
        sends = not (rooted.is_from_root(func._opname) and told) and not func._opname.startswith("recv_")
        # Of what a collective of c10d writes, its schema says nothing but by names.
        receives = func.namespace == "c10d" and func._opname not in ("send", "barrier")
        for argument, value in given:
            if sends and not argument.name.startswith("output"):
                # What is only moved harms nobody before it is used.
                self._touch(value, READ, uses="reduce" in func._opname)
        outputs = [
            value
            for argument, value in given
            if (argument.alias_info is not None and argument.alias_info.is_write)
            or (receives and not argument.name.startswith("input"))
        ]
        text = f"{func._opname.rstrip('_')} of torch.distributed"
        match func._opname:
            case "send" if ranks:
                # It may be over before it is received.
                self._recorder.came(self._next_key(name, (here, ranks[args[2]]), args[3]))
                call = _Call(outputs)
            case "recv_" if ranks:
                source = ranks[args[2]]
                call = _Call(outputs, text, self._next_key(name, (source, here), args[3]), (source,))
            case "recv_any_source_" if ranks:
                # From whom it came is known when it is there.
                call = _Call(outputs, f"{text} from any rank", (name, ranks, args[2]), ())
            case _ if ranks:
                call = _Call(outputs, text, self._next_key(name, ranks), told or ranks, told, takers)
                self._recorder.came(call.key)
            case _:
                call = _Call(outputs)
        if func.namespace != "c10d":
            # It is waited for by an operation of its own; the simulator's have ended when they return.
            return self._wait(call, lambda: func(*args, **kwargs))
        result = func(*args, **kwargs)
        works = [work for value in _flat(result) if (work := _work(value)) is not None]
        if works:
            self._begun[works[0]] = call
        else:
            self._wait(call, lambda: None)
        return result

    def _next_key(self, group: str, ranks: tuple[int, ...], tag: int | None = None) -> tuple:
        """The same on all who take part: calls of a group, and its messages of a tag one way, come in order."""
        key = ("torch.distributed", group, ranks, tag)
        self._calls[key] += 1
        return (*key, self._calls[key])

    def _wait(self, call: "_Call", wait: Callable[[], Any], work: dist.Work | None = None) -> Any:
        with self._recorder.awaiting(call.key, call.ranks, call.text) if call.key else contextlib.nullcontext():
            result = wait()
        self._end(call, work)
        return result

    def _end(self, call: "_Call", work: dist.Work | None = None) -> None:
        """What it wrote is there, and what the others did before they came, or sent, is known."""
        key, heard = call.key, call.ranks if call.heard is None else call.heard
        if key and not call.ranks:
            name, group, tag = key
            heard = (group[work._source_rank()],)
            key = self._next_key(name, (*heard, dist.get_rank()), tag)
        if key and heard:
            self._recorder.met(key, heard, call.takers)
        self._touch(call.outputs, WRITE, uses=False)

    def end(self, handle: Any, wait: Callable[[], Any], only_looks: bool) -> Any:
        """``wait`` waits for what ``handle`` is of, or tells whether that is over."""
        call = self._begun.get(handle)
        if call is None:
            return wait()
        handles = [each for each, of in self._begun.items() if of is call]
        work = next(each for each in handles if isinstance(each, dist.Work))
        if only_looks:
            result = wait()
            if not result:
                return result
            self._end(call, work)
        else:
            result = self._wait(call, wait, work)
        for each in handles:
            del self._begun[each]
        return result

    def promised(self, work: dist.Work, future: Any) -> None:
        """``future`` is of ``work``."""
        if work in self._begun:
            self._begun[future] = self._begun[work]

    def _touch(self, value: Any, kind: int, uses: bool, blank: bool = False) -> None:
        for tensor in _tensors(value):
            if _is_seen(tensor):
                self._recorder.used(tensor, "reads" if kind == READ else "writes")
                self._recorder.host_accessed(*runs(tensor), tensor.element_size() if uses else 0, kind, blank)


class _InThread(TorchDispatchMode):
    """Hands the operations of one more thread to the process' `HostAccesses`: torch keeps modes by thread."""

    def __init__(self, accesses: HostAccesses) -> None:
        super().__init__()
        self._accesses = accesses

    is_infra_mode, _should_skip_dynamo = HostAccesses.is_infra_mode, HostAccesses._should_skip_dynamo

    @untraced("the sanitizer looks at what torch does")
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return HostAccesses.__torch_dispatch__(self._accesses, func, types, args, kwargs)


# Ways to read a whole tensor that are no operations of torch's; None: inherited. `cpu` is one of them, since it copies
# nothing of a tensor that is on the CPU. What numpy does with the memory afterwards is not seen.
_READS = ("tolist", "__repr__", "__reduce_ex__", "numpy", "__array__", "cpu")
_UNSEEN = {name: vars(torch.Tensor).get(name) for name in _READS}


class _Call(NamedTuple):
    """A call of torch.distributed: what it writes, for which ranks it may wait, and whose coming its end tells of.

    ``ranks``: none of a message from any rank; then ``key`` has its group, the ranks of that, and its tag. ``heard``:
    None for all of ``ranks``; ``takers``: so many ranks hear of some.
    """

    outputs: list
    text: str = ""
    key: tuple = ()
    ranks: tuple[int, ...] = ()
    heard: tuple[int, ...] | None = None
    takers: int = 1


_GET_FUTURE = dist.Work.get_future
# By what a program hears that a call is over. (By `Work.synchronize` it does not: gloo's returns at once.)
_ENDS = {
    (kind, name): getattr(kind, name)
    for kind, names in ((dist.Work, ("wait", "is_completed")), (torch._C.Future, ("wait", "done")))
    for name in names
}


def _ending(accesses: HostAccesses, method: Callable) -> Callable:
    """``method``, which waits for a call or looks whether it is over, with a note of it."""

    @functools.wraps(method)
    def end(handle: Any, *args: Any, **kwargs: Any) -> Any:
        only_looks = method.__name__ in ("is_completed", "done")
        return accesses.end(handle, lambda: method(handle, *args, **kwargs), only_looks)

    return end


def _promising(accesses: HostAccesses, method: Callable) -> Callable:
    """``method``, which gives a future of a call, with a note of it."""

    @functools.wraps(method)
    def promise(work: dist.Work) -> Any:
        future = method(work)
        accesses.promised(work, future)
        return future

    return promise


def _work(value: Any) -> dist.Work | None:
    """The handle that an operation has returned, if it is one: the same object as its caller gets."""
    try:
        return dist.Work.unbox(value) if isinstance(value, torch.ScriptObject) else None
    except (RuntimeError, TypeError):
        return None


def _looking(accesses: HostAccesses, method: Callable) -> Callable:
    """``method``, with a note of it."""

    @functools.wraps(method)
    def look(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return method(tensor, *args, **kwargs)
        flags = [tensor] if accesses._recorder.may_be_flag(tensor) else []
        if not flags:
            # What is printed, or copied, without having been written harms nobody.
            accesses._touch(tensor, READ, uses=method.__name__ in ("tolist", "__reduce_ex__"))
        with accesses._looking_at(flags):
            return method(tensor, *args, **kwargs)

    return look


_ZERO, _FILL = torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar
_COPIES = (
    torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default,
    torch.ops.aten.cat.default, torch.ops.aten.stack.default,
)  # fmt: skip
_OVERWRITE = (_ZERO, _FILL, torch.ops.aten.fill_.Tensor, torch.ops.aten.copy_.default)


def _uses(func: Any, args: tuple, kwargs: dict, kind: int) -> bool:
    """Whether it matters what was in memory to which ``func`` does this."""
    if kind == READ:
        # A copy of what nobody has written harms nobody before it is used.
        return func not in _COPIES
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    return kind == UPDATE and not is_random and not indexed.replaces(func, args, kwargs)


def _given(func: Any, args: tuple, kwargs: dict) -> Iterator[Any]:
    """The arguments in the order of the operation's schema."""
    for index, argument in enumerate(func._schema.arguments):
        yield args[index] if index < len(args) else kwargs.get(argument.name)


def _is_seen(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.numel() > 0


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (each for each in _flat(value) if isinstance(each, torch.Tensor))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _process_group(name: str, value: Any) -> dist.ProcessGroup | None:
    """The group that an argument of this name is, if it is one."""
    if name == "group_name":
        return value if isinstance(value, dist.ProcessGroup) else distributed_c10d._resolve_process_group(value)
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(value)
    except (RuntimeError, TypeError):  # an operation's ReduceOp is one, too
        return None


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The ranks of the world that are in it; none if that cannot be told."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        # Torch was not told of it: the Gloo that stands beside a process group of Iris for tensors that are elsewhere.
        return tuple(range(group.size())) if group.size() == dist.get_world_size() else ()


def _name_of(group: dist.ProcessGroup | None) -> str:
    """The same on all its ranks; empty if torch was not told of it."""
    try:
        return "" if group is None else group.group_name
    except RuntimeError:
        return ""


def runs(tensor: torch.Tensor) -> tuple[np.ndarray, int]:
    """Where the tensor's elements lie, those side by side as one: addresses, and bytes at each."""
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
