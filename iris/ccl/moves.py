"""The collectives that only move data: how each is an exchange of pieces, and which kernel carries it."""

import math
from dataclasses import dataclass

import torch

from iris.capture import Line
from iris.ccl import one_hop
from iris.ccl.broadcast import broadcast
from iris.ccl.communicator import Communicator, Launch, power_of_two, ready
from iris.ccl.config import Config
from iris.ccl.exchange import exchange as exchange_kernel
from iris.ccl.exchange_v import exchange_v
from iris.ccl.queue import COUNTS, LONGEST_QUEUED
from iris.ccl.select import choose
from iris.errors import InvalidConfigError
from iris.language.target import threads_per_warp

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Exchange:
    """One collective as an exchange: see the table in `iris.ccl.exchange`. Distances and lengths in bytes.

    Attributes
    ----------
    rows, row : int
        A piece is ``rows`` rows of ``row`` bytes.
    in_pitch, out_pitch : int
        From one row of a piece to the next, in the input and the output.
    send_step, recv_step : int
        From one destination's piece to the next in the input, and one source's in the output.
    length : int
        Of the whole output.
    to, sources : range
        The ranks that get something from this one, and those that it gets something from; itself among them counts as
        a copy.
    """

    rows: int
    row: int
    in_pitch: int
    out_pitch: int
    send_step: int
    recv_step: int
    length: int
    to: range
    sources: range
    matched: bool = False
    """Whether sizes are compared: of what is addressed to one rank."""


def all_gather(comm: Communicator, input: torch.Tensor, output: torch.Tensor, config: Config) -> Exchange:
    everyone, piece = range(comm.size), input.nbytes
    # Tiles are of the shape, which all ranks share. Whether rows are apart is for each rank to know.
    if input.dim() == 2 and (config.block_size_m or config.block_size_n or not input.is_contiguous()):
        rows, row, pitch = len(input), input.shape[1] * input.itemsize, input.stride(0) * input.itemsize
    else:
        rows, row, pitch = 1, piece, piece
    return Exchange(rows, row, pitch, row, 0, piece, output.nbytes, everyone, everyone)


def all_to_all(comm: Communicator, input: torch.Tensor, output: torch.Tensor) -> Exchange:
    everyone = range(comm.size)
    row = input.shape[-1] * input.itemsize // comm.size
    rows = input.numel() // input.shape[-1] if input.numel() else 0
    pitch = row * comm.size if input.is_contiguous() else input.stride(0) * input.itemsize
    return Exchange(rows, row, pitch, row * comm.size, row, row, output.nbytes, everyone, everyone)


def gather(comm: Communicator, root: int, input: torch.Tensor, output: torch.Tensor) -> Exchange:
    piece, sources = input.nbytes, range(comm.size) if comm.rank == root else range(0)
    return Exchange(1, piece, piece, piece, 0, piece, output.nbytes, range(root, root + 1), sources, True)


def scatter(comm: Communicator, root: int, input: torch.Tensor, output: torch.Tensor) -> Exchange:
    piece, to = output.nbytes, range(comm.size) if comm.rank == root else range(0)
    return Exchange(1, piece, piece, piece, piece, 0, output.nbytes, to, range(root, root + 1), True)


def word_bytes(*values: int | torch.SymInt) -> int:
    """The widest element, of 8 bytes at most, that divides all these addresses and distances."""
    return math.gcd(8, *map(int, values))


def prepare_exchange(
    comm: Communicator, exchange: Exchange, output: torch.Tensor, input: torch.Tensor, config: Config,
    line: Line, peer: int | None = None,
) -> Launch:  # fmt: skip
    """A launch of ``exchange`` on a stream, for tensors that lie like these.

    ``peer``: the rank with which this one exchanges a message that the others know nothing of.
    """
    e = exchange
    everyone = range(comm.size)
    programs = config.comm_sms
    partitioned = False
    if e.to == e.sources == everyone:
        partitioned = config.all_gather_variant == "partitioned" and e.send_step == 0
        collective, piece = "all_to_all" if e.send_step else "all_gather", e.rows * e.row
        asked = config.all_gather_variant or config.block_size_m or config.block_size_n
        hops = {"one_hop"} if piece <= one_hop.LARGEST_PIECE and not asked else set()
        choice = choose(comm.table, collective, piece, config, {"exchange"} | hops)
        if choice.variant == "one_hop":
            return _one_hop(comm, e, output, input, config, line)
        programs = choice.programs
    lengths = (e.row, e.in_pitch, e.out_pitch, e.send_step, e.recv_step)
    begins = (input.storage_offset() * input.itemsize, output.storage_offset() * output.itemsize)
    word = word_bytes(*lengths, *begins, input.data_ptr(), output.data_ptr())
    few_sms = config.few_sms and peer is None
    if peer is None:
        if e.matched:
            # As between two ranks: calls of all sizes share their queues, which are to be small.
            programs = programs or comm.p2p_programs
        programs = comm.programs(programs, config.block_bytes(input.itemsize), few_sms)
    else:
        programs = comm.programs(min(programs or comm.p2p_programs, comm.p2p_programs))
    if partitioned:
        if programs < comm.size:
            raise InvalidConfigError(
                f"Config(all_gather_variant='partitioned') needs a program for each of {comm.size} ranks; there may "
                f"be {programs}: raise comm_sms, choose smaller blocks, or use 'persistent'."
            )
        programs = programs // comm.size * comm.size
    slot_bytes = comm.slot_bytes(programs, few_sms) if peer is None else comm.p2p_slot_bytes
    # Rows that are apart on this rank need not be on others, so their blocks are those of a piece in one row.
    tiled = config.block_shape is not None
    rows = "one" if e.rows == 1 and not tiled else "together" if e.send_step == 0 and not tiled else "apart"
    if rows == "together":
        block_m, block_n = 1, slot_bytes // word
    elif not tiled:
        block_m, block_n = _block(slot_bytes // word, e, word)
    else:
        block_m, block_n = config.block_that_fits(input.itemsize, slot_bytes)
        # A block is so many elements on all ranks, also where they lie in a way that takes narrower words.
        word = min(word, block_n * input.itemsize)
        block_n = block_n * input.itemsize // word
    blocks = -(-e.rows // block_m) * -(-(e.row // word) // block_n)
    if rows == "together":
        blocks = -(-e.rows * e.row // (block_n * word))
    most = programs
    if partitioned:
        programs = max(1, min(programs // comm.size, blocks)) * comm.size
    else:
        programs = max(1, min(programs, blocks))
    if peer is None:
        # What is matched meets in the same queues whatever its size.
        queues = comm.queues(line, most if e.matched else programs, few_sms)
    else:
        queues = comm.point_to_point(peer, len(e.to) > 0, line)
    warps = config.num_warps or max(1, min(16, block_m * block_n * word // 512))
    dtype = WORDS[word]
    before = (*queues.seen_as(dtype), comm.heap_table)
    after = (
        e.rows, e.row // word, *(length // word for length in lengths[1:]), e.length,
        e.to.start, e.to.stop, e.sources.start, e.sources.stop,
        comm.size, block_m, block_n, queues.slot_bytes // word, e.send_step == 0, rows, partitioned,
        *((most, queues.counts.numel() // COUNTS.value) if e.matched else (0, 0)),
    )  # fmt: skip
    kernel = exchange_kernel.gluon if config.use_gluon else exchange_kernel
    direct = e.rows * e.row > LONGEST_QUEUED.value
    # CUDA may hold up the loading of a kernel until those that run have ended (CUDA C++ Programming Guide, "Lazy
    # Loading"). Two ranks that send to each other and then receive must not wait for that, so a message of any length
    # loads what those of other lengths need, and both ends of a message are the same kernel.
    launches = {
        d: ready(comm, kernel, programs, warps, before, (input, output), (*after, d), dtype)
        for d in ({direct} if peer is None else {True, False})
    }
    return launches[direct]


def _one_hop(
    comm: Communicator, e: Exchange, output: torch.Tensor, input: torch.Tensor, config: Config,
    line: Line, root: int | None = None,
) -> Launch:  # fmt: skip
    lengths = (e.row, e.in_pitch, e.out_pitch, e.send_step, e.recv_step)
    begins = (input.storage_offset() * input.itemsize, output.storage_offset() * output.itemsize)
    word = min(4, word_bytes(*lengths, *begins, input.data_ptr(), output.data_ptr()))
    piece, most = e.rows * e.row, config.comm_sms or comm.num_sms
    block = one_hop.block_words(piece, comm.size, most)
    epochs_bytes, slots_bytes = one_hop.channel_bytes(comm.size, block)
    use = f"one hop of {block} words of all_gather, all_to_all or broadcast"
    size = epochs_bytes + slots_bytes
    channel = comm.workspace.channel(use, line, size, slice(0, epochs_bytes))
    memory = channel.memory
    epochs, slots = memory[:epochs_bytes].view(torch.int32), memory[epochs_bytes:].view(torch.int64)
    programs = max(1, min(-(-piece // (4 * block)) * comm.size, most))
    flat = e.rows == 1
    steps = tuple(length // word for length in lengths)
    blocks = one_hop.LARGEST_PIECE // (4 * block)
    after = (piece // word, *steps, 0 if root is None else root, comm.size, block, blocks, flat, root is not None)
    kernel = one_hop.one_hop.gluon if config.use_gluon else one_hop.one_hop
    before = (channel.context_tensor, epochs, slots)
    # No more warps than there are words for: see `ll_recv`.
    warps = min(config.num_warps or 4, block // threads_per_warp())
    programs = comm.fitting(programs, warps)
    return ready(comm, kernel, programs, warps, before, (input, output), after, WORDS[word], admits=True)


def _block(elements: int, exchange: Exchange, word: int) -> tuple[int, int]:
    """Rows and columns of a block of so many elements."""
    if exchange.rows == 1:
        return 1, elements
    block_n = min(elements, power_of_two(exchange.row // word))
    return elements // block_n, block_n


def prepare_broadcast(comm: Communicator, root: int, tensor: torch.Tensor, config: Config, line: Line) -> Launch:
    """A launch of broadcast from rank ``root`` of the group on a stream, for tensors that lie like this."""
    to = range(comm.size) if comm.rank == root else range(0)
    e = Exchange(1, tensor.nbytes, tensor.nbytes, tensor.nbytes, 0, 0, tensor.nbytes, to, range(root, root + 1))
    hops = {"one_hop"} if tensor.nbytes <= one_hop.LARGEST_PIECE else set()
    passed_on = {"deal", "pull"} if comm.size > 2 else set()
    choice = choose(comm.table, "broadcast", tensor.nbytes, config, {"exchange"} | hops | passed_on)
    if choice.variant == "one_hop":
        return _one_hop(comm, e, tensor, tensor, config, line, root)
    if choice.variant == "exchange":
        return prepare_exchange(comm, e, tensor, tensor, config, line)
    word = word_bytes(tensor.nbytes, tensor.storage_offset() * tensor.itemsize, tensor.data_ptr())
    programs = comm.programs(choice.programs)
    block = comm.slot_bytes(programs, config.few_sms) // word
    n = tensor.nbytes // word
    programs = min(programs, -(-n // (block * (comm.size - 1))))
    queues = comm.queues(line, programs, config.few_sms)
    before = (*queues.seen_as(WORDS[word]), comm.heap_table)
    after = (n, tensor.nbytes, root, comm.size, block, queues.slot_bytes // word, choice.variant == "pull")
    kernel = broadcast.gluon if config.use_gluon else broadcast
    warps = config.num_warps or max(1, min(16, block * word // 512))
    return ready(comm, kernel, programs, warps, before, (tensor, tensor), after, WORDS[word])


def prepare_exchange_v(
    comm: Communicator, output: torch.Tensor, input: torch.Tensor, rows: tuple[torch.Tensor, ...], config: Config,
    line: Line,
) -> Launch:  # fmt: skip
    """A launch of all_to_all_v on a stream, for tensors that lie like these; it takes the ``rows`` as well."""
    if config.use_gluon:
        raise InvalidConfigError("Config(use_gluon=True): all_to_all_v has no Gluon form; leave use_gluon out.")
    begins = (input.storage_offset() * input.itemsize, output.storage_offset() * output.itemsize)
    word = word_bytes(input.itemsize, *begins, input.data_ptr(), output.data_ptr())
    # What lies in the pieces is known to the device alone, so all programs come.
    programs = comm.programs(config.comm_sms)
    queues = comm.queues(line, programs, config.few_sms)
    dtype = WORDS[word]
    before = queues.seen_as(dtype)
    after = (input.itemsize // word, comm.size, queues.slot_bytes // word, queues.counts.numel() // COUNTS.value)
    warps = config.num_warps or max(1, min(16, queues.slot_bytes // 512))
    return ready(comm, exchange_v, programs, warps, before, (input, output, *rows), after, dtype)
