"""Arguments of the kernels of expert parallelism, as `iris.experts.expert_parallel` gives them."""

import torch

from codegen.collective_arguments import BF16, FLOAT32, INT32, INT64
from iris.experts.combine import GIVEN
from iris.experts.kernel_arguments import Layout, Slot
from iris.experts.memory import extents

# Of four ranks, as DeepSeek-V3 has them, in bf16.
EXTENTS = extents(4, num_experts=256, top_k=8, max_tokens=128, hidden=7168, dtype=torch.bfloat16)
SLOT = Slot(INT64, *[INT32] * 8, FLOAT32, BF16, BF16)
LAYOUT = Layout(BF16, INT32, INT32, INT32)
EXPERTS = {
    **{"slot": SLOT, "layout": LAYOUT, "EXTENTS": EXTENTS, "topk_ids": INT64, "topk_weights": FLOAT32, "places": INT32},
    **dict.fromkeys(["x", "y", "out"], BF16),
    **{"tokens": 128, "weighted": 1, "alignment": 0, "WEIGHTS": GIVEN.value},
}
