"""Layers of experts of SGLang with 4- and 8-bit weights: AWQ, GPTQ and compressed-tensors checkpoints.

Hooks stand around the two methods of the owners of such layers, as for linear layers. SGLang routes tokens and hands
them out: a layer sees ids of its own experts, and -1 for those of other GPUs, which add nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cute_kernels.formats.weights import SHIPPED_GROUP_SIZES
from cute_kernels.gemm.experts.call import MAX_TOKENS
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.gemm.quantize import DTYPES
from cute_kernels.gemm.weight import TILE_N
from cute_kernels.integrations import expert_kernels, expert_weights, ready
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.sglang import rows
from cute_kernels.integrations.sglang.seams import (
    IN_PLACE,
    WANTED,
    Hook,
    hooks_of_layers,
    logger,
    reasons_against,
    say_once,
    share_workspaces,
)
from cute_kernels.integrations.sglang.versions import Interface
from cute_kernels.runtime.spec import KernelSpec

WHAT: str = "experts with 4- and 8-bit weights"
SERVED = "cute_kernels_experts"
"""Attribute of a layer that is served here."""
NAMES = ("w13", "w2")
BIASES = ("w13_bias", "w2_bias", "w13_weight_bias", "w2_weight_bias")


class Form(NamedTuple):
    """The form of an owner's weights; group_size 0 for one scale per row."""

    bits: int
    group_size: int
    zero_point: bool
    act_order: bool


class Served(NamedTuple):
    """A layer's weights, and whether a token's result may not depend on other tokens."""

    gate_up: PackedExperts
    down: PackedExperts
    batch_invariant: bool


@dataclass(frozen=True)
class Kind:
    """Layers of a kind of checkpoint.

    Attributes:
        owner: the field of `versions.Interface` that names their owner.
        product: the owner's method that multiplies.
        words, scales, zeros: names of parameters, "{}" standing for "w13" and "w2", each [E, inputs, outputs].
        form: owner to form; ValueError says why it has none.
        pack: what packs them.
    """

    owner: str
    product: str
    words: str
    scales: str
    zeros: str
    form: Callable[[Foreign], Form]
    pack: Callable[..., PackedExperts] = expert_weights.from_inputs_packed


def _load(kind: Kind, original: Callable[..., None], owner: Foreign, layer: torch.nn.Module) -> None:
    """Packs a loaded layer, or leaves it to SGLang and logs why."""
    if getattr(layer, SERVED, None) is not None:
        return  # nothing was loaded since: parameters that are packed have no loader
    try:
        form = kind.form(owner)
        w2_scales = getattr(layer, kind.scales.format("w2"))
        reasons = [*reasons_of(form, layer, w2_scales.shape[2]), *reasons_against(w2_scales.device)]
        packed = [] if reasons else [_packed(kind, form, layer, name) for name in NAMES]
        reasons = reasons or _make_ready(layer, packed)
    except (AttributeError, TypeError, ValueError) as error:
        packed, reasons = [], [str(error)]
    if reasons:
        say_once(f"experts are left to SGLang: {kind.owner}: {'; '.join(reasons)}", logging.WARNING)
        original(owner, layer)
        return
    for name, experts in zip(NAMES, packed, strict=True):
        new = {kind.words: experts.codes, kind.scales: experts.scales, kind.zeros: experts.zeros}
        for text, tensor in new.items():
            if (before := getattr(layer, text.format(name), None)) is not None:
                tensor = before.data.new_empty(0) if tensor is None else tensor
                setattr(layer, text.format(name), torch.nn.Parameter(tensor, requires_grad=False))
    vars(layer)["_original_shapes"] = {}  # which SGLang would give parameters before it loads them again
    setattr(layer, SERVED, Served(packed[0], packed[1], rows.is_deterministic()))
    say_once("experts run here")


def _packed(kind: Kind, form: Form, layer: Foreign, name: str) -> PackedExperts:
    words, scales = (getattr(layer, text.format(name)).data for text in (kind.words, kind.scales))
    zeros = getattr(layer, kind.zeros.format(name)).data if form.zero_point else None
    options = {"bits": form.bits, "group_size": form.group_size or None, "dtype": layer.moe_runner_config.params_dtype}
    return kind.pack(words, scales, zeros, **options, gated=name == "w13")


def reasons_of(form: Form, layer: Foreign, hidden: int) -> list[str]:
    """Returns why a layer is left to SGLang. hidden: features of the model."""
    config = layer.moe_runner_config
    features, dtype = config.intermediate_size_per_partition, config.params_dtype  # GPTQ's scales may have another
    limits = (config.gemm1_alpha, config.gemm1_beta, config.gemm1_clamp_limit, config.swiglu_limit)
    wrong = {
        "its hooks were not seen to take effect": WHAT not in IN_PLACE,
        f"{form.bits}-bit weights": form.bits not in (4, 8),
        f"groups of {form.group_size}": form.group_size not in (0, *SHIPPED_GROUP_SIZES),
        "act-order": form.act_order,
        f"experts of {features} features": bool(features % (TILE_N // 2) or hidden % TILE_N),
        f"activations in {dtype}": dtype not in DTYPES,
        f"the activation {config.activation}": config.activation != "silu" or not config.is_gated,
        "limits": any(limit is not None for limit in limits),
        "biases": any(getattr(layer, name, None) is not None for name in BIASES),
        "weights on the input": bool(config.apply_router_weight_on_input),
        "results of experts that are not added up": bool(config.no_combine),
        **_wrong_of_server(),
    }
    return [what for what, is_so in wrong.items() if is_so]


def _wrong_of_server() -> dict[str, bool]:
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    return {
        "tokens sent between GPUs (all-to-all)": not get_moe_a2a_backend().is_none(),
        "experts that move between GPUs (--enable-eplb)": rows.published("get_exec", "moe.enable_eplb"),
        "LoRA": rows.published("get_lora", "enable_lora"),
    }


def _make_ready(layer: Foreign, packed: list[PackedExperts]) -> list[str]:
    """Loads or compiles the kernels of a layer's steps. Returns why they are not ready."""
    device = packed[0].device

    def specs() -> Iterable[KernelSpec]:
        tokens, forms = expert_kernels.tokens_of(rows.engine_rows().all(), MAX_TOKENS), (each.form for each in packed)
        return expert_kernels.specs(*forms, layer.top_k, tokens, rows.is_deterministic())

    reason = ready.make_ready(device, specs, logger, WANTED)
    if device.type == "cuda":
        share_workspaces()
    return [] if reason is None else [reason]


def _multiply(original: Callable[..., Any], owner: Foreign, layer: torch.nn.Module, dispatch_output: Foreign) -> Any:
    served: Served | None = getattr(layer, SERVED, None)
    if served is None:
        return original(owner, layer, dispatch_output)
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x, chosen, config = dispatch_output.hidden_states, dispatch_output.topk_output, layer.moe_runner_config
    weights = chosen.topk_weights
    if (factor := config.routed_scaling_factor) is not None and factor != 1.0:
        weights = weights * factor
    ids = chosen.topk_ids.int()
    out = expert_kernels.multiply(
        x, served.gate_up, served.down, weights, ids, served.batch_invariant, torch.empty_like(x)
    )
    return StandardCombineInput(hidden_states=out)


def _compressed_tensors_form(scheme: Foreign) -> Form:
    order = getattr(scheme.actorder, "value", scheme.actorder)
    return Form(scheme.num_bits, max(scheme.group_size or 0, 0), not scheme.sym, order == "group")


def _gptq_form(kernel: Foreign) -> Form:
    config = kernel.quant_config
    return Form(config.weight_bits, max(config.group_size, 0), False, bool(config.desc_act))


def _awq_form(kernel: Foreign) -> Form:
    config = kernel.quant_config
    return Form(config.weight_bits, max(config.group_size, 0), True, False)


KINDS = (
    Kind("compressed_tensors_experts", "apply_weights", *expert_weights.COMPRESSED_TENSORS, _compressed_tensors_form),
    Kind("gptq_experts", "apply", *expert_weights.AUTO, _gptq_form),
    Kind("awq_experts", "apply", *expert_weights.AUTO, _awq_form, expert_weights.from_awq),
)


def hooks(interface: Interface) -> dict[str, Hook]:
    """The hooks around methods of SGLang's, by their full names."""
    return hooks_of_layers(interface, KINDS, _load, _multiply, ("dispatch_output",))
