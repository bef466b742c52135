"""Whole numbers, rounded up."""


def power_of_two(number: int) -> int:
    """The next one."""
    return 1 << (number - 1).bit_length()


def ceil_div(number: int, by: int) -> int:
    return -(-number // by)
