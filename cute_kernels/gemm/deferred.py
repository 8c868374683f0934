"""Products before and after an RMSNorm that needs no launch of its own. `quantized_linear_norm` returns `NormedRows`,
and `quantized_linear` takes them as x.

The norm needs no launch if both products have kernels with the stores of :mod:`.wgmma.deferred_norm`. The first product
then also writes its rows times the norm's weight, and sums of squares. The second product applies the rest of the norm
to its accumulators. If a kernel is missing, there are three launches: a product, `rms_norm` and a product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch

from cute_kernels.arguments import Wanted, check_apart, check_kind, check_wanted, row_stride
from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm import call as linear_call
from cute_kernels.gemm import ops
from cute_kernels.gemm.activations import activation_named, config_of
from cute_kernels.gemm.call import LinearCall
from cute_kernels.gemm.deferred_choice import beside_a_norm, deferred
from cute_kernels.gemm.inputs.launch import input_rows
from cute_kernels.gemm.normed import NORM_VECTOR, DeferredParts, NormedRows, left_to_next
from cute_kernels.gemm.product import Product, make_product, problem_of
from cute_kernels.gemm.served import may_load, schedule_for
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.weight import PackedWeight, WeightForm, WeightTensors
from cute_kernels.gemm.wgmma.deferred_config import GIVES, SQUARES_N, STEP_N, TAKES, DeferredKind
from cute_kernels.gemm.wgmma.launch import TileSchedule
from cute_kernels.norm.config import MAX_COLUMNS
from cute_kernels.runtime.device import arch_of, is_supported
from cute_kernels.runtime.gpu import GPU, per_gpu
from cute_kernels.runtime.memory import blank
from cute_kernels.runtime.operator import Plan, is_direct, launcher
from cute_kernels.runtime.plans import ALIGNMENT, TENSOR, key_function

PIECE = 8  # results of 16 bytes
FLOATS_K_WARPGROUPS = 3  # warpgroups along K from which on fp32 results are staged


class Side(NamedTuple):
    """The properties of the weight [n, k] of one of the two products around a norm."""

    n: int
    k: int
    format: WeightFormat


@per_gpu
@lru_cache(maxsize=4096)
def deferred_product_of(
    m: int, side: Side, dtype: torch.dtype, device: int, kind: DeferredKind, activation: object = None
) -> Product | None:
    """Returns the product of ``m`` rows before or after a deferred norm. Returns None if no kernel supports it, or if
    the kernel is not compiled and may not be compiled now."""
    if dtype != torch.bfloat16 or (side.n if kind == GIVES else side.k) % STEP_N or not is_supported(device):
        return None
    problem = problem_of(m, *side, dtype, device, activation=activation)
    schedule = beside_a_norm(problem, schedule_for(problem), kind)
    config = deferred(schedule, kind)
    if config is None or not isinstance(schedule, TileSchedule):
        return None
    if not may_load(GemmSpec(config), arch_of(device), problem):  # a norm can be launched
        return None
    return make_product(replace(schedule, config=config), m, device)


def are_aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether tensors are contiguous and begin on 16 bytes."""
    return all(t is None or (t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0) for t in tensors)


# -- rows and their norm -----------------------------------------------------------------------------------------------


class GivingCall(NamedTuple):
    """Arguments of `quantized_linear_norm`."""

    x: torch.Tensor
    weight: PackedWeight | WeightTensors
    bias: torch.Tensor | None
    residual: torch.Tensor
    norm: torch.Tensor
    eps: float
    offset: float
    following: PackedWeight | WeightTensors | None = None


def give_apart(call: GivingCall) -> NormedRows:
    """Computes a checked call's rows without deferring the norm. The product that reads the rows launches `rms_norm`
    first.
    """
    rows = ops.linear(LinearCall(call.x, call.weight, call.bias, call.residual))
    return NormedRows(rows, call.norm, call.eps, call.offset)


def check_giving(call: GivingCall) -> GivingCall:
    """Raises TypeError or ValueError, which name the argument, unless a call's rows can be computed and then normed."""
    n = call.weight.shape[0]
    wanted = _giving_wanted(call)
    linear_call.check_norm_numbers(call.eps, call.offset)
    check_wanted(wanted)
    if n % NORM_VECTOR or n > MAX_COLUMNS:
        raise ValueError(f"weight: got {n} rows, want a multiple of {NORM_VECTOR} up to {MAX_COLUMNS}: they are normed")
    following = call.following
    check_kind("following", following, PackedWeight | WeightTensors | None, "a PackedWeight or None")
    if following is not None and following.shape[1] != n:
        raise ValueError(f"following: got a weight {list(following.shape)}, want one of {n} inputs")
    return call


def _giving_wanted(call: GivingCall) -> Iterator[Wanted]:
    x, n = call.x, call.weight.shape[0]
    yield linear_call.rows_wanted(x, call.weight, "...")
    if call.bias is not None:
        yield Wanted("bias", call.bias, (x.dtype,), (n,), x.device, contiguous=True)
    yield Wanted("residual", call.residual, (x.dtype,), (*x.shape[:-1], n), x.device)
    yield linear_call.norm_wanted(call.norm, call.residual)


def _giving_plan(call: GivingCall) -> Plan[[GivingCall], NormedRows]:
    x, weight, index = call.x, call.weight, call.x.get_device()
    (n, k), m = weight.shape, x.numel() // weight.shape[1]
    apart = Plan(index, give_apart)
    if not m or call.norm.dtype != x.dtype or not are_aligned(call.residual, call.norm):
        return apart
    as_it_is = weight.form.comes_as_it_is and are_aligned(x) and k % PIECE == 0
    inputs = None if as_it_is else input_rows(x, row_stride(x), weight.perm, weight.input_scale)
    if inputs is None and not as_it_is:
        return apart
    if call.following is not None and not _takes(m, call.following.form, x.dtype, index):
        return apart
    product = deferred_product_of(m, Side(n, k, weight.format), x.dtype, index, GIVES)
    if product is None:
        return apart
    numbers: dict[str, Any] = {"offset": float(call.offset)}
    send = product.bound(n, None, x.dtype, **numbers)
    new_rows, new_scaled = blank((*x.shape[:-1], n), x.dtype), blank((m, n), x.dtype)
    new_squares = blank((m, n // SQUARES_N), torch.float32)

    def launch(call: GivingCall) -> NormedRows:
        x, weight = call.x, call.weight
        if inputs is not None:
            x = inputs.make(x, weight.perm, weight.input_scale)
        rows, scaled, squares = GPU.empty(*new_rows), GPU.empty(*new_scaled), GPU.empty(*new_squares)
        send(
            x=(x.detach() if x.requires_grad else x).view(m, k), codes=weight.codes, scales=weight.scales,
            zeros=weight.zeros, bias=call.bias, residual=call.residual, out=rows, norm=call.norm, scaled=scaled,
            squares=squares,
        )  # fmt: skip
        return left_to_next(rows, call.norm, call.eps, call.offset, DeferredParts(scaled, squares))

    return Plan(index, launch, (product,))


_give = launcher(key_function(GivingCall), check_giving, _giving_plan)


def give(call: GivingCall) -> NormedRows:
    """Computes `cute_kernels.quantized_linear_norm`."""
    return _give(call) if is_direct(call.x, call.weight.codes) else give_apart(check_giving(call))


def leaves_norm(m: int, weight: PackedWeight, following: PackedWeight) -> bool:
    """Whether the norm between two products of ``m`` rows, with ``weight`` and then with ``following``, needs no launch
    of its own, since both products have kernels for a deferred norm. May compile these kernels."""
    gives, takes = weight.form, following.form
    alike = (takes.device_index, takes.dtype) == (gives.device_index, gives.dtype) and takes.comes_as_it_is
    if not alike or not (weight.codes.is_cuda or GPU.takes_cpu):
        return False
    sides = Side(*gives.shape, gives.format), Side(*takes.shape, takes.format)
    return no_launch_between(m, *sides, gives.dtype, gives.device_index)


def no_launch_between(m: int, gives: Side, takes: Side, dtype: torch.dtype, device: int) -> bool:
    """Whether the norm between two products on a GPU needs no launch of its own. gives, takes: the weights [n, k] of
    the first and the second product. The second weight has no perm and no input_scale.
    """
    if not m or takes.k != gives.n or deferred_product_of(m, takes, dtype, device, TAKES) is None:
        return False
    return deferred_product_of(m, gives, dtype, device, GIVES) is not None


def _takes(m: int, form: WeightForm, dtype: torch.dtype, index: int) -> bool:
    """Whether the second product, of ``m`` rows, has a kernel that applies the rest of a deferred norm."""
    side = Side(*form.shape, form.format)
    return form.comes_as_it_is and deferred_product_of(m, side, dtype, index, TAKES) is not None


# -- products of normed rows -------------------------------------------------------------------------------------------


def take(call: LinearCall) -> torch.Tensor:
    """Computes `cute_kernels.quantized_linear` of `NormedRows`."""
    parts = call.x.deferred
    if parts is None or call.batch_invariant is not False or not is_direct(parts.scaled, call.weight.codes):
        return take_apart(call)
    return _take(call)


def take_apart(call: LinearCall) -> torch.Tensor:
    """Computes a product of `NormedRows` in two launches: the norm, then the product."""
    rows = call.x
    normed = {"norm": rows.norm, "eps": rows.norm_eps, "offset": rows.norm_offset}
    return ops.linear(call._replace(x=rows.rows, **normed))


def check_taking(call: LinearCall) -> LinearCall:
    """Raises TypeError or ValueError, which name the argument, unless a product of `NormedRows` can be computed."""
    linear_call.check_activation(call.activation, call.weight.shape[0])
    linear_call.check_out_dtype(call.out_dtype)
    rows = linear_call.rows_wanted(call.x.rows, call.weight, "...")
    check_wanted(chain([rows], linear_call.results_wanted(call, call.x.rows), _parts_wanted(call.x)))
    parts = call.x.deferred
    if call.out is not None and parts is not None:
        read = {"x": parts.scaled, "squares": parts.squares, "bias": call.bias, "residual": call.residual}
        check_apart("out", call.out, read, in_place=("residual",))
    return call


def _parts_wanted(rows: NormedRows) -> Iterator[Wanted]:
    """Yields the required dtypes and shapes of the tensors in which the first product stores its part of a deferred
    norm.
    """
    if rows.deferred is None:
        return
    given, k = rows.rows, rows.rows.shape[-1]
    for name, dtype, columns in (("scaled", given.dtype, k), ("squares", torch.float32, k // SQUARES_N)):
        part, sizes = getattr(rows.deferred, name), (given.numel() // k, columns)
        where = given.device, "rows", "", "", True, ALIGNMENT
        yield Wanted(f"x.deferred.{name}", part, (dtype,), sizes, *where)


_READ = (TENSOR.replace("{0}", "{0}." + part) for part in ("rows", "deferred.scaled", "deferred.squares"))
_OUT = f"{TENSOR}, {{0}}.data_ptr() == x.deferred.scaled.data_ptr()"
_taking_key = key_function(LinearCall, x=", ".join((*_READ, "{0}.norm_eps")), out=_OUT)


def stores_floats(product: Product) -> bool:
    """Whether a kernel stores fp32 results directly from accumulators: `.wgmma.epilogue.TileEpilogue.is_floats`."""
    schedule = product.schedule
    return isinstance(schedule, TileSchedule) and schedule.config.k_warpgroups < FLOATS_K_WARPGROUPS


def _taking_plan(call: LinearCall) -> Plan[[LinearCall], torch.Tensor]:
    rows, weight, index = call.x.rows, call.weight, call.x.rows.get_device()
    (n, k), m = weight.shape, rows.numel() // weight.shape[1]
    out_dtype = linear_call.result_dtype(call.out_dtype, rows, call.out)
    activation = activation_named(call.activation)
    gated = activation is not None and activation.gated
    plain = call.residual is None and not gated
    whole = n % (2 * PIECE if gated else PIECE) == 0
    # Results that the kernel stages in fp32 go the other way: see `TakingStore`.
    packed = out_dtype == rows.dtype and whole and are_aligned(call.residual, call.out)
    packed = packed and (call.residual is None or activation is None)
    product = None
    if weight.form.comes_as_it_is and (packed or (out_dtype == torch.float32 and plain)):
        product = deferred_product_of(m, Side(n, k, weight.format), rows.dtype, index, TAKES, config_of(activation))
    if product is None or not (packed or stores_floats(product)):
        return Plan(index, take_apart)
    numbers: dict[str, Any] = {"parts": k // SQUARES_N, "inverse_k": 1.0 / k, "eps": float(call.x.norm_eps)}
    send: Callable[..., Any] = product.bound(n, call.activation, out_dtype, **numbers)
    new_out = blank(call._replace(x=rows).result_shape, out_dtype)

    def launch(call: LinearCall) -> torch.Tensor:
        weight, parts, out = call.weight, call.x.deferred, GPU.empty(*new_out) if call.out is None else call.out
        send(
            x=parts.scaled, codes=weight.codes, scales=weight.scales, zeros=weight.zeros, bias=call.bias,
            residual=call.residual, out=out, squares=parts.squares,
        )  # fmt: skip
        return out

    return Plan(index, launch, (product,))


_take = launcher(_taking_key, check_taking, _taking_plan)
