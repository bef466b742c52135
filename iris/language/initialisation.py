"""What a device context is initialised with: checks, and the two orders in which programs give it."""

import triton
import triton.language as tl


@triton.constexpr_function
def check_context(rank, num_ranks):
    """In the simulator: raise unless these can come from a context tensor, before anything is looked up by them."""
    from iris.errors import InvalidContextError

    rank, num_ranks = (
        value.handle.data.item() if isinstance(value, tl.tensor) else value for value in (rank, num_ranks)
    )
    if not 0 <= rank < num_ranks < 1 << 16:
        raise InvalidContextError(
            f"A device context cannot have rank {rank} of {num_ranks}. Initialise it from ctx.get_device_context(), "
            "and with this rank and the number of ranks, if they are given."
        )


@triton.constexpr_function
def refuse(name):
    """Raise: a kernel has called the class of this name as if that made a context."""
    from iris.errors import InvalidContextError

    raise InvalidContextError(
        f"{name}(...) makes no device context: write {name}.initialize(...), with what ctx.get_device_context() gives."
    )


@triton.constexpr_function
def is_switch(value):
    """Whether this is True or False, and no number or tensor."""
    return isinstance(value, bool)
