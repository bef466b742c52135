"""`note`: tells the simulator what a device function does, where its operations alone do not show it."""

import triton


@triton.constexpr_function
def note(event, *arguments):
    """Call the function ``event`` of `iris.simulator.noted`. Only under ``if in_simulator()``."""
    # Imported here: Triton follows the global names of a constexpr_function.
    from iris.simulator import noted

    getattr(noted, event)(*arguments)
