"""The collectives that combine data: which kernel carries each, and with which numbers."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from iris.capture import Line
from iris.ccl import atomic, lamport_all_reduce, pull, ring, two_shot
from iris.ccl.communicator import Communicator, Launch, power_of_two, ready
from iris.ccl.config import Config, ReduceOp
from iris.ccl.reduction import PREMUL_SUM, PremulSum
from iris.ccl.select import Choice, choose, choose_all_reduce
from iris.errors import InvalidConfigError, UnsupportedReductionError, WorkspaceTooSmallError, readable

# Dtypes whose elements can be their own flags: all ones are a NaN (`iris.language.lamport`).
LAMPORT = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2}

# Dtypes that kernels can combine.
ARITHMETIC = {
    *LAMPORT, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex32, torch.complex64, torch.complex128,
    torch.bool, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
}  # fmt: skip

# Variants that push elements which are their own flags, and in how many steps.
PUSHES = {"one_shot": 1, "two_shot_push": 2}
# Their channels are several times as large as the sums, and every stream has its own: a sixteenth at most.
SHARE_OF_WORKSPACE = 16


Op = ReduceOp | PremulSum


class Operands(NamedTuple):
    """What is combined, as kernels take it.

    Attributes
    ----------
    op : str
        The operation on elements of ``dtype``.
    dtype : torch.dtype
        What ``input`` and ``output`` are taken for.
    factors : tuple of torch.Tensor
        Of PREMUL_SUM alone: ``[W]``, each rank's, of the type that sums are formed in.
    """

    op: str
    dtype: torch.dtype
    input: torch.Tensor
    output: torch.Tensor
    factors: tuple[torch.Tensor, ...]

    def ready(
        self, comm: Communicator, kernel: Any, programs: int, num_warps: int, before: tuple, after: tuple,
        admits: bool = False,
    ) -> Launch:  # fmt: skip
        """As `iris.ccl.communicator.ready`, of a kernel that takes factors, or None, behind the output."""
        if not self.factors:
            after = (None, *after)
        tensors = (self.input, self.output, *self.factors)
        # Products of their own: in a fused multiply-add the variants might round differently.
        options = {"enable_fp_fusion": False} if self.factors else {}
        return ready(comm, kernel, programs, num_warps, before, tensors, after, self.dtype, admits, **options)


def check(op: Op, dtype: torch.dtype) -> None:
    """Raise `UnsupportedReductionError` unless ``op`` has a meaning for ``dtype``."""
    if dtype not in ARITHMETIC:
        raise UnsupportedReductionError(f"{dtype} cannot be combined: convert it, or move it as it is.")
    if dtype.is_complex and op not in (ReduceOp.SUM, ReduceOp.AVG, PREMUL_SUM):
        raise UnsupportedReductionError(f"{op} has no meaning for {dtype}, which has no order; SUM and AVG have.")
    if op in (ReduceOp.AVG, PREMUL_SUM) and not (dtype.is_floating_point or dtype.is_complex):
        raise UnsupportedReductionError(
            f"{op} of {dtype} would not be of that type: use SUM and divide, or a float type."
        )


def elements(dtype: torch.dtype, op: Op) -> tuple[torch.dtype, int, str]:
    """What kernels take ``dtype`` for, how many of these an element is, and the operation on them."""
    if dtype.is_complex:
        return {8: torch.float32, 16: torch.float64, 4: torch.float16}[dtype.itemsize], 2, op.value
    if dtype == torch.bool:
        # Any and all: what sum, product, largest and smallest of booleans are.
        return torch.uint8, 1, "max" if op in (ReduceOp.SUM, ReduceOp.MAX) else "min"
    return dtype, 1, op.value


def prepare_all_reduce(
    comm: Communicator, op: Op, output: torch.Tensor, input: torch.Tensor, factors: tuple[torch.Tensor, ...],
    config: Config, line: Line,
) -> Launch:  # fmt: skip
    """A launch of all_reduce on a stream, for tensors that lie like these."""
    dtype, times, name = elements(input.dtype, op)
    operands = Operands(name, dtype, input, output, factors)
    lamport = dtype in LAMPORT and comm.size > 1
    if comm.size == 1:
        choice = Choice(None, "two_shot", config.comm_sms)
    else:
        fitting = pushes(comm, input.nbytes) if lamport else set()
        choice = choose_all_reduce(comm.table, input.nbytes, lamport, fitting, config)
    if choice.variant in PUSHES:
        return _push(comm, choice, operands, times * input.numel(), 0, config, line)
    n = times * input.numel()
    if choice.variant == "ring":
        return _ring(comm, choice, operands, n, config, line)
    if choice.variant in ("atomic", "spinlock"):
        return _atomic(comm, choice, operands, n, config, line)
    launch = _queued(comm, choice, operands, n, None, range(comm.size), config, line)
    return launch if comm.size > 1 or factors else _unless_in_place(launch)


def _unless_in_place(launch: Launch) -> Launch:
    """Of one rank, whose sum is its input: there is nothing to do where that is the output."""

    def enqueue(stream: int | None, input: torch.Tensor, output: torch.Tensor) -> None:
        if input.data_ptr() != output.data_ptr():
            launch(stream, input, output)

    return enqueue


def prepare_reduce_scatter(
    comm: Communicator, op: Op, output: torch.Tensor, input: torch.Tensor, factors: tuple[torch.Tensor, ...],
    config: Config, line: Line,
) -> Launch:  # fmt: skip
    """A launch of reduce_scatter on a stream, for tensors that lie like these."""
    dtype, times, name = elements(input.dtype, op)
    operands = Operands(name, dtype, input, output, factors)
    n = times * output.numel()
    fitting = pushes(comm, output.nbytes) & {"one_shot"} if dtype in LAMPORT and comm.size > 1 else set()
    choice = choose(comm.table, "reduce_scatter", input.nbytes, config, {"two_shot", "pull"} | fitting)
    if choice.variant == "one_shot":
        return _push(comm, choice, operands, n, n, config, line)
    return _queued(comm, choice, operands, n, n, None, config, line)


def prepare_reduce(
    comm: Communicator, op: Op, root: int, output: torch.Tensor, input: torch.Tensor,
    factors: tuple[torch.Tensor, ...], config: Config, line: Line,
) -> Launch:  # fmt: skip
    """A launch of reduce to rank ``root`` of the group on a stream, for tensors that lie like these."""
    dtype, times, name = elements(input.dtype, op)
    operands = Operands(name, dtype, input, output, factors)
    n = times * input.numel()
    choice = Choice(None, "two_shot", config.comm_sms)
    to = range(root, root + 1)
    return _queued(comm, choice, operands, n, None, to, config, line)


def _warps(config: Config, part: int) -> int:
    """Enough for 16 bytes a thread."""
    return config.num_warps or max(1, min(16, part // 512))


def _push_room(comm: Communicator, steps: int, nbytes: int, programs: int) -> tuple[int, int, int]:
    """Bytes of a block's part, blocks that there is room for, and bytes of the channel, for sums of ``nbytes``."""
    part = lamport_all_reduce.part_bytes(comm.size, nbytes // (1 if steps == 1 else comm.size), programs)
    most = power_of_two(max(1, -(-nbytes // (part if steps == 1 else part * comm.size))))
    return part, most, lamport_all_reduce.channel_bytes(comm.size, most, part, steps)


def pushes(comm: Communicator, nbytes: int) -> set[str]:
    """The variants that push, if sums of ``nbytes`` do not take more than their share of the group's memory."""
    room = comm.workspace.limit // SHARE_OF_WORKSPACE
    return {name for name, steps in PUSHES.items() if _push_room(comm, steps, nbytes, 2 * comm.num_sms)[2] <= room}


def _push(
    comm: Communicator, choice: Choice, operands: Operands, n: int, send_step: int, config: Config, line: Line
) -> Launch:
    dtype = operands.dtype
    programs = choice.programs or 2 * comm.num_sms
    steps = PUSHES[choice.variant]
    part_bytes, most, size = _push_room(comm, steps, n * dtype.itemsize, programs)
    use = f"push of {most} blocks of {part_bytes} bytes in {steps} steps of all_reduce or reduce_scatter"
    channel = comm.workspace.channel(use, line, size, slice(size - 4 * most, size))
    part = part_bytes // dtype.itemsize
    blocks = -(-n // (part if steps == 1 else part * comm.size))
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    # The regions first, which are aligned then whatever their number.
    memory = channel.memory
    slots, epochs = memory[: size - 4 * most].view(bits), memory[size - 4 * most :].view(torch.int32)
    # No more warps than there is data for: they poll together.
    warps = min(_warps(config, part_bytes), max(1, part_bytes // 512))
    programs = comm.fitting(max(1, min(blocks, programs)), warps)
    before = (channel.context_tensor, epochs, slots)
    ranks = 1 << (comm.size - 1).bit_length()
    step, same = ((send_step,), (send_step == 0,)) if steps == 1 else ((), ())
    after = (n, most, *step, comm.size, ranks, part, operands.op, *same)
    kernel = {
        (1, False): lamport_all_reduce.one_shot, (1, True): lamport_all_reduce.one_shot.gluon,
        (2, False): lamport_all_reduce.two_shot, (2, True): lamport_all_reduce.two_shot.gluon,
    }[steps, config.use_gluon]  # fmt: skip
    return operands.ready(comm, kernel, programs, warps, before, after, admits=True)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What `iris.ccl.combine.accumulator` says, on the host."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize <= 4 else dtype


def _block(config: Config, dtype: torch.dtype, room: int) -> int:
    """Elements of ``dtype`` of a block: as many as fit in ``room`` bytes, or fewer if the configuration says so."""
    return min(config.block_bytes(dtype.itemsize) or room, room) // dtype.itemsize


def _ring(comm: Communicator, choice: Choice, operands: Operands, n: int, config: Config, line: Line) -> Launch:
    dtype = operands.dtype
    sums, slice_n = accumulator(dtype), config.all_reduce_ring_slice_n
    asked = max(config.block_bytes(sums.itemsize), (slice_n or 0) * sums.itemsize)
    programs = comm.programs(choice.programs, asked, config.few_sms)
    slot_bytes = comm.slot_bytes(programs, config.few_sms)
    block = _block(config, sums, slot_bytes)
    if slice_n:
        if slice_n & (slice_n - 1) or slice_n * sums.itemsize > slot_bytes:
            raise InvalidConfigError(
                f"Config(all_reduce_ring_slice_n={slice_n}) cannot work: a slice of {dtype} is a power of two of "
                f"elements, {slot_bytes // sums.itemsize} at most."
            )
        block = slice_n
    programs = min(programs, -(-n // (block * comm.size)))
    queues = comm.queues(line, programs, config.few_sms)
    before = queues.seen_as(sums)
    after = (
        n, config.all_reduce_num_rings or 2, comm.size, block, queues.slot_bytes // sums.itemsize, operands.op,
        config.all_reduce_distribution != 1,
    )  # fmt: skip
    kernel = ring.ring.gluon if config.use_gluon else ring.ring
    return operands.ready(comm, kernel, programs, _warps(config, block * sums.itemsize), before, after)


def _atomic(comm: Communicator, choice: Choice, operands: Operands, n: int, config: Config, line: Line) -> Launch:
    dtype = operands.dtype
    if operands.op not in ("sum", "avg", "premul_sum"):
        raise UnsupportedReductionError(
            f"Config(all_reduce_variant={choice.variant!r}) adds: it is for SUM and AVG of numbers. Use 'two_shot' or "
            "'auto'."
        )
    # Of what hardware adds atomically; integers wrap in the wider type as in their own.
    sums = accumulator(dtype)
    sums = torch.int32 if sums.itemsize < 4 else sums
    slot = atomic.ACCUMULATOR_BYTES // sums.itemsize
    block = _block(config, sums, atomic.ACCUMULATOR_BYTES)
    programs = min(comm.programs(choice.programs), -(-n // block))
    most = power_of_two(programs)
    size = atomic.channel_bytes(comm.size, most)
    locks = most * 2 * atomic.ACCUMULATOR_BYTES
    flags = locks + most * atomic.LOCK_BYTES
    use = f"accumulators of {most} programs of all_reduce"
    channel = comm.workspace.channel(use, line, size, slice(flags, size))
    memory = channel.memory
    before = (
        channel.context_tensor, memory[flags:].view(torch.int32), memory[locks:flags].view(torch.int32),
        memory[:locks].view(sums),
    )  # fmt: skip
    after = (n, comm.size, block, slot, operands.op, choice.variant == "spinlock")
    kernel = atomic.atomic.gluon if config.use_gluon else atomic.atomic
    return operands.ready(comm, kernel, programs, _warps(config, block * sums.itemsize), before, after)


def _queued(
    comm: Communicator, choice: Choice, operands: Operands, n: int, step: int | None, to: range | None,
    config: Config, line: Line,
) -> Launch:  # fmt: skip
    """Parts of ``step`` elements that lie behind each other, or (None) blocks each with its parts."""
    dtype, input, output = operands.dtype, operands.input, operands.output
    programs = comm.programs(choice.programs, config.block_bytes(dtype.itemsize), config.few_sms)
    slot_bytes = comm.slot_bytes(programs, config.few_sms)
    block = _block(config, dtype, slot_bytes)
    block_step = block * comm.size if step is None else block
    part_step = block if step is None else step
    limit_step = block if step is None else 0
    programs = min(programs, -(-n // block_step))
    queues = comm.queues(line, programs, config.few_sms)
    before = (*queues.seen_as(dtype), comm.heap_table)
    steps = (n, part_step, block_step, limit_step, 0 if step is not None else block)
    sizes = (comm.size, block, queues.slot_bytes // dtype.itemsize, operands.op, to is not None)
    if choice.variant == "pull":
        kernel = pull.pull.gluon if config.use_gluon else pull.pull
        after: tuple = (*steps, input.nbytes, output.nbytes, *sizes)
    else:
        kernel = two_shot.two_shot.gluon if config.use_gluon else two_shot.two_shot
        wanted = to or range(comm.size)
        direct = to is not None and output.nbytes > 65536
        after = (*steps, output.nbytes, wanted.start, wanted.stop, *sizes, direct)
    return operands.ready(comm, kernel, programs, _warps(config, block * dtype.itemsize), before, after)


@dataclass(frozen=True)
class Preparation:
    """What `all_reduce_preamble` returns: proof that the calls it was made for have their memory.

    Attributes
    ----------
    communicator : Communicator
        Of the group that was given, or of all ranks.
    size : int
        Bytes of the largest input.
    dtype : torch.dtype
    any_group : bool
        Whether no group was given: then it is for those of any group of the context.
    """

    communicator: Communicator
    size: int
    dtype: torch.dtype
    any_group: bool = False

    def covers(self, comm: Communicator, output: torch.Tensor, input: torch.Tensor) -> bool:
        """Whether a call may use it."""
        return self._covers_group(comm) and input.dtype == self.dtype and input.nbytes <= self.size

    def check(self, comm: Communicator, output: torch.Tensor, input: torch.Tensor) -> None:
        """Raise `WorkspaceTooSmallError` unless a call may use it."""
        if self.covers(comm, output, input):
            return
        if self._covers_group(comm):
            mine, other = f"{readable(self.size)} of {self.dtype}", f"has {readable(input.nbytes)} of {input.dtype}"
        elif comm.heap is self.communicator.heap:
            mine, other = f"the group of ranks {self.communicator.ranks}", f"is of the group of ranks {comm.ranks}"
        else:
            mine, other = "another Iris context", "is of this one"
        raise WorkspaceTooSmallError(
            f"The workspace was prepared for {mine}; this all_reduce {other}. Call all_reduce_preamble() with these "
            "tensors and this group; one that is called without a group is for all groups of its context."
        )

    def _covers_group(self, comm: Communicator) -> bool:
        return comm is self.communicator or (self.any_group and comm.heap is self.communicator.heap)
