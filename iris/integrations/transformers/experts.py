"""`IrisEP`: how tokens of transformers' models reach their experts, by `ctx.experts`.

A forward reads nothing back to the host, so it may be captured in a CUDA graph, once an eager forward of that size has
set memory aside.

1. Ranks with the same batch, those of a tensor parallel group, take a share of its tokens each (`shared_batch`).
2. dispatch, the experts, combine. Experts that are gated products with SiLU (`usual_form`) are one operator with these
   where there are no gradients, ``iris::experts_mlp``; with gradients, in bf16, they are torch's grouped products. Else
   transformers' own experts compute, on the rows that dispatch has brought: with whatever weights, biases, gates and
   kernels they have (``experts_implementation``).
3. The ranks of a tensor parallel group gather their shares.

Room for tokens is what the ranks of the experts have agreed on, for none of them knows how many tokens another has.
"""

import weakref
from typing import Any

import torch
from transformers.distributed.expert_parallel import EPImplementation

from iris.context import Iris
from iris.distributed.contexts import context_of
from iris.errors import InvalidExpertsError, InvalidGroupError
from iris.experts import ExpertParallel, ExpertsConfig, functional
from iris.integrations.transformers.groups import Ranks
from iris.integrations.transformers.shared_batch import gather_shares, share_size, take_share
from iris.integrations.transformers.usual_form import has_grouped_products, has_usual_form, products
from iris.operators.graph_break import breaks_graph
from iris.ops.experts_functional import experts_mlp

# For fewer tokens than that no memory is saved that would matter.
LEAST_ROOM = 8

# One in flight, since each call ends with its combine; compact rows, one after the other, as grouped products take.
CONFIG = ExpertsConfig(in_flight=1, layouts=("compact",), alignment=1)

# Layers of one shape share memory. Of a context, which keeps them: those of a number of experts, a room, a row, top k
# and a dtype.
_made: "weakref.WeakKeyDictionary[Iris, weakref.WeakValueDictionary[tuple, ExpertParallel]]"
_made = weakref.WeakKeyDictionary()


class IrisEP(EPImplementation):
    """The experts of one layer. Made by transformers, for ``ep_implementation="iris"``.

    Every rank of the experts calls forward, and backward, as often as the others; with any number of tokens, 0 too.
    """

    def __init__(self, experts: torch.nn.Module, ep_mesh: Any, tp_mesh: Any, max_tokens: int | None = None) -> None:
        """Local. Raises `InvalidGroupError` where the mesh has its ranks in another order than their group."""
        super().__init__(experts, ep_mesh, tp_mesh)
        for mesh in (ep_mesh, tp_mesh):
            number, rank = mesh.get_coordinate()[0], mesh.get_local_rank()
            if number != rank:
                raise InvalidGroupError(
                    f"A mesh of the experts has this rank as number {number}, and its process group as {rank}. Experts "
                    "lie by ranks of the group: make the mesh of ranks in ascending order, as "
                    "torch.distributed.init_device_mesh() does."
                )
        self._experts: Any = experts
        self._max_tokens = max_tokens
        self._usual = has_usual_form(experts)
        self._named: dict[tuple[int, torch.dtype], str] = {}
        # Those of one batch. Where they are those of the experts, too, one context is enough.
        self._sharers = Ranks((ep_mesh if self.shares_batch else tp_mesh).get_group())
        self._room: int | None = None

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        x, ids, weights = hidden_states, top_k_index, top_k_weights.float()
        tokens, size = x.shape[0], self.tp_mesh.size()
        share = tokens if size == 1 else share_size(tokens, size)
        experts = self._named.get((self._room_for(share), x.dtype)) or self._make(share, x, ids.shape[1])
        if size == 1:
            return self._forward(x, ids, weights, experts)
        rank, sharers = self.tp_mesh.get_local_rank(), self._sharers.name(x.device)
        x, ids, weights = (take_share(each, rank, size, sharers) for each in (x, ids, weights))
        return gather_shares(self._forward(x, ids, weights, experts), rank, size, tokens, sharers)

    def _forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: str) -> torch.Tensor:
        """Of tokens that no other rank has."""
        usual = self._usual and self._experts.gate_up_proj.dtype == self._experts.down_proj.dtype == x.dtype
        if usual:
            up, down = self._experts.gate_up_proj, self._experts.down_proj
            if not needs_gradient(x, weights, up, down):
                return experts_mlp(x, ids, weights, up, down, experts)
        rows, _, offsets = functional.dispatch(x, ids, experts)
        if usual and has_grouped_products(x.dtype):
            y = products(rows, offsets[1:].contiguous(), up, down)
        else:
            # transformers' experts leave out rows of the expert after the last one.
            number = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
            # Not in offsets[1:]: of a slice Inductor searches the whole, before torch 2.13 (pytorch/pytorch#182343).
            expert = torch.searchsorted(offsets, number, right=True) - 1
            y = self.experts_forward(rows, expert[:, None], torch.ones_like(expert, dtype=x.dtype)[:, None]).to(x.dtype)
        return functional.combine(y, ids, weights, experts)

    def _room_for(self, tokens: int) -> int:
        """Tokens that memory is set aside for, where a rank has so many; the same on all ranks of the experts.

        Raises `InvalidExpertsError` where they are more than the ranks have agreed on.
        """
        if not self.shares_batch:
            if self._room is not None:
                check_room(tokens, self._room)
            return self._room or 0
        room = LEAST_ROOM
        while room < tokens:
            room *= 2
        return room

    @breaks_graph("the first forward of this size sets memory aside, for which ranks meet on the host")
    def _make(self, tokens: int, x: torch.Tensor, top_k: int) -> str:
        """The name of experts with room for these tokens. Collective over the ranks of the experts."""
        context = context_of(self.ep_mesh.get_group(), x.device)
        if not self.shares_batch and self._room is None:
            room = self._max_tokens or agree(context, tokens)
            # Together: whoever has too many tokens would leave the others waiting for it below.
            context._group(None).agree(lambda: check_room(tokens, room), "make the first forward of its experts")
            self._room = room
        room = self._room_for(tokens)
        asked = {
            "num_experts": self.num_local_experts * self.ep_mesh.size(),
            "hidden": x.shape[1],
            "max_tokens": room,
            "top_k": top_k,
            "dtype": x.dtype,
        }
        made = _made.setdefault(context, weakref.WeakValueDictionary())
        key = tuple(asked.values())
        experts = made.get(key)
        if experts is None:
            experts = made[key] = context.experts(**asked, config=CONFIG)
        name = self._named[room, x.dtype] = functional.name_of(experts)
        return name


def check_room(tokens: int, room: int) -> None:
    """Raise if a forward has more tokens on this rank than the ranks of the experts have agreed on."""
    if tokens > room:
        raise InvalidExpertsError(
            f"A forward has {tokens} tokens on this rank, and the ranks of the experts have set memory aside for "
            f"{room} each. They have different batches, so none can set aside more alone: say how many a rank may "
            "have, iris.integrations.transformers.register(max_tokens=...), before the model is made."
        )


def agree(context: Iris, tokens: int) -> int:
    """The most that any rank has, rounded up to a power of two. Collective; blocks the host."""
    most = max(context._group(None).all_gather(tokens, "the number of tokens in a first forward"))
    return max(LEAST_ROOM, 1 << (most - 1).bit_length())


def needs_gradient(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
