"""The time limit of waits in kernels.

``IRIS_WAIT_TIMEOUT_S`` (seconds, read when Iris is imported; unset or 0: no limit) bounds every wait of the library on
a GPU. A wait that exceeds it reports to the host (`iris.failures.device_record`) and returns. In the simulator the
scheduler sees every wait itself (`iris.simulator.grid`).
"""

import os

from iris.errors import InvalidSettingError

VARIABLE = "IRIS_WAIT_TIMEOUT_S"


def _nanoseconds() -> int:
    text = os.environ.get(VARIABLE, "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise InvalidSettingError(VARIABLE, text, "a number of seconds, 0 for no limit")
    return int(seconds * 1e9)


NANOSECONDS: int = _nanoseconds()
"""The limit; 0 for none."""
