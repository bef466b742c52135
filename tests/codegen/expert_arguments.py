"""Arguments of the kernels of expert parallelism, as `iris.experts.expert_parallel` gives them."""

import torch

from codegen.collective_arguments import BF16, FLOAT32, INT16, INT32, INT64
from iris.experts.combine import combine
from iris.experts.dispatch import dispatch
from iris.experts.kernel_arguments import Bias, Form, Layout, LowLatencySlot, Scales, Slot
from iris.experts.low_latency.combine import combine as combine_few
from iris.experts.low_latency.dispatch import dispatch as dispatch_few
from iris.experts.low_latency.memory import few_tokens
from iris.experts.memory import extents
from iris.experts.padding import zero_padding
from iris.experts.routing import WHOLE
from iris.experts.rows import BY_BLOCK, BY_ROW, GROUP, NOT
from iris.experts.statistics import Statistics
from iris.experts.token_rows import GIVEN

EXPERT_KERNELS = (dispatch, combine, dispatch_few, combine_few, zero_padding)
# Of four ranks, as DeepSeek-V3 has them, in bf16.
EXTENTS = extents(4, num_experts=256, top_k=8, max_tokens=128, hidden=7168, dtype=torch.bfloat16, programs=128)
SLOT = Slot(INT64, *[INT32] * 8, FLOAT32, BF16, BF16)
LAYOUT = Layout(BF16, INT32, INT32, INT32)
EXPERTS = {
    **{"slot": SLOT, "layout": LAYOUT, "EXTENTS": EXTENTS, "topk_ids": INT64, "topk_weights": FLOAT32, "places": INT32},
    **dict.fromkeys(["x", "y", "out"], BF16),
    **{
        "PHASE": WHOLE.value,
        "scales": None,
        "num_tokens": None,
        "statistics": None,
        "bias": Bias(),
        "FORM": Form(),
        "tokens": 128,
        "weighted": 1,
        "alignment": 0,
        "WEIGHTS": GIVEN.value,
    },
    **{"rows": INT16, "counts": INT32, "offsets": INT32, "ROOM": 32768, "WIDTH": 7168, "BLOCK": 8192},
}

# What combine adds to its result, and where kernels count.
TWO_BIASES = Bias(BF16, BF16)
COUNTED = Statistics(INT64, INT64, INT64)

# The kernels for few tokens, of which as many programs as tokens have a whole row each, or several share one.
FEW_SLOT = LowLatencySlot(INT64, *[INT32] * 4, *[INT64] * 4, FLOAT32, INT64, INT32, INT32)


def few(target, tokens, ranks=2):
    """Their sizes."""
    sizes = {"num_experts": 256, "top_k": 8, "max_tokens": tokens, "hidden": 7168, "dtype": torch.bfloat16}
    return few_tokens(extents(ranks, **sizes, programs=128), torch.bfloat16, 64 if target.startswith("gfx") else 32)


def arguments_in(folder):
    """By name, those of the kernels in a folder of the library, if they are of experts."""
    of_few = {"slot": FEW_SLOT, "EXTENTS": few("sm_90", 128)}
    return {"experts": EXPERTS, "low_latency": EXPERTS | of_few}.get(folder, {})


def forms(target):
    """What dispatch of fp8 takes in the place of some of these, by name; of the type that the target has."""
    narrow = torch.float8_e4m3fnuz if target == "gfx942" else torch.float8_e4m3fn
    found = {}
    for name, scales, way, dtype in (
        ("given by row", 1, NOT, torch.uint8),
        ("given by block", 56, NOT, torch.uint8),
        ("by row", 1, BY_ROW, narrow),
        ("by block", 56, BY_BLOCK, narrow),
    ):
        rows = BF16.view(torch.uint8).view(dtype)
        found[name] = {
            "x": rows if way == NOT else BF16,
            "slot": SLOT._replace(rows=rows),
            "layout": LAYOUT._replace(rows=rows),
            "scales": Scales(FLOAT32 if way == NOT else None, FLOAT32, FLOAT32),
            "FORM": Form(scales, 1 << (scales - 1).bit_length(), way.value, GROUP, 448.0),
        }
    return found
