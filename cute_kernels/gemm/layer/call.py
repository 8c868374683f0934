"""Computes all products between the attentions of two layers.

One launch computes all products if a kernel supports them. If not, `quantized_linear_norm` and `quantized_linear`
compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from cute_kernels.arguments import check_wanted
from cute_kernels.gemm.call import LinearCall, norm_wanted
from cute_kernels.gemm.deferred import GivingCall, are_aligned, check_giving, give, take
from cute_kernels.gemm.layer import config as layout
from cute_kernels.gemm.layer.arguments import LAYER_PRODUCTS, NUMBERS, PRODUCTS
from cute_kernels.gemm.layer.compile import SHIPPED_K
from cute_kernels.gemm.layer.config import LayerProductsConfig
from cute_kernels.gemm.normed import NormedRows, left_to_next
from cute_kernels.gemm.spec import GemmSpec
from cute_kernels.gemm.weight import PackedWeight, WeightTensors
from cute_kernels.runtime.cache import default_cache, load
from cute_kernels.runtime.device import arch_of, is_supported
from cute_kernels.runtime.gpu import GPU, forgotten, per_gpu
from cute_kernels.runtime.memory import blank
from cute_kernels.runtime.native import compiler_version
from cute_kernels.runtime.operator import Plan, is_direct, launcher
from cute_kernels.runtime.plans import keep, key_function
from cute_kernels.runtime.workspace import UnsettledError

Weight = PackedWeight | WeightTensors
GATED, ADDING = 1, 2  # numbers of products: gate and up; down, which adds o's results
# Products whose rows are normed. Never two in succession: consumers of the second would overwrite the sums of squares
# that the store warp has not read yet. The product between them makes sure that it has.
NORMED: tuple[int, ...] = (1, 3)
assert all(following - one > 1 for one, following in pairwise(NORMED))


class LayerCall(NamedTuple):
    """Arguments of `quantized_layer`."""

    x: torch.Tensor
    o: Weight
    gate_up: Weight
    down: Weight
    qkv: Weight | None
    residual: torch.Tensor
    norm: torch.Tensor
    following_norm: torch.Tensor
    eps: float
    offset: float

    @property
    def weights(self) -> tuple[Weight, ...]:
        three = (self.o, self.gate_up, self.down)
        return three if self.qkv is None else (*three, self.qkv)


_key = key_function(LayerCall)


class LayerRows(NamedTuple):
    """The results of `quantized_layer`.

    Attributes:
        rows: the residual stream after the layer, with the norm of the next layer.
        qkv: q, k and v of the next layer, or None if the call has no weight for them.
    """

    rows: NormedRows
    qkv: torch.Tensor | None


def layer(call: LayerCall) -> LayerRows:
    """Computes `cute_kernels.quantized_layer`."""
    check_weights(call)
    return _layer(call) if is_direct(call.x, call.o.codes) else layer_apart(check_layer(call))


_refused: dict[tuple[Hashable, ...], None] = {}
"""Keys of calls that `layer` refuses, as `is_one_launch` has found."""
forgotten(_refused.clear)


def is_one_launch(call: LayerCall) -> bool:
    """Whether one launch computes a call; False for an invalid call, too. May compile the kernel."""
    if not is_direct(call.x, call.o.codes, (call.residual, call.norm, call.following_norm)):
        return False
    key = _key(call)
    plan = _layer.plans.get(key)
    if plan is None:
        if key in _refused:
            return False
        try:
            plan = _plan(check_layer(call))
        except (TypeError, ValueError):
            keep(_refused, key, None)
            return False
        keep(_layer.plans, key, plan)
    return bool(plan.products)


def layer_apart(call: LayerCall) -> LayerRows:
    """Computes a checked call product by product."""
    norms = call.eps, call.offset
    middle = give(GivingCall(call.x, call.o, None, call.residual, call.norm, *norms, call.gate_up))
    gated = take(LinearCall(middle, call.gate_up, activation="swiglu"))
    given = GivingCall(gated, call.down, None, middle.rows, call.following_norm, *norms, call.qkv)
    rows = give(given)
    return LayerRows(rows, None if call.qkv is None else take(LinearCall(rows, call.qkv)))


def check_weights(call: LayerCall) -> None:
    """Raises TypeError unless every weight is a `PackedWeight`, or its tensors."""
    for name, weight in zip(("o", "gate_up", "down", "qkv"), call.weights, strict=False):
        if not isinstance(weight, Weight):
            raise TypeError(f"{name}: got {type(weight).__name__}, want a PackedWeight")


def check_layer(call: LayerCall) -> LayerCall:
    """Raises TypeError or ValueError, which name the argument, unless all products can be computed."""
    hidden, (both, _) = call.o.shape[0], call.gate_up.shape
    shapes = {"gate_up": (both & ~1, hidden), "down": (hidden, both // 2)}
    if call.qkv is not None:
        shapes["qkv"] = (call.qkv.shape[0], hidden)
    for name, wanted in shapes.items():
        found = getattr(call, name).shape
        if tuple(found) != wanted:
            raise ValueError(f"{name}: got a weight {list(found)}, want {list(wanted)} behind o {list(call.o.shape)}")
        check_beside(name, getattr(call, name), call.o)
    check_giving(GivingCall(call.x, call.o, None, call.residual, call.norm, call.eps, call.offset))
    check_wanted([norm_wanted(call.following_norm, call.residual, "following_norm")])
    return call


def check_beside(name: str, weight: Weight, o: Weight) -> None:
    """Raises TypeError or ValueError unless ``weight`` is on o's device and takes rows of o's dtype."""
    if weight.codes.device != o.codes.device:
        raise ValueError(f"{name}: got a weight on {weight.codes.device}, want it on {o.codes.device}, where o is")
    if weight.dtype != o.dtype:
        raise TypeError(f"{name}: got a weight for rows of {weight.dtype}, want it for {o.dtype}, as o")


# -- plans -------------------------------------------------------------------------------------------------------------


def configs_for(most_k: int) -> list[LayerProductsConfig]:
    """Returns the configurations for rows of up to ``most_k`` inputs, the best one first. If ``most_k`` is below
    `SHIPPED_K`, the second one is the configuration that bundles hold, which supports longer rows.
    """
    found = (layout.config_for(room) for room in dict.fromkeys((most_k, max(most_k, SHIPPED_K))))
    return [config for config in found if config is not None]


@per_gpu
@lru_cache(maxsize=256)
def kernel_of(most_k: int, device: int) -> tuple[LayerProductsConfig, Callable[..., Any]] | None:
    """Returns the best (configuration, compiled kernel) for rows of up to ``most_k`` inputs. The kernel is compiled
    already, or may be compiled now. Returns None if there is no such kernel."""
    if not is_supported(device):
        return None
    arch, can_compile = arch_of(device), compiler_version() is not None
    for config in configs_for(most_k):
        if can_compile or default_cache().has(GemmSpec(config), arch):
            return config, load(GemmSpec(config), arch)
    return None


def serves_rows(rows: int) -> bool:
    """Whether one launch computes products of ``rows`` rows: only if there is one row. With two to four rows it would
    take longer than four launches.
    """
    return rows == 1


def serves_shape(n: int, k: int) -> bool:
    """Whether the launch supports weights [n, k]."""
    return n % (2 * layout.TILE_N) == 0 and k % layout.STAGE_K == 0


def is_served(weight: Weight) -> bool:
    """Whether the launch supports a weight."""
    as_it_is = weight.perm is weight.input_scale is None and weight.scales.dtype == torch.bfloat16
    return weight.format == layout.FORMAT and as_it_is and serves_shape(*weight.shape)


def _plan(call: LayerCall) -> Plan[[LayerCall], LayerRows]:
    index, m = call.x.get_device(), call.x.numel() // call.o.shape[1]
    tensors = (call.x, call.residual, call.norm, call.following_norm)
    fits = all(tensor.dtype == torch.bfloat16 for tensor in tensors) and are_aligned(*tensors)
    fits = fits and serves_rows(m) and results_of(call) <= 2 * layout.SET_WORDS
    kernel = None
    if fits and all(is_served(weight) for weight in call.weights):
        kernel = kernel_of(max(weight.shape[1] for weight in call.weights), index)
    return Plan(index, layer_apart) if kernel is None else make_plan(call, *kernel, GPU.num_sms(index))


def exchange_words(device_index: int) -> int:
    """Returns the address of the words by which CTAs of a launch on the current stream exchange results. Raises
    UnsettledError if a CUDA graph is captured before such words have been filled.
    """
    return GPU.counters(device_index, GPU.stream(device_index), layout.EXCHANGE_WORDS)


def results_of(call: LayerCall) -> int:
    """Returns the number of bf16 results of a row that CTAs exchange. Two results share a word."""
    hidden = call.o.shape[0]
    return hidden + call.down.shape[1] + (0 if call.qkv is None else hidden)


def make_plan(
    call: LayerCall, config: LayerProductsConfig, function: Callable[..., Any], num_ctas: int
) -> Plan[[LayerCall], LayerRows]:
    """Returns the plan of a compiled kernel for calls like ``call``, with at most ``num_ctas`` CTAs."""
    hidden, heads = call.o.shape
    assert results_of(call) <= 2 * layout.SET_WORDS, "a set has no room for so many results"
    dtype, leading = call.x.dtype, call.x.shape[:-1]
    new = [blank((*leading, hidden), dtype)]
    if call.qkv is not None:
        new.append(blank((*leading, call.qkv.shape[0]), dtype))
    numbers: dict[str, Any] = {"eps": float(call.eps), "offset": float(call.offset)}
    for i, names in enumerate(PRODUCTS):
        if i < len(call.weights):
            values = (*call.weights[i].shape, int(i == GATED), int(i == ADDING))
            numbers |= dict(zip((names[each] for each in NUMBERS), values, strict=True))
        else:
            numbers |= dict.fromkeys(names.values(), 0)
    tiles = sum(weight.shape[0] for weight in call.weights) // layout.TILE_N
    numbers["num_ctas"] = min(num_ctas, tiles)
    send, index, news = LAYER_PRODUCTS.bound(function, numbers), call.x.get_device(), tuple(new)

    def launch(call: LayerCall) -> LayerRows:
        try:
            exchange = exchange_words(index)
        except UnsettledError:
            return layer_apart(call)
        rows, *qkv = (GPU.empty(*new) for new in news)
        outs, norms = (None, None, rows, *qkv), dict(zip(NORMED, (call.norm, call.following_norm), strict=True))
        named: dict[str, Any] = {}
        for i, (names, weight, out) in enumerate(zip(PRODUCTS, call.weights, outs, strict=False)):
            norm = norms.get(i)
            named[names["codes"]], named[names["scales"]] = weight.codes.data_ptr(), weight.scales.data_ptr()
            named[names["norm"]] = 0 if norm is None else norm.data_ptr()
            named[names["out"]] = 0 if out is None else out.data_ptr()
        x = call.x.detach() if call.x.requires_grad else call.x
        send(**named, x=x.view(1, heads), residual=call.residual.data_ptr(), exchange=exchange)
        given = left_to_next(rows, call.following_norm, call.eps, call.offset, None)
        return LayerRows(given, qkv[0] if qkv else None)

    return Plan(index, launch, (config,))


_layer = launcher(_key, check_layer, _plan)
