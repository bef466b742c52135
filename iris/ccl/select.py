"""Which variant, and how many programs: from what is equal on all ranks, never from where a tensor lies.

The crossovers are measured (docs/performance.md); `TABLE` holds those of machines that were there.
"""

from dataclasses import dataclass

from iris.ccl.config import Config
from iris.errors import InvalidConfigError

# Largest input in bytes that one shot, and pushing in two shots, carry.
ONE_SHOT = {2: 512 << 10, 3: 256 << 10, 4: 256 << 10}
ONE_SHOT_OF_MORE = 128 << 10
TWO_SHOT_PUSH = 2 << 20


@dataclass(frozen=True)
class Choice:
    """A variant, the programs it runs with (None: as many as there is work for), and the blocks it has memory for."""

    variant: str
    programs: int | None
    blocks: int = 0


def choose(collective: str, size: int, nbytes: int, marked: bool, config: Config) -> Choice:
    """The choice for a collective of ``nbytes`` a rank; ``marked``: its elements can tell that they have arrived."""
    from iris.ccl.push import part_bytes

    blocks = max(TWO_SHOT_PUSH // (part_bytes(size) * size), ONE_SHOT.get(size, ONE_SHOT_OF_MORE) // part_bytes(size))
    wanted = config.all_reduce_variant if collective == "all_reduce" else "auto"
    programs = config.comm_sms
    if collective == "reduce_scatter":
        fits = -(-nbytes // size) <= blocks * part_bytes(size)
        return Choice("one_shot" if marked and fits and not config.batch_invariant else "two_shot", programs, blocks)
    if wanted == "auto":
        if not marked or config.batch_invariant:
            return Choice("two_shot", programs)
        if nbytes <= ONE_SHOT.get(size, ONE_SHOT_OF_MORE):
            return Choice("one_shot", programs, blocks)
        if nbytes <= TWO_SHOT_PUSH:
            return Choice("two_shot_push", programs, blocks)
        return Choice("two_shot", programs)
    if wanted == "one_shot":
        if not marked or nbytes > blocks * part_bytes(size):
            raise InvalidConfigError(
                f"Config(all_reduce_variant='one_shot') is for floating-point tensors of at most "
                f"{blocks * part_bytes(size)} bytes among {size} ranks; this one has {nbytes}. Use 'two_shot' or 'auto'."
            )
        return Choice("one_shot", programs, blocks)
    return Choice(wanted, programs)
