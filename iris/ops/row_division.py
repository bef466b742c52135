"""How the rows of `all_reduce_rms_norm` are divided among programs."""

import functools
from typing import NamedTuple

from iris.ccl.communicator import SIMULATED_PROGRAMS, power_of_two
from iris.ccl.kernel_launch import ALL_REGISTERS, EARLY_LAUNCH, SMALL_LAUNCH
from iris.language.target import launches_early, threads_per_warp

# The variants of all_reduce that have a kernel of their own here, and the steps of each.
STEPS = {"one_shot": 1, "two_shot_push": 2}
# And the variant in which a row is normalised by the rank that owns it: `iris.ops.sharded_rms_norm`.
BY_OWNER = "owners"

# Elements of a row that a program has at least, in one shot, and twice as many in two; and of them that a rank adds up.
SMALLEST_PIECE, SMALLEST_PART = 256, 128
MOST_WARPS = 8
# Registers of a thread at most, on NVIDIA, and of a multiprocessor's those that a launch may take: half of them
# (`iris.ccl.kernel_launch`).
REGISTERS, HALF = 128, ALL_REGISTERS // 2
# Programs of a cluster begin together or not at all. So each takes an eighth of a multiprocessor's registers at most,
# and a warp a quarter of a partition's, which collectives leave in each of the four
# (`iris.ccl.kernel_launch.MOST_REGISTERS`).
CLUSTER_REGISTERS = ALL_REGISTERS // 8
# In one shot between two ranks such a program has up to two warps, or four of fewer registers. So 128 rows of 4096 took
# 5.5 us on 2 H200, and 5.7 with one warp. The parts of more ranks would take more registers.
FEWER_REGISTERS = 64
# Bytes that a thread holds at most for each of its registers, of a program in a cluster or of `BY_OWNER`: of the pieces
# of all ranks, but in two shots; and of one piece and what is computed from it, which is four times as much.
REGISTER_BYTES = 2


class Residency(NamedTuple):
    """What a launch may take of the multiprocessors, and when."""

    small: bool
    """It lets the next launch begin while it waits."""
    early: bool
    """It begins while the launch before it ends."""
    registers: int
    """Of a thread at most."""


def residency(variant: str, size: int, warps: int, registers: int, sms: int | None) -> Residency:
    """That of a launch of so many ``warps`` in all. ``sms``: multiprocessors, or None in the simulator.

    ``registers``: of a thread, of a launch that takes half of a multiprocessor's.
    """
    if sms is None:
        return Residency(small=False, early=False, registers=registers)
    if warps * 32 * registers <= SMALL_LAUNCH * sms:
        return Residency(small=True, early=True, registers=registers)
    # The parts of more ranks, and of two shots, have no room in fewer registers: compiled for sm_90, up to 230 bytes a
    # thread spill. Between two ranks at most 44 do of rows `in_registers`, which take less time than a launch gains.
    early = variant == "one_shot" and size == 2 and launches_early()
    return Residency(small=False, early=early, registers=registers * EARLY_LAUNCH // HALF if early else registers)


class Division(NamedTuple):
    """How the rows of a call are divided among programs."""

    pieces: int
    """Of a row, each with a program of its own if there are several."""
    piece: int
    """Elements of one, rounded up to a power of two."""
    part: int
    """Elements of one that a rank adds up: in one shot all of them."""
    block: int
    """The same, rounded up to a power of two."""
    warps: int
    registers: int
    """Of a thread at most, of a launch that takes half of a multiprocessor's."""
    clustered: bool
    """Whether the programs of a row are a cluster."""

    def programs_at_once(self, sms: int) -> int:
        """Those that so many multiprocessors have a place for."""
        return HALF * sms // (32 * self.registers * self.warps)


def held_bytes(variant: str, size: int, itemsize: int, piece: int) -> int:
    """Of a piece of so many elements: of all ranks' parts of it, where a program has them, or of what comes of them."""
    return piece * itemsize * max(4, 1 if variant == "two_shot_push" else size)


def in_registers(division: Division, variant: str, size: int, itemsize: int) -> bool:
    """Whether a thread has the registers for what it holds of a piece."""
    bytes_ = division.warps * threads_per_warp() * division.registers * REGISTER_BYTES
    return held_bytes(variant, size, itemsize, division.piece) <= bytes_


def divide(variant: str, size: int, room: int, columns: int, itemsize: int, sms: int | None, cluster: int) -> Division:
    """For ``room`` rows of ``columns``, by a variant of `STEPS`, or `BY_OWNER`, among ``size`` ranks.

    ``sms``: multiprocessors, or None in the simulator; ``cluster``: programs that a cluster has at most.
    """
    threads = threads_per_warp()
    # At least as many words as a warp has threads: each polls one of its own (`iris.language.ll`).
    fewest = threads * max(1, 4 // itemsize)
    # Ranks among which a piece is divided; else a program holds those of all ranks.
    ranks = size if variant == "two_shot_push" else 1

    held = functools.partial(held_bytes, variant, size, itemsize)

    def warps_to_hold(piece: int, registers: int) -> int:
        return power_of_two(-(-held(piece) // (threads * registers * REGISTER_BYTES)))

    between_two = variant == "one_shot" and size == 2

    def most_pieces(clustered: bool) -> int:
        """Of a row, as far as there is room for programs."""
        if sms is None or not clustered:
            return (SIMULATED_PROGRAMS if sms is None else 2 * sms) // room
        if not between_two:
            return 4 * sms // room
        # One on each multiprocessor, and more only to hold the row.
        return max(sms // room, -(-held(power_of_two(columns)) // (CLUSTER_REGISTERS * REGISTER_BYTES)))

    def cut(clustered: bool) -> Division:
        """Into as many pieces as there may be."""
        most = min(cluster, most_pieces(clustered)) if clustered else most_pieces(clustered)
        smallest = SMALLEST_PIECE if variant == "one_shot" else max(2 * SMALLEST_PIECE, ranks * SMALLEST_PART)
        pieces = 1
        while 2 * pieces * smallest <= power_of_two(columns) and 2 * pieces <= most:
            pieces *= 2
        if variant == "one_shot":
            piece = part = block = max(fewest, power_of_two(columns) // pieces)
            # 16 bytes a thread of what is polled; or 32 of a piece if each thread still polls a word.
            share = block * itemsize // 16
        elif variant == BY_OWNER:
            # Parts and results begin at multiples of 16 bytes, and a thread polls a word of either, if they are fp8.
            part = -(-columns // (16 * pieces)) * 16
            piece = block = max(4 * threads, power_of_two(part))
            share = block // 16
        else:
            # Parts begin at multiples of 16 bytes.
            part = -(-columns // (8 * pieces * ranks)) * 8
            piece, block = max(fewest, power_of_two(ranks * part)), max(fewest, power_of_two(part))
            share = min(piece * itemsize // 32, block * itemsize // 4)
        if not clustered:
            most_warps = MOST_WARPS
        elif between_two:
            most_warps = max(2, warps_to_hold(piece, FEWER_REGISTERS))
        else:
            most_warps = warps_to_hold(piece, REGISTERS)
        warps = max(1, min(most_warps, share // threads))
        registers = min(REGISTERS, CLUSTER_REGISTERS // (32 * warps)) if clustered and between_two else REGISTERS
        division = Division(pieces, piece, part, block, warps, registers, clustered)
        # Pieces of a row are under way together, so there must be room for all programs.
        while sms and pieces > 1 and division.warps > 1 and room * pieces > division.programs_at_once(sms):
            division = division._replace(warps=division.warps // 2)
        return division

    # Fewer pieces that meet in shared memory are faster than more that meet in L2.
    division = cut(clustered=True)
    small = division.warps * 32 * division.registers <= CLUSTER_REGISTERS
    fits = division.pieces > 1 and small and in_registers(division, variant, size, itemsize)
    return division if fits else cut(clustered=False)
