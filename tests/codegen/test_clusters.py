"""How programs of a cluster meet, in the code for a GPU that has clusters."""

import pytest

from codegen.offline import compile_for
from codegen.test_every_kernel import ARGUMENTS, OPERATIONS, ROWS
from iris.ops.all_reduce_rms_norm import one_shot_rms_norm, two_shot_rms_norm

PIECES = 16
ARRIVES = f"mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [meeting], {8 * PIECES};"
BEFORE_THE_LAUNCHS_TURN = [
    "mbarrier.init", "fence.mbarrier_init.release.cluster", ARRIVES, "barrier.cluster.arrive.relaxed",
]  # fmt: skip
BEHIND_THE_DATA = ["barrier.cluster.wait.acquire", "st.async", "mbarrier.try_wait.parity.acquire.cluster"]
IN_ORDER = [*BEFORE_THE_LAUNCHS_TURN, "griddepcontrol.wait", *BEHIND_THE_DATA]


@pytest.mark.parametrize("kernel", [one_shot_rms_norm, two_shot_rms_norm], ids=["one shot", "two shot"])
def test_programs_of_a_row_meet_once_in_shared_memory(kernel):
    cluster = {"CLUSTERED": True, "PIECES": PIECES, "PIECE": 256, "PART": 64, "BLOCK": 64, "LANES": 32}
    given = ARGUMENTS | OPERATIONS | ROWS | cluster
    text = compile_for("sm_90", kernel, *[given[name] for name in kernel.arg_names]).text
    places = [text.index(instruction) for instruction in IN_ORDER]
    assert places == sorted(places)
    assert all(text.count(instruction) == 1 for instruction in IN_ORDER)
