"""Settings in the environment that are on or off."""

import os

from iris.errors import InvalidSettingError


def switched_on(variable: str) -> bool:
    """Whether ``variable`` is 1; 0, nothing and absence are off."""
    text = os.environ.get(variable, "0")
    if text not in ("", "0", "1"):
        raise InvalidSettingError(variable, text, "1 for on, 0 for off")
    return text == "1"
