"""Refuses operations on types for which Triton compiles them for no GPU. (numpy would calculate them all the same.)"""

import triton.language as tl

from iris.simulator.shapes import unwrapped

# The dtype of a product's accumulator, by that of its factors, where there is only one.
ACCUMULATORS = {tl.int8: tl.int32, tl.bfloat16: tl.float32, tl.float32: tl.float32, tl.float64: tl.float64}


def check_arithmetic(dtype: tl.dtype) -> None:
    """Refuse arithmetic on fp8: Triton compiles only absolute values, `tl.where` and conversions of it."""
    if dtype.is_fp8():
        raise TypeError(
            f"Arithmetic on {dtype} does not compile, nor do comparisons and scans of it: convert to {tl.float32} "
            "first, and the result back."
        )


def check_conversion(source: tl.dtype, target: tl.dtype, toward_zero: bool) -> None:
    """Refuse a conversion that Triton compiles for no GPU. ``toward_zero``: its rounding."""
    # All fp8 formats: with 4 and with 5 bits of exponent, and AMD's "fnuz" forms.
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


def check_product(factor: tl.dtype, accumulator: tl.dtype) -> None:
    """Refuse a product of matrices whose accumulator has a dtype for which there is no instruction."""
    wanted = ACCUMULATORS.get(factor, accumulator)
    if wanted != accumulator or (accumulator == tl.float64) != (factor == tl.float64):
        raise TypeError(
            f"A product of {factor} is added to {accumulator}, for which there is no instruction, nor does it compile. "
            f"Give an accumulator of {ACCUMULATORS.get(factor, tl.float32)}."
        )


def check_swap(pointer: tl.tensor, **values: tl.tensor) -> None:
    """Refuse ``values`` of `tl.atomic_cas` unless they have the type and the shape of the elements: it converts none.

    A whole number may have a sign or none: the compiler's integers have neither.
    """
    element, shape = pointer.dtype.element_ty, list(map(unwrapped, pointer.shape))

    def bits(dtype: tl.dtype) -> object:
        return dtype.primitive_bitwidth if dtype.is_int() else dtype

    for name, value in values.items():
        if bits(value.dtype) != bits(element) or list(map(unwrapped, value.shape)) != shape:
            raise TypeError(
                f"atomic_cas() with {name} of {value.type} does not compile for a pointer to {element} of shape "
                f"{shape}: it converts and broadcasts nothing. Give tl.full({shape}, {name}, {element})."
            )
