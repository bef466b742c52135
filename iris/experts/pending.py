"""What a dispatch or a combine with ``async_op=True`` returns: what is sent is on its way, and not yet received."""

from collections.abc import Callable
from typing import Generic, TypeVar

from iris.errors import PendingCallError
from iris.operators.graph_break import methods_break_graph

Result = TypeVar("Result")


@methods_break_graph("what is enqueued is waited for by the host")
class PendingCall(Generic[Result]):
    """The handle of a call of which one half is enqueued; returned by `ExpertParallel`, never made by a program.

    Its memory, one of `ExpertsConfig.in_flight`, is in use until the call is waited for, and, of a dispatch, until
    that is combined. Until then the tensors that the call was given are kept alive, and may not be written.
    """

    def __init__(self, call: str, receive: Callable[[], Result]) -> None:
        self._call = call
        self._receive: Callable[[], Result] | None = receive

    def wait(self) -> Result:
        """Enqueue the other half, which receives, on the current stream, and return what the call is for.

        Once, on every rank, in the same order of all calls. The host does not wait. The stream may be another than
        that of the call, which it then waits for. If one of the two is captured in a graph, both are, in the same one.

        Raises
        ------
        PendingCallError
            It was waited for before; or a graph would have one half of it.
        HeapClosedError
            The `ExpertParallel` was closed.
        GroupAbortedError
            The group is broken by an earlier call.
        """
        if self._receive is None:
            raise PendingCallError(
                f"wait() of a {self._call} is called a second time: the first has returned what the call is for. Keep "
                "that, and wait once for each call."
            )
        result = self._receive()
        self._receive = None
        return result

    def __repr__(self) -> str:
        state = "was waited for" if self._receive is None else "is to be waited for"
        return f"<PendingCall of {self._call}, {state}>"
