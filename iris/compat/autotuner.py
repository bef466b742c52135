"""How Triton's autotuner measures configurations and keeps the results.

`triton.runtime.Autotuner._bench` and `check_disk_cache` are there in Triton 3.6 to 3.9. Where one is gone,
`replace_measurements` raises `MissingPartError`, and with it the import of `iris` in the simulator.
"""

from collections.abc import Callable

from triton.runtime import Autotuner

from iris.compat.parts import required

_WHY = "take the same configuration on every rank in the simulator"


def replace_measurements(bench: Callable, check_disk_cache: Callable) -> None:
    """Let ``bench(self, *args, config, **options)`` give a configuration's times.

    And let ``check_disk_cache(self, key, configs, choose)`` be asked for the times that the disk has; ``choose()``
    measures them.
    """
    required("triton.runtime:Autotuner._bench", _WHY)
    required("triton.runtime:Autotuner.check_disk_cache", _WHY)
    Autotuner._bench, Autotuner.check_disk_cache = bench, check_disk_cache
