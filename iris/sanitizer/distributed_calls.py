"""Calls of ``torch.distributed``: what they read and write, and which ranks they order.

Such a call is a *meeting*: a collective or a message, in which ranks wait for each other. If the program gets its
handle and goes on, as with ``async_op=True``, the call is asynchronous (`calls`) until the program has waited for it,
by the handle or by a future of it. So methods of handles and futures are replaced while the sanitizer records.
"""

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist

from iris.compat.c10d import Future, goes_on_by_itself, group_named, is_of_torch_distributed, source_of
from iris.compat.dispatch import operation_name
from iris.observer import READ, WRITE
from iris.sanitizer import rooted
from iris.sanitizer.calls import Call
from iris.simulator import lines
from iris.simulator.folders import IRIS

Touch = Callable[..., None]


class MeetingRecorder(Protocol):
    """The part of `iris.sanitizer.host_recorder.HostRecorder` to which meetings are reported."""

    def begun(self, name: str, stream: Any = None) -> Call: ...
    def collective_entered(self, key: tuple) -> None: ...
    def collective_done(self, key: tuple, ranks: tuple[int, ...], receivers: int) -> None: ...
    def awaiting(self, key: tuple, ranks: tuple[int, ...], text: str) -> contextlib.AbstractContextManager[None]: ...


@dataclass(eq=False)
class _Meeting:
    """A call of torch.distributed.

    Attributes
    ----------
    outputs
        The tensors that it writes.
    text, key
        The call, in words; and what names it on all ranks that take part. The key is empty if nothing is waited for.
    ranks
        For which it may wait. None for a message from any rank: then ``key`` has the group, its ranks, and the tag.
    sources
        The ranks whose data it brings; None for all of ``ranks``.
    receivers
        How many ranks get data of any other.
    call
        If it is asynchronous.
    """

    outputs: list
    text: str = ""
    key: tuple = ()
    ranks: tuple[int, ...] = ()
    sources: tuple[int, ...] | None = None
    receivers: int = 1
    call: Call | None = None

    def carried_out(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext() if self.call is None else self.call.carried_out()


class Meetings:
    """The calls of one rank. ``touch(value, kind, uses)`` records an access to the tensors in ``value``."""

    def __init__(self, recorder: MeetingRecorder, touch: Touch) -> None:
        self._recorder, self._touch = recorder, touch
        self._counts: Counter[tuple] = Counter()
        # The calls for which nobody has waited, by each of their handles and futures.
        self._begun: dict[Any, tuple[_Meeting, ...]] = {}
        self._replaced = [(of, name, getattr(of, name)) for of, names, _ in _HANDLES for name in names]
        for of, names, instead in _HANDLES:
            for name in names:
                setattr(of, name, instead(self, getattr(of, name)))

    def close(self) -> None:
        for of, name, before in self._replaced:
            setattr(of, name, before)
        # Calls for which nobody has waited were under way until now.
        for meeting in {meeting for meetings in self._begun.values() for meeting in meetings}:
            if meeting.ranks or not meeting.key:
                self._happened(meeting, None)
        self._begun.clear()

    def dispatch(self, func: Any, args: tuple, kwargs: dict, given: list[tuple[Any, Any]]) -> Any:
        """Make a call of torch.distributed. This rank enters or sends here; what others did comes before its `end`.

        ``given``: each argument of the operation's schema, with its value.
        """
        operation = operation_name(func).rstrip("_")
        meeting, entered, sends = self._meeting_of(func, operation, args, given)
        if _is_asynchronous(func, operation, {argument.name: value for argument, value in given}):
            meeting.call = self._recorder.begun(operation.strip("_"))
        with meeting.carried_out():
            for argument, value in given:
                if sends and not argument.name.startswith("output"):
                    # To move what nobody has written does no harm before it is used.
                    self._touch(value, READ, uses="reduce" in operation)
            if entered is not None:
                self._recorder.collective_entered(entered)
        if func.namespace != "c10d":
            # A functional collective. Another operation waits for it, but here it has ended when it returns.
            return self._wait(meeting, lambda: func(*args, **kwargs))
        result = func(*args, **kwargs)
        works = [work for value in flat(result) if (work := _work(value)) is not None]
        if works:
            self._begun[works[0]] = (meeting,)
        else:
            self._wait(meeting, lambda: None)
        return result

    def _meeting_of(
        self, func: Any, operation: str, args: tuple, given: list[tuple[Any, Any]]
    ) -> tuple[_Meeting, tuple | None, bool]:
        """The call; the key by which this rank enters or sends, if it does; and whether the call reads its tensors."""
        group = next((g for argument, value in given if (g := _process_group(argument.name, value)) is not None), None)
        name, ranks, here = _name_of(group), () if group is None else _ranks_of(group), dist.get_rank()
        arguments = {argument.name: value for argument, value in given}
        sources, receivers = rooted.data_sources(operation, arguments, ranks, here) if ranks else (None, 0)
        sends = not (rooted.is_from_root(operation) and sources) and not operation.startswith("recv")
        # The schemas of c10d do not say what is written, except by the arguments' names.
        receives = func.namespace == "c10d" and operation not in ("send", "barrier")
        outputs = [
            value
            for argument, value in given
            if (argument.alias_info is not None and argument.alias_info.is_write)
            or (receives and not argument.name.startswith("input"))
        ]
        text = f"{operation} of torch.distributed"
        match operation:
            case "send" if ranks:  # args: tensors, group, destination, tag
                # It need not wait until it is received.
                return _Meeting(outputs), self._next_key(name, (here, ranks[args[2]]), args[3]), sends
            case "recv" if ranks:  # args: tensors, group, source, tag
                source = ranks[args[2]]
                key = self._next_key(name, (source, here), args[3])
                return _Meeting(outputs, text, key, (source,)), None, sends
            case "recv_any_source" if ranks:  # args: tensors, group, tag
                # Its source is known when it has come.
                return _Meeting(outputs, f"{text} from any rank", (name, ranks, args[2]), ()), None, sends
            case _ if ranks:
                key = self._next_key(name, ranks)
                return _Meeting(outputs, text, key, sources or ranks, sources, receivers), key, sends
            case _:
                return _Meeting(outputs), None, sends

    def begin(self, handle: Any, call: Call) -> None:
        """``handle`` is that of a call of this library's."""
        self._begun[handle] = (_Meeting([], call=call),)

    def end(self, handle: Any, wait: Callable[[], Any], only_looks: bool) -> Any:
        """Call ``wait``: it waits for the calls of ``handle`` or, if it ``only_looks``, says whether they are over."""
        meetings = self._begun.get(handle)
        if meetings is None:
            return wait()
        if only_looks:
            result = wait()
            if result:
                for meeting in meetings:
                    self._end(meeting)
            return result
        return self._wait(meetings[0], wait, meetings[1:])

    def promised(self, handles: Iterable[Any], future: Any) -> None:
        """``future`` completes with the calls of these handles."""
        meetings = tuple(meeting for handle in handles for meeting in self._begun.get(handle, ()))
        if meetings:
            self._begun[future] = meetings

    def is_of_one(self, handle: Any) -> bool:
        """Whether ``handle`` is that of a call for which nobody has waited."""
        return handle in self._begun

    def _next_key(self, group: str, ranks: tuple[int, ...], tag: int | None = None) -> tuple:
        """The key of a call, the same on all ranks that take part.

        It counts the calls of a group, and its messages of one tag from one rank to another: both come in order.
        """
        key = ("torch.distributed", group, ranks, tag)
        self._counts[key] += 1
        return (*key, self._counts[key])

    def _wait(self, meeting: _Meeting, wait: Callable[[], Any], others: tuple[_Meeting, ...] = ()) -> Any:
        key, ranks, text = meeting.key, meeting.ranks, meeting.text
        with self._recorder.awaiting(key, ranks, text) if key else contextlib.nullcontext():
            result = wait()
        for each in (meeting, *others):
            self._end(each)
        return result

    def _end(self, meeting: _Meeting) -> None:
        handles = [handle for handle, of in list(self._begun.items()) if meeting in of]
        self._happened(meeting, next((each for each in handles if isinstance(each, dist.Work)), None))
        if meeting.call is not None:
            meeting.call.awaited()
        for handle in handles:
            left = tuple(each for each in self._begun[handle] if each is not meeting)
            if left:
                self._begun[handle] = left
            else:
                del self._begun[handle]

    def _happened(self, meeting: _Meeting, work: dist.Work | None) -> None:
        """The call is over: its outputs are written, after what the others did before they entered or sent.

        ``work``: its handle, which says from which rank a message came.
        """
        key, sources = meeting.key, meeting.ranks if meeting.sources is None else meeting.sources
        if key and not meeting.ranks:
            assert work is not None
            name, group, tag = key
            sources = (group[source_of(work)],)
            key = self._next_key(name, (*sources, dist.get_rank()), tag)
        with meeting.carried_out():
            if key and sources:
                self._recorder.collective_done(key, sources, meeting.receivers)
            self._touch(meeting.outputs, WRITE, uses=False)


def flat(value: Any) -> Iterator[Any]:
    """The members of nested sequences."""
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from flat(each)
    else:
        yield value


def _is_asynchronous(func: Any, operation: str, given: dict[str, Any]) -> bool:
    """Whether the program goes on before this call is over."""
    if func.namespace != "c10d" or operation == "barrier" or not goes_on_by_itself(given):
        return False
    return goes_to_the_program(sys._getframe(1))


def goes_to_the_program(frame: FrameType | None) -> bool:
    """Whether the program gets the handle of a call that was made in ``frame``, and goes on before it waits.

    Not if torch made the call in C++, as its data parallel module and its functional collectives do: it waits there.
    """
    while frame is not None and frame.f_code.co_filename.startswith(IRIS):
        frame = frame.f_back
    return frame is not None and (is_of_torch_distributed(frame.f_code) or lines.owner(frame.f_code) == lines.USER)


def _work(value: Any) -> dist.Work | None:
    """``value`` as a handle, if an operation has returned one: the same object as its caller gets."""
    try:
        return dist.Work.unbox(value) if isinstance(value, torch.ScriptObject) else None
    except (RuntimeError, TypeError):
        return None


def _process_group(name: str, value: Any) -> dist.ProcessGroup | None:
    """The group that an argument of this name is, if it is one."""
    if name == "group_name":
        return value if isinstance(value, dist.ProcessGroup) else group_named(value)
    if not isinstance(value, torch.ScriptObject):
        return None
    try:
        return dist.ProcessGroup.unbox(value)
    except (RuntimeError, TypeError):  # an operation's ReduceOp is one, too
        return None


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """The group's ranks, as numbers in the world; none if that is unknown."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except KeyError:
        # Torch does not know of it: the Gloo that stands beside a process group of Iris for tensors that are elsewhere.
        return tuple(range(group.size())) if group.size() == dist.get_world_size() else ()


def _name_of(group: dist.ProcessGroup | None) -> str:
    """The same on all its ranks; empty if torch does not know of it."""
    try:
        return "" if group is None else group.group_name
    except RuntimeError:
        return ""


# Functions in the place of methods of handles and futures -------------------------------------------------------------


def _waiting(meetings: Meetings, method: Callable) -> Callable:
    @functools.wraps(method)
    def wait(handle: Any, *args: Any, **kwargs: Any) -> Any:
        return meetings.end(handle, lambda: method(handle, *args, **kwargs), only_looks=False)

    return wait


def _looking(meetings: Meetings, method: Callable) -> Callable:
    @functools.wraps(method)
    def look(handle: Any) -> Any:
        return meetings.end(handle, lambda: method(handle), only_looks=True)

    return look


def _promising(meetings: Meetings, method: Callable) -> Callable:
    @functools.wraps(method)
    def promise(work: dist.Work) -> Any:
        future = method(work)
        meetings.promised([work], future)
        return future

    return promise


def _calling_back(meetings: Meetings, method: Callable) -> Callable:
    """A callback knows that its future is over; so does a thread that has waited for the future of ``then``."""

    @functools.wraps(method)
    def call_back(future: Any, callback: Callable) -> Any:
        if not meetings.is_of_one(future):
            return method(future, callback)

        def called(*args: Any) -> Any:
            meetings.end(future, lambda: True, only_looks=True)
            return callback(*args)

        result = method(future, called)
        if result is not None:
            meetings.promised([future], result)
        return result

    return call_back


def _collecting(meetings: Meetings, function: Callable) -> Callable:
    @functools.wraps(function)
    def collect(futures: list) -> Any:
        result = function(futures)
        meetings.promised(futures, result)
        return result

    return collect


# What is replaced: of what, which attributes, and by what they are made. (`Work.synchronize` is not: gloo's returns at
# once, so a program does not learn by it that a call is over.)
_HANDLES = [
    (dist.Work, ("wait",), _waiting),
    (dist.Work, ("is_completed",), _looking),
    (dist.Work, ("get_future",), _promising),
    (Future, ("wait", "value"), _waiting),
    (Future, ("done",), _looking),
    (Future, ("then", "add_done_callback"), _calling_back),
    (torch.futures, ("collect_all",), _collecting),
]
