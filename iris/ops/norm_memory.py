"""The memory through which ranks send each other rows that are normalised."""

from typing import NamedTuple

import torch

from iris.ccl.kernel_launch import INTEGERS
from iris.ccl.lamport_channel import SLOTS
from iris.ops.all_reduce_rms_norm import places
from iris.ops.kernel_arguments import NormChannel, ShardedNormChannel
from iris.ops.row_division import BY_OWNER, STEPS
from iris.runtime.workspace import Channel


class NormLayout(NamedTuple):
    """Of the calls of a shape, by a variant of `STEPS` or `BY_OWNER`, among ``size`` ranks.

    First what peers send, so that it is aligned; after it messages of 8 bytes, and last the epochs.
    """

    variant: str
    size: int
    room: int
    """Rows that there may be; of `BY_OWNER`, of each rank."""
    units: int
    """Pieces of them."""
    part: int
    """Elements of a piece that a rank adds up."""
    itemsize: int
    out_itemsize: int

    @property
    def part_bytes(self) -> int:
        """Of what peers send in words of the input's size."""
        parts = places(self.size) if self.variant == "one_shot" else STEPS.get(self.variant, 1) * self.size
        nbytes = SLOTS.value * self.units * parts * self.part * self.itemsize
        return -(-nbytes // 16) * 16

    @property
    def result_bytes(self) -> int:
        """Of what owners of rows send."""
        by_owner = self.variant == BY_OWNER
        return SLOTS.value * self.units * (self.size - 1) * self.part * self.out_itemsize if by_owner else 0

    @property
    def slot_bytes(self) -> int:
        return self.part_bytes + self.result_bytes

    @property
    def epochs(self) -> slice:
        """Where they are."""
        factors = 8 * self.room * self.size if self.variant == BY_OWNER else 0
        begin = self.slot_bytes + 16 * self.units + factors
        return slice(begin, begin + 4 * self.units)

    @property
    def nbytes(self) -> int:
        return self.epochs.stop

    def channel(self, channel: Channel) -> NormChannel | ShardedNormChannel:
        """As a kernel takes it."""
        memory, sent = channel.memory, self.slot_bytes
        parts = memory[: self.part_bytes].view(INTEGERS[self.itemsize])
        messages = memory[sent : self.epochs.start].view(torch.int64)
        partials, epochs = messages[: 2 * self.units], memory[self.epochs].view(torch.int32)
        if self.variant != BY_OWNER:
            return NormChannel(channel.context_tensor, epochs, partials, parts)
        return ShardedNormChannel(
            channel.context_tensor,
            epochs,
            partials,
            parts,
            results=memory[self.part_bytes : sent].view(INTEGERS[self.out_itemsize]),
            factors=messages[2 * self.units :],
        )
