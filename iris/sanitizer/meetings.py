"""Where the host meets others by ``torch.distributed``: what its calls read and write, and whom they order.

A call whose handle the program gets, as with ``async_op=True``, goes on beside the program until that has waited for it
(`calls`): by the handle, or by a future of it.
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
    """The part of `iris.sanitizer.host_recorder.HostRecorder` that is told of meetings."""

    def begun(self, name: str, stream: Any = None) -> Call: ...
    def collective_entered(self, key: tuple) -> None: ...
    def collective_done(self, key: tuple, ranks: tuple[int, ...], receivers: int) -> None: ...
    def awaiting(self, key: tuple, ranks: tuple[int, ...], text: str) -> contextlib.AbstractContextManager[None]: ...


@dataclass(eq=False)
class _Meeting:
    """A call of torch.distributed: what it writes, for which ranks it may wait, and which ranks it orders.

    ``ranks``: none of a message from any rank; then ``key`` has its group, the ranks of that, and its tag.
    ``sources``: whose data it brings, None for all of ``ranks``. ``receivers``: how many ranks get data of any other.
    ``call``: if it goes on beside its thread.
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
    """Of one rank. ``touch(value, kind, uses)`` notes what is done to the tensors in ``value``."""

    def __init__(self, recorder: MeetingRecorder, touch: Touch) -> None:
        self._recorder, self._touch = recorder, touch
        self._counts: Counter[tuple] = Counter()
        # By each handle of calls that have not ended: torch's, and futures of them.
        self._begun: dict[Any, tuple[_Meeting, ...]] = {}
        self._replaced = [(of, name, getattr(of, name)) for of, names, _ in _HANDLES for name in names]
        for of, names, instead in _HANDLES:
            for name in names:
                setattr(of, name, instead(self, getattr(of, name)))

    def close(self) -> None:
        for of, name, before in self._replaced:
            setattr(of, name, before)
        # They were under way until now.
        for meeting in {meeting for meetings in self._begun.values() for meeting in meetings}:
            if meeting.ranks or not meeting.key:
                self._happened(meeting, None)
        self._begun.clear()

    def dispatch(self, func: Any, args: tuple, kwargs: dict, given: list[tuple[Any, Any]]) -> Any:
        """A collective of torch's, or a message: a rank enters, or sends, here; what others did comes before its `end`.

        ``given``: each argument of the operation's schema, with its value.
        """
        group = next((g for argument, value in given if (g := _process_group(argument.name, value)) is not None), None)
        ranks, here = () if group is None else _ranks_of(group), dist.get_rank()
        name, operation = _name_of(group), operation_name(func).rstrip("_")
        given_by_name = {argument.name: value for argument, value in given}
        sources, receivers = rooted.data_sources(operation, given_by_name, ranks, here) if ranks else (None, 0)
        sends = not (rooted.is_from_root(operation) and sources) and not operation.startswith("recv")
        # Of what a collective of c10d writes, its schema says nothing but by names.
        receives = func.namespace == "c10d" and operation not in ("send", "barrier")
        outputs = [
            value
            for argument, value in given
            if (argument.alias_info is not None and argument.alias_info.is_write)
            or (receives and not argument.name.startswith("input"))
        ]
        text = f"{operation} of torch.distributed"
        key: tuple | None = None
        match operation:
            case "send" if ranks:
                # It may be over before it is received.
                meeting, key = _Meeting(outputs), self._next_key(name, (here, ranks[args[2]]), args[3])
            case "recv" if ranks:
                source = ranks[args[2]]
                meeting = _Meeting(outputs, text, self._next_key(name, (source, here), args[3]), (source,))
            case "recv_any_source" if ranks:
                # From whom it came is known when it is there.
                meeting = _Meeting(outputs, f"{text} from any rank", (name, ranks, args[2]), ())
            case _ if ranks:
                key = self._next_key(name, ranks)
                meeting = _Meeting(outputs, text, key, sources or ranks, sources, receivers)
            case _:
                meeting = _Meeting(outputs)
        if _is_asynchronous(func, operation, given_by_name):
            meeting.call = self._recorder.begun(operation.strip("_"))
        with meeting.carried_out():
            for argument, value in given:
                if sends and not argument.name.startswith("output"):
                    # What is only moved harms nobody before it is used.
                    self._touch(value, READ, uses="reduce" in operation)
            if key is not None:
                self._recorder.collective_entered(key)
        if func.namespace != "c10d":
            # It is waited for by an operation of its own; the simulator's have ended when they return.
            return self._wait(meeting, lambda: func(*args, **kwargs))
        result = func(*args, **kwargs)
        works = [work for value in flat(result) if (work := _work(value)) is not None]
        if works:
            self._begun[works[0]] = (meeting,)
        else:
            self._wait(meeting, lambda: None)
        return result

    def begin(self, handle: Any, call: Call) -> None:
        """``handle`` is of a call of this library's."""
        self._begun[handle] = (_Meeting([], call=call),)

    def end(self, handle: Any, wait: Callable[[], Any], only_looks: bool) -> Any:
        """``wait`` waits for what ``handle`` is of, or asks whether that is over."""
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
        """``future`` is of the calls of which ``handles`` are."""
        meetings = tuple(meeting for handle in handles for meeting in self._begun.get(handle, ()))
        if meetings:
            self._begun[future] = meetings

    def is_of_one(self, handle: Any) -> bool:
        """Whether ``handle`` is of a call that has not ended."""
        return handle in self._begun

    def _next_key(self, group: str, ranks: tuple[int, ...], tag: int | None = None) -> tuple:
        """The same on all who take part: calls of a group, and its messages of a tag one way, come in order."""
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
        """What it wrote is there, and what the others did before they entered, or sent, comes before."""
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
    """Whether this goes on beside the program."""
    if func.namespace != "c10d" or operation == "barrier" or not goes_on_by_itself(given):
        return False
    return goes_to_the_program(sys._getframe(1))


def goes_to_the_program(frame: FrameType | None) -> bool:
    """Whether the program gets the handle of a call that was made here, and goes on before it waits.

    What torch calls in C++, as its data parallel module and its functional collectives do, it waits for there.
    """
    while frame is not None and frame.f_code.co_filename.startswith(IRIS):
        frame = frame.f_back
    return frame is not None and (is_of_torch_distributed(frame.f_code) or lines.owner(frame.f_code) == lines.USER)


def _work(value: Any) -> dist.Work | None:
    """The handle that an operation has returned, if it is one: the same object as its caller gets."""
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
    """The ranks of the world that are in it; none if that is unknown."""
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


# Interceptors of methods of handles -----------------------------------------------------------------------------------


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
    """Whom a future calls back knows that it is over; so does who waits for what ``then`` returns."""

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


# (By `Work.synchronize` a program does not learn that a call is over: gloo's returns at once.)
_HANDLES = [
    (dist.Work, ("wait",), _waiting),
    (dist.Work, ("is_completed",), _looking),
    (dist.Work, ("get_future",), _promising),
    (Future, ("wait", "value"), _waiting),
    (Future, ("done",), _looking),
    (Future, ("then", "add_done_callback"), _calling_back),
    (torch.futures, ("collect_all",), _collecting),
]
