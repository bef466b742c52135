"""One-sided access to a tensor of each rank of a process group: torch's windows.

    tensor = group.allocate_tensor(1000, dtype=torch.float32, device=device)     # on every rank
    window = group.new_window(tensor)           # torch 2.14: torch.distributed.distributed_c10d._new_window(tensor)
    window.put(mine, peer, 20)                  # to elements 20, 21, … of the peer's tensor
    window.signal(peer)                         # the peer's wait_signal(this rank) is after that

Contract
--------
*Calls are enqueued on the current stream*. With ``async_op=True`` they are enqueued on streams of the window's own,
after what is on the current one: puts and signals on one stream, the waits for each peer on another. All calls return a
work, whose ``wait()`` lets the current stream wait.

*A signal comes after the puts before it* on its stream, so whoever has waited for it sees them. Signals from a rank to
a peer are counted: each ends one wait, and none is lost. Accesses through `map_remote_tensor` are ordered by signals in
the same way, and by nothing else.

A put is a copy by torch: of plain memory the copy engine makes it, and it takes no multiprocessor. A kernel of one
program sets a flag, and another waits for one. The kernel that sets it begins when the copy before it is over (CUDA C++
Programming Guide, "Streams").
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from iris import observer, simulator
from iris.arg_parser import index
from iris.ccl.checks import check_tensor
from iris.ccl.queue import MAX_RANKS
from iris.compat.c10d import unified_window
from iris.distributed.calls import EnqueuedWork, SimulatedMessage
from iris.distributed.group import stream_of
from iris.errors import InvalidCollectiveError, names, short_repr
from iris.heap import describe_address
from iris.heap.history import tensor_text
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.language.ordering import store_after_sync
from iris.runtime.launch import addresses, prepare
from iris.simulator.streams import Stream

if TYPE_CHECKING:
    from iris.distributed.group import ProcessGroupBase

# A rank's int32 counts, of which peers write the first half. Word p: how often rank p has signalled. Word AWAITED + p:
# how many of those signals this rank has waited for.
AWAITED = tl.constexpr(MAX_RANKS)
COUNTS = 2 * MAX_RANKS


# `do_not_specialize`: one binary for all peers.
@triton.jit(do_not_specialize=["peer"])
def signal_peer(context_tensor, counts, peer, W: tl.constexpr):
    gdc_wait()
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    ctx.signal(counts + ctx.cur_rank, 1, peer, op="add")


@triton.jit(do_not_specialize=["peer"])
def await_peer(context_tensor, counts, peer, W: tl.constexpr):
    gdc_wait()
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    # Kernels that wait for one peer follow each other, so nobody else counts here.
    awaited = tl.load(counts + AWAITED + peer) + 1
    ctx.wait(counts + peer, awaited, cmp="reached")
    store_after_sync(counts + AWAITED + peer, awaited)


class Window:
    """One rank's end of a window. All ranks of the group make it, and register and deregister tensors together.

    All other methods are one-sided.
    """

    def __init__(self, group: "ProcessGroupBase", device: torch.device, number: int) -> None:
        """Collective; blocks the host. ``number`` counts the group's windows, and is the same on all ranks."""
        self._group, self._device = group, device
        self._context = group.context(device, "new_window")
        self._comm = self._context.ccl.communicator()
        name, nbytes = f"signals of window {number} of a process group", 4 * COUNTS
        channel = self._comm.workspace.channel(name, None, nbytes, slice(0, nbytes))
        self._memory = channel.context_tensor, channel.memory.view(torch.int32)
        self._launches = {
            kernel: prepare(kernel, (1, 1, 1), *self._memory, 0, self._comm.size, num_warps=1)
            for kernel in (signal_peer, await_peer)
        }
        # The registered tensor of each rank, by rank in the group.
        self._tensors: list[torch.Tensor] = []
        self._owned: torch.Tensor | None = None
        # Each window has its own: a wait on one window may have to end before a signal of another is sent.
        self._streams: dict[Any, torch.cuda.Stream | Stream] = {}

    def tensor_register(self, tensor: torch.Tensor, owning: bool = True) -> None:
        """Let peers reach ``tensor``, one of `ProcessGroup.allocate_tensor`. Collective; blocks the host.

        All ranks give the same shape and dtype. With ``owning`` the window keeps the tensor alive; else the caller
        does, for as long as any rank uses the window.

        Raises
        ------
        InvalidCollectiveError
            On this rank: the window has a tensor already. On all ranks: the tensor of one of them is not contiguous,
            or is not from `allocate_tensor`; or the ranks' tensors differ in shape or dtype.
        """
        if self._tensors:
            raise InvalidCollectiveError("This window has a tensor. Call tensor_deregister() first, on all ranks.")
        if self._comm.size == 1:
            self._tensors, self._owned = [tensor], tensor
            return
        memory = self._group.memory(self._device)
        place = memory.place_of(tensor) if tensor.is_contiguous() else None
        text, meeting = tensor_text(tensor.shape, tensor.dtype), "the registration of a tensor with a window"
        everyones = self._comm.workspace.group.all_gather((place, text), meeting)
        texts = [text for _, text in everyones]
        if len(set(texts)) > 1:
            raise InvalidCollectiveError(
                f"A window has tensors of one shape and dtype; the ranks register {', '.join(texts)}."
            )
        lacking = [rank for rank, (where, _) in zip(self._comm.ranks, everyones, strict=True) if where is None]
        if lacking:
            instead = (
                "There is now: make them anew, on all ranks."
                if memory.grow(tensor.nbytes)
                else "There will be no more of it, as a warning has said: let tensors die that the group has made."
            )
            raise InvalidCollectiveError(
                f"A window takes contiguous tensors of group.allocate_tensor(), and {names(lacking)} registered "
                f"others, or some for which there was no symmetric memory. {instead}"
            )
        self._tensors = [memory.peer(tensor, rank, *where) for rank, (where, _) in enumerate(everyones)]
        self._owned = tensor if owning else None

    def tensor_deregister(self) -> None:
        """Let go of the tensor. Collective; blocks the host. No rank may be using the tensor any more."""
        self._tensors, self._owned = [], None
        self._comm.workspace.group.all_gather(None, "the end of a tensor's registration with a window")

    def put(
        self,
        tensor: torch.Tensor,
        dst_rank: int,
        target_offset_nelems: int,
        async_op: bool = False,
        opts: Any = None,
    ) -> dist.Work:
        """Copy ``tensor`` to the elements from ``target_offset_nelems`` on of the tensor of ``dst_rank``."""
        target = self.map_remote_tensor(dst_rank).view(-1)
        check_tensor("put", tensor)
        if index(target_offset_nelems) is None:
            raise InvalidCollectiveError(
                f"put() to element {short_repr(target_offset_nelems)}: that is a whole number."
            )
        end = target_offset_nelems + tensor.numel()
        if tensor.dtype != target.dtype or not 0 <= target_offset_nelems <= end <= target.numel():
            raise InvalidCollectiveError(
                f"put() of {tensor_text(tensor.shape, tensor.dtype)} to elements {target_offset_nelems} to {end} does "
                f"not fit in a window of {tensor_text((target.numel(),), target.dtype)}."
            )
        elements = target[target_offset_nelems:end]

        def enqueue() -> None:
            with torch.no_grad():
                elements.copy_(tensor.reshape(-1), non_blocking=True)

        return self._enqueue("put", enqueue, "out", async_op, [tensor])

    def map_remote_tensor(self, rank: int) -> torch.Tensor:
        """The registered tensor of ``rank``, for use by torch and by kernels on this device."""
        if not self._tensors:
            raise InvalidCollectiveError("This window has no tensor: call tensor_register(), on all ranks.")
        self._check(rank)
        return self._tensors[rank]

    def signal(self, peer_rank: int, async_op: bool = False, opts: Any = None) -> dist.Work:
        """End a `wait_signal` of ``peer_rank`` for this rank, after all that is on the stream."""
        return self._enqueue("signal", self._flag_kernel(signal_peer, peer_rank), "out", async_op)

    def wait_signal(self, peer_rank: int, async_op: bool = False, opts: Any = None) -> dist.Work:
        """Wait on the stream for the next `signal` of ``peer_rank``."""
        return self._enqueue("wait_signal", self._flag_kernel(await_peer, peer_rank), ("in", peer_rank), async_op)

    def get_attr(self, peer_rank: int) -> Any:
        """torch's attributes of the peer's memory: unified, as its tensor itself is reached. None before torch 2.14."""
        self._check(peer_rank)
        return unified_window()

    def _check(self, rank: int) -> None:
        if index(rank) is None or not 0 <= rank < self._comm.size:
            raise InvalidCollectiveError(
                f"Rank {short_repr(rank)} of a window: its group has ranks 0 to {self._comm.size - 1}."
            )

    def _flag_kernel(self, kernel: Any, peer: int) -> Callable[[], None]:
        """What launches `signal_peer` or `await_peer` for this peer on the current stream."""
        self._check(peer)
        launch, args = self._launches[kernel], addresses((*self._memory, peer, self._comm.size))

        def enqueue() -> None:
            on_gpu = self._device.type == "cuda"
            launch(torch.cuda.current_stream(self._device).cuda_stream if on_gpu else None, args)
            if simulator.ACTIVE:
                self._comm.abort_flag.raise_recorded(describe_address)

        return enqueue

    def _enqueue(
        self,
        call: str,
        enqueue: Callable[[], None],
        queue: Any,
        async_op: bool,
        tensors: Sequence[torch.Tensor] = (),
    ) -> dist.Work:
        """Enqueue a call on the current stream or, with ``async_op``, on the window's stream for ``queue``."""
        self._group.context(self._device, call)  # raises, if the group was destroyed
        flag = self._comm.abort_flag
        flag.check()
        if not async_op:
            enqueue()
            return EnqueuedWork([], self._device)
        stream = stream_of(self._streams, queue, self._device)
        if isinstance(stream, Stream):
            enqueue, sign = observer.beside(call, stream, enqueue, in_thread=True)
            message = stream.enqueue(enqueue)
            return sign(SimulatedMessage([], self._device, message, functools.partial(flag.interrupted, call)))
        with torch.cuda.stream(stream):
            enqueue()
            self._group.keep_for(tensors, stream)
            return EnqueuedWork([], self._device)
