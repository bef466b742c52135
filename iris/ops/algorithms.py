"""The table of the ways to carry a fused operation, and which of them a configuration asks for.

| algorithm | operations | carries | workspace | asked for by |
| --- | --- | --- | --- | --- |
| `vendor` | all | what the vendor's GEMM takes | no | `variant="vendor"`, or another `all_reduce_variant` |
| `copies` | all_gather_matmul, matmul_reduce_scatter | the same | yes | `variant="copies"` |
| `hopper` | all but all_gather_matmul_k | fp16, bf16, fp8; rows of whole 16 bytes; its tiles | yes | `use_gluon=True` |
| `cdna3` | all but all_gather_matmul_k | fp16, bf16; no scales; its tiles | yes | `use_gluon=True`, on AMD |
| `triton` | all | everything | yes | anything else |

The row of each is in the file of that way, an `Algorithm` that says in its `problem` what it cannot carry. Where the
caller gives no configuration, `iris.ops.choose` makes one, by what each way should take. The choice depends on nothing
that may differ between ranks.
"""

import torch

from iris.ops.call import Algorithm, Call
from iris.ops.cdna3.arguments import Cdna3Kernels
from iris.ops.config import FusedConfig
from iris.ops.copies import CopyEngines
from iris.ops.hopper.launch import HopperKernels
from iris.ops.portable import TritonKernels
from iris.ops.vendor import Vendor, by_collective

ALGORITHMS: tuple[type[Algorithm], ...] = (Vendor, CopyEngines, HopperKernels, Cdna3Kernels, TritonKernels)


def asked(call: Call, config: FusedConfig) -> str:
    """The name of the algorithm that a configuration asks for, whether that can carry the call or not."""
    if config.variant != "kernel":
        return config.variant
    if by_collective(call, config):
        return "vendor"
    if config.use_gluon:
        return "cdna3" if torch.version.hip else "hopper"
    return "triton"
