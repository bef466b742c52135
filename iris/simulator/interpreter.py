"""The builder: what each operation of ``tl`` does to numpy arrays and to memory.

Triton's semantic layer turns each ``tl`` operation into calls of a builder. The compiler's makes IR; that of Triton's
CPU interpreter calculates with numpy. This one derives from the interpreter's. It corrects arithmetic on bf16,
rounding, NaN in minima and maxima, masked atomics, and atomics on types that numpy lacks.

Every access to memory is also reported: to `iris.simulator.tasks` if a program may be waiting by it, and to the
sanitizer's recorder (`iris.observer.recorder`) if there is one.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl

from iris import observer
from iris.compat import libtriton
from iris.compat.interpreter import InterpreterBuilder, InterpreterOptions, TensorHandle
from iris.errors import NotInSimulatorError
from iris.observer import READ, UPDATE, WRITE
from iris.simulator import atomics, dtypes, libdevice, tasks
from iris.simulator.legality import check_arithmetic, check_conversion, check_product
from iris.simulator.tensor_map import TensorMap


class MissingOperation(AttributeError):
    """A builtin needs an operation that is not here. It becomes a `NotInSimulatorError` with the builtin's name."""


@dataclass(frozen=True)
class Options(InterpreterOptions):
    """The compiler's options that builtins ask for."""

    sanitize_overflow: bool = False
    """Integers wrap, as in a kernel that is not compiled for debugging. The check would take ten operations more."""
    enable_iisan: bool = False
    allowed_dot_input_precisions: tuple[str, ...] = ("tf32", "tf32x3", "ieee", "bf16x3", "bf16x6")


class Builder(InterpreterBuilder):
    """The methods ``create_*`` that the semantic layer calls. Values are `TensorHandle`, a numpy array and a dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.options = Options()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("create_"):
            raise MissingOperation(name)
        raise AttributeError(name)

    def create_inline_asm(self, *_: Any) -> TensorHandle:
        raise NotInSimulatorError("inline assembly")

    def create_extern_elementwise(
        self, library: str, path: str, symbol: str, arguments: list, result: tl.dtype, pure: bool
    ) -> TensorHandle:
        return libdevice.call(symbol, arguments, result)

    # The programming model ------------------------------------------------------------------------------------------

    @property
    def grid_idx(self) -> tuple[int, int, int]:
        return tasks.current().index

    @property
    def grid_dim(self) -> tuple[int, int, int]:
        return tasks.current().launch.dims

    # Constants ------------------------------------------------------------------------------------------------------

    def _narrow_constant(self, value: float, dtype: tl.dtype) -> TensorHandle:
        return TensorHandle(dtypes.narrow(np.array([value]), dtype), dtype)

    def get_bf16(self, value: float) -> TensorHandle:
        return self._narrow_constant(value, tl.bfloat16)

    def get_fp8e4nv(self, value: float) -> TensorHandle:
        return self._narrow_constant(value, tl.float8e4nv)

    def get_fp8e5(self, value: float) -> TensorHandle:
        return self._narrow_constant(value, tl.float8e5)

    def get_fp8e4b8(self, value: float) -> TensorHandle:
        return self._narrow_constant(value, tl.float8e4b8)

    def get_fp8e5b16(self, value: float) -> TensorHandle:
        return self._narrow_constant(value, tl.float8e5b16)

    def get_all_ones_value(self, type: tl.dtype) -> TensorHandle:
        return TensorHandle(np.array([-1]).astype(dtypes.storage(type)), type.scalar)

    # Arithmetic -----------------------------------------------------------------------------------------------------

    def _result(self, values: np.ndarray, dtype: tl.dtype) -> TensorHandle:
        if dtypes.is_narrow(dtype):
            return TensorHandle(dtypes.narrow(values, dtype), dtype)
        return TensorHandle(values.astype(dtypes.storage(dtype), copy=False), dtype)

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Callable) -> TensorHandle:
        check_arithmetic(lhs.dtype.scalar)
        left, right = dtypes.widen(lhs), dtypes.widen(rhs)
        if left.dtype == np.bool_ and op in (np.add, np.subtract, np.multiply):
            # int1 is an integer of one bit; numpy's bool saturates.
            return TensorHandle((op(left.astype(np.int8), right) & 1).astype(bool), tl.int1)
        values = op(left, right)
        return self._result(values, tl.int1 if values.dtype == np.bool_ else lhs.dtype.scalar)

    def unary_op(self, arg: TensorHandle, op: Callable) -> TensorHandle:
        check_arithmetic(arg.dtype.scalar)
        return self._result(op(dtypes.widen(arg)), arg.dtype.scalar)

    def ternary_op(self, lhs: TensorHandle, rhs: TensorHandle, other: TensorHandle, op: Callable) -> TensorHandle:
        check_arithmetic(other.dtype.scalar)
        return self._result(op(dtypes.widen(lhs), dtypes.widen(rhs), dtypes.widen(other)), other.dtype.scalar)

    def create_select(self, condition: TensorHandle, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        # Triton 3.6 chooses between signed and unsigned here, which numpy would widen.
        other = rhs.data.astype(lhs.data.dtype, copy=False)
        return TensorHandle(np.where(condition.data, lhs.data, other), lhs.dtype.scalar)

    def create_minnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        return self.binary_op(lhs, rhs, np.fmax)

    def create_clampf(self, arg: TensorHandle, low: TensorHandle, high: TensorHandle, nan: Any) -> TensorHandle:
        ignores_nan = nan == libtriton.PROPAGATE_NAN.NONE
        raised = self.binary_op(arg, low, np.fmax if ignores_nan else np.maximum)
        return self.binary_op(raised, high, np.fmin if ignores_nan else np.minimum)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        # A product of two float32 is exact in float64, so the sum is rounded (all but) once.
        return self.ternary_op(x, y, z, lambda a, b, c: np.multiply(a, b, dtype=np.float64) + c)

    def create_rsqrt(self, arg: TensorHandle) -> TensorHandle:
        return self.unary_op(arg, lambda x: 1 / np.sqrt(x))

    def create_erf(self, arg: TensorHandle) -> TensorHandle:
        return self.unary_op(arg, lambda x: torch.erf(torch.from_numpy(np.array(x))).numpy())

    def create_ashr(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        signed = f"i{lhs.data.itemsize}"
        shifted = np.right_shift(lhs.data.astype(signed), rhs.data.astype(signed))
        return self._result(shifted, lhs.dtype.scalar)

    def create_umulhi(self, lhs: TensorHandle, rhs: TensorHandle) -> TensorHandle:
        # Operands are taken as unsigned. numpy has no 128-bit product; Python's integers have.
        bits = 8 * lhs.data.itemsize
        unsigned, wide = f"u{lhs.data.itemsize}", object if bits == 64 else np.uint64
        left, right = (np.ascontiguousarray(x.data).view(unsigned).astype(wide) for x in (lhs, rhs))
        return TensorHandle(((left * right) >> bits).astype(unsigned).view(lhs.data.dtype), lhs.dtype.scalar)

    def create_dot(self, a: TensorHandle, b: TensorHandle, d: TensorHandle, *precision: Any) -> TensorHandle:
        check_product(a.dtype.scalar, d.dtype.scalar)
        left, right, accumulator = dtypes.widen(a), dtypes.widen(b), dtypes.widen(d)
        if d.dtype.scalar.is_int():
            # Exact in float64 (|a.b| < 2^53), which has a fast product where integers have none.
            product = np.matmul(left.astype(np.float64), right.astype(np.float64)).astype(np.int64)
        else:
            wide = np.float64 if d.dtype.scalar == tl.float64 else np.float32
            product = np.matmul(left.astype(wide, copy=False), right.astype(wide, copy=False))
        return self._result(product + accumulator, d.dtype.scalar)

    def create_histogram(self, data: TensorHandle, bins: int, mask: TensorHandle | None) -> TensorHandle:
        values = data.data if mask is None else data.data[mask.data]
        counted = values[(values >= 0) & (values < bins)]
        return TensorHandle(np.bincount(counted, minlength=bins).astype(np.int32), tl.int32)

    # Conversions ----------------------------------------------------------------------------------------------------

    def cast_impl(self, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        return self._result(dtypes.widen(src), dst_type.scalar)

    def create_fp_to_si(self, src: TensorHandle, dst_type: tl.dtype) -> TensorHandle:
        return TensorHandle(dtypes.to_integer(dtypes.widen(src), dst_type.scalar), dst_type.scalar)

    create_fp_to_ui = create_fp_to_si

    def create_fp_to_fp(self, src: TensorHandle, dst_type: tl.dtype, rounding: Any) -> TensorHandle:
        toward_zero = rounding == libtriton.ROUNDING_MODE.RTZ
        check_conversion(src.dtype.scalar, dst_type.scalar, toward_zero)
        return TensorHandle(dtypes.narrow(dtypes.widen(src), dst_type.scalar, toward_zero), dst_type.scalar)

    # Memory ---------------------------------------------------------------------------------------------------------

    def get_cache_policy(self, cache_modifier: Any, eviction_policy: Any) -> Any:
        return cache_modifier

    # Triton 3.9 has one policy, 3.6 two.
    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *policy: Any, **named: Any) -> Any:
        recorder = observer.recorder
        if recorder is not None:
            recorder.check_mapped(ptrs.data[_active(mask, ptrs)], READ)
        if any(map(_is_volatile, (*policy, *named.values()))):
            return self._volatile_load(ptrs, mask, other, *policy, **named)
        # A load of one element may be a look at a flag.
        single = recorder if ptrs.data.size == 1 else None
        with single.numbered() if single is not None else contextlib.nullcontext() as number:
            result = super().create_masked_load(ptrs, mask, other, *policy, **named)
        active = _active(mask, ptrs)
        pointers, values = ptrs.data[active], result.data[active]
        if recorder is not None:
            recorder.accessed(pointers, values.itemsize, READ, values, number)
            if 0 < pointers.size <= tasks.MOST_FLAGS and recorder.spins_on(pointers):
                tasks.observe("plain loads", pointers, values, ptrs.get_element_ty(), _never)
                return result
        tasks.observe_plain_load(pointers, values, ptrs.get_element_ty())
        return result

    def _volatile_load(self, ptrs: Any, mask: Any, other: Any, *policy: Any, **named: Any) -> Any:
        """A load by which a loop may wait: it synchronises, as a relaxed atomic load does."""
        recorder, message = observer.recorder, tasks.take_message()
        with recorder.numbered() if recorder is not None else contextlib.nullcontext() as number:
            result = super().create_masked_load(ptrs, mask, other, *policy, **named)
        active = _active(mask, ptrs)
        if active.any():
            pointers, values = ptrs.data[active], result.data[active]
            tasks.used_flags(pointers, writes=False, acquires=False, releases=False)
            if recorder is not None and number is not None:
                recorder.spins_on(pointers)
                recorder.synchronised(number, pointers, values, READ, "relaxed", "sys", message)
            tasks.observe("load", pointers, values, ptrs.get_element_ty(), _never)
        return result

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *policy: Any, **named: Any) -> Any:
        tasks.stored()
        recorder = observer.recorder
        if recorder is None:
            return super().create_masked_store(ptrs, value, mask, *policy, **named)
        active = _active(mask, ptrs)
        pointers, values = ptrs.data[active], np.broadcast_to(value.data, ptrs.data.shape)[active]
        recorder.check_mapped(pointers, WRITE)
        if tasks.take_message():
            with recorder.numbered() as number:
                super().create_masked_store(ptrs, value, mask, *policy, **named)
                recorder.synchronised(number, pointers, values, WRITE, "relaxed", "sys", message=True)
        else:
            recorder.accessed(pointers, values.itemsize, WRITE)
            super().create_masked_store(ptrs, value, mask, *policy, **named)
            recorder.changed()

    def create_barrier(self, *_: Any) -> None:
        if observer.recorder is not None:
            observer.recorder.cta_synced()

    def create_make_tensor_descriptor(
        self, base: Any, shape: Any, strides: Any, block_shape: Any, is_signed: Any, padding: Any
    ) -> TensorMap:
        sizes, steps = ([int(number.data.item()) for number in numbers] for numbers in (shape, strides))
        return TensorMap(base, sizes, steps, block_shape, padding == libtriton.PADDING_OPTION.PAD_NAN)

    def create_descriptor_load(self, desc: TensorMap, indices: Any, *policy: Any) -> TensorHandle:
        pointers, inside = desc.materialize_pointers(indices)
        values = self.create_masked_load(pointers, inside, desc.fill(), *policy, False)
        return TensorHandle(desc.rounded(values.data), desc.element)

    def create_descriptor_store(self, desc: TensorMap, value: TensorHandle, indices: Any) -> None:
        super().create_descriptor_store(desc.as_written(), value, indices)

    def create_descriptor_reduce(self, kind: Any, desc: TensorMap, value: TensorHandle, indices: Any) -> None:
        pointers, inside = desc.as_written().materialize_pointers(indices)
        self.reduce(kind.name, pointers, value, inside)

    def reduce(self, name: str, pointers: TensorHandle, value: TensorHandle, inside: TensorHandle) -> None:
        """Update each element atomically (PTX ISA, cp.reduce.async.bulk.tensor: relaxed, of GPU scope)."""
        operation = atomics.of(name, value.dtype.scalar)
        self.create_atomic_rmw(
            operation, pointers, value, inside, libtriton.MEM_SEMANTIC.RELAXED, libtriton.MEM_SYNC_SCOPE.GPU
        )

    def create_atomic_cas(self, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> TensorHandle:
        expected, new = (np.broadcast_to(operand.data, ptr.data.shape) for operand in (cmp, val))
        with _recorded(ptr.data, sem, scope) as record:
            old = atomics.compare_and_swap(ptr.data, expected, new, sem)
            record(old, UPDATE if atomics.swapped(expected, new, old) else READ, compares=True, after=new)
        tasks.observe(
            "atomic_cas",
            ptr.data,
            old,
            ptr.get_element_ty(),
            lambda: atomics.swapped(expected, new, old),
            expected,
        )
        return TensorHandle(old, cmp.dtype.scalar)

    def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> TensorHandle:
        element = ptr.get_element_ty()
        shape = ptr.data.shape
        active = _active(mask, ptr)
        operand = np.broadcast_to(val.data, shape)[active]
        pointers = ptr.data[active]
        result = np.zeros(shape, dtype=operand.dtype)  # what a lane that is masked off returns
        message = tasks.take_message()  # even if no lane is active: it does not apply to the next access
        if pointers.size:
            with _recorded(pointers, sem, scope, message) as record:
                old = atomics.read_modify_write(op, pointers, operand, element, sem)
                # An exchange that finds the value that it puts there changes nothing: it may be a poll.
                after = atomics.apply(op, old, operand, element)
                changed = after.tobytes() != old.tobytes()
                kind = WRITE if op == atomics.OP.XCHG else UPDATE if changed else READ
                record(old, kind, changed=changed, after=after, adds=op == atomics.OP.ADD)
            result[active] = old
            tasks.observe(
                atomics.NAMES[op],
                pointers,
                old,
                element,
                lambda: changed,
            )
        return TensorHandle(result, val.dtype.scalar)

    def create_atomic_load(self, ptr: Any, mask: Any, sem: Any, scope: Any) -> TensorHandle:
        active = _active(mask, ptr)
        pointers = ptr.data[active]
        with _recorded(pointers, sem, scope) as record:
            result = super().create_masked_load(ptr, mask, None, None, True)
            record(result.data[active], READ)
        if pointers.size:
            tasks.observe("load", pointers, result.data[active], ptr.get_element_ty(), _never)
        return result

    def create_atomic_poll(self, ptr: Any, expected: Any, timeout_ns: Any, sem: Any, scope: Any) -> TensorHandle:
        limited = isinstance(timeout_ns, TensorHandle)
        end = time.monotonic_ns() + int(timeout_ns.data.item()) if limited else None
        everywhere = TensorHandle(np.ones(ptr.data.shape, dtype=bool), tl.int1)
        while True:
            with _recorded(ptr.data, sem, scope) as record:
                found = super().create_masked_load(ptr, everywhere, None, None, True).data
                record(found, READ)
            matched = found == expected.data
            if matched.all() or (end is not None and time.monotonic_ns() >= end):
                return TensorHandle(matched, tl.int1)
            waiting = ~matched
            tasks.observe("atomic_poll", ptr.data[waiting], found[waiting], ptr.get_element_ty(), _never, expected.data)


@contextlib.contextmanager
def _recorded(pointers: np.ndarray, sem: Any, scope: Any, message: bool = False) -> Iterator[Callable[..., None]]:
    """Around an atomic operation. Gives a function by which it reports: the old values, and what it did to memory.

    ``message``: it is of data that contain their own flag.
    """
    recorder, asked = observer.recorder, atomics.ORDERS[sem]
    partitioned = tasks.current().partitioned

    def use_flags(kind: int) -> None:
        if partitioned:
            writes = kind != READ
            # An update whose result is dropped acquires nothing: the program cannot act on what it found.
            acquires = asked in ("acquire", "acq_rel") and not (writes and tasks.current().dropped)
            tasks.used_flags(pointers, writes=writes, acquires=acquires, releases=asked in ("release", "acq_rel"))

    if recorder is None:
        yield lambda old, kind, **_: use_flags(kind)
        return
    recorder.check_mapped(pointers, UPDATE)

    def record(old: np.ndarray, kind: int, **how: Any) -> None:
        use_flags(kind)
        where, before = np.atleast_1d(pointers), np.atleast_1d(old)  # numpy makes scalars of arrays without dimensions
        if kind == READ:
            recorder.spins_on(where)
        recorder.synchronised(number, where, before, kind, asked, atomics.SCOPES[scope], message, **how)

    with recorder.numbered() as number:
        yield record


def _is_volatile(argument: Any) -> bool:
    """Whether an argument of a load is what a loop that polls needs: ``volatile``, or the cache modifier ".cv".

    The modifier is a string in Triton 3.9. Before, it has a type that compares with nothing else.
    """
    if isinstance(argument, libtriton.CACHE_MODIFIER):
        return argument == libtriton.CACHE_MODIFIER.CV
    return argument is True or argument == "cv"


def _active(mask: TensorHandle, pointers: TensorHandle) -> np.ndarray:
    """Which elements are accessed. Most masks have the shape of the pointers, and need no slow broadcast."""
    shape = pointers.data.shape
    return mask.data if mask.data.shape == shape else np.broadcast_to(mask.data, shape)


def _never() -> bool:
    return False
