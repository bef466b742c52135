"""Whose data a rank gets by a collective of torch's: all ranks', the root's alone, or of those that send to it.

A rank that only sends may be done before anybody receives (NCCL's, "Collective Operations"; MPI 4.1, 6.1: the end of a
call says nothing of other ranks but what its data depend on). So an edge goes where data go.
"""

from typing import Any

_FROM_ROOT = ("broadcast", "scatter")
_TO_ROOT = ("gather", "reduce")


def is_from_root(name: str) -> bool:
    return name.rstrip("_") in _FROM_ROOT


def data_sources(
    name: str, arguments: dict[str, Any], ranks: tuple[int, ...], here: int
) -> tuple[tuple[int, ...], int]:
    """The ``ranks`` of a group whose data the one that is ``here`` has at the end of the call; how many ranks get any.

    ``name``: the operation's; ``arguments``: by their names in its schema.
    """
    if name.rstrip("_") in _FROM_ROOT + _TO_ROOT:
        root = ranks[arguments["src"] if "src" in arguments else arguments["root_rank"]]
        if is_from_root(name):
            return ((root,) if here != root else ()), len(ranks) - 1
        return (ranks if here == root else ()), 1
    if (parts := _parts(arguments)) is not None:
        return tuple(rank for rank, size in zip(ranks, parts, strict=True) if size), len(ranks)
    return ranks, len(ranks)


def _parts(arguments: dict[str, Any]) -> list[int] | None:
    """How much of an all-to-all comes from each rank, if it may be nothing."""
    if "output_split_sizes" in arguments:
        return list(arguments["output_split_sizes"]) or None
    if "input_tensors" in arguments and isinstance(arguments.get("output_tensors"), (list, tuple)):
        outputs = arguments["output_tensors"]
        if len(outputs) == len(arguments["input_tensors"]) > 1:
            return [tensor.numel() for tensor in outputs]
    return None
