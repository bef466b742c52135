"""The rooted collectives of `ctx.ccl`: one rank gives what all get, or gets what all give.

The root alone has some of the arguments, and a mistake in these, or in any other, may be its alone. The others would
wait for it. So each of these calls checks everything first, and says in memory that all members see that it has begun
(`iris.ccl.refusal`). After that, ranks may meet in the preparation of a launch.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from iris.arg_parser import index
from iris.ccl import checks
from iris.ccl.call import Call
from iris.ccl.config import Config, ReduceOp
from iris.ccl.enqueue import FOR_THE_HOST, Enqueuer, to_read, to_write
from iris.ccl.reduction import check_op, own_factor, reduction
from iris.ccl.refusal import begin, refuse
from iris.ccl.work import Work
from iris.compat.cuda import current_raw_stream, is_current_stream_capturing
from iris.errors import GroupAbortedError, IrisError
from iris.operators.graph_break import methods_break_graph


@methods_break_graph(FOR_THE_HOST)
class RootedCollectives(Enqueuer):
    """Those of `Collectives` that have a root."""

    def broadcast(
        self,
        tensor: torch.Tensor,
        src: int = 0,
        *,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Copy ``tensor`` of rank ``src`` (its rank in the world) into ``tensor`` of every rank."""
        try:
            comm, stream, line = self._enter("broadcast", group, tensor, tensor, config, src)
            root = checks.rank_in_group(comm, "src", src, self._context.num_ranks)
            dense = to_read(tensor)
            key = self._key(("broadcast", root), dense, dense, config, line)
            if (launch := comm.launches.get(key)) is None:
                checks.check_pair(comm, "broadcast", tensor, tensor, 1, 1)
                checks.check_config(config)
        except IrisError as error:
            self._refuse(
                *("broadcast", error, src, group, config),
                lambda own, everyones, used: self.broadcast(own, src, group=group, config=used),
            )
        begin(comm, dense)
        launch = launch or self._prepare(key, config, Call("broadcast", comm, dense, dense, line, root))
        output = None if comm.rank == root else tensor
        return self._launch(comm, "broadcast", launch, stream, dense, dense, output, async_op)

    def gather(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,
        dst: int = 0,
        *,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Gather every rank's ``input`` into ``output`` of rank ``dst`` (its rank in the world), by rank.

        ``output`` is not looked at elsewhere, and may be None.
        """
        try:
            comm, stream, line = self._enter("gather", group, input, input, config, dst)
            root = checks.rank_in_group(comm, "dst", dst, self._context.num_ranks)
            here = comm.rank == root
            if here:
                checks.check_at_root(comm, "gather", "output", output, root)
            source = to_read(input)
            target = output if here and output is not None else source
            result = to_write(target)
            key = self._key(("gather", root), result, source, config, line)
            if (launch := comm.launches.get(key)) is None:
                checks.check_pair(comm, "gather", target, input, comm.size if here else 1, 1)
                checks.check_config(config)
            if here and source.data_ptr() != result.data_ptr() + comm.rank * source.nbytes:
                checks.check_overlap("gather", result, source)
        except IrisError as error:
            self._refuse(
                *("gather", error, dst, group, config),
                lambda own, everyones, used: self.gather(everyones, own, dst, group=group, config=used),
            )
        begin(comm, source)
        launch = launch or self._prepare(key, config, Call("gather", comm, result, source, line, root))
        return self._launch(comm, "gather", launch, stream, source, result, output if here else None, async_op)

    def scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor | Sequence[torch.Tensor] | None,
        src: int = 0,
        *,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Send part r of ``input`` of rank ``src`` (its rank in the world) to ``output`` of rank r.

        ``input`` has W times the elements of ``output``, or is a list of W tensors of as many as that; it is not looked
        at elsewhere, and may be None.
        """
        try:
            comm, stream, line = self._enter("scatter", group, output, output, config, src)
            root = checks.rank_in_group(comm, "src", src, self._context.num_ranks)
            here = comm.rank == root
            if here:
                if isinstance(input, list | tuple):
                    input = checks.joined(comm, "scatter", input, output)
                checks.check_at_root(comm, "scatter", "input", input, root)
            result = to_write(output)
            source = to_read(input) if here and isinstance(input, torch.Tensor) else result
            key = self._key(("scatter", root), result, source, config, line)
            if (launch := comm.launches.get(key)) is None:
                checks.check_pair(comm, "scatter", output, source, 1, comm.size if here else 1)
                checks.check_config(config)
            if here and result.data_ptr() != source.data_ptr() + comm.rank * result.nbytes:
                checks.check_overlap("scatter", result, source)
        except IrisError as error:
            self._refuse(
                *("scatter", error, src, group, config),
                lambda own, everyones, used: self.scatter(own, everyones, src, group=group, config=used),
            )
        begin(comm, result)
        launch = launch or self._prepare(key, config, Call("scatter", comm, result, source, line, root))
        return self._launch(comm, "scatter", launch, stream, source, result, output, async_op)

    def reduce(
        self,
        output: torch.Tensor | None,
        input: torch.Tensor,
        dst: int = 0,
        *,
        op: Any = ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
        config: Config | None = None,
    ) -> Work | None:
        """Combine every rank's ``input`` element by element into ``output`` of rank ``dst`` (its rank in the world).

        ``output`` is not touched elsewhere, and may be None; on ``dst`` it may be the ``input``. Rounding as in
        `all_reduce`.
        """
        factor = own = None
        try:
            kind, factor = (op, None) if op.__class__ is ReduceOp else reduction(op)
            comm, stream, line = self._enter("reduce", group, input, input, config, dst, kind)
            root = checks.rank_in_group(comm, "dst", dst, self._context.num_ranks)
            here = comm.rank == root
            if here:
                checks.check_at_root(comm, "reduce", "output", output, root)
            target = output if here and output is not None else input
            source = to_read(input)
            result = to_write(target) if here else source
            key = self._key(("reduce", id(kind), root), result, source, config, line)
            if (launch := comm.launches.get(key)) is None:
                checks.check_pair(comm, "reduce", target, input, 1, 1)
                checks.check_config(config)
                check_op(kind, input.dtype)
            if factor is not None:
                own = own_factor(factor, input.dtype, comm.device)
            if here and source.data_ptr() != result.data_ptr():
                checks.check_overlap("reduce", result, source)
        except IrisError as error:
            # The others' sums have the factors of all.
            theirs = ReduceOp.SUM if factor is None else op
            self._refuse(
                *("reduce", error, dst, group, config),
                lambda own, everyones, used: self.reduce(own, own, dst, op=theirs, group=group, config=used),
            )
        begin(comm, source, source.dtype)
        factors = () if own is None else self._factors(comm, own, stream, line)
        if launch is None:
            launch = self._prepare(key, config, Call("reduce", comm, result, source, line, root, kind, factors))
        return self._launch(comm, "reduce", launch, stream, source, result, output if here else None, async_op, factors)

    def _refuse(
        self,
        name: str,
        error: IrisError,
        root: int,
        group: dist.ProcessGroup | None,
        config: Config | None,
        call: Callable[[torch.Tensor, torch.Tensor, Config | None], object],
    ) -> NoReturn:
        """Raise ``error``; if this rank is the root and refuses alone what the others have begun, nobody waits for it.

        ``call`` is the same collective with a tensor for one rank's data, one for that of all, and a configuration.
        """
        if isinstance(error, GroupAbortedError) or not isinstance(group, dist.ProcessGroup | None):
            raise error
        stream, capturing = None, False
        if self._on_gpu:
            stream, capturing = current_raw_stream(self._index), is_current_stream_capturing()
        # In the group's first call the others may wait in the meeting that begins it.
        try:
            comm = self.communicator(group)
        except IrisError:
            raise error from None
        used = config if isinstance(config, Config) else None

        def take_part(size: int, dtype: torch.dtype) -> None:
            everyones = torch.zeros(comm.size * size, dtype=torch.uint8, device=comm.device).view(dtype)
            call(everyones[: everyones.numel() // comm.size], everyones, used)

        refuse(comm, name, error, index(root) == comm.ranks[comm.rank], stream, capturing, take_part)
