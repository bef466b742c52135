"""How messages name numbers of bytes, ranks, and values that callers gave."""

import reprlib
from collections.abc import Sequence

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60


def short_repr(value: object) -> str:
    """``repr(value)``, but of a long one a part, with dots for the rest."""
    return _repr.repr(value)


def readable(size: int) -> str:
    """A number of bytes for a message: ``1.5 GiB``, with all digits beside it where rounding hides some."""
    power = min(max(size.bit_length() - 1, 0) // 10, 4)
    if power == 0:
        return f"{size} bytes"
    scaled = size / (1 << 10 * power)
    text = f"{scaled:.4g} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"
    return text if float(f"{scaled:.4g}") == scaled else f"{text} ({size} bytes)"


def names(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 and 3``, ``ranks 0, 1 and 3``."""
    *most, last = [str(rank) for rank in ranks]
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
