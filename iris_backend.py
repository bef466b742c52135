"""Lets ``torch.distributed`` know the backend "iris" in every program, once Iris is installed.

torch calls `register` whenever it is imported (entry points of the group ``torch.backends``); from 2.14 on also when a
program first names the backend (``torch.distributed.backends``). This module is not in the
package, since importing that decides whether kernels run in the simulator, which no program has asked for by then.
"""

from typing import Any

import torch.distributed as dist


def register() -> None:
    """Register the backend, without importing Iris."""
    dist.Backend.register_backend("iris", _create, extended_api=True, devices=["cpu", "cuda"])


def _create(options: Any, backend_options: Any) -> dist.ProcessGroup:
    from iris.distributed import create

    return create(options, backend_options)
