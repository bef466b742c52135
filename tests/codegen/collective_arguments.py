"""Arguments of the collectives' kernels for the compile checks: four ranks, and tensors as launches give them."""

import torch

from iris.ccl.kernel_arguments import (
    BlockTiling,
    ExchangeForm,
    LamportChannel,
    LLChannel,
    PartLayout,
    PieceLayout,
    PieceTiling,
    QueueMemory,
)

INT16, INT32, INT64 = (torch.zeros(4096, dtype=dtype) for dtype in (torch.int16, torch.int32, torch.int64))
BF16, FLOAT32 = (torch.zeros(4096, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
W = 4
COLLECTIVES = {
    **dict.fromkeys(["counts", "epochs"], INT32),
    **dict.fromkeys(["words", "slots", "heap_table", "input", "output"], INT64),
    **dict.fromkeys(["send_counts", "send_displs", "recv_counts", "recv_displs"], INT64),
    "regions": 1,
    **dict.fromkeys(["rows", "to_first", "from_first", "root", "factor"], 2),
    **dict.fromkeys(["to_last", "from_last"], 4),
    **dict.fromkeys(["row", "in_pitch", "out_pitch", "send_step", "recv_step", "length"], 4096),
    **dict.fromkeys(["part_step", "block_step", "limit_step", "out_part_step", "in_length", "max_blocks"], 4096),
    **{"flags": INT32, "locks": INT32, "accumulators": FLOAT32, "rings": 2, "factors": None},
    **{"W": W, "RANKS": 4, "BLOCK": 4096, "BLOCK_M": 1, "BLOCK_N": 4096, "SLOT": 8192, "PART": 2048, "OP": "sum"},
    **dict.fromkeys(["PROGRAMS", "QUEUES"], 8),
    **dict.fromkeys(["SAME", "DIRECT", "FLAT", "ALL_REDUCE", "STRIDING", "LOCKED", "PULLS", "ONE_EACH", "EARLY"], True),
    **dict.fromkeys(["PARTITIONED", "ROOTED"], False),
}
ELEMENTS = {
    "exchange": {"ROWS": "apart"},
    "one_hop": {"input": INT32, "output": INT32, "BLOCK": 1024, "BLOCKS": 64},
    **dict.fromkeys(["one_shot", "two_shot_push"], {"slots": INT16, "input": BF16, "output": BF16}),
    **dict.fromkeys(["two_shot", "two_shot_direct"], {"slots": BF16, "input": BF16, "output": BF16}),
    "pull": {"slots": BF16, "input": BF16, "output": BF16, "HALVES": 2},
    "exchange_v": {"heap_table": None},
    "ring": {"heap_table": None, "slots": FLOAT32, "input": BF16, "output": BF16},
    "atomic": {"input": BF16, "output": BF16},
}


def collective_in_tuples(kernel, given):
    """The arguments of a kernel that are tuples, of what ``given`` has by the names of their fields."""
    given = given | {"context": given["context_tensor"]}
    channel = LLChannel if kernel.fn.__name__ == "one_hop" else LamportChannel
    layout = PieceLayout if "root" in kernel.arg_names or "rows" in kernel.arg_names else PartLayout
    tiling = PieceTiling if "FORM" in kernel.arg_names else BlockTiling
    tuples = {"queues": QueueMemory, "channel": channel, "layout": layout, "TILING": tiling, "FORM": ExchangeForm}
    return {
        name: kind(**{field: given[field] for field in kind._fields})
        for name, kind in tuples.items()
        if name in kernel.arg_names
    }
