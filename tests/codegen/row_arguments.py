"""Arguments for the kernels that normalise rows, which take them in tuples."""

from codegen.collective_arguments import BF16, FLOAT32, INT16, INT32, INT64
from iris.ops.kernel_arguments import NormChannel, NormTensors, RowDivision, ShardedNormChannel

# The modules of these kernels.
OF_ROWS = ("all_reduce_rms_norm", "rms_norm", "sharded_rms_norm")
# Rows of 3600 in two pieces, of which four ranks have a part each: no power of two.
ROWS = {
    **{"epochs": INT32, "partials": INT64, "factors": INT64, **dict.fromkeys(["slots", "parts", "results"], INT16)},
    **{"scale": None, "row_scales": FLOAT32, "eps": 1e-6},
    **dict.fromkeys(["input", "residual", "weight"], BF16),
    **dict.fromkeys(["rows", "apart", "room"], 256),
    **{"H": 3600, "ROW": 4096, "PART": 456, "BLOCK": 512, "PIECES": 2, "PIECE": 2048},
    **{"LANES": 128, "CLUSTERED": False, "EARLY": True, "ONE_EACH": True},
    **{"ADDS": True, "SCALED": False, "BY_ROW": False, "LARGEST": 0.0},
}
# The same where a rank adds up whole pieces.
OWNED_ROWS = {"PART": 1808, "BLOCK": 2048}


def rows_for(module):
    """Arguments of a kernel in one of `OF_ROWS`, by the names of old."""
    return ROWS | (OWNED_ROWS if module == "sharded_rms_norm" else {})


def rows_in_tuples(module, given):
    """Those that are tuples, of what is ``given`` by these names."""
    channel = ShardedNormChannel if module == "sharded_rms_norm" else NormChannel
    wanted = {"residual": given["ADDS"], "scale": given["SCALED"], "row_scales": given["BY_ROW"]}
    tensors = {name: given[name] if wanted.get(name, True) else None for name in NormTensors._fields}
    return {
        "channel": channel(given["context_tensor"], *(given[name] for name in channel._fields[1:])),
        "tensors": NormTensors(**tensors),
        "DIVISION": RowDivision(**{name: given[name] for name in RowDivision._fields}),
    }
