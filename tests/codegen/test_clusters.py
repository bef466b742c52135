"""How programs of a cluster meet, in the code for a GPU that has clusters."""

import pytest
import torch

from codegen.offline import compile_for
from codegen.test_every_kernel import ARGUMENTS, OPERATIONS, ROWS
from iris.ops.all_reduce_rms_norm import one_shot_rms_norm, two_shot_rms_norm


def compiled(kernel, pieces, warps, **more):
    cluster = {"CLUSTERED": True, "PIECES": pieces, "PIECE": 512, "PART": 128, "BLOCK": 128, "LANES": 64}
    given = ARGUMENTS | OPERATIONS | ROWS | cluster | more
    return compile_for("sm_90", kernel, *[given[name] for name in kernel.arg_names], num_warps=warps)


@pytest.mark.parametrize(("pieces", "warps", "by_row"), [(2, 1, False), (4, 1, True), (8, 2, True), (16, 2, False)])
@pytest.mark.parametrize("kernel", [one_shot_rms_norm, two_shot_rms_norm], ids=["one shot", "two shot"])
def test_programs_of_a_row_meet_once_in_shared_memory(kernel, pieces, warps, by_row):
    nbytes = 4 * (1 + by_row) * warps * pieces
    in_order = [
        "mbarrier.init", "fence.mbarrier_init.release.cluster",
        f"mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [meeting], {nbytes};",
        "barrier.cluster.arrive.relaxed",
        # What follows is behind the launch before this one.
        "griddepcontrol.wait", "barrier.cluster.wait.acquire", "st.async",
        "mbarrier.try_wait.parity.acquire.cluster",
    ]  # fmt: skip
    code = compiled(kernel, pieces, warps, BY_ROW=by_row)
    assert code.instructions(), "the assembler takes it"
    places = [code.text.index(instruction) for instruction in in_order]
    assert places == sorted(places)
    assert all(code.text.count(instruction) == 1 for instruction in in_order)


def bf16(pieces, warps):
    """What the GPU runs of rows of bf16 in one shot, in order."""
    tensors = {name: torch.zeros(64, dtype=torch.bfloat16) for name in ("input", "residual", "weight", "out")}
    slots = torch.zeros(64, dtype=torch.int16)
    return compiled(one_shot_rms_norm, pieces, warps, slots=slots, BY_ROW=False, **tensors).instructions()


def test_a_row_of_bf16_is_rounded_by_pairs_and_no_warp_waits_for_another_behind_its_data():
    code = bf16(16, 2)
    told = next(number for number, line in enumerate(code) if "STAS" in line)
    *_, last_barrier = (number for number, line in enumerate(code) if "BAR.SYNC" in line)
    assert not any("F2F." in line for line in code)
    assert any("F2FP.BF16" in line for line in code[last_barrier:told]) and last_barrier < told


def test_what_can_be_done_while_data_are_on_their_way_is():
    """Behind the last store to a peer, and in front of the first look for what peers have stored."""
    code = bf16(16, 2)
    stores = [number for number, line in enumerate(code) if "STG" in line]
    looks = next(number for number, line in enumerate(code) if "LDG" in line and "STRONG.SYS" in line)
    entered = next(number for number, line in enumerate(code) if "UCGABAR_WAIT" in line)
    # To three peers, of which each thread has 8 elements; then the slots of four ranks, and the epoch.
    sent, cleared = stores[:3], [number for number in stores[3:] if number < looks]
    assert sent[-1] < entered < looks and len(cleared) == 5
