"""Dynamic quantisation to fp8 with a scale for each row (token), as programs write it.

``scale = amax(abs(rows), -1, keepdim=True) / 448``, bounded from below before or after the division, and
``result = (rows / scale).to(float8_e4m3fn)``, where a clamp to ±448 before the conversion changes nothing.
"""

from typing import NamedTuple

import torch
from torch.fx import Node

from iris.compat.inductor import value_of
from iris.inductor.nodes import CONVERSIONS, ancestors, arguments, aten, calls, only_user, users

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
# A lower bound on the largest of a row, up to which the operator's own, 1e-12 on the scale, may stand for it: what is
# normalised is zero in the whole row, or has far larger numbers.
TINY = 1e-9


class Quantised(NamedTuple):
    """``result = rows / scale`` as `FP8`; scale is ``[..., 1]``, float32."""

    scale: Node
    result: Node


def quantised(rows: Node) -> Quantised | None:
    """The quantisation of ``rows``, if nothing else uses them. Followed forward: abs, amax, scale, division, to fp8."""
    # Some convert to float32 first, for the amax, the division or both.
    wide = [rows, *(each for each in users(rows, CONVERSIONS) if value_of(each).dtype == torch.float32)]
    magnitudes = [magnitude for each in wide for magnitude in users(each, aten.abs.default)]
    for peak in [peak for each in magnitudes for peak in users(each, aten.amax.default) if _is_of_rows(peak)]:
        scale = _scale(peak)
        if scale is None:
            continue
        for quotient in users(scale, aten.div.Tensor):
            result = _rounded(quotient) if quotient.args[0] in wide and quotient.args[1] is scale else None
            if result is not None and _are_only_results(rows, scale, result):
                return Quantised(scale, result)
    return None


def _is_of_rows(peak: Node) -> bool:
    """Whether an amax is along the last dimension, which it keeps."""
    _, *given = arguments(peak)
    return not peak.kwargs and given in ([[-1], True], [[value_of(peak).dim() - 1], True])


def _scale(peak: Node) -> Node | None:
    """The scale of each row, float32: the node after ``peak`` where it is both divided by 448 and bounded from below.

    Without a bound a row of zeros would become NaN, as it does not by the operator. So that is something else.
    """
    node, factor, is_bounded = peak, 1.0, False  # of what node is: peak * factor
    while not is_bounded or abs(factor * LARGEST - 1) > 1e-6:
        step = only_user(node)
        number = arguments(step)[1] if step is not None and len(step.args) == 2 else None
        if calls(step, CONVERSIONS) and value_of(step).dtype in (torch.float32, value_of(peak).dtype):
            pass
        elif calls(step, aten.clamp_min.default) and isinstance(number, float) and 0 < number <= TINY * factor:
            is_bounded = True
        elif calls(step, aten.div.Tensor) and step.args[0] is node and isinstance(number, (int, float)):
            factor /= number
        elif calls(step, aten.mul.Tensor) and step.args[0] is node and isinstance(number, (int, float)):
            factor *= number
        else:
            return None
        node = step
    return node if value_of(node).dtype == torch.float32 else None


def _rounded(quotient: Node) -> Node | None:
    """The quotient as `FP8`, after clamps to its range if there are any."""
    node = quotient
    while (step := only_user(node)) is not None:
        if calls(step, CONVERSIONS) and value_of(step).dtype == FP8:
            return step
        bounds = {aten.clamp_min.default: -LARGEST, aten.clamp_max.default: LARGEST}
        if step.target not in bounds or step.args[1] != bounds[step.target]:
            return None
        node = step
    return None


def _are_only_results(rows: Node, scale: Node, result: Node) -> bool:
    """Whether only these two of all that is computed from the rows have other users: the operator returns no more."""
    made = {each for each in ancestors(result, rows) | {result} if rows in ancestors(each, rows)}
    inner = (made | {rows}) - {scale, result}
    return all(user in made for each in inner for user in each.users)
