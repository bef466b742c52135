"""A barrier of a group's ranks on the current stream: what each rank enqueued before it is visible after it.

One program a rank. Over the link: one 4-byte flag to each peer, in one step. The flags count their own epochs
(`iris.language.barrier`), so a replayed CUDA graph needs nothing from the host.
"""

from collections.abc import Callable

import torch
import triton

from iris.cuda_graphs.capture import Line
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_launch_dependents, gdc_wait
from iris.runtime.launch import addresses, prepare
from iris.runtime.workspace import Channel, Workspace

FLAGS = "flags of device_barrier()"


@triton.jit
def _barrier_kernel(context_tensor, flags):
    # After gdc_wait() the kernels before this one are complete. The barrier's release is cumulative: it covers their
    # stores, too. Its acquire comes before the kernels that follow on the stream.
    ctx = DeviceContext.initialize(context_tensor)
    gdc_wait()
    gdc_launch_dependents()
    ctx.barrier(flags)


class DeviceBarrier:
    """The barrier of one workspace's group, with a prepared launch for each stream.

    To make one is collective and blocks the host; to enqueue it is not.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._size = 4 * workspace.group.size

        # Compile and load first, then meet: no rank's kernel waits while another's is still being compiled.
        def compile_first() -> None:
            self._prepare(channel)

        channel = self._channel("flags to compile device_barrier() with", None)
        workspace.group.agree(compile_first, "compile its first device barrier of a group")
        self._launches: dict[Line, Callable[[int | None], None]] = {}

    def enqueue(self, stream: int | None, capturing: bool) -> None:
        """Enqueue on the stream with this handle (None in the simulator); ``capturing``: a graph is recording it."""
        line = self._workspace.line(stream, True) if capturing else stream
        if line not in self._launches:
            self._launches[line] = self._prepare(self._channel(FLAGS, line))
        try:
            self._launches[line](stream)
        except BaseException as error:
            self._workspace.abort_flag.interrupted("device_barrier", error)
            raise

    def _channel(self, operation: str, line: Line) -> Channel:
        return self._workspace.channel(operation, line, self._size, slice(None))

    def _prepare(self, channel: Channel) -> Callable[[int | None], None]:
        # One warp: it holds all flags, so one fence serves them all, and there is no other warp to wait for.
        args = (channel.context_tensor, channel.memory.view(torch.int32))
        launch = prepare(_barrier_kernel, (1, 1, 1), *args, num_warps=1)
        launched = addresses(args)

        def enqueue(stream: int | None) -> None:
            launch(stream, launched)

        enqueue.keeps_alive = args  # type: ignore[attr-defined]
        return enqueue
