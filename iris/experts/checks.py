"""What `ctx.experts` and its calls may be asked for: checked before anything is enqueued."""

from typing import Any, NamedTuple

import torch

from iris.arg_parser import count
from iris.ccl.checks import check_tensor
from iris.errors import InvalidConfigError, InvalidExpertsError, WrongDeviceError, short_repr
from iris.experts.config import DEFAULT, LAYOUTS, ExpertsConfig
from iris.experts.kernel_arguments import Form
from iris.experts.pending import PendingCall
from iris.experts.received import Received
from iris.experts.rows import BY_BLOCK, BY_ROW, GROUP, NOT
from iris.language.barrier import LANES
from iris.language.target import architecture

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Without an infinity, minus zero, and all NaNs but one.
FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
QUANTIZE = {None: NOT.value, "fp8_row": BY_ROW.value, "fp8_block128": BY_BLOCK.value}
# Elements of a row of fp8 are a multiple of these: 16 bytes.
NARROW_MULTIPLE = 16
# A program has a number for each expert in its registers, and compares a token's choices with each other.
MOST_EXPERTS, MOST_CHOICES = 4096, 128
# Rows and pairs are numbered by int32.
MOST_ROWS = (1 << 31) - 1
IDS = (torch.int32, torch.int64)


class Limits(NamedTuple):
    """Of what a rank may give. ``messages``: rows are such, as those of few tokens are."""

    max_tokens: int
    hidden: int
    top_k: int
    num_experts: int
    dtype: torch.dtype
    device: torch.device
    messages: bool


def sizes(size: int, hosts: int, **asked: object) -> dict[str, int]:
    """The sizes that `ctx.experts` was asked for, for a group of ``size`` ranks."""
    found = {}
    for name, value in asked.items():
        number = count(value)
        if number is None:
            raise InvalidExpertsError(
                f"ctx.experts({name}={short_repr(value)}) cannot work: {name} is 1 or more, a number."
            )
        found[name] = number
    experts, choices = found["num_experts"], found["top_k"]
    if size > LANES.value * hosts:
        raise InvalidExpertsError(
            f"ctx.experts() is for groups of up to {LANES.value} ranks of a host, and this one has {size // hosts}."
        )
    if experts % size:
        raise InvalidExpertsError(
            f"ctx.experts(num_experts={experts}) cannot work among {size} ranks: each has as many experts as the "
            f"others, so num_experts is a multiple of {size}."
        )
    if experts > MOST_EXPERTS:
        raise InvalidExpertsError(f"ctx.experts(num_experts={experts}) cannot work: there are at most {MOST_EXPERTS}.")
    if choices > min(experts, MOST_CHOICES):
        raise InvalidExpertsError(
            f"ctx.experts(top_k={choices}) cannot work: a token has at most {min(experts, MOST_CHOICES)} of {experts} "
            "experts."
        )
    rows = size * found["max_tokens"] * max(choices, experts // size)
    if rows > MOST_ROWS or found["hidden"] > MOST_ROWS:
        raise InvalidExpertsError(
            f"ctx.experts(max_tokens={found['max_tokens']}, hidden={found['hidden']}) cannot work: rows and elements "
            f"of a row are numbered by 32 bits, and there may be {rows} rows."
        )
    return found


def check_dtype(dtype: object) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise InvalidExpertsError(
            f"ctx.experts(dtype={short_repr(dtype)}) cannot work: rows are of torch.bfloat16, torch.float16 or "
            "torch.float32."
        )
    return dtype


def check_config(config: object) -> ExpertsConfig:
    """``config``, or the default."""
    used = DEFAULT if config is None else config
    if not isinstance(used, ExpertsConfig):
        raise InvalidConfigError(
            f"config={short_repr(config)} is not possible: it is an iris.experts.ExpertsConfig, or None."
        )
    return used


def check_layout(layout: object, config: ExpertsConfig) -> str:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise InvalidExpertsError(
            f"dispatch(layout={short_repr(layout)}) is not possible; it takes one of {', '.join(map(repr, LAYOUTS))}."
        )
    if layout not in config.layouts:
        raise InvalidExpertsError(
            f"dispatch(layout={layout!r}) has no memory: ExpertsConfig(layouts={config.layouts}) sets none aside. Name "
            "it there."
        )
    return layout


def check_given(
    call: str,
    role: str,
    tensor: Any,
    device: torch.device,
    shape: tuple[int, ...] | None,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """That it is a tensor on the device, of this shape, if one is given, and one of these dtypes."""
    check_tensor(call, tensor)
    if tensor.device != device:
        raise WrongDeviceError(
            f"The {role} of {call}() is on {tensor.device}, and this context works on {device}. Move it there first."
        )
    shape = tuple(tensor.shape) if shape is None else shape
    if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
        wanted = " or ".join(str(each) for each in dtypes)
        raise InvalidExpertsError(
            f"{call}() takes {role} of shape {list(shape)} and {wanted}; it got {list(tensor.shape)} of {tensor.dtype}."
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise InvalidExpertsError(
            f"{call}() has no gradients, and its {role} requires one. Call it under torch.no_grad(), or with "
            f"{role}.detach()."
        )


def check_dispatch(
    limits: Limits, x: Any, topk_ids: Any, topk_weights: Any, x_scales: Any, quantize: object, num_tokens: Any
) -> Form:
    """Raise unless these fit; how the rows travel."""
    tokens = check_tokens(x, limits.max_tokens, limits.hidden)
    check_given("dispatch", "x", x, limits.device, (tokens, limits.hidden), (limits.dtype, *NARROW))
    if limits.messages:
        check_messages(x)
    form = form_of(x, x_scales, quantize, limits.dtype)
    check_choices(limits, tokens, topk_ids, topk_weights)
    if num_tokens is not None:
        check_given("dispatch", "num_tokens", num_tokens, limits.device, (1,), (torch.int32,))
    return form


def check_choices(limits: Limits, tokens: int, topk_ids: Any, topk_weights: Any) -> None:
    pairs = (tokens, limits.top_k)
    check_given("dispatch", "topk_ids", topk_ids, limits.device, pairs, IDS)
    if topk_weights is not None:
        check_given("dispatch", "topk_weights", topk_weights, limits.device, pairs, (torch.float32,))


def check_combine(
    limits: Limits, tokens: int, y: Any, rows: torch.Size, topk_weights: Any, out: Any, biases: tuple[Any, ...]
) -> None:
    """Raise unless these fit. ``rows``: the shape of what was received."""
    check_given("combine", "y", y, limits.device, tuple(rows), (limits.dtype,))
    if topk_weights is not None:
        pairs = (tokens, limits.top_k)
        check_given("combine", "topk_weights", topk_weights, limits.device, pairs, (torch.float32,))
    for role, tensor in (("out", out), *[("bias", each) for each in biases]):
        check_given("combine", role, tensor, limits.device, (tokens, limits.hidden), (limits.dtype,))


def check_received(received: Any, owner: object) -> None:
    """That a combine of this owner may have it."""
    if isinstance(received, PendingCall):
        raise InvalidExpertsError(f"combine() takes what dispatch() returns in the end: call wait() of {received!r}.")
    if not isinstance(received, Received) or received._owner is not owner:
        given = (
            f"{short_repr(received)} is of another one" if isinstance(received, Received) else f"got {named(received)}"
        )
        raise InvalidExpertsError(
            f"combine() takes, as received, what dispatch() of the same ctx.experts() has returned, and {given}."
        )
    received._check_in_use("combine")


def check_out(out: torch.Tensor) -> None:
    """That a kernel can write it: each tensor anew, whatever is known of those of its shape."""
    if not out.is_contiguous() or out.is_neg():
        raise InvalidExpertsError(f"combine() takes an out that is contiguous; its strides are {out.stride()}.")


def form_of(x: torch.Tensor, x_scales: Any, quantize: object, wide: torch.dtype) -> Form:
    """How the rows of a dispatch travel."""
    tokens, hidden = x.shape
    blocks = -(-hidden // GROUP)
    if not isinstance(quantize, str | None) or quantize not in QUANTIZE:
        raise InvalidExpertsError(
            f"dispatch(quantize={short_repr(quantize)}) is not possible; it takes one of "
            f"{', '.join(map(repr, QUANTIZE))}."
        )
    narrow = x.dtype in NARROW
    if narrow != (x_scales is not None) or (narrow and quantize is not None):
        raise InvalidExpertsError(
            f"dispatch() got x of {x.dtype}, x_scales {'not ' if x_scales is None else ''}given, "
            f"quantize={quantize!r}. An x of fp8 has x_scales and is not quantised; one of {wide} has none."
        )
    if not narrow and quantize is None:
        return Form()
    if hidden % NARROW_MULTIPLE:
        raise InvalidExpertsError(
            f"dispatch() of fp8 takes rows whose elements are a multiple of {NARROW_MULTIPLE}, and hidden is {hidden}."
        )
    if quantize is None:
        check_given("dispatch", "x_scales", x_scales, x.device, None, (torch.float32,))
        if tuple(x_scales.shape) not in ((tokens, 1), (tokens, blocks)):
            raise InvalidExpertsError(
                f"dispatch() takes x_scales of shape [{tokens}, 1], a factor a token, or [{tokens}, {blocks}], one for "
                f"each {GROUP} elements; it got {list(x_scales.shape)}."
            )
        scales = x_scales.shape[1]
    else:
        scales = 1 if quantize == "fp8_row" else blocks
    lanes = 1 << (scales - 1).bit_length()
    group = min(GROUP, 1 << (hidden - 1).bit_length())
    return Form(scales, lanes, QUANTIZE[quantize], group, torch.finfo(quantized_dtype()).max)


def in_words(dtype: torch.dtype, form: Form) -> str:
    """How rows of this dtype travel, for a comparison of what ranks call."""
    if not form.MOVES:
        return "choices alone"
    quantize = next(name for name, kind in QUANTIZE.items() if kind == form.QUANTIZE)
    return f"x of {dtype}, quantize={quantize!r}, {form.SCALES} scales a row"


def quantized_dtype() -> torch.dtype:
    """What rows are rounded to: e4m3, as the GPU has it."""
    return torch.float8_e4m3fnuz if architecture() == "gfx942" else torch.float8_e4m3fn


def check_messages(x: torch.Tensor) -> None:
    """That rows of this dtype can be messages, as those of few tokens are: bytes of ones are no number."""
    if x.dtype in FNUZ:
        raise InvalidExpertsError(
            f"dispatch() got x of {x.dtype}, and this ctx.experts() is for few tokens, whose rows are messages: "
            "those are of torch.float8_e4m3fn or torch.float8_e5m2. Convert x, or make the experts with an "
            "ExpertsConfig(low_latency=False)."
        )


def check_tokens(x: Any, max_tokens: int, hidden: int) -> int:
    """How many tokens ``x`` has."""
    check_tensor("dispatch", x)
    if x.dim() != 2 or x.shape[1] != hidden:
        raise InvalidExpertsError(f"dispatch() takes x of shape [tokens, {hidden}]; it got {list(x.shape)}.")
    check_number(x, max_tokens)
    return len(x)


def check_number(rows: torch.Tensor, max_tokens: int) -> None:
    """That there is memory for as many tokens as this has rows."""
    if len(rows) > max_tokens:
        raise InvalidExpertsError(
            f"dispatch() got {len(rows)} tokens, and ctx.experts(max_tokens={max_tokens}) has set memory aside for "
            f"{max_tokens}. Ask for more there, or dispatch them in parts."
        )


def biases_of(bias: object) -> tuple[torch.Tensor, ...]:
    """What `combine` is to add, one or two."""
    found = (bias,) if isinstance(bias, torch.Tensor) else bias
    if not isinstance(found, tuple) or len(found) not in (1, 2):
        raise InvalidExpertsError(f"combine() takes as bias a tensor, or a tuple of two, and got {named(bias)}.")
    for each in found:
        check_tensor("combine", each)
    return found


def named(value: object) -> str:
    """What a program has given, where that is no matter of its numbers."""
    number = f" of {len(value)}" if isinstance(value, tuple | list) else ""
    return "None" if value is None else f"a {type(value).__name__}{number}"


def check_apart(out: int, nbytes: int, y: int, y_nbytes: int, biases: tuple[int, ...]) -> None:
    """That a result does not lie where y does, nor across what is added to it: addresses, and bytes from there on.

    Of a bias it has as many bytes.
    """
    if out < y + y_nbytes and y < out + nbytes:
        raise InvalidExpertsError(
            "combine() got an out that overlaps its y in memory: it would write over rows that are still to be added "
            "up. Give it an out of its own, or none."
        )
    for bias in biases:
        if 0 < abs(out - bias) < nbytes:
            raise InvalidExpertsError(
                f"combine() got an out that begins {abs(out - bias)} bytes {'after' if out > bias else 'before'} its "
                f"bias and lies across it, {nbytes} bytes each. Give it the same memory, or memory apart."
            )


def check_numbers(topk_ids: torch.Tensor, num_experts: int) -> None:
    """That each is an expert, or -1 for none. Blocks the host: in the simulator and in debug mode."""
    wrong = (topk_ids < -1) | (topk_ids >= num_experts)
    if wrong.any():
        token, choice = (int(each) for each in wrong.nonzero()[0])
        raise InvalidExpertsError(
            f"dispatch(): choice {choice} of token {token} is expert {int(topk_ids[token, choice])}; experts are "
            f"numbered from 0 to {num_experts - 1}, and -1 is none."
        )
