"""Rows that collectives move, and how graphs bring them in their order where a dimension is not the first.

Collectives along another dimension than the first are made of those along the first: a gather splits its result by
ranks and joins it along the dimension, and a scatter splits what it is given along the dimension and joins it by ranks.
A fused operator takes and leaves rows by ranks, so that what it takes, or leaves, is brought in their order instead.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from iris.compat.inductor import value_of
from iris.inductor.nodes import arguments, aten, calls, known_equal, reshaped_rows, users

SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


class Rejoined(NamedTuple):
    """A tensor that was split along one dimension and joined along another."""

    source: Node
    split: int
    joined: int


class Blocks(NamedTuple):
    """Rows in three dimensions, of which the first two are to be swapped. What is not known before it runs is -1."""

    first: int
    second: int
    inner: int

    @property
    def in_order(self) -> bool:
        """Whether rows are the same before and after the swap."""
        return 1 in (self.first, self.second)

    @property
    def known(self) -> bool:
        """Whether a view can be made of them, of which one extent at most may be unknown."""
        return self.count(-1) < 2


def rejoined(node: Any, size: int) -> Rejoined | None:
    """How ``node`` was made of ``size`` equal parts of another, if it is their join."""
    if not calls(node, aten.cat.default):
        return None
    parts, dim = arguments(node)[0], _dim(node, 1)
    if not parts or not all(calls(part, operator.getitem) for part in parts):
        return None
    split = arguments(parts[0])[0]
    if not calls(split, SPLITS) or [arguments(part) for part in parts] != [(split, number) for number in range(size)]:
        return None
    source, along = arguments(split)[0], _dim(split, 2)
    extents, whole = [value_of(part).shape[along] for part in parts], value_of(source)
    if not known_equal([*extents, whole.shape[along]], [*[extents[0]] * size, size * extents[0]]):
        return None
    return Rejoined(source, along % whole.dim(), dim % whole.dim())


def _dim(node: Node, place: int) -> int:
    """The dimension that an operator is given in this place, or by name, or not at all: then it is the first."""
    args = arguments(node)
    return args[place] if len(args) > place else cast(int, node.kwargs.get("dim", 0))


def carriers(rows: Node, size: int) -> dict[Node, Blocks | None]:
    """What has these rows, which are by ranks: ``rows``, its reshapes, and what is joined along another dimension.

    With the blocks that bring rows by ranks in the order of the tensor; None where they are in it.
    """
    found: dict[Node, Blocks | None] = {rows: None}
    open_ = [rows]
    while open_:
        node = open_.pop()
        after = {each: found[node] for each in node.users if reshaped_rows(each)}
        if found[node] is None:
            for cat in _joins(node):
                how = rejoined(cat, size)
                if how is not None and how.split == 0 and 0 < how.joined < value_of(node).dim() - 1:
                    shape = value_of(node).shape
                    # A rank has a `size`-th of the first dimension.
                    after[cat] = blocks((size,), (shape[0] // size, *shape[1 : how.joined]), shape[how.joined : -1])
        found |= after
        open_ += after
    return found


def between(rows: Node) -> set[Node]:
    """The splits of rows, and their parts."""
    splits = users(rows, SPLITS)
    return {*splits, *(part for split in splits for part in split.users if calls(part, operator.getitem))}


def _joins(rows: Node) -> set[Node]:
    return {cat for part in between(rows) for cat in users(part, aten.cat.default)}


def blocks(*extents: tuple[Any, ...]) -> Blocks:
    """Of rows with these extents in each of the three dimensions."""
    return Blocks(*(math.prod(each) if all(isinstance(n, int) for n in each) else -1 for each in extents))


def swapped(graph: Graph, rows: Node, how: Blocks) -> Node:
    """The rows with the first two dimensions of their blocks the other way round."""
    if how.in_order:
        return rows
    columns = value_of(rows).shape[-1]
    apart = call(graph, aten.reshape.default, rows, [*how, columns])
    other = call(graph, aten.permute.default, apart, [1, 0, 2, 3])
    packed = call(graph, aten.clone.default, other, memory_format=torch.contiguous_format)
    return call(graph, aten.view.default, packed, [-1, columns])


def flattened(graph: Graph, rows: Node) -> Node:
    """The rows as a matrix."""
    value = value_of(rows)
    return rows if value.dim() == 2 else call(graph, aten.reshape.default, rows, [-1, value.shape[-1]])


def shaped(graph: Graph, rows: Node, extents: Sequence[Any]) -> Node:
    """A matrix' rows with these extents: numbers, of which one may be -1, or nodes."""
    return rows if len(extents) == 2 else call(graph, aten.view.default, rows, list(extents))


def known_extents(node: Node) -> list[int] | None:
    """Those of a tensor, of which one may be unknown, and -1; None if more are."""
    extents = [n if isinstance(n, int) else -1 for n in value_of(node).shape]
    return extents if extents.count(-1) < 2 else None


def inner_extents(graph: Graph, node: Node) -> list[Any]:
    """Those of a tensor after the first: numbers, or nodes for what is not known before it runs."""
    extents = value_of(node).shape[1:]
    return [n if isinstance(n, int) else call(graph, aten.sym_size.int, node, 1 + i) for i, n in enumerate(extents)]


def ask_for_extents(graph: Graph, rows: Node, shard: Node, size: int, dim: int) -> None:
    """Let what asks for an extent of ``rows``, ``size`` shards along ``dim``, ask for that of the shard."""
    for user in users(rows, aten.sym_size.int):
        along = arguments(user)[1]
        with graph.inserting_before(user):
            extent = call(graph, aten.sym_size.int, shard, along)
            if along == dim:
                extent = call(graph, operator.mul, extent, size)
        user.replace_all_uses_with(extent)
        graph.erase_node(user)


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node where the graph inserts, with what stands for its result."""
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*map_arg(args, value_of), **kwargs)
    return node


def erase_unused(graph: Graph, nodes: set[Node]) -> None:
    """Erase those of the nodes that nothing uses any more. torch leaves a wait where it is."""
    for node in reversed([each for each in graph.nodes if each in nodes]):
        if not node.users:
            graph.erase_node(node)


def used_only_by(node: Node, last: Node, passed: set[Node]) -> bool:
    """Whether all that is made of ``node`` goes to ``last``, by way of those that are ``passed``."""
    return all(user is last or user in passed and used_only_by(user, last, passed) for user in node.users)
