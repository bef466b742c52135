"""Checks of the arguments of ``initialize``, for `iris.language.context`."""

import triton
import triton.language as tl


@triton.constexpr_function
def check_context(rank, num_ranks, own, size):
    """In the simulator: raise unless rank ``own`` of ``size`` can have these, before they are used as an index.

    A kernel may initialise its context with fewer ranks than there are.
    """
    from iris.errors import InvalidContextError

    rank, num_ranks, own, size = (
        value.handle.data.item() if isinstance(value, tl.tensor) else value for value in (rank, num_ranks, own, size)
    )
    if not 0 <= rank < num_ranks < 1 << 16 or rank != own or num_ranks > size:
        there = "" if (rank, num_ranks) == (own, size) else f": the context tensor is that of rank {own} of {size}"
        raise InvalidContextError(
            f"A device context cannot have rank {rank} of {num_ranks}{there}. Initialise it from "
            "ctx.get_device_context(), and with this rank and the number of ranks, if they are given."
        )


@triton.constexpr_function
def refuse(name):
    """Raise the error that a kernel has called the context class itself, ``name``, and not its ``initialize``."""
    from iris.errors import InvalidContextError

    raise InvalidContextError(
        f"{name}(...) makes no device context: write {name}.initialize(...), with what ctx.get_device_context() gives."
    )


@triton.constexpr_function
def is_switch(value):
    """Whether this is True or False, and not a number or a tensor."""
    return isinstance(value, bool)
