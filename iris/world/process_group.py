"""Process groups of torch that a program gives to a call: whether this rank can use one, and who its members are."""

from collections.abc import Sequence

import torch.distributed as dist

from iris.errors import InvalidGroupError, names, short_repr


def check_process_group(group: object) -> None:
    """Raise `InvalidGroupError` unless ``group`` is one that this rank is in."""
    if not isinstance(group, dist.ProcessGroup):
        raise InvalidGroupError(
            "This rank is not a member of the group: torch.distributed.new_group() gave it a placeholder. "
            "Only members make this call."
            if group is dist.GroupMember.NON_GROUP_MEMBER
            else f"group={short_repr(group)} is not a process group: make one with torch.distributed.new_group()."
        )


def ranks_of(process_group: dist.ProcessGroup) -> list[int]:
    """The global ranks of its members; InvalidGroupError if this rank is none of them, or the group was destroyed."""
    check_process_group(process_group)
    try:
        return dist.get_process_group_ranks(process_group)
    except KeyError:
        raise InvalidGroupError(
            "The group was destroyed by torch.distributed.destroy_process_group(). Make another one with "
            "torch.distributed.new_group()."
        ) from None


def check_among(ranks: Sequence[int], everyone: Sequence[int]) -> None:
    """Raise `InvalidGroupError` unless these global ranks of a group are among those of a context, ``everyone``."""
    strangers = [rank for rank in ranks if rank not in everyone]
    if strangers:
        raise InvalidGroupError(
            f"The group has {names(strangers)}, and this context has {names(list(everyone))}. Use a group of "
            "these, or make a context for the group: iris.iris(process_group=group)."
        )
