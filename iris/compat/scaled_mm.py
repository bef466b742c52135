"""Matrix products of fp8, by cuBLAS or hipBLASLt.

`torch._scaled_mm` is there in torch 2.9 to 2.13. Where it is gone, its call raises `MissingPartError`. The public
`torch.nn.functional.scaled_mm`, which only newer releases have, takes other arguments.
"""

from iris.compat.parts import function

scaled_mm = function("torch:_scaled_mm", "multiply matrices of fp8 with torch")
