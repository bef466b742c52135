"""The *store* of a process group, its small key-value server, and how to wait for what others write there."""

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

# Between two looks: a share of what was waited already, so that a wait becomes longer by no more than that, and at most
# so long. A wait inside the store itself would hear of its end a little sooner, but of no signal (Ctrl-C) and no death.
SHARE, LONGEST_PAUSE_S = 1 / 8, 5e-3
# A pause takes the system longer than asking a few times does (prctl(2), PR_SET_TIMERSLACK: 50 µs).
NO_PAUSE_S = 3e-4


def own_client(store: dist.Store) -> dist.Store:
    """A connection of its own to the same server: torch locks one while a thread uses it."""
    try:
        return store.clone()
    except dist.DistError:
        raise
    except (AttributeError, RuntimeError):  # a store that is written in Python
        return store


def await_keys(store: dist.Store, keys: Sequence[str], timeout_s: float, look: Callable[[float], None]) -> bool:
    """Whether all ``keys`` came to be within the time limit. Signals interrupt it.

    ``look`` is called again and again with the seconds that were waited, and ends the wait by what it raises.
    """
    start = time.monotonic()
    while not store.check(keys):
        waited = time.monotonic() - start
        if waited > timeout_s:
            return False
        look(waited)
        if waited > NO_PAUSE_S:
            time.sleep(min(waited * SHARE, LONGEST_PAUSE_S))
    return True
