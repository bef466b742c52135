"""From which ranks a rank gets data by a collective of torch: from all, from the root alone, or from those that send.

A rank that only sends may be done before anybody receives: the end of a call says no more of other ranks than its data
depend on (NCCL, "Collective Operations"; MPI 4.1, 6.1). So happens-before edges go where data go.
"""

from typing import Any

_FROM_ROOT = ("broadcast", "scatter")
_TO_ROOT = ("gather", "reduce")


def is_from_root(name: str) -> bool:
    return name.rstrip("_") in _FROM_ROOT


def data_sources(
    name: str, arguments: dict[str, Any], ranks: tuple[int, ...], here: int
) -> tuple[tuple[int, ...], int]:
    """Those of a group's ``ranks`` whose data rank ``here`` has after the call; and how many ranks get any data.

    ``name``: the operation's. ``arguments``: by their names in its schema.
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
    """Of an all-to-all: how much comes from each rank, if that may be nothing; else None."""
    if "output_split_sizes" in arguments:
        return list(arguments["output_split_sizes"]) or None
    if "input_tensors" in arguments and isinstance(arguments.get("output_tensors"), (list, tuple)):
        outputs = arguments["output_tensors"]
        if len(outputs) == len(arguments["input_tensors"]) > 1:
            return [tensor.numel() for tensor in outputs]
    return None
