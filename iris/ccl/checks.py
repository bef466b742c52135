"""What a collective may be asked for: checked before anything is enqueued, and between ranks in debug mode."""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch

from iris import observer
from iris.arg_parser import index
from iris.ccl.call import extent
from iris.ccl.communicator import Communicator
from iris.ccl.config import DEFAULT, Config, ReduceOp
from iris.errors import (
    InvalidCollectiveError,
    InvalidConfigError,
    MismatchedCollectiveError,
    NotATensorError,
    RankOutOfRangeError,
    UnknownChoiceError,
    WrongDeviceError,
    short_repr,
)
from iris.heap.history import debugging
from iris.language.target import threads_per_warp
from iris.operators.stand_ins import stand_in
from iris.world import Group

DEBUGGING = debugging()


class Ranks(Protocol):
    """The ranks of a collective: a `Communicator`, or those of several hosts."""

    @property
    def size(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def device(self) -> torch.device: ...


def check_tensor(name: str, tensor: object) -> None:
    """That it is one, with memory of its own."""
    if not isinstance(tensor, torch.Tensor):
        raise NotATensorError(tensor, f"{name}() takes tensors")
    problem = "a nested tensor. Pass its parts, x.unbind()." if tensor.is_nested else stand_in(tensor)
    if problem:
        raise InvalidCollectiveError(f"{name}() takes tensors with memory of their own, and got {problem}")


def check_at_root(comm: Ranks, name: str, role: str, tensor: object, root: int) -> None:
    """That it is a tensor, where the root of the collective takes one and the others may give None."""
    if tensor is None:
        way = "from" if role == "input" else "to"
        raise NotATensorError(tensor, f"{name}() {way} rank {comm.ranks[root]} needs an {role} there")
    check_tensor(name, tensor)


def joined(comm: Ranks, name: str, parts: Sequence[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """The parts that a collective sends, one a rank, in one tensor, if each is as large as ``output``, and like it."""
    for part in parts:
        check_tensor(name, part)
        if (part.dtype, part.device) != (output.dtype, output.device):
            raise InvalidCollectiveError(
                f"{name}() takes a list of tensors of its output's dtype and device, {output.dtype} on "
                f"{output.device}; one is {part.dtype} on {part.device}."
            )
    sizes = [part.numel() for part in parts]
    if sizes != [output.numel()] * comm.size:
        raise InvalidCollectiveError(
            f"{name}() sends each of {comm.size} ranks {output.numel()} elements, as many as its output has; the list "
            f"has tensors of {sizes}."
        )
    return torch.cat([part.reshape(-1) for part in parts])


def check_config(config: Config | None) -> Config:
    """``config``, or the default."""
    used = DEFAULT if config is None else config
    if not isinstance(used, Config):
        raise InvalidConfigError(f"config={short_repr(config)} is not possible: it is an iris.ccl.Config, or None.")
    if used.threads_per_warp not in (None, threads_per_warp()):
        raise InvalidConfigError(
            f"Config(threads_per_warp={used.threads_per_warp}) cannot work: this machine has {threads_per_warp()}."
        )
    return used


def check_pair(
    comm: Ranks,
    name: str,
    output: torch.Tensor,
    input: torch.Tensor,
    times_in: int | None,
    times_out: int | None,
) -> None:
    """That both are on the device, of one dtype, and ``times_out`` outputs as long as ``times_in`` inputs."""
    for role, tensor in (("output", output), ("input", input)):
        check_tensor(name, tensor)
        if tensor.device != comm.device:
            raise WrongDeviceError(
                f"The {role} of {name}() is on {tensor.device}, and this context works on {comm.device}. "
                "Move it there first."
            )
    if output.dtype != input.dtype:
        raise InvalidCollectiveError(
            f"{name}() takes an output of the input's dtype, {input.dtype}; it got {output.dtype}."
        )
    if times_in is not None and times_out is not None and input.numel() * times_in % times_out:
        raise InvalidCollectiveError(
            f"{name}() among {comm.size} ranks takes an input whose elements are a multiple of {times_out}; it got "
            f"{list(input.shape)}, which are {input.numel()}."
        )
    if times_in is not None and times_out is not None and output.numel() * times_out != input.numel() * times_in:
        expected = input.numel() * times_in // times_out
        raise InvalidCollectiveError(
            f"{name}() among {comm.size} ranks with an input of {list(input.shape)} needs an output of {expected} "
            f"elements; it got {list(output.shape)}, which are {output.numel()}."
        )


def check_columns(comm: Ranks, name: str, output: torch.Tensor, input: torch.Tensor) -> None:
    """That both have the same columns, and these can be divided among the ranks."""
    if input.dim() == 0 or input.shape[-1] % comm.size or output.shape != input.shape:
        raise InvalidCollectiveError(
            f"{name}() among {comm.size} ranks takes an input and an output of the same shape whose last dimension is "
            f"a multiple of {comm.size}; it got {list(input.shape)} and {list(output.shape)}."
        )


def rank_in_group(comm: Ranks, name: str, rank: int, num_ranks: int) -> int:
    """A rank of the world, of ``num_ranks``, as a rank of the group."""
    number = index(rank)
    if number not in comm.ranks:
        if number is None:
            raise InvalidCollectiveError(f"{name}={short_repr(rank)} is not a rank, which is a whole number: {name}=0.")
        if comm.ranks == tuple(range(num_ranks)):
            raise observer.reported(RankOutOfRangeError(number, num_ranks))
        # Of a group of some ranks, or a context over one, these are not counted from 0.
        raise UnknownChoiceError(name, number, comm.ranks)
    return comm.ranks.index(number)


def check_overlap(name: str, output: torch.Tensor, input: torch.Tensor) -> None:
    """That the contiguous ``output`` shares no memory with ``input``, or with what lies between its rows."""
    begin, start = output.data_ptr(), input.data_ptr()
    if start >= begin + output.nbytes:
        return
    if begin < start + (input.nbytes if input.is_contiguous() else extent(input)):
        raise InvalidCollectiveError(
            f"Input and output of {name}() overlap in memory, in a way that it does not allow: results would be "
            "written over what has not been read. Give it an output of its own."
        )


def check_rows(comm: Communicator, lists: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """Counts and displacements that are on the device, of which the host sees the form alone."""
    for row in lists:
        if (
            not isinstance(row, torch.Tensor)
            or row.device != comm.device
            or row.dtype != torch.int64
            or row.shape != (comm.size,)
            or row.stride() != (1,)
        ):
            given = f"{list(row.shape)} {row.dtype} on {row.device}" if isinstance(row, torch.Tensor) else repr(row)
            raise InvalidCollectiveError(
                f"Counts and displacements on the device are four contiguous int64 tensors on {comm.device} of "
                f"{comm.size} elements, one a rank; one is {given}."
            )
    return lists


def counts(name: str, values: Sequence[int] | torch.Tensor, size: int) -> tuple[int, ...]:
    """A count or displacement a rank, as numbers."""
    try:
        numbers = tuple(map(index, values.tolist() if isinstance(values, torch.Tensor) else values))
    except TypeError:
        numbers = ()
    if len(numbers) != size or any(number is None or not 0 <= number < 1 << 63 for number in numbers):
        raise InvalidCollectiveError(
            f"{name} takes {size} whole numbers of elements, one a rank, none negative: {short_repr(values)}."
        )
    return cast(tuple[int, ...], numbers)


def end(counts: tuple[int, ...], displs: tuple[int, ...]) -> tuple[int, int]:
    """Where the last of these elements ends, and whose it is."""
    ends = [(begin + count, rank) for rank, (count, begin) in enumerate(zip(counts, displs, strict=True)) if count]
    return max(ends, default=(0, 0))


def compare(
    comm: Communicator, name: str, input: torch.Tensor, config: Config | None, root: int | None, op: ReduceOp | None
) -> None:
    """In debug mode: that all members make the same call. Blocks the host."""
    if name in ("send", "recv"):  # of which the other members know nothing
        return
    size = "" if name == "all_to_all_v" else f"{list(input.shape)} "
    call = f"{name}() with an input of {size}{input.dtype}"
    if root is not None:
        call += f", {'src' if name in ('broadcast', 'scatter') else 'dst'}={root}"
    if op is not None:
        call += f", {op}"
    if config not in (None, DEFAULT):
        call += f", {config}"
    compare_calls(comm.workspace.group, call)


def compare_calls(group: Group, call: str) -> None:
    """In debug mode: that all members describe their ``call`` in the same words. Blocks the host."""
    calls = group.all_gather(call, "the comparison of a collective's arguments", orders=False)
    if len(set(calls)) > 1:
        differing = "; ".join(f"rank {rank} calls {call}" for rank, call in zip(group.ranks, calls, strict=True))
        raise MismatchedCollectiveError(f"The ranks do not make the same call: {differing}.")


def compare_counts(comm: Communicator, send: Sequence[int] | torch.Tensor, recv: Sequence[int] | torch.Tensor) -> None:
    """In debug mode: that every member expects of each other what that one sends. Blocks the host."""
    mine = counts("send_counts", send, comm.size), counts("recv_counts", recv, comm.size)
    everyone = comm.workspace.group.all_gather(mine, "the comparison of all_to_all_v's counts", orders=False)
    for sender, (sends, _) in enumerate(everyone):
        for receiver, (_, expects) in enumerate(everyone):
            if sends[receiver] != expects[sender]:
                raise MismatchedCollectiveError(
                    f"In all_to_all_v() rank {comm.ranks[sender]} sends {sends[receiver]} elements to rank "
                    f"{comm.ranks[receiver]}, which expects {expects[sender]}."
                )
