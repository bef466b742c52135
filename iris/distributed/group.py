"""A group of ``torch.distributed`` apart from its calls: its context, its names and devices, how it is split.

`iris.distributed.ProcessGroup` derives from the class here and adds the calls.
"""

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from iris import simulator
from iris.arg_parser import count
from iris.compat.c10d import backend_of, describe, is_split_group, set_backend
from iris.context import Iris
from iris.cuda_graphs.capture import refuse_in_capture
from iris.distributed.symmetric_memory import SymmetricMemory
from iris.errors import HeapClosedError, InvalidCountError, InvalidGroupError, WrongDeviceError
from iris.simulator.streams import Enqueued, Stream

NAME = "iris"


class ProcessGroupBase(dist.ProcessGroup):
    """A group without collectives, send and recv, which `iris.distributed.ProcessGroup` adds.

    It replaces torch's whole group and is no backend in one, as up to torch 2.13 no backend can be written in Python.
    """

    # What torch asks of a backend: whether it has what not all backends have.
    supports_coalescing = supports_time_estimate = False
    supports_splitting = True
    # split_group() copies the options of the parent's backend; there are none.
    options = None
    _bound_device_id: torch.device | None = None

    def __init__(self, options: Any) -> None:
        """Local. ``options``: what ``torch.distributed`` hands to backends with an extended API."""
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._store, self._timeout, self._name = options.store, options.timeout, options.group_id
        self.device_type = "cpu" if simulator.ACTIVE else "cuda"
        self._context: Iris | None = None
        self._memory: SymmetricMemory | None = None
        # Made and used by `iris.distributed.calls`.
        self.beside_computation: Any = None
        self._windows = 0
        self._is_shut_down = False
        self._gloo: dist.ProcessGroup | None = None
        self._streams: dict[Any, torch.cuda.Stream | Stream] = {}
        # By call (send or recv) and peer on another host: the thread that connects for the latest message.
        self._connecting: dict[Any, Enqueued] = {}

    @property
    def has_context(self) -> bool:
        """Whether the group's context has been made."""
        return self._context is not None

    def context(self, device: torch.device, call: str = "context") -> Iris:
        """The group's context, on ``device``. The first call is collective over the group and blocks the host.

        Its heap is empty, as the collectives take tensors from anywhere. Raises `FirstUseInCaptureError` where
        ``call`` is the first of the group, and is captured in a CUDA graph.
        """
        if self._context is None:
            if self._is_shut_down:
                raise HeapClosedError(
                    "This process group was destroyed. Make another one: torch.distributed.new_group()."
                )
            refuse_in_capture(f"{call}() of torch.distributed")
            if device.type == "cuda" and device.index is not None:
                torch.cuda.set_device(device)
            self._context = Iris(0, process_group=self)
        return self._context

    # What torch asks about a group ------------------------------------------------------------------------------------

    def name(self) -> str:
        return NAME

    getBackendName = name

    # torch's own groups take their names and devices from their backends.
    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def getGroupName(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in ([self.device_type, "cpu"] if self._has_gloo() else [self.device_type])]

    def _get_backend(self, device: torch.device) -> Any:
        # To split a group, torch up to 2.11 asks for its backend for "cuda", whatever its device is.
        its_own = (self.device_type, "cuda") if simulator.ACTIVE else (self.device_type,)
        return self if device.type in its_own else backend_of(self._cpu_group(device), device)

    def _cpu_group(self, device: torch.device) -> dist.ProcessGroup:
        """The Gloo group of the same ranks, for tensors on the CPU in a group for GPUs."""
        if device.type != "cpu" or not self._has_gloo():
            raise WrongDeviceError(
                f"The Iris backend of this group works on {self.device_type}, and was given a tensor on {device}. Move "
                'it, or give that device a backend: dist.init_process_group("cpu:gloo,cuda:iris").'
            )
        if self._gloo is None:
            # torch made one, too, but dropped it with the group that this one replaces.
            store, kind = dist.PrefixStore("gloo", self._store), dist.ProcessGroup.BackendType.GLOO
            gloo = dist.ProcessGroupGloo(store, self.rank(), self.size(), timeout=self._timeout)
            self._gloo = dist.ProcessGroup(store, self.rank(), self.size())
            set_backend(self._gloo, device, kind, gloo)
        return self._gloo

    def _has_gloo(self) -> bool:
        return self.device_type != "cpu" and "cpu:gloo" in dist.get_backend_config(self).split(",")

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Whether `allocate_tensor` is for this device."""
        return torch.device(device).type == self.device_type

    def allocate_tensor(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of ``[size]``, undefined, that the group's collectives move without staging.

        The first call is collective over the group and blocks the host, and so are some that follow: all ranks must
        make the same calls (`iris.distributed.symmetric_memory`). Others are local. Memory is reused as torch reuses
        it: in the order of the stream on which the tensor was made.

        Raises
        ------
        WrongDeviceError
            The group does not work on this device.
        InvalidCountError
            ``size`` is no number of elements.
        OutOfStepError, IrisTimeoutError
            Other ranks made other calls, or none.
        """
        device = torch.device(device)
        if device.type != self.device_type:
            raise WrongDeviceError(
                f"The Iris backend of this group works on {self.device_type}, and was asked for a tensor on {device}. "
                "Ask for it where supports_tensor_alloc() is True, and take torch.empty() elsewhere."
            )
        if count(size, least=0) is None:
            raise InvalidCountError("size", size, "elements", least=0)
        return self.memory(device).empty(size, dtype)

    def memory(self, device: torch.device) -> SymmetricMemory:
        """The memory from which `allocate_tensor` takes."""
        if self._memory is None:
            self._memory = SymmetricMemory(self.context(device, "allocate_tensor"))
        return self._memory

    def stream_for(self, use: Any, device: torch.device) -> torch.cuda.Stream | Stream | None:
        """The group's own stream for one ``use``, made to wait for what is on the current stream.

        ``use``: "collectives", or ("send" or "recv", peer). None for collectives in the simulator.
        """
        return None if use == "collectives" and device.type != "cuda" else stream_of(self._streams, use, device)

    def keep_for(self, tensors: Sequence[Tensor], stream: torch.cuda.Stream | None) -> None:
        """Keep the tensors' memory from being reused before ``stream`` is done, though the tensors may die before."""
        if stream is None:
            return
        for tensor in tensors:
            tensor.record_stream(stream)
            if self._memory is not None:
                self._memory.record_stream(tensor, stream)

    def shutdown(self) -> None:
        """Let go of the group's memory. Local; blocks the host until this rank's calls are over."""
        if self._context is not None:
            # The threads of messages that connect; in the simulator, of all messages.
            for message in self._connecting.values():
                message.synchronize()
            for stream in self._streams.values():
                if isinstance(stream, Stream):
                    stream.synchronize()
            if self.device_type == "cuda":
                torch.cuda.synchronize(self._context.device)
            self._context._release()
        # Programs keep groups that they have destroyed. So what holds memory and a connection to the store goes here.
        self._context, self._memory, self._is_shut_down = None, None, True
        self.beside_computation = None
        self._gloo = None

    def abort(self) -> None:
        """Break the group: later calls are errors, on every rank. Local.

        Kernels that wait in vain end by their own time limit, and memory that they use stays. Of a group that nobody
        has used there is nothing to break.
        """
        if self._context is None:
            return
        why = f"rank {self._context.cur_rank} called abort()"
        if self._context.num_hosts > 1:
            # The abort flag is seen on this host alone. Ranks of other hosts learn it from the store.
            self._context._world.group.break_off(why)
        else:
            self._context._workspaces[None].abort_flag.abort(f"{why}.")

    # Splitting --------------------------------------------------------------------------------------------------------

    @property
    def bound_device_id(self) -> torch.device | None:
        """The device of init_process_group(device_id=...), which torch gives to the group that this one replaces.

        So torch's split_group(), which asks for one, gets the current one. Raises `InvalidGroupError` there in the
        simulator.
        """
        # The answer depends on the caller, as torch reads this property in several places and no value fits all. None
        # makes split_group() fail. A device makes new_group() split this group's communicator by NCCL (split_from), and
        # barrier() take it for the device that the program has chosen.
        if self._bound_device_id is not None or not is_split_group(sys._getframe(1).f_code):
            return self._bound_device_id
        if self.device_type == "cpu":
            raise InvalidGroupError(
                "torch.distributed.split_group() is for groups on GPUs. In the simulator make the same group with "
                "torch.distributed.new_group(ranks), which works on GPUs too."
            )
        return torch.device("cuda", torch.cuda.current_device())

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        self._bound_device_id = device

    def split_group(
        self,
        ranks: list[int],
        timeout: Any = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> "ProcessGroupBase | None":
        """The group of some ``ranks`` of this one; None if this rank is not among them. Local: it meets when used."""
        if self.rank() not in ranks:
            return None
        part = type(self)(
            SimpleNamespace(
                group_rank=ranks.index(self.rank()),
                group_size=len(ranks),
                store=dist.PrefixStore(f"{group_name}/", self._store),
                timeout=timeout or self._timeout,
                group_id=group_name,
            )
        )
        describe(part, group_desc or "")
        return part

    def get_group_store(self) -> dist.Store:
        return self._store

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Nothing: a group meets when it is first used."""

    def _set_sequence_number_for_group(self) -> None:
        """Nothing: there are none."""


def stream_of(streams: dict[Any, torch.cuda.Stream | Stream], use: Any, device: torch.device) -> Any:
    """The stream for ``use`` in ``streams``, made to wait for what is on the current stream. Made at the first use."""
    if device.type != "cuda":
        return streams.setdefault(use, Stream())
    stream = streams.get(use)
    if not isinstance(stream, torch.cuda.Stream):
        # High priority: where computation waits for a multiprocessor too, communication gets it first, since all other
        # ranks wait for the last one.
        stream = streams[use] = torch.cuda.Stream(device, priority=-1)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
