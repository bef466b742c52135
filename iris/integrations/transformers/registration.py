"""`register`: makes the names of this package known to transformers."""

import functools

from transformers.distributed.expert_parallel import EPImplementationInterface
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from iris.arg_parser import count
from iris.errors import InvalidExpertsError, short_repr
from iris.integrations.transformers.experts import IrisEP
from iris.integrations.transformers.tensor_parallel import FusedColwiseParallel, FusedRowwiseParallel


def register(max_tokens: int | None = None) -> None:
    """Let ``DistributedConfig`` choose Iris by name. Local; another call replaces what an earlier one has said.

    ``ep_implementation="iris"``: experts on `ctx.experts`. In a ``tp_plan``, ``"iris_rowwise"`` and ``"iris_colwise"``
    in the place of ``"rowwise"`` and ``"colwise"``: see `tp_plan`.

    Parameters
    ----------
    max_tokens : int, optional
        Tokens that a rank has in one forward at most, for ranks with different batches (``ep_size > tp_size``): memory
        is set aside for so many. By default as many as any rank has in the first forward, rounded up to a power of two.
        Where all ranks of the experts share a batch (``ep_size == tp_size``) they all see its size, and memory is set
        aside when a larger one comes. Holds for models that are made afterwards.

    Raises
    ------
    InvalidExpertsError
        ``max_tokens`` is no number of tokens.
    """
    if max_tokens is not None and count(max_tokens) is None:
        raise InvalidExpertsError(
            f"register(max_tokens={short_repr(max_tokens)}): it is a whole number, 1 or more, or None."
        )
    EPImplementationInterface.register("iris", functools.partial(IrisEP, max_tokens=max_tokens))
    ALL_PARALLEL_STYLES.register("iris_rowwise", FusedRowwiseParallel())
    ALL_PARALLEL_STYLES.register("iris_colwise", FusedColwiseParallel())
