"""The products of `ctx.ops`: what they share, from the check of a call to the way that carries it.

`iris.ops.algorithms` has the table of the ways, and what each can do.
"""

import dataclasses

import torch

from iris.ccl.checks import compare_calls
from iris.ccl.protocols import CollectivesContext
from iris.ccl.work import Work
from iris.compat.cuda import current_raw_stream, is_current_stream_capturing
from iris.cuda_graphs.capture import refuse_in_capture
from iris.errors import InvalidConfigError
from iris.heap.history import debugging
from iris.operators.version_counter import bump_version
from iris.ops import vendor
from iris.ops.algorithms import ALGORITHMS, asked
from iris.ops.buffers import Buffers
from iris.ops.call import Algorithm, Call, described
from iris.ops.choose import allows_tf32, choose, figures_for
from iris.ops.config import FusedConfig
from iris.ops.kernel import most_programs
from iris.ops.known import KnownCalls, call_key
from iris.ops.workspaces import Workspaces
from iris.runtime.launch import remember

DEBUGGING = debugging()


class Products:
    """Of one context.

    Attributes
    ----------
    even : dict
        What `iris.ops.named_ranks` has found out: by what a call moves, the other extents of B that all ranks have;
        None where theirs differ.
    """

    def __init__(self, context: CollectivesContext) -> None:
        self._context = context
        self._on_gpu = context.device.type == "cuda"
        self._algorithms = {each.name: each(context) for each in ALGORITHMS}
        self._workspaces = Workspaces(context)
        self._known = KnownCalls(self._workspaces)
        self._abort_flag = context._workspace(None).abort_flag
        self.even: dict[tuple, set[int] | None] = {}
        self._chosen: dict[tuple, FusedConfig] = {}

    # As with collectives: `iris.ops.functional` has the gradients.
    def _run(
        self,
        call: Call,
        config: FusedConfig | None,
        async_op: bool,
        workspace: Buffers | None,
        apart: bool = False,
    ) -> Work | None:
        """``apart``: whether nothing overlaps what is written, as the caller has made it for this call."""
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._run(call, config, async_op, workspace, apart)
        key = None
        if workspace is None and not (DEBUGGING or self._on_gpu and is_current_stream_capturing()):
            key = call_key(call, config)
        stream = current_raw_stream(self._context.gpu_id) if self._on_gpu else None
        relaunch = self._known.find(call, key, stream, apart)
        if relaunch is None:
            self._look_and_enqueue(call, config, workspace, key, stream)
        else:
            self._context.heap.check_open()
            self._abort_flag.check()
            try:
                relaunch(call, stream)
            except BaseException as error:
                self._interrupted(call.method, error)
                raise
        bump_version(call.out)
        if call.gathered is not None:
            bump_version(call.gathered)
        return Work(self._on_gpu) if async_op else None

    def _look_and_enqueue(
        self,
        call: Call,
        config: FusedConfig | None,
        workspace: Buffers | None,
        key: tuple | None,
        stream: int | None,
    ) -> None:
        """A call that is to be checked and chosen for. ``key``: of later calls that need neither, or None."""
        given = call
        algorithm, config = self._check(call, config)
        if DEBUGGING and not (self._on_gpu and torch.cuda.is_current_stream_capturing()):
            self._compare(call, algorithm, config)
        call = algorithm.operands(call)
        needs = algorithm.needs(call, config)
        if workspace is not None:
            self._workspaces.check(call.method, workspace, needs and needs.kind)
        try:
            if needs is None:
                # Collectives, which may have to move an A even where the result is empty.
                algorithm.enqueue(call, config, None, None)
            elif call.out.numel():
                buffers = self._workspaces.find(needs, stream) if workspace is None else workspace
                algorithm.enqueue(call, config, buffers, stream)
                if key is not None and not self._known.has(key, stream):
                    copied = any(one is not other for one, other in zip(call, given, strict=True))
                    relaunch = None if copied else algorithm.relaunch(call, config, buffers)
                    self._known.remember(call, key, stream, relaunch)
        except BaseException as error:
            self._interrupted(call.method, error)
            raise

    def _interrupted(self, name: str, error: BaseException) -> None:
        """Let nobody wait for this rank, whose call has ended with this error; unless it had not begun."""
        self._abort_flag.interrupted(name, error)

    @torch.no_grad()
    def _prepare(self, call: Call, config: FusedConfig | None) -> Buffers | None:
        algorithm, config = self._check(call, config)
        needs = algorithm.needs(call, config)
        if needs is None:
            return None
        refuse_in_capture(f"{call.method}_preamble()")
        buffers = self._workspaces.make(needs)
        if call.out.numel():
            # A graph may be captured next, in which nothing can be compiled.
            algorithm.prepare(algorithm.operands(call), config, buffers)
        return buffers

    def _check(self, call: Call, config: FusedConfig | None) -> tuple[Algorithm, FusedConfig]:
        """What carries the call: as ``config`` asks for it, or what is chosen where that is None.

        Raises unless the call fits together and the algorithm can carry it.
        """
        self._context.heap.check_open()
        self._abort_flag.check()
        call.check(self._context.device, self._context.num_ranks, config)
        if config is None:
            chosen = self._choose(call, vendor.problem(call) is None)
            return self._algorithms[asked(call, chosen)], chosen
        algorithm = self._algorithms[asked(call, config)]
        problem = algorithm.problem(call, config)
        if problem:
            raise InvalidConfigError(problem)
        return algorithm, config

    def _choose(self, call: Call, by_vendor: bool) -> FusedConfig:
        """What is chosen where the caller does not say: it can carry the call."""
        kept = call.gathered is not None
        key = (call.name, call.a.shape, call.b.shape, call.a.dtype, call.out.dtype, kept, by_vendor, allows_tf32())
        chosen = self._chosen.get(key)
        if chosen is None:
            gpu = figures_for(self._context) if self._on_gpu else None
            chosen = choose(call, self._context.num_ranks, most_programs(self._context), gpu, by_vendor)
            remember(self._chosen, key, chosen)
        return chosen

    def _compare(self, call: Call, algorithm: Algorithm, config: FusedConfig) -> None:
        """In debug mode: that all ranks make the same call, with the result at the same place if peers store it."""
        config = dataclasses.replace(config, variant=algorithm.variant)
        said = f"{call.title} with {described(call.given())}, {config}"
        if algorithm.direct(call):
            place = call.out.data_ptr() - self._context.heap.mapping.bases[self._context.cur_rank]
            said += f", out at offset {place:#x} of the heap with strides {list(call.out.stride())}"
        compare_calls(self._context._world.group, said)
