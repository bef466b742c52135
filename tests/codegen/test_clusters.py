"""How programs of a cluster meet, in the code for a GPU that has clusters."""

import re

import pytest
import torch
from covering import thorough

from codegen.offline import OLDEST, by_turns, compile_for
from codegen.test_every_kernel import arguments_of
from iris.ops.all_reduce_rms_norm import one_shot_rms_norm, two_shot_rms_norm
from iris.ops.sharded_rms_norm import sharded_rms_norm

KERNELS = [one_shot_rms_norm, two_shot_rms_norm, sharded_rms_norm]
# Pieces, warps, and whether a row has a factor of its own.
CASES = [(2, 1, False), (4, 1, True), (8, 2, True), (16, 2, False)]
CLUSTER = {"CLUSTERED": True, "PIECE": 512, "PART": 128, "BLOCK": 128, "LANES": 64}


def arguments(kernel, pieces, **more):
    return arguments_of(kernel, **CLUSTER | {"PIECES": pieces} | more)


def of_bf16(pieces, **more):
    """Of rows of bf16 in one shot: the kernel and its arguments."""
    tensors = {name: torch.zeros(64, dtype=torch.bfloat16) for name in ("input", "residual", "weight", "out")}
    slots = torch.zeros(64, dtype=torch.int16)
    return one_shot_rms_norm, arguments(one_shot_rms_norm, pieces, slots=slots, BY_ROW=False, **tensors, **more)


def of_fp8(size, begin=0):
    """Of rows of bf16 that their owners send as fp8, each with a factor: the kernel and its arguments.

    ``begin``: the byte of an allocation at which ``out`` begins.
    """
    tensors = {name: torch.zeros(64, dtype=torch.bfloat16) for name in ("input", "residual", "weight")}
    tensors |= {"out": torch.zeros(64, dtype=torch.float8_e4m3fn)[begin:], "results": torch.zeros(64, dtype=torch.int8)}
    division = {"PIECE": 1024, "PART": 896, "BLOCK": 1024, "LANES": 64}
    return sharded_rms_norm, arguments_of(
        sharded_rms_norm, PIECES=1, W=size, H=896, BY_ROW=True, LARGEST=448.0, **division, **tensors
    )


@pytest.mark.parametrize(("pieces", "warps", "by_row"), by_turns(CASES))
@pytest.mark.parametrize("kernel", KERNELS, ids=["one shot", "two shot", "by owner"])
def test_programs_of_a_row_meet_once_in_shared_memory(kernel, pieces, warps, by_row):
    nbytes = 4 * (1 + by_row) * warps * pieces
    in_order = [
        "mbarrier.init", "fence.mbarrier_init.release.cluster",
        f"mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [meeting], {nbytes};",
        "barrier.cluster.arrive.relaxed",
        # What follows is after the launch before this one.
        "griddepcontrol.wait", "barrier.cluster.wait.acquire", "st.async",
        "mbarrier.try_wait.parity.acquire.cluster",
    ]  # fmt: skip
    code = compile_for("sm_90", kernel, *arguments(kernel, pieces, BY_ROW=by_row), num_warps=warps)
    assert code.instructions(), "the assembler takes it"
    places = [code.text.index(instruction) for instruction in in_order]
    assert places == sorted(places)
    assert all(code.text.count(instruction) == 1 for instruction in in_order)


def bf16(pieces, warps):
    """What the GPU runs of them, in order."""
    kernel, arguments = of_bf16(pieces)
    return compile_for("sm_90", kernel, *arguments, num_warps=warps).instructions()


def test_a_row_of_bf16_is_rounded_by_pairs_and_no_warp_waits_for_another_after_its_data():
    code = bf16(16, 2)
    sent = next(number for number, line in enumerate(code) if "STAS" in line)
    *_, last_barrier = (number for number, line in enumerate(code) if "BAR.SYNC" in line)
    assert not any("F2F." in line for line in code)
    assert any("F2FP.BF16" in line for line in code[last_barrier:sent]) and last_barrier < sent


def test_what_can_be_done_while_data_are_on_their_way_is():
    """After the last store to a peer, and before the first look for what peers have stored."""
    code = bf16(16, 2)
    stores = [number for number, line in enumerate(code) if "STG" in line]
    looks = next(number for number, line in enumerate(code) if "LDG" in line and "STRONG.SYS" in line)
    entered = next(number for number, line in enumerate(code) if "UCGABAR_WAIT" in line)
    # To three peers, of which each thread has 8 elements; then their slots, and the epoch.
    sent, cleared = stores[:3], [number for number in stores[3:] if number < looks]
    assert sent[-1] < entered < looks and len(cleared) == 4


@pytest.mark.parametrize(("pieces", "warps"), [(16, 2), thorough(8, 1), thorough(1, 8)])
def test_a_launch_that_begins_early_knows_the_first_address_before_it_waits(pieces, warps):
    division = {"CLUSTERED": pieces > 1, "PIECE": 8192 // pieces, "PART": 8192 // pieces}
    kernel, arguments = of_bf16(pieces, W=2, H=7168, **division)
    code = compile_for("sm_90", kernel, *arguments, num_warps=warps).instructions()
    waits = next(number for number, line in enumerate(code) if "ACQBULK" in line)
    loads = next(number for number, line in enumerate(code) if "LDG" in line and number > waits)
    assert not [line for line in code[waits:loads] if re.search(r"\b(IMAD|IADD3|LEA|SHF|VIADD)\b", line)]


@pytest.mark.parametrize("small", [True, False])
def test_the_next_launch_is_let_in_at_once_or_when_all_threads_have_their_data(small):
    kernel, arguments = of_bf16(4, EARLY=small)
    code = compile_for("sm_90", kernel, *arguments, num_warps=2).text
    lets_in, last_look = code.index("griddepcontrol.launch_dependents"), code.rindex("bra POLL")
    assert code.count("griddepcontrol.launch_dependents") == 1 and (lets_in < last_look) == small
    if not small:
        since_barrier = code[code.rindex("bar.sync", last_look, lets_in) : lets_in]
        assert not re.search(r"\$L__BB|\bbra\b", since_barrier), "a thread may come here alone"


@pytest.mark.parametrize("kernel", [one_shot_rms_norm, thorough(two_shot_rms_norm)])
def test_a_thread_stores_the_fp8_that_it_has_computed_and_rounds_sums_by_pairs(kernel):
    """16 elements each: threads exchange the sum of squares and the peak alone, in five steps of a shuffle.

    Each step waits in one loop. (Where threads exchanged elements, Triton 3.6 had three for each.)
    """
    tensors = {name: torch.zeros(64, dtype=torch.bfloat16) for name in ("input", "residual", "weight")}
    tensors |= {"out": torch.zeros(64, dtype=torch.float8_e4m3fn), "slots": torch.zeros(64, dtype=torch.int16)}
    division = {"PIECE": 512, "PART": 256, "BLOCK": 256} if kernel is two_shot_rms_norm else {"PIECE": 512, "PART": 512}
    shape = CLUSTER | division | {"LARGEST": 448.0, "BY_ROW": True}
    code = compile_for("sm_90", kernel, *arguments_of(kernel, W=2, H=8192, PIECES=16, **shape, **tensors), num_warps=1)
    assert code.text.count("shfl.sync") == 10 and "st.shared" not in code.text
    assert code.text.count("bra POLL") == (2 if kernel is two_shot_rms_norm else 1)
    assert not any("F2F." in line for line in code.instructions())


@pytest.mark.parametrize("one_each", [True, False])
def test_a_program_with_several_rows_sends_one_of_them_ahead(one_each):
    """Before the loop it sends the first one, and in the loop the next one. It waits in one place.

    A thread has two vectors of a row. It sends them, clears as many, and stores as many of residual and result.
    """
    whole = {"CLUSTERED": False, "PIECE": 4096, "PART": 4096, "BLOCK": 4096, "LANES": 256}
    kernel, given = of_bf16(1, W=2, H=4096, ONE_EACH=one_each, **whole)
    text = compile_for("sm_90", kernel, *given, num_warps=8).text
    assert text.count("st.global.v4") == (8 if one_each else 10)
    assert text.count("bra POLL") == 1


# Of each rank a thread has four vectors of 16 bytes, or with three ranks eight, of which four are awaited at once.
@pytest.mark.parametrize(("size", "piece", "loops"), [(2, 1024, 1), (3, 2048, 2)])
def test_a_warp_awaits_vectors_in_one_loop_and_leaves_it_as_a_whole(size, piece, loops):
    """Each loop takes a trip to the L2 cache, and loops come one after the other."""
    division = CLUSTER | {"PIECE": piece, "PART": piece, "BLOCK": piece}
    given = arguments_of(one_shot_rms_norm, PIECES=8, W=size, **division)
    text = compile_for("sm_90", one_shot_rms_norm, *given, num_warps=1).text
    assert text.count("bra POLL") == text.count("vote.sync.any.pred again") == loops


@pytest.mark.parametrize("size", [2, thorough(3)])
def test_an_owner_awaits_all_parts_at_once_and_a_rank_the_result_of_each_owner(size):
    """Also where results are of fp8: they are polled 16 bytes at a time, as the parts are.

    Triton 3.6 compiles the wait for parts three times then, one after the other: once for each layout of the sums.
    """
    kernel, given = of_fp8(size)
    text = compile_for("sm_90", kernel, *given, num_warps=2).text
    assert text.count("bra POLL") == text.count("vote.sync.any.pred again") == size + (2 if OLDEST else 0)
    assert text.count("ld.relaxed.sys.global.v4.b32") >= 2 * size - 1


@pytest.mark.parametrize("size", [2, thorough(3), thorough(4)])
def test_an_owners_row_may_lie_anywhere(size):
    """Then it is stored byte by byte, beside the words that travel: see `codegen.converted_pairs`, which is asked."""
    kernel, given = of_fp8(size, begin=4)
    text = compile_for("sm_90", kernel, *given, num_warps=1).text
    assert "st.global.b8" in text and "cvt.rn.satfinite.e4m3x2.f32" in text
