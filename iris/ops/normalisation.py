"""`all_reduce_rms_norm`: what it may be asked for, which kernel carries it, and its launch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from iris.arg_parser import real
from iris.ccl import Config
from iris.ccl.checks import compare_calls
from iris.ccl.communicator import SIMULATED_PROGRAMS, power_of_two
from iris.ccl.lamport_channel import ROOM_LEFT, SHARE_OF_WORKSPACE
from iris.ccl.one_shot import LAMPORT
from iris.ccl.protocols import CollectivesContext
from iris.ccl.select import choose
from iris.compat.cuda import current_raw_stream, is_current_stream_capturing
from iris.cuda_graphs.capture import Line
from iris.errors import FirstUseInCaptureError, InvalidCollectiveError
from iris.heap.history import debugging
from iris.language.target import on_nvidia, threads_per_warp
from iris.ops.all_reduce_rms_norm import one_shot_rms_norm, rms_norm, two_shot_rms_norm
from iris.ops.call import NARROW, WIDE, check_devices, described
from iris.ops.kernel_arguments import NormTensors, RowDivision, by_name
from iris.ops.norm_memory import NormLayout
from iris.ops.row_division import (
    BY_OWNER,
    EARLY_REGISTERS,
    MOST_WARPS,
    REGISTERS,
    SMALL_WARPS,
    STEPS,
    WARPS,
    divide,
    in_registers,
)
from iris.ops.sharded_rms_norm import sharded_rms_norm
from iris.runtime.launch import addresses, prepare, remember

DEBUGGING = debugging()

# Columns of a row at most: one program's registers hold it.
MOST_COLUMNS = 32768
# Who keeps the residual: every rank all of it; or each rank the rows that it owns, one W-th of them, by rank.
REPLICATED, SHARDED = "replicated", "sharded"
LAYOUTS = (REPLICATED, SHARDED)

TWO_SHOT = "two_shot_push"
KERNELS = {"one_shot": one_shot_rms_norm, TWO_SHOT: two_shot_rms_norm, BY_OWNER: sharded_rms_norm}

# The fewest bytes of rows that are worth a launch of their own, where many rows are normalised by several launches.
# Each has as many rows as there is memory for, which are 8 MiB on two H200. So these take 4.0 to 4.3 us a MiB of any
# number of rows, where an all-reduce of all and a kernel after it took 4.7 to 5.8. Not with more ranks: on 4 H200
# larger sums are faster, 39 us for 8 MiB of 64 and 49 for 8 alone.
LEAST_AT_A_TIME = 4 << 20

# Memory that stays free after a call's, as a multiple of it, for calls of fewer rows. Without that, many rows of
# several shapes took all that calls may have, and one row of 8192 took 6.5 us, not 3.2 (2 x H200).
FEWER_ROWS = 4

Launch = Callable[["NormCall", float, int | None], None]
"""Called with a call like the one it was made for, `eps` and the stream's handle."""


class NormCall(NamedTuple):
    """A call of `all_reduce_rms_norm`. ``input``: ``[..., H]``; ``weight``: ``[H]``; what is besides is contiguous."""

    out: torch.Tensor
    input: torch.Tensor
    weight: torch.Tensor
    residual: torch.Tensor | None
    scale: torch.Tensor | None
    row_scales: torch.Tensor | None

    @property
    def columns(self) -> int:
        return self.weight.numel()

    @property
    def rows(self) -> int:
        return self.input.numel() // self.columns

    def check(self, device: torch.device, owners: int | None = None) -> None:
        """Raise unless this can be computed on ``device``.

        ``owners``: among how many ranks the residual is sharded; None if each has all of it.
        """
        check_devices("all_reduce_rms_norm", self.given(), device)
        problem = self._problem(owners)
        if problem:
            raise InvalidCollectiveError(f"all_reduce_rms_norm() with {described(self.given())}: {problem}.")

    def given(self) -> dict[str, torch.Tensor]:
        """The tensors by their roles."""
        needed = ("out", "input", "weight")
        return {role: tensor for role, tensor in self._asdict().items() if tensor is not None or role in needed}

    def _problem(self, owners: int | None) -> str | None:
        """What is wrong, in words."""
        x, columns = self.input, self.columns
        if self.weight.dim() != 1 or x.dim() == 0 or x.shape[-1] != columns or not 0 < columns <= MOST_COLUMNS:
            return f"weight has one dimension, of as many elements as a row of input has, 1 to {MOST_COLUMNS}"
        if x.dtype not in WIDE or self.weight.dtype not in WIDE:
            return "input and weight are fp16, bf16 or fp32"
        if not _lies_as(self.out, x.shape):
            return "out has the shape of input, and is contiguous"
        if owners is None:
            if not _lies_as(self.residual, x.shape):
                return "residual has the shape of input, and is contiguous"
        elif self.rows % owners:
            return f"{owners} ranks cannot own equal parts of {self.rows} rows; give a multiple"
        elif not _lies_as(self.residual, (self.rows // owners, columns)):
            return f"a residual that is sharded has shape {[self.rows // owners, columns]}, and is contiguous"
        if self.residual is not None and self.residual.dtype not in WIDE:
            return "the residual is fp16, bf16 or fp32"
        clash = self._clash(owners is not None)
        if clash:
            return f"{clash} overlap in memory, in a way that it does not allow; give it an output of its own"
        if self.out.dtype not in WIDE + NARROW:
            return "out is fp8, fp16, bf16 or fp32"
        if self.out.dtype not in NARROW and (self.scale is not None or self.row_scales is not None):
            return "scale and row_scales are for an out of fp8"
        if self.scale is not None and self.row_scales is not None:
            return "it takes scale, which is given, or row_scales, which are computed, and not both"
        if self.scale is not None and (self.scale.dtype != torch.float32 or self.scale.numel() != 1):
            return "scale is one element of float32"
        scales = self.row_scales
        if scales is not None and not (
            scales.dtype == torch.float32 and scales.numel() == self.rows and scales.is_contiguous()
        ):
            return f"row_scales are {self.rows} contiguous elements of float32, one a row"
        return None

    def _clash(self, sharded: bool) -> str | None:
        """What is written where something else lies, but for an input that is written over in whole, row by row.

        Not by a ``sharded`` residual: its rows begin where the input does on rank 0 alone, and all ranks refuse a call.
        """
        if self.residual is not None and _overlap(self.out, self.residual):
            return "out and residual"
        for written, tensor in (("out", self.out), ("residual", self.residual)):
            for read, other in (("input", self.input), ("weight", self.weight)):
                # What is not contiguous is copied before.
                if tensor is None or not other.is_contiguous() or not _overlap(tensor, other):
                    continue
                in_place = (tensor.data_ptr(), tensor.dtype) == (other.data_ptr(), other.dtype)
                if read == "weight" or not in_place or (sharded and written == "residual"):
                    return f"{written} and {read}"
        return None

    def kind(self) -> tuple:
        """What makes the code of one call differ from another's."""
        return tuple(x if x is None else (x.dtype, x.data_ptr() % 16) for x in self) + (self.columns,)

    def largest(self) -> float:
        """What ``out`` can hold, if it is of fp8."""
        return torch.finfo(self.out.dtype).max if self.out.dtype in NARROW else 0.0

    def of(self, rows: slice) -> "NormCall":
        """Of these rows alone."""
        out, input = (x.view(-1, self.columns)[rows] for x in (self.out, self.input))
        residual = None if self.residual is None else self.residual.view(-1, self.columns)[rows]
        scales = None if self.row_scales is None else self.row_scales.view(-1)[rows]
        return self._replace(out=out, input=input, residual=residual, row_scales=scales)

    def owned(self, rank: int, owners: int) -> "NormCall":
        """Of the rows alone that a rank owns of so many; the residual has no others."""
        rows = slice(rank * self.rows // owners, (rank + 1) * self.rows // owners)
        return self._replace(residual=None).of(rows)._replace(residual=self.residual)

    def tensors(self, input: torch.Tensor) -> NormTensors:
        """For kernels: with ``input``, or the sums that are there already."""
        return NormTensors(input, self.residual, self.weight, self.out, self.scale, self.row_scales)


def _lies_as(tensor: torch.Tensor | None, shape: Sequence[int]) -> bool:
    """Whether what is given is contiguous and has this shape."""
    return tensor is None or (tensor.shape == shape and tensor.is_contiguous())


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    return x.data_ptr() < y.data_ptr() + y.nbytes and y.data_ptr() < x.data_ptr() + x.nbytes


def one_after_the_other(launch: Launch, some: int) -> Launch:
    """Of all rows of a call, ``some`` at a time."""

    def enqueue(given: NormCall, eps: float, stream: int | None) -> None:
        for begin in range(0, given.rows, some):
            launch(given.of(slice(begin, begin + some)), eps, stream)

    return enqueue


class AllReduceRmsNorm:
    """The operation among all ranks of a context, enqueued on the current stream."""

    def __init__(self, context: CollectivesContext) -> None:
        self._context = context
        self._on_gpu = context.device.type == "cuda"
        self._used = False
        self._launches: dict[tuple, Launch] = {}

    def __call__(self, call: NormCall, eps: float, layout: str = REPLICATED) -> None:
        """``layout``: one of `LAYOUTS`."""
        owners = self._context.num_ranks if layout == SHARDED else None
        call.check(self._context.device, owners)
        eps = eps if eps.__class__ is float else real("eps", eps)
        if not call.out.numel():
            return
        call = call._replace(input=call.input.contiguous(), weight=call.weight.contiguous())
        stream, capturing = None, False
        if self._on_gpu:
            stream = current_raw_stream(self._context.gpu_id)
            capturing = is_current_stream_capturing()
        if capturing and not self._used:
            raise FirstUseInCaptureError("all_reduce_rms_norm()")
        if DEBUGGING and not capturing:
            said = f"all_reduce_rms_norm() with {described(call.given())}, eps={eps}, residual_layout={layout!r}"
            compare_calls(self._context._world.group, said)
        self._used = True
        # Numbers of rows share memory and launches up to the next power of two.
        line = self._context._workspaces[None].line(stream, True) if capturing else stream
        by_owner = owners is not None and owners > 1
        own = self._owned(call) if by_owner else call
        key = (by_owner, power_of_two(own.rows), *own.kind(), line)
        if key not in self._launches:
            remember(self._launches, key, self._prepare_by_owner(own, line) if by_owner else self._prepare(call, line))
        self._launches[key](call, eps, stream)

    def close(self) -> None:
        """Forget all launches. The caller guarantees that no graph with them will be replayed."""
        self._launches.clear()

    def _owned(self, call: NormCall) -> NormCall:
        return call.owned(self._context.cur_rank, self._context.num_ranks)

    def _prepare(self, call: NormCall, line: Line) -> Launch:
        """A function that enqueues calls like this one."""
        comm, room = self._context.ccl.communicator(), power_of_two(call.rows)
        if self._context.num_hosts > 1:
            return self._after_all_reduce(call)
        variant = "one_shot"
        if comm.size > 1:
            nbytes = room * call.columns * call.input.itemsize
            variant = choose(comm.table, "all_reduce", nbytes, Config(), {*STEPS, "two_shot", "pull"}).variant
        launch = self._in_one_kernel(call, variant, line) if variant in STEPS else None
        return launch or self._some_at_a_time(call, line) or self._after_all_reduce(call)

    def _some_at_a_time(self, call: NormCall, line: Line) -> Launch | None:
        """Of more rows than the kernel has room for: as many as it has, in launches one after the other.

        None where that is slower than an all-reduce of all rows, or there is no room for as few.
        """
        comm, row = self._context.ccl.communicator(), call.columns * call.input.itemsize
        some = power_of_two(call.rows) // 2
        while comm.size == 2 and some * row >= LEAST_AT_A_TIME:
            variant = choose(comm.table, "all_reduce", some * row, Config(), {*STEPS, "two_shot", "pull"}).variant
            launch = self._in_one_kernel(call.of(slice(0, some)), variant, line) if variant == TWO_SHOT else None
            if launch is not None:
                return one_after_the_other(launch, some)
            some //= 2
        return None

    def _prepare_by_owner(self, own: NormCall, line: Line) -> Launch:
        """The same of calls whose residual is sharded; ``own``: the rows of this rank."""
        size, some = self._context.num_ranks, power_of_two(own.rows)
        launch = None
        # Results are their own flags, as in `iris.ccl.one_shot`.
        if self._context.num_hosts == 1 and own.out.dtype in LAMPORT:
            launch = self._in_one_kernel(own, BY_OWNER, line)
            row = size * own.columns * own.input.itemsize
            # Between more ranks that was not measured.
            while launch is None and size == 2 and some // 2 * row >= LEAST_AT_A_TIME:
                some //= 2
                launch = self._in_one_kernel(own.of(slice(0, some)), BY_OWNER, line)
        if launch is None:
            return self._by_owners

        def enqueue(given: NormCall, eps: float, stream: int | None) -> None:
            own = self._owned(given)
            for begin in range(0, own.rows, some):
                launch(own.of(slice(begin, begin + some)), eps, stream, own.rows)

        return enqueue

    def _in_one_kernel(self, call: NormCall, variant: str, line: Line) -> Callable[..., None] | None:
        """Of a variant of `STEPS`, or of the own rows `BY_OWNER`. None if there is no room for it.

        The latter takes besides how many rows of an owner there are, if a call is of some of them.
        """
        comm, room, itemsize = self._context.ccl.communicator(), power_of_two(call.rows), call.input.itemsize
        sms = comm.num_sms if self._on_gpu else None
        division = divide(variant, comm.size, room, call.columns, itemsize, sms, comm.largest_cluster)
        pieces, piece, part, block, warps, clustered = division
        if variant == BY_OWNER and not in_registers(division, variant, comm.size, itemsize):
            return None
        memory, units = comm.workspace, room * pieces
        layout = NormLayout(variant, comm.size, room, units, part, itemsize, call.out.itemsize)
        if layout.slot_bytes > memory.limit // SHARE_OF_WORKSPACE:
            return None
        programs = min(units, SIMULATED_PROGRAMS if sms is None else WARPS * sms // warps)
        small = sms is not None and programs * warps <= SMALL_WARPS * sms
        lanes = max(pieces, power_of_two(warps * threads_per_warp()))
        shape = RowDivision(call.columns, pieces, piece, part, block, lanes, clustered, small)
        wanted = [name for name, tensor in call._asdict().items() if tensor is not None]
        # By what is wanted too: of what programs tell each other, each call writes the words that it reads.
        name = (
            f"all_reduce_rms_norm of {room} rows of {call.columns} {call.input.dtype} by {variant}, {shape}, "
            f"with {wanted} of {call.out.dtype}"
        )
        # Every shape has a channel, which is kept, and however many there are the collectives need room for theirs. So
        # do fewer rows than these, which gain more.
        if not memory.admits(name, line, layout.nbytes, left=memory.limit // ROOM_LEFT + FEWER_ROWS * layout.nbytes):
            return None
        kernel = KERNELS[variant]
        norm_channel = layout.channel(memory.channel(name, line, layout.nbytes, layout.epochs))
        constants = {"room": room, "W": comm.size, "DIVISION": shape, "LARGEST": call.largest()}
        # The parts of more ranks, and of two shots, have no room in fewer registers.
        reduced = not small and variant == "one_shot" and comm.size == 2
        options = {"maxnreg": EARLY_REGISTERS if reduced else REGISTERS} if on_nvidia() else {}

        def arguments(given: NormCall, tensors: object, place: object, eps: float, apart: int | None) -> tuple:
            rows = {"rows": given.rows, "apart": apart or given.rows} if variant == BY_OWNER else {"rows": given.rows}
            return by_name(kernel, channel=place, tensors=tensors, eps=eps, **rows, **constants)

        launch = prepare(
            kernel,
            (programs, 1, 1),
            *arguments(call, call.tensors(call.input), norm_channel, 0.5, None),
            cluster=pieces if clustered else 1,
            early=small or reduced,
            num_warps=warps,
            **options,
        )
        (place,) = addresses((norm_channel,))

        def enqueue(given: NormCall, eps: float, stream: int | None, apart: int | None = None) -> None:
            (tensors,) = addresses((given.tensors(given.input),))
            launch(stream, arguments(given, tensors, place, eps, apart))

        # It launches with addresses in this memory.
        enqueue.keeps_alive = norm_channel  # type: ignore[attr-defined]
        return enqueue

    def _by_owners(self, call: NormCall, eps: float, stream: int | None) -> None:
        """Each rank adds up and normalises the rows that it owns, and sends all ranks what these become."""
        ccl, own = self._context.ccl, self._owned(call)
        sums = own.out if own.out.dtype == own.input.dtype else torch.empty_like(own.input)
        own = own._replace(input=sums)
        ccl.reduce_scatter(sums, call.input)
        key = (SHARDED, power_of_two(own.rows), *own.kind())
        if key not in self._launches:
            remember(self._launches, key, self._of_sums(own))
        self._launches[key](own, eps, stream)
        ccl.all_gather(call.out.view(-1, call.columns), own.out)
        if call.row_scales is not None and own.row_scales is not None:
            ccl.all_gather(call.row_scales.view(-1), own.row_scales)

    def _after_all_reduce(self, call: NormCall) -> Launch:
        """Of many rows: the sums, and a kernel that normalises them."""

        def room(given: NormCall) -> torch.Tensor:
            return given.out if given.out.dtype == given.input.dtype else torch.empty_like(given.input)

        normalise = self._of_sums(call._replace(input=room(call)))

        def enqueue(given: NormCall, eps: float, stream: int | None) -> None:
            total = room(given)
            self._context.ccl.all_reduce(total, given.input)
            normalise(given._replace(input=total), eps, stream)

        return enqueue

    def _of_sums(self, call: NormCall) -> Launch:
        """A kernel that normalises rows whose sums are the input."""
        columns = power_of_two(call.columns)
        constants = {"H": call.columns, "ROW": columns, "LARGEST": call.largest()}
        most = 2 * self._context.get_cu_count() if self._on_gpu else SIMULATED_PROGRAMS
        warps = max(1, min(MOST_WARPS, columns * call.input.itemsize // (16 * threads_per_warp())))
        grid = (min(power_of_two(call.rows), most), 1, 1)
        # It waits for the sums, which may be of a launch that lets the next one begin, and takes what places there are.
        arguments = by_name(rms_norm, tensors=call.tensors(call.input), rows=call.rows, eps=0.5, **constants)
        launch = prepare(rms_norm, grid, *arguments, early=False, num_warps=warps)

        def enqueue(given: NormCall, eps: float, stream: int | None) -> None:
            (tensors,) = addresses((given.tensors(given.input),))
            launch(stream, by_name(rms_norm, tensors=tensors, rows=given.rows, eps=eps, **constants))

        return enqueue
