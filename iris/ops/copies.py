"""Products by the vendor's GEMM, a chunk at a time, while the copy engines move other chunks.

No multiprocessor moves data.

all_gather_matmul: each rank puts its rows of A where peers can read them, and multiplies them. Meanwhile the copy
engine fetches the rows of one peer after the other, its right neighbour's first, in chunks, and each is multiplied when
it is there. Ranks fetch from different peers at a time, so every link is busy both ways. Over the link, each rank: W -
1 times its ``[m, K]`` in, one step.

matmul_reduce_scatter: each rank multiplies the rows of its peers first, those of its right neighbour before all, and
the copy engine stores every chunk to its owner. Its own rows come last; then it adds up what has come, in float32 and
in the order of ranks. Over the link, each rank: (W - 1) / W times M N elements out, one step.

Products are on the caller's stream, copies on one of their own, joined by events. Flags are told and awaited by kernels
of one program, in the stream of the copies that they are about: a kernel begins when the copy before it is over, and is
over when the copy after it begins (CUDA C++ Programming Guide, "Streams").

The counts are those of `iris.ops.counts`, with one epoch. ``ready[r]``: rank r's memory may be read, or written, in
this call. ``done``: how often a peer has moved all that it moves from this rank's memory, or to it; in each call every
peer does, once. No call is over before it is complete, since others use the same memory: then nobody reads the rows any
more, and parts may be added up.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
import triton
import triton.language as tl

from iris import simulator
from iris.ccl.protocols import CollectivesContext
from iris.language.context import DeviceContext
from iris.language.dependent_launch import gdc_wait
from iris.ops.buffers import Buffers, Needs
from iris.ops.call import Algorithm, Call
from iris.ops.config import FusedConfig
from iris.ops.counts import DONE, READY, end, signal_ready
from iris.ops.kernel import most_programs
from iris.ops.vendor import Product, refusal
from iris.runtime.launch import addresses, prepare

# The operations that can be carried out so.
COPIED = ("all_gather_matmul", "matmul_reduce_scatter")
# A rank's rows are cut in so many chunks at most. The vendor's GEMM has tiles of about so many rows and columns, and
# takes as long for few of them as for one on each multiprocessor.
CHUNKS = 2
TILE = 8 if simulator.ACTIVE else 128


# One binary for all peers.
@triton.jit(do_not_specialize=["peer"])
def handshake(context_tensor, counts, peer, W: tl.constexpr, WHAT: tl.constexpr):
    """One step of a call's protocol: a word to all peers or to one, the wait for theirs, or at its end its epoch."""
    gdc_wait()
    ctx = DeviceContext.initialize(context_tensor, num_ranks=W)
    epoch = tl.load(counts)
    if WHAT == "signal ready":
        signal_ready(ctx, counts, epoch + 1)
    elif WHAT == "wait ready":
        ctx.wait(counts + READY + peer, epoch + 1, cmp="reached")
    elif WHAT == "signal done":
        ctx.signal(counts + DONE, 1, peer, op="add")
    elif WHAT == "wait done":
        ctx.wait(counts + DONE, (epoch + 1) * (W - 1), cmp="reached")
    else:
        tl.static_assert(WHAT == "end", "unknown step")
        end(counts, epoch + 1)


# A number of rows may be 1, and is no constant then.
@triton.jit(do_not_specialize=["share"])
def add_parts(
    parts, bias, out, share, N, stride_om, stride_on, W: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr
):
    """``out = parts[0] + ... + parts[W - 1] + bias``; parts are ``[W, share, N]``. Nothing over the link."""
    gdc_wait()
    n = share.to(tl.int64) * N
    for block in range(tl.program_id(0), tl.cdiv(n, BLOCK), tl.num_programs(0)):
        i = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = i < n
        total = tl.load(parts + i, mask=mask, other=0).to(tl.float32)
        for rank in tl.static_range(1, W):
            total += tl.load(parts + rank * n + i, mask=mask, other=0).to(tl.float32)
        if BIASED:
            total += tl.load(bias + i % N, mask=mask, other=0).to(tl.float32)
        tl.store(out + (i // N * stride_om + i % N * stride_on), total.to(out.dtype.element_ty), mask=mask)


class Copies:
    """The stream of copies that goes with one workspace, and its handshakes with the peers, ready to be launched."""

    # As `iris.ops.workspaces` makes what this takes views of.
    @torch.inference_mode(False)
    def __init__(self, buffers: Buffers, context: CollectivesContext) -> None:
        rank, size, device = context.cur_rank, context.num_ranks, context.device
        self.rank, self.size, self.programs = rank, size, most_programs(context)
        # By rank.
        self.data = [buffers.data if peer == rank else buffers.peer(peer) for peer in range(size)]
        self._memory = buffers.context_tensor, buffers.counts
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._launches: dict[object, Callable[..., None]] = {}
        # All before the first: compiling must not keep a peer waiting.
        for what in ("signal ready", "wait ready", "signal done", "wait done", "end"):
            args = (*self._memory, 0, size, what)
            self._launches[what] = prepare(handshake, (1, 1, 1), *args, num_warps=1)

    def handshake(self, what: str, peer: int = 0) -> None:
        """Enqueue a step of one on the current stream."""
        args = (*self._memory, peer, self.size, what)
        self._launches[what](self._current(), addresses(args))

    def add(self, parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """Enqueue `add_parts` on the current stream."""
        launch, args = self._adder(parts, bias, out)
        launch(self._current(), addresses(args))

    def _adder(self, parts: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> tuple:
        """`add_parts`, ready to be launched, and all that it gets."""
        args = (parts, bias, out, *out.shape, *out.stride(), self.size, bias is not None, 2048)
        key = (out.stride(), *(None if x is None else (x.dtype, x.data_ptr() % 16) for x in (bias, out)))
        if key not in self._launches:
            self._launches[key] = prepare(add_parts, (self.programs, 1, 1), *args, num_warps=4)
        return self._launches[key], args

    def prepare(self, call: Call) -> None:
        """Compile what carries this call besides."""
        if call.name == "matmul_reduce_scatter":
            self._adder(self.parts(call)[0], call.bias, call.out)

    def parts(self, call: Call) -> torch.Tensor:
        """Of matmul_reduce_scatter: ``[2, W, share, N]``, what came and what is to be sent, by rank."""
        return self.data[self.rank].view(2, self.size, *call.out.shape)

    def _current(self) -> int | None:
        return None if self._stream is None else torch.cuda.current_stream().cuda_stream

    def peers(self) -> list[int]:
        """In the order in which this rank moves data: at a time each rank has another peer."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """What is enqueued here goes on the stream of copies."""
        with torch.cuda.stream(self._stream) if self._stream is not None else contextlib.nullcontext():
            yield

    def fork(self) -> None:
        """Copies come after what the caller's stream has so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        """The caller's stream goes on after the copies so far."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def tiles(rows: int, columns: int) -> int:
    """Of a product."""
    return -(-rows // TILE) * -(-columns // TILE)


def chunks(rows: int, columns: int, programs: int) -> list[slice]:
    """The rows of one rank, cut between tiles: if in several, each one's product has a tile for each multiprocessor."""
    lines = -(-rows // TILE)
    number = max((n for n in range(2, CHUNKS + 1) if tiles(lines // n * TILE, columns) >= programs), default=1)
    cuts = [min(rows, lines * i // number * TILE) for i in range(number + 1)]
    return [slice(begin, stop) for begin, stop in zip(cuts, cuts[1:], strict=False)]


def _all_gather_matmul(copies: Copies, call: Call) -> None:
    m, K = call.a.shape
    shared = copies.data[copies.rank].view(copies.size, m, K)
    # Peers read this rank's own rows alone, so the rows of the others may come where the caller keeps them.
    kept = call.gathered_by_rank(copies.size)
    gathered = shared if kept is None else kept
    product = Product(call)

    def multiply(a: torch.Tensor, begin: int, end: int) -> None:
        product(call.out[begin:end], a, call.bias, slice(begin, end))

    copies.fork()
    with copies.beside():
        shared[copies.rank].copy_(call.a)
        copies.handshake("signal ready")
        if kept is not None:
            kept[copies.rank].copy_(call.a)
    multiply(call.a, copies.rank * m, (copies.rank + 1) * m)
    for peer in copies.peers():
        theirs = copies.data[peer].view_as(shared)[peer]
        with copies.beside():
            copies.handshake("wait ready", peer)
        for rows in chunks(m, call.out.shape[1], copies.programs):
            with copies.beside():
                gathered[peer, rows].copy_(theirs[rows], non_blocking=True)
            copies.join()
            multiply(gathered[peer, rows], peer * m + rows.start, peer * m + rows.stop)
        with copies.beside():
            copies.handshake("signal done", peer)
    with copies.beside():
        copies.handshake("wait done")
        copies.handshake("end")
    copies.join()


def _matmul_reduce_scatter(copies: Copies, call: Call) -> None:
    share, N = call.out.shape
    parts, sent = copies.parts(call)
    product = Product(call)

    def multiply(out: torch.Tensor, begin: int, end: int) -> None:
        product(out, call.a[begin:end], None, slice(begin, end))

    copies.fork()
    with copies.beside():
        copies.handshake("signal ready")
    for peer in copies.peers():
        theirs = copies.data[peer].view(2, copies.size, share, N)[0, copies.rank]
        with copies.beside():
            copies.handshake("wait ready", peer)
        for rows in chunks(share, N, copies.programs):
            multiply(sent[peer, rows], peer * share + rows.start, peer * share + rows.stop)
            copies.fork()
            with copies.beside():
                theirs[rows].copy_(sent[peer, rows], non_blocking=True)
        with copies.beside():
            copies.handshake("signal done", peer)
    multiply(parts[copies.rank], copies.rank * share, (copies.rank + 1) * share)
    copies.join()
    copies.handshake("wait done")
    copies.add(parts, call.bias, call.out)
    copies.handshake("end")


class CopyEngines(Algorithm):
    """Products on the current stream, copies on a stream that belongs to the workspace."""

    name = variant = "copies"
    operations = COPIED

    def problem(self, call: Call, config: FusedConfig) -> str | None:
        if call.name not in COPIED:
            return f"FusedConfig(variant='copies') is for {' and '.join(COPIED)}, and not for {call.title}."
        return refusal(call, config, "variant")

    def needs(self, call: Call, config: FusedConfig) -> Needs:
        kind = call.kind(config, direct=False)
        if call.name == "all_gather_matmul":
            return Needs(kind, 0, self._context.num_ranks * call.a.numel(), call.a.dtype)
        # Parts that came, and parts to be sent.
        return Needs(kind, 0, 2 * len(call.a) * call.b.shape[1], call.out.dtype)

    def prepare(self, call: Call, config: FusedConfig, buffers: Buffers) -> None:
        self._copies(buffers).prepare(call)

    def enqueue(self, call: Call, config: FusedConfig, buffers: Buffers, stream: int | None) -> None:
        carry = _all_gather_matmul if call.name == "all_gather_matmul" else _matmul_reduce_scatter
        carry(self._copies(buffers), call)

    def _copies(self, buffers: Buffers) -> Copies:
        """Those of the workspace, made with its first call."""
        if buffers.mover is None:
            buffers.mover = Copies(buffers, self._context)
        return buffers.mover
