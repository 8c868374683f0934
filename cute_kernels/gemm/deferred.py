"""Products around an RMSNorm without a launch for it: `quantized_linear_norm` gives `NormedRows`, `quantized_linear`
takes them.

Where the kernels of both products have the stores of :mod:`.wgmma.deferred_norm`, the first writes rows times the
norm's weight and sums of squares beside the rows, and the second applies what is left of the norm to its accumulators.
Everywhere else the same two calls are a product, `rms_norm` and a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from cute_kernels.arguments import check_tensors
from cute_kernels.formats.weights import WeightFormat
from cute_kernels.gemm import checks, ops
from cute_kernels.gemm.deferred_choice import beside_a_norm, deferred
from cute_kernels.gemm.inputs.launch import InputRows, input_rows
from cute_kernels.gemm.launch import RowNorm
from cute_kernels.gemm.plan import ACTIVATIONS, OUT_KINDS, CompiledProduct, LinearPlan, plan_of_tiles, problem_of
from cute_kernels.gemm.reference import out_features
from cute_kernels.gemm.served import may_load, schedule_for
from cute_kernels.gemm.weight import PackedWeight
from cute_kernels.gemm.wgmma.deferred_compile import ARGUMENTS, DeferredNormSpec
from cute_kernels.gemm.wgmma.deferred_config import GIVES, SQUARES_N, STEP_N, TAKES, DeferredKind
from cute_kernels.gemm.wgmma.schedule import TileSchedule
from cute_kernels.norm.call import DTYPES
from cute_kernels.norm.config import MAX_COLUMNS
from cute_kernels.norm.config import VECTOR as NORM_VECTOR
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of, is_supported
from cute_kernels.runtime.gpu import GPU, per_gpu
from cute_kernels.runtime.memory import Blank, blank
from cute_kernels.runtime.operator import launcher
from cute_kernels.runtime.plans import identity

ALIGNMENT = 16  # bytes
PIECE = 8  # results of 16 bytes
FLOATS_K_WARPGROUPS = 3  # warpgroups along K from which on fp32 results are staged


@dataclass(frozen=True, eq=False)
class DeferredParts:
    """What is there of a norm that the next product finishes. scaled: bf16 [M, n], rows times the norm's weight;
    squares: fp32 [M, n / 64], sums of squares of 64 of a row each."""

    scaled: torch.Tensor
    squares: torch.Tensor


@dataclass(frozen=True, eq=False)
class NormedRows:
    """Rows, and the RMSNorm of them that the next product takes: of `quantized_linear_norm`, for `quantized_linear`.

    Attributes:
        rows: bf16 or fp16 [..., n], before the norm: a model's residual stream; any strides, n a multiple of 8 up to
            16384. Nobody may write to it before the products of the norm are computed.
        norm: [n], the norm's weight, in the dtype of rows or fp32.
        norm_eps: added to the mean square.
        norm_offset: added to the weight.
        deferred: what the product that made the rows left of the norm; None where the norm takes a launch. No argument:
            it belongs to these rows and this norm, so `dataclasses.replace` of either makes rows without it.

    Raises:
        TypeError, ValueError: a field is not as above; the message names it, what came and what is wanted.
    """

    rows: torch.Tensor
    norm: torch.Tensor
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    deferred: DeferredParts | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_rows(self.rows, self.norm, self.norm_eps, self.norm_offset)

    def normed(self) -> torch.Tensor:
        """The norm of the rows, [..., n] in their dtype, by `rms_norm`: what any other consumer takes."""
        return RowNorm(self.norm, self.norm_eps, self.norm_offset).of(self.rows)


def check_rows(rows: torch.Tensor, norm: torch.Tensor, eps: object, offset: object) -> None:
    """Raises TypeError or ValueError unless `rms_norm` takes rows with this weight and these numbers."""
    check_tensors(rows=rows)
    if rows.dtype not in DTYPES:
        raise TypeError(f"rows: got dtype {rows.dtype}, want torch.bfloat16 or torch.float16")
    n = rows.shape[-1] if rows.dim() else 0
    if not n or n % NORM_VECTOR or n > MAX_COLUMNS:
        want = f"[..., n] with n a multiple of {NORM_VECTOR} up to {MAX_COLUMNS}"
        raise ValueError(f"rows: got shape {list(rows.shape)}, want {want}")
    checks.check_norm(norm, eps, offset, rows)


def left_to_next(
    rows: torch.Tensor, norm: torch.Tensor, eps: float, offset: float, parts: DeferredParts | None
) -> NormedRows:
    """Rows of a checked call, and what there is of their norm; not checked again, as every layer makes some."""
    made = object.__new__(NormedRows)
    values = {"rows": rows, "norm": norm, "norm_eps": eps, "norm_offset": offset, "deferred": parts}
    made.__dict__.update(values)
    return made


# -- plans -------------------------------------------------------------------------------------------------------------


@per_gpu
@lru_cache(maxsize=4096)
def deferred_plan_of(
    m: int, n: int, k: int, form: WeightFormat, dtype: torch.dtype, device: int, kind: DeferredKind
) -> LinearPlan | None:
    """The plan of a product of ``m`` rows on one side of a deferred norm; None if its kernel is not, or is not there
    and nobody may wait for the compiler."""
    if dtype != torch.bfloat16 or (n if kind == GIVES else k) % STEP_N or not is_supported(device):
        return None
    problem = problem_of(m, n, k, form, dtype, device, False)
    schedule = beside_a_norm(problem, schedule_for(problem, GPU.name(device)), kind)
    config = deferred(schedule, kind)
    if config is None or not isinstance(schedule, TileSchedule):
        return None
    spec, arch = DeferredNormSpec(config), arch_of(device)
    if not may_load(spec, arch, problem):  # a norm can be launched
        return None
    function = load(spec, arch)
    return plan_of_tiles(CompiledProduct(function, ARGUMENTS[kind]), schedule, device)


def _aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether tensors are contiguous and begin on 16 bytes."""
    return all(t is None or (t.is_contiguous() and t.data_ptr() % ALIGNMENT == 0) for t in tensors)


# -- rows and their norm -----------------------------------------------------------------------------------------------


class GivingCall(NamedTuple):
    """Arguments of `quantized_linear_norm`."""

    x: torch.Tensor
    weight: PackedWeight
    bias: torch.Tensor | None
    residual: torch.Tensor
    norm: torch.Tensor
    eps: float
    offset: float
    following: PackedWeight | None = None


def give(call: GivingCall) -> NormedRows:
    """`cute_kernels.quantized_linear_norm`."""
    if ops.is_direct(call.x, call.weight.codes, call.bias, call.residual, call.norm):
        return _give(call)
    check_giving(call)
    return give_apart(call)


def give_apart(call: GivingCall) -> NormedRows:
    """The rows by a product as any other, of a checked call: the norm is left to the next one."""
    rows = _product(call.x, call.weight)(bias=call.bias, residual=call.residual)
    return NormedRows(rows, call.norm, call.eps, call.offset)


def check_giving(call: GivingCall) -> GivingCall:
    """Raises TypeError or ValueError, which name the argument, unless rows can be computed and normed."""
    x, weight, residual = call.x, call.weight, call.residual
    (n, k), dtype = weight.shape, weight.format.activation_dtype(weight.scales.dtype)
    checks.check_input(x, k, dtype, weight.codes.device)
    if call.bias is not None:
        checks.check_bias(call.bias, x, n)
    check_tensors(residual=residual)
    checks.check_result("residual", residual, x, n, None, x.dtype)
    checks.check_norm(call.norm, call.eps, call.offset, residual)
    if n % NORM_VECTOR or n > MAX_COLUMNS:
        raise ValueError(f"weight: got {n} rows, want a multiple of {NORM_VECTOR} up to {MAX_COLUMNS}: they are normed")
    following = call.following
    if following is not None and not isinstance(following, PackedWeight):
        raise TypeError(f"following: got {type(following).__name__}, want a PackedWeight or None")
    if following is not None and following.shape[1] != n:
        raise ValueError(f"following: got a weight {list(following.shape)}, want one of {n} inputs")
    return call


@dataclass(frozen=True)
class GivingPlan:
    """What of a launch is kept. matrix: [M, K], as the kernel takes x. inputs: what makes x ready, where it is not.
    send: the launch. new: results: rows, scaled rows, sums of squares."""

    product: LinearPlan
    matrix: tuple[int, int]
    inputs: InputRows | None
    send: Callable[..., Any]
    new: tuple[Blank, Blank, Blank]

    @property
    def device_index(self) -> int:
        return self.product.device_index

    def launch(self, call: GivingCall) -> NormedRows:
        """Launches on the current stream."""
        x, weight, bias = call.x, call.weight, call.bias
        if self.inputs is not None:
            x = self.inputs.make(x, weight.perm, weight.input_scale)
        rows, scaled, squares = (GPU.empty(*new) for new in self.new)
        self.send(
            x=(x.detach() if x.requires_grad else x).view(self.matrix),
            codes=weight.codes.data_ptr(),
            scales=weight.scales.data_ptr(),
            zeros=0 if weight.zeros is None else weight.zeros.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            residual=call.residual.data_ptr(),
            out=rows.data_ptr(),
            workspace=self.product.workspace(),
            norm=call.norm.data_ptr(),
            scaled=scaled.data_ptr(),
            squares=squares.data_ptr(),
        )
        return left_to_next(rows, call.norm, call.eps, call.offset, DeferredParts(scaled, squares))


@dataclass(frozen=True)
class ApartPlan:
    """Of calls that no kernel of a deferred norm serves. run: what does, with the call."""

    device_index: int
    run: Callable[[Any], Any]

    def launch(self, call: GivingCall | TakingCall) -> Any:
        return self.run(call)


def _weight_key(weight: PackedWeight) -> tuple[Any, ...]:
    places = (None if t is None else t.data_ptr() % ALIGNMENT for t in (weight.perm, weight.input_scale))
    return weight.format.key, weight.shape, weight.scales.dtype, weight.codes.get_device(), *places


def _giving_key(call: GivingCall) -> tuple[Any, ...]:
    bias = None if call.bias is None else identity(call.bias)
    tensors = identity(call.x), identity(call.residual), identity(call.norm), bias
    following = None if call.following is None else _weight_key(call.following)
    return *tensors, *_weight_key(call.weight), call.eps, call.offset, following


def _giving_plan(call: GivingCall) -> GivingPlan | ApartPlan:
    x, weight, index = call.x, call.weight, call.x.get_device()
    (n, k), m = weight.shape, x.numel() // weight.shape[1]
    apart = ApartPlan(index, give_apart)
    if not m or call.norm.dtype != x.dtype or not _aligned(call.residual, call.norm):
        return apart
    as_it_is = weight.perm is weight.input_scale is None and _aligned(x) and k % PIECE == 0
    inputs = None if as_it_is else input_rows(x, weight.perm, weight.input_scale)
    if inputs is None and not as_it_is:
        return apart
    following = call.following
    if following is not None and not _comes_as_it_is(following):
        return apart
    if following is not None and deferred_plan_of(m, *following.shape, following.format, x.dtype, index, TAKES) is None:
        return apart
    product = deferred_plan_of(m, n, k, weight.format, x.dtype, index, GIVES)
    if product is None:
        return apart
    rows = blank((*x.shape[:-1], n), x.dtype)
    numbers: dict[str, Any] = {"offset": float(call.offset)}
    return GivingPlan(
        product=product,
        matrix=(m, k),
        inputs=inputs,
        send=product.bound(n, ACTIVATIONS[None], OUT_KINDS[x.dtype], **numbers),
        new=(rows, blank((m, n), x.dtype), blank((m, n // SQUARES_N), torch.float32)),
    )


def leaves_norm(m: int, weight: PackedWeight, following: PackedWeight) -> bool:
    """Whether no launch lies between a product of ``m`` rows with ``weight``, the norm of its rows, in their dtype, and
    their product with ``following``: whether kernels of both are on the sides of a deferred norm. May compile them."""
    index, dtype = weight.codes.get_device(), weight.format.activation_dtype(weight.scales.dtype)
    if not (weight.codes.is_cuda or GPU.takes_cpu) or following.codes.get_device() != index:
        return False
    if following.format.activation_dtype(following.scales.dtype) != dtype or not _comes_as_it_is(following):
        return False
    sides = Side(*weight.shape, weight.format), Side(*following.shape, following.format)
    return no_launch_between(m, *sides, dtype, index)


class Side(NamedTuple):
    """A weight [n, k] on one side of a norm."""

    n: int
    k: int
    format: WeightFormat


def no_launch_between(m: int, gives: Side, takes: Side, dtype: torch.dtype, device: int) -> bool:
    """`leaves_norm` of weights [n, k] on a GPU; the second has its inputs in their own order and unscaled."""
    if not m or takes.k != gives.n or deferred_plan_of(m, *takes, dtype, device, TAKES) is None:
        return False
    return deferred_plan_of(m, *gives, dtype, device, GIVES) is not None


def _comes_as_it_is(weight: PackedWeight) -> bool:
    """Whether a weight takes rows in their own order, unscaled."""
    return weight.perm is weight.input_scale is None


_give = launcher(_giving_key, check_giving, _giving_plan)

# -- products of normed rows -------------------------------------------------------------------------------------------


class TakingCall(NamedTuple):
    """Arguments of `quantized_linear` of rows that are normed."""

    rows: NormedRows
    weight: PackedWeight
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    activation: str | None
    out_dtype: torch.dtype | None
    batch_invariant: bool
    out: torch.Tensor | None


def take(call: TakingCall) -> torch.Tensor:
    """`cute_kernels.quantized_linear` of rows that are normed."""
    parts = call.rows.deferred
    if parts is None or call.batch_invariant is not False:
        return take_apart(call)
    if ops.is_direct(parts.scaled, call.weight.codes, call.bias, call.residual, call.out):
        return _take(call)
    return take_apart(call)


def take_apart(call: TakingCall) -> torch.Tensor:
    """The product behind a launch for the norm."""
    options = call._asdict()
    rows, weight = options.pop("rows"), options.pop("weight")
    norm = RowNorm(rows.norm, rows.norm_eps, rows.norm_offset)
    normed, *left = ops.normed_inputs(rows.rows, norm, weight.perm, weight.input_scale)
    return _product(normed, weight, *left)(**options)


def _product(x: torch.Tensor, weight: PackedWeight, *inputs: torch.Tensor | None) -> Callable[..., torch.Tensor]:
    """A product as any other, of its options. inputs: an order and an input scale in place of the weight's."""
    tensors = weight.codes, weight.scales, weight.zeros, *(inputs or (weight.perm, weight.input_scale))
    return partial(ops.apply, x, *tensors, format=weight.format, shape=weight.shape)


def check_taking(call: TakingCall) -> TakingCall:
    """Raises TypeError or ValueError, which name the argument, unless the product can be computed."""
    weight = call.weight
    dtype = weight.format.activation_dtype(weight.scales.dtype)
    checks.check_input(call.rows.rows, weight.shape[1], dtype, weight.codes.device)
    checks.check_options(
        call.rows.rows, weight.shape[0], bias=call.bias, residual=call.residual, activation=call.activation,
        out_dtype=call.out_dtype, out=call.out,
    )  # fmt: skip
    _check_parts(call.rows)
    if call.out is not None and call.rows.deferred is not None:
        checks.check_apart(call.out, call.rows.deferred.scaled)
    return call


def _check_parts(rows: NormedRows) -> None:
    """Raises TypeError or ValueError unless what is deferred of a norm is that of rows of this size, as products give
    it."""
    k, parts = rows.rows.shape[-1], rows.deferred
    if parts is None:
        return
    m = rows.rows.numel() // k
    given = {"scaled": (parts.scaled, rows.rows.dtype, k), "squares": (parts.squares, torch.float32, k // SQUARES_N)}
    for name, (tensor, dtype, columns) in given.items():
        name = f"x: got deferred.{name}"
        if tensor.dtype != dtype:
            raise TypeError(f"{name} of dtype {tensor.dtype}, want {dtype}")
        if list(tensor.shape) != [m, columns]:
            raise ValueError(f"{name} of shape {list(tensor.shape)}, want {[m, columns]}")
        if tensor.device != rows.rows.device:
            raise ValueError(f"{name} on {tensor.device}, want it on {rows.rows.device}, where rows are")
        if not _aligned(tensor):
            raise ValueError(f"{name} with strides {tensor.stride()}, want it contiguous, on {ALIGNMENT} bytes")


@dataclass(frozen=True)
class TakingPlan:
    """What of a launch is kept. send: the launch. new: the result."""

    product: LinearPlan
    send: Callable[..., Any]
    new: Blank

    @property
    def device_index(self) -> int:
        return self.product.device_index

    def launch(self, call: TakingCall) -> torch.Tensor:
        """Launches on the current stream."""
        weight, bias, residual, parts = call.weight, call.bias, call.residual, call.rows.deferred
        assert parts is not None
        out = GPU.empty(*self.new) if call.out is None else call.out
        self.send(
            x=parts.scaled,
            codes=weight.codes.data_ptr(),
            scales=weight.scales.data_ptr(),
            zeros=0 if weight.zeros is None else weight.zeros.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            residual=0 if residual is None else residual.data_ptr(),
            out=out.data_ptr(),
            workspace=self.product.workspace(),
            squares=parts.squares.data_ptr(),
        )
        return out


def _taking_key(call: TakingCall) -> tuple[Any, ...]:
    given = (None if t is None else identity(t) for t in (call.bias, call.residual, call.out))
    parts = call.rows.deferred
    assert parts is not None
    on_input = call.out is not None and call.out.data_ptr() == parts.scaled.data_ptr()
    rows = identity(call.rows.rows), identity(parts.scaled), identity(parts.squares), call.rows.norm_eps, on_input
    options = call.activation, call.out_dtype
    return *rows, *_weight_key(call.weight), *given, *options


def stores_floats(product: LinearPlan) -> bool:
    """Whether a kernel stores fp32 results from where accumulators lie: `.wgmma.epilogue.TileEpilogue.is_floats`."""
    schedule = product.schedule
    return isinstance(schedule, TileSchedule) and schedule.config.k_warpgroups < FLOATS_K_WARPGROUPS


def _taking_plan(call: TakingCall) -> TakingPlan | ApartPlan:
    rows, weight, index = call.rows.rows, call.weight, call.rows.rows.get_device()
    (n, k), m = weight.shape, rows.numel() // weight.shape[1]
    out_dtype = checks.result_dtype(call.out_dtype, rows, call.out)
    plain = call.residual is None and call.activation != "swiglu"
    whole = n % (2 * PIECE if call.activation == "swiglu" else PIECE) == 0
    # Results that the kernel stages in fp32 go the other way: see `TakingStore`.
    packed = out_dtype == rows.dtype and whole and _aligned(call.residual, call.out)
    packed = packed and (call.residual is None or call.activation is None)
    as_it_is = weight.perm is weight.input_scale is None and (packed or (out_dtype == torch.float32 and plain))
    product = deferred_plan_of(m, n, k, weight.format, rows.dtype, index, TAKES) if as_it_is else None
    if product is None or not (packed or stores_floats(product)):
        return ApartPlan(index, take_apart)
    numbers: dict[str, Any] = {"parts": k // SQUARES_N, "inverse_k": 1.0 / k, "eps": float(call.rows.norm_eps)}
    return TakingPlan(
        product=product,
        send=product.bound(n, ACTIVATIONS[call.activation], OUT_KINDS[out_dtype], **numbers),
        new=blank((*rows.shape[:-1], out_features(n, call.activation)), out_dtype),
    )


_take = launcher(_taking_key, check_taking, _taking_plan)
