"""Which piece goes where in the collectives that only move data; the table is in `iris.ccl.exchange`."""

import math
from typing import NamedTuple

from iris.ccl.call import Call, extent
from iris.ccl.kernel_arguments import PieceLayout


class Pieces(NamedTuple):
    """Distances and lengths are in bytes.

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
    matched : bool
        Whether sizes are compared: of what is addressed to one rank.
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

    @property
    def nbytes(self) -> int:
        """Of one piece."""
        return self.rows * self.row

    def word_bytes(self, call: Call) -> int:
        """Of the widest element in which the pieces of ``call`` can be moved."""
        return word_bytes(call, self.row, self.in_pitch, self.out_pitch, self.send_step, self.recv_step)

    def layout(self, word: int) -> PieceLayout:
        """In elements of so many bytes, as kernels take it."""
        distances = (self.row, self.in_pitch, self.out_pitch, self.send_step, self.recv_step)
        return PieceLayout(*(each // word for each in distances))


def pieces_of(call: Call) -> Pieces:
    """The pieces of a call, as its collective and its rank have it."""
    size, length = call.comm.size, call.output.nbytes
    everyone, nobody, root = range(size), range(0), range(call.root, call.root + 1)
    is_root = call.comm.rank == call.root
    match call.collective:
        case "all_gather":
            return _all_gather(call)
        case "all_to_all":
            return _all_to_all(call)
        case "broadcast":
            to = everyone if is_root else nobody
            return Pieces(1, length, length, length, 0, 0, length, to, root)
        case "gather":
            piece, sources = call.input.nbytes, everyone if is_root else nobody
            return Pieces(1, piece, piece, piece, 0, piece, length, root, sources, matched=True)
        case "scatter":
            to = everyone if is_root else nobody
            return Pieces(1, length, length, length, length, 0, length, to, root, matched=True)
        case "send":
            return Pieces(1, length, length, length, 0, 0, length, root, nobody, matched=True)
        case "recv":
            return Pieces(1, length, length, length, 0, 0, length, nobody, root, matched=True)
    raise ValueError(f"{call.collective} moves no pieces.")


def _all_gather(call: Call) -> Pieces:
    input, config = call.input, call.config
    everyone, piece = range(call.comm.size), input.nbytes
    # Tiles are of the shape, which all ranks share. Whether rows are apart is for each rank to know.
    if input.dim() == 2 and (config.block_size_m or config.block_size_n or not input.is_contiguous()):
        rows, row, pitch = len(input), input.shape[1] * input.itemsize, input.stride(0) * input.itemsize
    else:
        rows, row, pitch = 1, piece, piece
    apart = not call.output.is_contiguous()
    step = call.output.stride(0) * call.output.itemsize if apart else piece
    return Pieces(rows, row, pitch, row, 0, step, extent(call.output), everyone, everyone)


def _all_to_all(call: Call) -> Pieces:
    input, size = call.input, call.comm.size
    row = input.shape[-1] * input.itemsize // size
    rows = input.numel() // input.shape[-1] if input.numel() else 0
    pitch = row * size if input.is_contiguous() else input.stride(0) * input.itemsize
    return Pieces(rows, row, pitch, row * size, row, row, call.output.nbytes, range(size), range(size))


def word_bytes(call: Call, *lengths: int) -> int:
    """Of the widest element, 8 at most, that divides these, and the places at which the call's tensors begin."""
    begins = (tensor.storage_offset() * tensor.itemsize for tensor in (call.input, call.output))
    return math.gcd(8, *lengths, *begins, call.input.data_ptr(), call.output.data_ptr())
