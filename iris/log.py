"""Iris' messages: the logger named "iris", printed as ``[Iris] [rank/num_ranks] text`` unless the program logs."""

import logging

from iris.errors import UnknownChoiceError

logger = logging.getLogger("iris")


class _UntilConfigured(logging.StreamHandler):
    """Prints while the program has not set up logging of its own, which then gets the messages by propagation."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not logging.getLogger().handlers


def set_logger_level(level: int) -> None:
    """Show messages of ``level`` and above: ``iris.DEBUG``, ``INFO``, ``WARNING`` or ``ERROR``; INFO at first.

    If the program configures Python's logging, the messages go to its handlers instead.
    """
    try:
        logger.setLevel(level)
    except (TypeError, ValueError):
        raise UnknownChoiceError("level", level, ("iris.DEBUG", "INFO", "WARNING", "ERROR")) from None


if not logger.handlers:
    _console = _UntilConfigured()
    _console.setFormatter(logging.Formatter("[Iris] %(message)s"))
    logger.addHandler(_console)
    set_logger_level(logging.INFO)
