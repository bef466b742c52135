"""Allocates GPU memory that the library keeps, never from a memory pool that the program or torch has set up.

While a thread runs what ``torch.compile(mode="reduce-overhead")`` is about to capture, all that it allocates comes from
the pool of the graphs. A tensor that stays there and is no result is an error ("not tracked as outputs"), as a later
graph would overwrite it (torch/_inductor/cudagraph_trees.py, `_use_cuda_memory_pool_manager`).
``torch.cuda.use_mem_pool`` sets a pool for a thread as well. Of two pools the outer one is used, so a pool of the
library's own would not help. But both hold only for their thread. So `keep` allocates in a new thread.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from iris.cuda_graphs.capture import outside_captures

Made = TypeVar("Made")


def keep(make: Callable[[], Made], device: torch.device) -> Made:
    """Call ``make``, which makes tensors on ``device`` that are to be kept, and return its result.

    Local; blocks the host until the tensors are filled. On a GPU ``make`` runs in another thread, on a stream that
    waits for nothing, also while a graph is captured.
    """
    if device.type != "cuda":
        # Tensors that are made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            return make()
    made: Future = Future()

    def run() -> None:
        try:
            with outside_captures(device):
                result = make()
                torch.cuda.current_stream().synchronize()
            made.set_result(result)
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="iris.cuda_graphs.kept", daemon=True).start()
    return made.result()
