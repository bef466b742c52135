"""Which dtypes an operation may have: what Triton compiles for no GPU is refused in the simulator, too."""

import triton.language as tl

# What products are added up in, where the factors leave no choice.
SUMS_OF = {tl.int8: tl.int32, tl.bfloat16: tl.float32, tl.float32: tl.float32, tl.float64: tl.float64}


def check_arithmetic(dtype: tl.dtype) -> None:
    """Refuse what Triton compiles for no GPU: of fp8 only absolute values, choices and conversions."""
    if dtype.is_fp8():
        raise TypeError(
            f"Arithmetic on {dtype} does not compile, nor do comparisons and scans of it: convert to {tl.float32} "
            "first, and the result back."
        )


def check_conversion(source: tl.dtype, target: tl.dtype, toward_zero: bool) -> None:
    """Refuse what Triton compiles for no GPU."""
    # Those of 4 and those of 5 bits of exponent alike, and AMD's forms of them.
    narrow = [dtype for dtype in (source, target) if dtype.is_fp8()]
    if source != target and (len(narrow) == 2 or (narrow and tl.float64 in (source, target))):
        raise TypeError(
            f"A conversion from {source} to {target} does not compile: convert to {tl.float32} first, and that to "
            f"{target}."
        )
    if toward_zero and (source == tl.float64 or (target.is_fp8() and target != tl.float8e5)):
        raise TypeError(
            f'A conversion from {source} to {target} with fp_downcast_rounding="rtz" does not compile: every GPU '
            "rounds float32 to float16, bfloat16 and fp8e5 in this way."
        )


def check_product(factor: tl.dtype, summed: tl.dtype) -> None:
    """Refuse a product of matrices whose sums have a dtype for which there is no instruction."""
    if SUMS_OF.get(factor, summed) != summed or (summed == tl.float64) != (factor == tl.float64):
        raise TypeError(
            f"A product of {factor} is added to {summed}, for which there is no instruction, nor does it compile. "
            f"Give an accumulator of {SUMS_OF.get(factor, tl.float32)}."
        )
