"""Rows that collectives move: where a graph has them, and in which order.

A row lies along the last dimension. c10d gathers and scatters along the first dimension only, so torch makes a
collective along another one of that and a copy. Of W ranks with ``[B, S, H]`` each, along dimension 1:

- a gather: ``all_gather_into_tensor`` gives ``[W B, S, H]``, which ``cat(split(…, dim=0), dim=1)`` makes
  ``[B, W S, H]``;
- a scatter: ``cat(split(…, dim=1), dim=0)`` makes ``[W B, S, H]`` of ``[B, W S, H]``, for ``reduce_scatter_tensor``.

A fused operator takes, or returns, a matrix of rows *by ranks*: all of rank 0, then all of rank 1, ``[W B S, H]``. So
split and cat go, and the rows of its input, or its result, are permuted instead (`Permutation`): the rows of this
gather are ``[W, B, S]`` by ranks and ``[B, W, S]`` in the tensor.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from iris.compat.inductor import value_of
from iris.inductor.nodes import arguments, aten, calls, keeps_rows, known, known_equal, users

SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


class Rejoined(NamedTuple):
    """The parts of ``source``, split along dimension ``split`` and concatenated along dimension ``joined``."""

    source: Node
    split: int
    joined: int


class Permutation(NamedTuple):
    """Rows as ``[first, second, inner]``, to be permuted to ``[second, first, inner]``.

    An extent that is not known before the graph runs is -1.
    """

    first: int
    second: int
    inner: int

    @property
    def is_identity(self) -> bool:
        """Whether it leaves the rows where they are."""
        return 1 in (self.first, self.second)

    @property
    def is_known(self) -> bool:
        """Whether rows can be viewed as these dimensions: ``view`` infers one -1, and not two."""
        return self.count(-1) < 2


def rejoined(node: Any, size: int) -> Rejoined | None:
    """How ``node`` concatenates the ``size`` equal parts of another tensor, in their order; None if it does not."""
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


def carriers(rows: Node, size: int) -> dict[Node, Permutation | None]:
    """The nodes that have the rows of ``rows``, which are by ranks: itself, concatenations along another dimension, and
    reshapes of both.

    Each with the permutation from the order by ranks to that of the node; None where it has them by ranks.
    """
    found: dict[Node, Permutation | None] = {rows: None}
    to_visit = [rows]
    while to_visit:
        node = to_visit.pop()
        following = {each: found[node] for each in node.users if keeps_rows(each)}
        if found[node] is None:
            for cat in {cat for part in splits_and_parts(node) for cat in users(part, aten.cat.default)}:
                made = rejoined(cat, size)
                # Along the last dimension they would be other rows.
                if made is not None and made.split == 0 and 0 < made.joined < value_of(node).dim() - 1:
                    shape = value_of(node).shape
                    outer = (shape[0] // size, *shape[1 : made.joined])
                    following[cat] = permutation((size,), outer, shape[made.joined : -1])
        found |= following
        to_visit += following
    return found


def splits_and_parts(rows: Node) -> set[Node]:
    """The nodes that split ``rows``, and those that take a part of a split."""
    splits = users(rows, SPLITS)
    return {*splits, *(part for split in splits for part in split.users if calls(part, operator.getitem))}


def permutation(*extents: tuple[Any, ...]) -> Permutation:
    """``extents``: for each of its three dimensions, those of the tensor's dimensions that it is the product of."""
    return Permutation(*(math.prod(each) if all(isinstance(n, int) for n in each) else -1 for each in extents))


def permuted(graph: Graph, rows: Node, how: Permutation) -> Node:
    """The rows of a matrix in the other order: a copy, unless that is the same, as it is of rows without elements."""
    columns = value_of(rows).shape[-1]
    # Of these ``view`` could not infer how many there are.
    if how.is_identity or known(columns == 0):
        return rows
    rows = call(graph, aten.reshape.default, rows, [*how, columns])
    rows = call(graph, aten.permute.default, rows, [1, 0, 2, 3])
    rows = call(graph, aten.clone.default, rows, memory_format=torch.contiguous_format)
    return call(graph, aten.view.default, rows, [-1, columns])


def flattened(graph: Graph, rows: Node) -> Node:
    """The rows of a tensor as a matrix, ``[rows, last dimension]``."""
    value = value_of(rows)
    return rows if value.dim() == 2 else call(graph, aten.reshape.default, rows, [-1, value.shape[-1]])


def shaped(graph: Graph, rows: Node, extents: Sequence[Any]) -> Node:
    """A matrix' rows with these extents: numbers, of which one may be -1, or nodes."""
    return rows if len(extents) == 2 else call(graph, aten.view.default, rows, list(extents))


def extents_for_view(node: Node) -> list[int] | None:
    """The extents of a node's result as ``view`` takes them: one that is not known is -1; None if several are not."""
    extents = [n if isinstance(n, int) else -1 for n in value_of(node).shape]
    return extents if extents.count(-1) < 2 else None


def inner_extents(graph: Graph, node: Node) -> list[Any]:
    """The extents of a node's result but the first: numbers, or new nodes for what is not known before it runs."""
    extents = value_of(node).shape[1:]
    return [n if isinstance(n, int) else call(graph, aten.sym_size.int, node, 1 + i) for i, n in enumerate(extents)]


def ask_for_extents(graph: Graph, rows: Node, shard: Node, size: int, dim: int) -> None:
    """Compute extents of ``rows``, which are ``size`` shards along ``dim``, from those of the shard.

    Then what only asks how large ``rows`` is does not use it, and ``rows`` can go.
    """
    for user in users(rows, aten.sym_size.int):
        along = arguments(user)[1]
        with graph.inserting_before(user):
            extent = call(graph, aten.sym_size.int, shard, along)
            if along == dim:
                extent = call(graph, operator.mul, extent, size)
        user.replace_all_uses_with(extent)
        graph.erase_node(user)


def call(graph: Graph, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node at the graph's insertion point, with the fake tensor of its result."""
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*map_arg(args, value_of), **kwargs)
    return node


def erase_unused(graph: Graph, nodes: set[Node]) -> None:
    """Erase those of the nodes that nothing uses any more.

    Graph.eliminate_dead_code() would keep a wait, which counts as impure.
    """
    for node in reversed([each for each in graph.nodes if each in nodes]):
        if not node.users:
            graph.erase_node(node)


def used_only_by(node: Node, last: Node, passed: set[Node]) -> bool:
    """Whether ``node`` is used by ``last`` alone, directly or by way of nodes in ``passed``."""
    return all(user is last or user in passed and used_only_by(user, last, passed) for user in node.users)
