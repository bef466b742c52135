"""`all_reduce_rms_norm`: which kernel carries a call (`iris.ops.norm_call`), and its launch."""

from collections.abc import Callable

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
from iris.errors import FirstUseInCaptureError
from iris.heap.history import debugging
from iris.language.target import on_nvidia, threads_per_warp
from iris.ops.all_reduce_rms_norm import one_shot_rms_norm, two_shot_rms_norm
from iris.ops.call import described
from iris.ops.kernel_arguments import RowDivision, by_name
from iris.ops.norm_call import REPLICATED, SHARDED, NormCall
from iris.ops.norm_memory import NormLayout
from iris.ops.rms_norm import rms_norm
from iris.ops.row_division import BY_OWNER, MOST_WARPS, STEPS, Division, divide, in_registers, residency
from iris.ops.sharded_rms_norm import sharded_rms_norm
from iris.runtime.launch import addresses, prepare, remember

DEBUGGING = debugging()

KERNELS = {"one_shot": one_shot_rms_norm, "two_shot_push": two_shot_rms_norm, BY_OWNER: sharded_rms_norm}

# The fewest bytes of rows that are worth a launch of their own, where many rows are normalised by several launches.
# Each has as many rows as there is memory for, which are 16 MiB on two H200. So these take 3.3 to 3.5 us a MiB of any
# number of rows, where an all-reduce of all and a kernel after it took 4.1 to 4.7. Not with more ranks: on 4 H200
# larger sums are faster, 39 us for 8 MiB of 64 and 49 for 8 alone. Fewer bytes have memory of their own.
LEAST_AT_A_TIME = 4 << 20

# Memory that stays free after a call's, as a multiple of it, for calls of fewer rows: those of one number of columns
# take as much together. Without that, many rows of several shapes took all that calls may have, and one row of 8192
# took 6.5 us, not 3.2 (2 x H200).
FEWER_ROWS = 2

Launch = Callable[[NormCall, float, int | None], None]
"""Called with a call like the one it was made for, `eps` and the stream's handle."""


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
        if self._context.num_hosts > 1:
            return self._after_all_reduce(call)
        variant = self._variant(call)
        launch = self._in_one_kernel(call, variant, line) if variant in STEPS else None
        return launch or self._some_at_a_time(call, line) or self._after_all_reduce(call)

    def _variant(self, call: NormCall) -> str:
        """Of the all-reduce's, the one that carries a call."""
        comm, itemsize = self._context.ccl.communicator(), call.input.itemsize
        if comm.size == 1:
            return "one_shot"
        # Between two ranks two shots send as many bytes as one, in twice as many steps; but of a row they have less in
        # registers: for sm_90, 16384 of bf16 spill 948 bytes a thread in one shot, and 48 in two.
        if comm.size == 2 and in_registers(self._divide(call, "one_shot"), "one_shot", comm.size, itemsize):
            return "one_shot"
        nbytes = power_of_two(call.rows) * call.columns * itemsize
        return choose(comm.table, "all_reduce", nbytes, Config(), {*STEPS, "two_shot", "pull"}).variant

    @property
    def _sms(self) -> int | None:
        """Multiprocessors, or None in the simulator."""
        return self._context.ccl.communicator().num_sms if self._on_gpu else None

    def _divide(self, call: NormCall, variant: str) -> Division:
        """The rows of a call, up to the next power of two."""
        comm, rows = self._context.ccl.communicator(), power_of_two(call.rows)
        return divide(variant, comm.size, rows, call.columns, call.input.itemsize, self._sms, comm.largest_cluster)

    def _some_at_a_time(self, call: NormCall, line: Line) -> Launch | None:
        """Of more rows than the kernel has room for: as many as it has, in launches one after the other.

        None where that is slower than an all-reduce of all rows, or there is no room for as few.
        """
        comm, row = self._context.ccl.communicator(), call.columns * call.input.itemsize
        some = power_of_two(call.rows) // 2
        while comm.size == 2 and some * row >= LEAST_AT_A_TIME:
            first = call.of(slice(0, some))
            variant = self._variant(first)
            launch = self._in_one_kernel(first, variant, line) if variant in STEPS else None
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
        comm, rows, itemsize = self._context.ccl.communicator(), power_of_two(call.rows), call.input.itemsize
        sms, division = self._sms, self._divide(call, variant)
        pieces, piece, part, block, warps, registers, clustered = division
        if variant == BY_OWNER and not in_registers(division, variant, comm.size, itemsize):
            return None
        memory, units = comm.workspace, rows * pieces

        def layout_of(room: int) -> NormLayout:
            return NormLayout(variant, comm.size, room, room * pieces, part, itemsize, call.out.itemsize)

        most = memory.limit // SHARE_OF_WORKSPACE // layout_of(1).slot_bytes
        if rows > most:
            return None
        # Calls of many rows share memory, however many these are.
        of_all = rows * comm.size if variant == BY_OWNER else rows
        many = pieces == 1 and of_all * call.columns * itemsize >= LEAST_AT_A_TIME
        room = power_of_two(most // 2 + 1) if many else rows
        layout = layout_of(room)
        programs = min(units, SIMULATED_PROGRAMS if sms is None else division.programs_at_once(sms))
        small, early, registers = residency(variant, comm.size, programs * warps, registers, sms)
        lanes = max(pieces, power_of_two(warps * threads_per_warp()))
        shape = RowDivision(call.columns, pieces, piece, part, block, lanes, clustered, small, programs == units)
        name = (
            f"all_reduce_rms_norm of {room} rows of {call.columns} {call.input.dtype} in {pieces} pieces by {variant}"
        )
        if variant == BY_OWNER or (pieces > 1 and not clustered):
            # What is wanted of a row travels in messages, and each call has to write those that it reads.
            wanted = [name for name, tensor in call._asdict().items() if tensor is not None]
            name += f", with {wanted} of {call.out.dtype}"
        # Every shape has a channel, which is kept, and however many there are the collectives need room for theirs. So
        # do fewer rows than these, which gain more.
        if not memory.admits(name, line, layout.nbytes, left=memory.limit // ROOM_LEFT + FEWER_ROWS * layout.nbytes):
            return None
        kernel = KERNELS[variant]
        norm_channel = layout.channel(memory.channel(name, line, layout.nbytes, layout.epochs))
        constants = {"room": room, "W": comm.size, "DIVISION": shape, "LARGEST": call.largest()}
        options = {"maxnreg": registers} if on_nvidia() else {}

        def arguments(given: NormCall, tensors: object, place: object, eps: float, apart: int | None) -> tuple:
            rows = {"rows": given.rows, "apart": apart or given.rows} if variant == BY_OWNER else {"rows": given.rows}
            return by_name(kernel, channel=place, tensors=tensors, eps=eps, **rows, **constants)

        launch = prepare(
            kernel,
            (programs, 1, 1),
            *arguments(call, call.tensors(call.input), norm_channel, 0.5, None),
            cluster=pieces if clustered else 1,
            early=early,
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
