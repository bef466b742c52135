"""How device functions tell the simulator what they do, where the operations themselves do not show it."""

import triton


@triton.constexpr_function
def note(event, *arguments):
    """In the simulator alone, and there under ``if in_simulator()``: report one of `iris.simulator.noted`'s events."""
    # Imported here: Triton follows the global names of a constexpr_function.
    from iris.simulator import noted

    getattr(noted, event)(*arguments)
