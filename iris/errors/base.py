"""What every error of Iris is."""


class IrisError(Exception):
    """Base of every error that Iris raises on purpose."""
