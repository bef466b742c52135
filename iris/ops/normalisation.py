"""`all_reduce_rms_norm`: what it may be asked for, which kernel carries it, and its launch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from iris.capture import capture_id
from iris.ccl import Config
from iris.ccl.communicator import KEPT, SIMULATED_PROGRAMS, power_of_two
from iris.ccl.push import SLOTS
from iris.ccl.select import Table, choose_all_reduce
from iris.ccl.sums import PUSHES, SHARE_OF_WORKSPACE
from iris.errors import FirstUseInCaptureError, InvalidCollectiveError
from iris.language.target import on_nvidia, threads_per_warp
from iris.launch import addresses, prepare
from iris.ops.all_reduce_rms_norm import one_shot_rms_norm, rms_norm, two_shot_rms_norm
from iris.ops.call import check_devices, told

SUMMED = (torch.float16, torch.bfloat16, torch.float32)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
# Elements of a row that a program adds up at least. Columns of a row at most: one program's registers hold it.
SMALLEST_PIECE = 256
MOST_COLUMNS = 32768
MOST_WARPS = 8
# Rows below which one shot is quicker where an all-reduce would take two: in two a row has one program.
FEW_ROWS = 32
# Registers of a thread, on NVIDIA: a multiprocessor of these has room for 16 warps (CUDA C++ Programming Guide,
# "Compute Capabilities": 65536 registers). Programs wait for peers, so when a rank has begun a call on one stream and
# another rank a call on another, there must be room for both: a launch has half of the warps; or a third, if the next
# launch of its stream takes places before its turn.
REGISTERS, WARPS, EARLY_WARPS = 128, 8, 5

Launch = Callable[["Rows", float, int | None], None]
"""Called with a call like the one it was made for, `eps` and the stream's handle."""


class Rows(NamedTuple):
    """One call. All are contiguous but ``input``: ``[..., H]``, and ``weight``: ``[H]``."""

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

    def check(self, device: torch.device) -> None:
        """Raise unless this can be computed on ``device``."""
        given = {role: tensor for role, tensor in self._asdict().items() if tensor is not None}
        check_devices("all_reduce_rms_norm", given, device)
        problem = self._problem()
        if problem:
            raise InvalidCollectiveError(f"all_reduce_rms_norm() with {told(given)}: {problem}.")

    def _problem(self) -> str | None:
        """What is wrong, in words."""
        x, columns = self.input, self.columns
        if self.weight.dim() != 1 or x.dim() == 0 or x.shape[-1] != columns or not 0 < columns <= MOST_COLUMNS:
            return f"weight has one dimension, of as many elements as a row of input has, 1 to {MOST_COLUMNS}"
        if x.dtype not in SUMMED or self.weight.dtype not in SUMMED:
            return "input and weight are fp16, bf16 or fp32"
        for role, tensor in (("out", self.out), ("residual", self.residual)):
            if tensor is not None and (tensor.shape != x.shape or not tensor.is_contiguous()):
                return f"{role} has the shape of input, and is contiguous"
        if self.residual is not None and self.residual.dtype not in SUMMED:
            return "the residual is fp16, bf16 or fp32"
        if self.out.dtype not in SUMMED + NARROW:
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

    def kind(self) -> tuple:
        """What makes the code of one call differ from another's."""
        return tuple(x if x is None else (x.dtype, x.data_ptr() % 16) for x in self) + (self.columns,)

    def constants(self) -> tuple[bool, bool, bool, float]:
        """`ADDS`, `SCALED`, `BY_ROW` and `LARGEST` of the kernels."""
        largest = torch.finfo(self.out.dtype).max if self.out.dtype in NARROW else 0.0
        return self.residual is not None, self.scale is not None, self.row_scales is not None, largest


def choose_variant(table: Table, size: int, rows: int, nbytes: int) -> str:
    """The all-reduce's, of so many rows with so many bytes in all among ``size`` ranks."""
    if size == 1:
        return "one_shot"
    variant = choose_all_reduce(table, nbytes, True, set(PUSHES), Config()).variant
    return "one_shot" if variant == "two_shot_push" and rows < FEW_ROWS else variant


class AllReduceRmsNorm:
    """The operation among all ranks of a context, enqueued on the current stream."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._on_gpu = context.device.type == "cuda"
        self._used = False
        self._launches: dict[tuple, Launch] = {}

    def __call__(self, call: Rows, eps: float) -> None:
        call.check(self._context.device)
        if not call.out.numel():
            return
        call = call._replace(input=call.input.contiguous(), weight=call.weight.contiguous())
        stream = capture = None
        if self._on_gpu:
            stream = torch._C._cuda_getCurrentRawStream(self._context.gpu_id)
            capture = capture_id(stream) if torch._C._cuda_isCurrentStreamCapturing() else None
        if capture is not None and not self._used:
            raise FirstUseInCaptureError("all_reduce_rms_norm()")
        self._used = True
        # Numbers of rows share memory and launches up to the next power of two.
        key = (power_of_two(call.rows), *call.kind(), stream, capture)
        if key not in self._launches:
            if len(self._launches) == KEPT:
                self._launches.clear()
            self._launches[key] = self._prepare(call, stream, capture is not None)
        self._launches[key](call, float(eps), stream)

    def close(self) -> None:
        """Forget all launches. The caller guarantees that no graph with them will be replayed."""
        self._launches.clear()

    def _prepare(self, call: Rows, stream: int | None, capturing: bool) -> Launch:
        """A function that enqueues calls like this one."""
        comm, room, itemsize = self._context.ccl.communicator(), power_of_two(call.rows), call.input.itemsize
        threads = threads_per_warp()
        # At least as many words as a warp has threads: each polls one of its own (`iris.language.stamped`).
        fewest = threads * max(1, 4 // itemsize)
        columns = max(fewest, power_of_two(call.columns))
        variant = choose_variant(comm.table, comm.size, room, room * call.columns * itemsize)
        pieces = 1
        if variant == "one_shot":
            most = 2 * comm.num_sms if self._on_gpu else SIMULATED_PROGRAMS
            while 2 * pieces * SMALLEST_PIECE <= columns and 2 * pieces * room <= most:
                pieces *= 2
            polled = columns // pieces
            kernel, region = one_shot_rms_norm, comm.size * polled
        else:
            # Parts begin at multiples of 16 bytes.
            part = -(-call.columns // (8 * comm.size)) * 8
            polled = max(fewest, power_of_two(part))
            kernel, region = two_shot_rms_norm, 2 * comm.size * part
        units = room * pieces
        slot_bytes = -(-SLOTS.value * units * region * itemsize // 16) * 16
        if variant not in PUSHES or slot_bytes > comm.workspace.size // SHARE_OF_WORKSPACE:
            return self._behind_all_reduce(call)
        # 16 bytes a thread of what is polled, or 32 of a row if each thread still polls a word.
        by_words = polled * itemsize // 4
        share = by_words // 4 if variant == "one_shot" else min(columns * itemsize // 32, by_words)
        warps = max(1, min(MOST_WARPS, share // threads))
        # Pieces of a row are under way together, so these programs are as many as there are pieces.
        while pieces > 1 and warps > 1 and units * warps > WARPS * comm.num_sms and self._on_gpu:
            warps //= 2
        programs = min(units, WARPS * comm.num_sms // warps) if self._on_gpu else min(units, SIMULATED_PROGRAMS)
        early = programs * warps <= EARLY_WARPS * comm.num_sms
        lanes = max(pieces, power_of_two(warps * threads))
        shape = (pieces, polled, lanes) if kernel is one_shot_rms_norm else (columns, part, polled)
        constants = call.constants()
        # By the constants too: of what programs tell each other, each call writes the words that it reads.
        channel = comm.workspace.channel(
            f"all_reduce_rms_norm of {room} rows of {call.columns} {call.input.dtype} in {shape}, {constants}",
            stream, capturing, slot_bytes + 20 * units, slice(slot_bytes + 16 * units, None),
        )  # fmt: skip
        # The regions first, which are aligned then whatever their number; what programs of a row tell each other.
        slots = channel[:slot_bytes].view({2: torch.int16, 4: torch.int32}[itemsize])
        partials = channel[slot_bytes : slot_bytes + 16 * units].view(torch.int64)
        epochs = channel[slot_bytes + 16 * units :].view(torch.int32)
        front = (comm.workspace.context_tensor, epochs, *((partials,) if kernel is one_shot_rms_norm else ()), slots)
        back = (comm.size, call.columns, *shape, early, *constants)

        def arguments(given: Rows, eps: float) -> tuple:
            out, input, weight, residual, scale, row_scales = given
            return (*front, input, residual, weight, out, scale, row_scales, given.rows, room, eps, *back)

        options = {"maxnreg": REGISTERS} if on_nvidia() else {}
        launch = prepare(kernel, (programs, 1, 1), *arguments(call, 0.5), num_warps=warps, **options)
        return lambda given, eps, stream: launch(stream, addresses(arguments(given, eps)))

    def _behind_all_reduce(self, call: Rows) -> Launch:
        """Of many rows: the sums, and a kernel that normalises them."""
        columns, constants = power_of_two(call.columns), call.constants()

        def arguments(given: Rows, total: torch.Tensor, eps: float) -> tuple:
            out, _, weight, residual, scale, row_scales = given
            return (total, residual, weight, out, scale, row_scales, given.rows, eps, call.columns, columns, *constants)

        def room(given: Rows) -> torch.Tensor:
            return given.out if given.out.dtype == given.input.dtype else torch.empty_like(given.input)

        most = 2 * self._context.get_cu_count() if self._on_gpu else SIMULATED_PROGRAMS
        warps = max(1, min(MOST_WARPS, columns * call.input.itemsize // (16 * threads_per_warp())))
        grid = (min(power_of_two(call.rows), most), 1, 1)
        launch = prepare(rms_norm, grid, *arguments(call, room(call), 0.5), num_warps=warps)

        def enqueue(given: Rows, eps: float, stream: int | None) -> None:
            total = room(given)
            self._context.ccl.all_reduce(total, given.input)
            launch(stream, addresses(arguments(given, total, eps)))

        return enqueue
