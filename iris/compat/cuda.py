"""The handle of the current stream, and whether it is being captured, at the lowest cost to the host.

`torch._C._cuda_isCurrentStreamCapturing` and `torch._C._cuda_getCurrentRawStream` are there in torch 2.9 to 2.13, the
latter only in builds for GPUs. Where one is gone, the public function is used. Its answer is the same, but for a
stream's handle it makes a Stream object, which costs the host ten times as much.
"""

from collections.abc import Callable

import torch

from iris.compat.parts import optional


def _handle_of_current_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


current_raw_stream: Callable[[int], int] = optional("torch._C:_cuda_getCurrentRawStream") or _handle_of_current_stream
"""The handle of the current stream of the GPU with this index."""

is_current_stream_capturing: Callable[[], bool] = (
    optional("torch._C:_cuda_isCurrentStreamCapturing") or torch.cuda.is_current_stream_capturing
)
"""Whether a graph is being captured on the current stream of the current GPU."""
