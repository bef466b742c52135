"""The handle of a collective that was asked for with ``async_op=True``."""

import torch

from iris.operators.graph_break import methods_break_graph


@methods_break_graph("what is enqueued is waited for by the host")
class Work:
    """A collective that has been enqueued on a stream. Methods as those of ``torch.distributed.Work``."""

    def __init__(self, on_gpu: bool, stream: torch.cuda.Stream | None = None) -> None:
        """``stream``: the current one, if the caller has it at hand."""
        self._event: torch.cuda.Event | None = None
        if on_gpu:
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def wait(self, timeout: object = None) -> bool:
        """Let the current stream wait for the collective; the host does not wait."""
        if self._event is not None:
            self._event.wait()
        return True

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._event is None or self._event.query()

    def is_success(self) -> bool:
        """Whether it is over; a failure is raised by ``ctx.barrier()``."""
        return self.is_completed()

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()
