"""Memory of a GPU that outlives the call which allocates it: never from a pool that others have set up.

While a thread runs what ``torch.compile(mode="reduce-overhead")`` is about to capture, all that it allocates comes from
the graphs' pool, and a tensor that is left there and is no result is an error ("not tracked as outputs"); a later graph
would write over it (torch/_inductor/cudagraph_trees.py, `_use_cuda_memory_pool_manager`). ``torch.cuda.use_mem_pool``
does the same to a thread, and of two such pools the outer one counts, so a pool of the library's own would not help.
Both go by the thread. So what is kept is allocated by a thread of its own.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from iris.cuda_graphs.capture import outside_captures

Made = TypeVar("Made")


def keep(make: Callable[[], Made], device: torch.device) -> Made:
    """What ``make()`` returns: tensors on ``device`` that are to be kept. Local; blocks the host until they are filled.

    On a GPU it runs in another thread, on a stream that waits for nothing, also while a graph is captured.
    """
    if device.type != "cuda":
        # What is made in inference mode could not be written outside it.
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
