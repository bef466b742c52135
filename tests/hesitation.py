"""Ranks and programs that are late, each at other times, so that some are a step or a call ahead of others."""

import contextlib
import time

from triton.runtime.interpreter import InterpreterBuilder


@contextlib.contextmanager
def hesitant(ctx, generator, chance=0.03):
    """Programs stop now and then before an access to memory, while other ranks go on; in the simulator, which can."""
    if ctx.device.type == "cuda":
        yield
        return
    names = ["create_masked_load", "create_masked_store"]
    plain = {name: getattr(InterpreterBuilder, name) for name in names}

    def hesitating(access):
        def wait_and_access(*args, **kwargs):
            if generator.random() < chance:
                time.sleep(0.002)
            return access(*args, **kwargs)

        return wait_and_access

    for name in names:
        setattr(InterpreterBuilder, name, hesitating(plain[name]))
    try:
        yield
    finally:
        for name in names:
            setattr(InterpreterBuilder, name, plain[name])
