"""Errors of collectives and fused operations."""

from iris.errors.base import IrisError


class ChannelsExhaustedError(IrisError, RuntimeError):
    """A group has no memory left for the flags and staging of another kind of call, stream or line of graphs."""

    def __init__(self, wanted: str, size: str, channels: int, lines: int) -> None:
        super().__init__(
            f"The {size} that this group may have for flags and staging are in use by {channels} channels, and another "
            f"needs {wanted}. Each operation has one a stream, and one for all graphs of a pool or of a capture stream "
            f"({lines} of these so far), which they keep. Use fewer streams, capture on one stream what never runs at "
            "once, or give back the channels of graphs that are gone with ctx.ccl.release_graphs()."
        )


class TooManyStreamsError(IrisError, RuntimeError):
    """Messages from one rank to another are on more than two streams, for which there is staging."""


class FirstUseInCaptureError(IrisError, RuntimeError):
    """The first use of an operation by a group, or the making of a context, was inside the capture of a CUDA graph.

    Of collectives, ``device_barrier``, calls of a group of ``torch.distributed``, and fused operations of a shape or
    their preamble. The capture can be ended, and another one begun.
    """

    def __init__(self, call: str) -> None:
        super().__init__(
            f"The first {call} of a group compiles a kernel and meets the other ranks on the host, which a CUDA graph "
            "cannot hold. Call it once before the capture."
        )


class InvalidConfigError(IrisError, ValueError):
    """A field of `iris.ccl.Config` or `iris.ops.FusedConfig` has a value that cannot work."""


class InvalidCollectiveError(IrisError, ValueError):
    """The tensors of a collective do not fit together, or not the group."""


class UnsupportedReductionError(IrisError, TypeError):
    """A reduction has no meaning for a dtype, or is not one of Iris'."""


class WorkspaceTooSmallError(IrisError, ValueError):
    """A workspace that was given to a collective was prepared for something smaller, or something else."""


class MismatchedCollectiveError(IrisError, RuntimeError):
    """Ranks call a collective or a fused operation with different arguments, or with a result elsewhere on the heap.

    Found with ``IRIS_DEBUG=1``. Over several hosts always: in the simulator by the call, and on GPUs where the ranks
    stand still, by a process that ends then (``IRIS_PEER_LOST``).
    """


class InvalidTableError(IrisError, ValueError):
    """A table of what was measured, by which operations are chosen, is missing, broken, or differs between ranks."""
