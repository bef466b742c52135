"""How messages name numbers of bytes, and ranks."""

from collections.abc import Sequence


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
