"""Expert layers of SGLang with 4- and 8-bit weights: AWQ, GPTQ, compressed-tensors and gpt-oss checkpoints.

Two methods of the layers' owners are hooked, as for linear layers. SGLang routes and dispatches tokens. A layer sees
the ids of its own experts. In place of experts of other GPUs it sees -1, which adds nothing to the layer's result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cute_kernels.gemm.activations import ActivationFunction, ClampedSwiglu
from cute_kernels.gemm.experts.call import MAX_TOKENS
from cute_kernels.gemm.packed_experts import PackedExperts
from cute_kernels.gemm.quantize import DTYPES
from cute_kernels.integrations import expert_kernels, expert_weights
from cute_kernels.integrations.expert_kernels import Epilogues
from cute_kernels.integrations.expert_weights import Stored
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.sglang import rows
from cute_kernels.integrations.sglang.seams import Hook, Layers, Seam, make_ready, reasons_against, refuse
from cute_kernels.integrations.sglang.versions import Interface
from cute_kernels.runtime.spec import KernelSpec

NAMES = ("w13", "w2")
MXFP4_BIASES = ("w13_weight_bias", "w2_weight_bias")
BIASES = ("w13_bias", "w2_bias", *MXFP4_BIASES)
ROUTER = "cute_kernels_router"
"""Attribute of gpt-oss's expert layers: the module that chooses a token's experts."""


class Served(NamedTuple):
    """A layer's weights, the epilogues of its products, and whether results are batch-invariant."""

    gate_up: PackedExperts
    down: PackedExperts
    epilogues: Epilogues
    batch_invariant: bool


@dataclass(frozen=True)
class Kind:
    """The expert layers of one kind of checkpoint.

    Attributes:
        owner: the field of `versions.Interface` that names the layers' owner.
        product: the owner's method that multiplies.
        words, scales, zeros: names of parameters; "{}" stands for "w13" or "w2".
        form: a function from an owner to the way in which its layers store codes. It raises ValueError, with the
            reason, for unsupported layers.
        pack: the function that packs parameters [E, inputs, outputs].
        outputs_first: whether parameters are [E, outputs, inputs]. Rows of gate and up may then alternate.
    """

    owner: str
    product: str
    words: str
    scales: str
    zeros: str
    form: Callable[[Foreign], Stored]
    pack: Callable[..., PackedExperts] = expert_weights.from_inputs_packed
    outputs_first: bool = False

    def tensor(self, layer: Foreign, text: str, name: str) -> torch.Tensor:
        """Returns a parameter as [E, inputs, outputs]. text: the parameter's name with "{}". name: "w13" or "w2"."""
        tensor = getattr(layer, text.format(name)).data
        return tensor.transpose(1, 2) if self.outputs_first else tensor

    def in_turn(self, config: Foreign) -> bool:
        """Returns whether the rows of gate and up alternate, as in gpt-oss's checkpoints; otherwise all rows of gate
        come first.
        """
        return self.outputs_first and config.gemm1_alpha is not None and config.gate_up_interleaved

    def biases_of(self, owner: Foreign, layer: Foreign) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns the biases of both products, as kernels take them: in the first, elements of gate and up alternate.
        Returns (None, None) for layers without biases.
        """
        if not (self.outputs_first and owner.with_bias):
            return None, None
        config = layer.moe_runner_config
        first, second = (getattr(layer, name).data.to(config.params_dtype) for name in MXFP4_BIASES)
        return first if self.in_turn(config) else expert_weights.gate_and_up_in_turn(first), second


def _pack(kind: Kind, owner: Foreign, layer: Foreign) -> tuple[dict[str, torch.Tensor | None], Served]:
    """Packs a loaded layer, as `Layers.pack` describes."""
    form, config = kind.form(owner), layer.moe_runner_config
    features, hidden = (kind.tensor(layer, kind.scales, name).shape[2] for name in NAMES)
    wrong = form.wrong(features // 2, hidden) | _wrong_of(kind, layer) | _wrong_of_server()
    device = getattr(layer, kind.scales.format("w2")).device
    refuse([*(what for what, is_so in wrong.items() if is_so), *reasons_against(device)])
    options = {"bits": form.bits, "group_size": form.group_size or None, "dtype": config.params_dtype}
    tensors: dict[str, torch.Tensor | None] = {}
    packed: list[PackedExperts] = []
    for name in NAMES:
        texts = (kind.words, kind.scales, *((kind.zeros,) if form.zero_point else ()))
        words, scales, *zeros = (kind.tensor(layer, text, name) for text in texts)
        gated = name == "w13" and not kind.in_turn(config)
        experts = kind.pack(words, scales, zeros[0] if zeros else None, **options, gated=gated)
        new = {kind.words: experts.codes, kind.scales: experts.scales, kind.zeros: experts.zeros}
        tensors |= {text.format(name): tensor for text, tensor in new.items()}
        packed.append(experts)
    epilogues = Epilogues(activation_of(config) or expert_kernels.SWIGLU, *kind.biases_of(owner, layer))
    refuse(make_ready(device, lambda: _specs(layer, packed, epilogues.activation)))
    if (router := vars(layer).get(ROUTER)) is not None:
        from sglang.srt.layers.moe.topk import TopKOutputFormat

        router.topk_config.output_format = TopKOutputFormat.STANDARD
    return tensors, Served(packed[0], packed[1], epilogues, rows.is_deterministic())


def activation_of(config: Foreign) -> ActivationFunction | None:
    """Returns the activation that SGLang applies to a layer's gates and ups; None if no kernel here computes it."""
    alpha, clamp, limit = config.gemm1_alpha, config.gemm1_clamp_limit, config.swiglu_limit
    if config.activation != "silu" or not config.is_gated or config.gemm1_beta is not None:
        return None
    if alpha is clamp is None:
        return ClampedSwiglu(1.0, limit, 0.0) if limit else expert_kernels.SWIGLU
    return ClampedSwiglu(alpha, clamp, 1.0) if limit is None and alpha is not None and clamp else None


def _wrong_of(kind: Kind, layer: Foreign) -> dict[str, bool]:
    """Returns the properties that no kernel here supports: {property: whether the layer has it}."""
    config, dtype = layer.moe_runner_config, layer.moe_runner_config.params_dtype  # GPTQ's scales may have another
    return {
        f"activations in {dtype}": dtype not in DTYPES,
        f"the activation {config.activation}, or its numbers": activation_of(config) is None,
        "biases": not kind.outputs_first and any(getattr(layer, name, None) is not None for name in BIASES),
        "weights on the input": bool(config.apply_router_weight_on_input),
        "results of experts that are not added up": bool(config.no_combine),
        "tokens sorted by experts": kind.outputs_first and layer.use_triton_kernels and ROUTER not in vars(layer),
    }


def _wrong_of_server() -> dict[str, bool]:
    from sglang.srt.layers.moe.utils import get_moe_a2a_backend

    return {
        "tokens sent between GPUs (all-to-all)": not get_moe_a2a_backend().is_none(),
        "experts that move between GPUs (--enable-eplb)": rows.published("get_exec", "moe.enable_eplb"),
        "experts paged from the host": rows.published("get_exec", "moe.enable_paged_experts"),
        "experts shared with the CPU (KTransformers)": rows.published("get_exec", "moe.kt_weight_path"),
        "experts fetched from other GPUs (DWDP)": rows.published("get_parallel", "dwdp_size"),
        "LoRA": rows.published("get_lora", "enable_lora"),
    }


def _specs(layer: Foreign, packed: list[PackedExperts], activation: ActivationFunction) -> Iterable[KernelSpec]:
    """Returns the kernels of a layer's steps."""
    tokens, forms = expert_kernels.tokens_of(rows.engine_rows().all(), MAX_TOKENS), (each.form for each in packed)
    return expert_kernels.specs(*forms, layer.top_k, tokens, rows.is_deterministic(), activation)


def multiply(served: Served, layer: Foreign, dispatch_output: Foreign) -> Foreign:
    """Returns SGLang's result for dispatched tokens: for each token, the sum over its experts."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x, chosen = dispatch_output.hidden_states, dispatch_output.topk_output
    weights, factor = chosen.topk_weights, layer.moe_runner_config.routed_scaling_factor
    if factor is not None and factor != 1.0:
        weights = weights * factor
    choice = weights, chosen.topk_ids.int(), served.batch_invariant
    out = expert_kernels.multiply(x, served.gate_up, served.down, *choice, torch.empty_like(x), served.epilogues)
    return StandardCombineInput(hidden_states=out)


def note_router(original: Callable[..., None], block: Foreign, *arguments: object, **named: object) -> None:
    """Runs the constructor of a gpt-oss block, then notes the block's router on its experts.

    SGLang's gpt-oss kernels take tokens sorted by experts. The kernels here take the experts of each token, so `_pack`
    changes the router's output format.
    """
    original(block, *arguments, **named)
    vars(block.experts)[ROUTER] = block.topk


def _compressed_tensors_form(scheme: Foreign) -> Stored:
    order = getattr(scheme.actorder, "value", scheme.actorder)
    return Stored(scheme.num_bits, max(scheme.group_size or 0, 0), not scheme.sym, order == "group")


def _auto_form(zero_point: bool, kernel: Foreign) -> Stored:
    config = kernel.quant_config
    return Stored(config.weight_bits, max(config.group_size, 0), zero_point, getattr(config, "desc_act", False))


def _mxfp4_form(method: Foreign) -> Stored:
    from sglang.srt.layers.moe import get_moe_runner_backend

    backend = get_moe_runner_backend()
    if not (backend.is_auto() or backend.is_triton_kernels()):  # SGLang's choices on Hopper
        raise ValueError(f"--moe-runner-backend {backend.value}")
    return expert_weights.AS_MXFP4


LAYERS = Layers(
    "experts with 4- and 8-bit weights",
    (
        Kind(
            "compressed_tensors_experts", "apply_weights", *expert_weights.COMPRESSED_TENSORS, _compressed_tensors_form
        ),
        Kind("gptq_experts", "apply", *expert_weights.AUTO, functools.partial(_auto_form, False)),
        Kind(
            "awq_experts", "apply", *expert_weights.AUTO, functools.partial(_auto_form, True), expert_weights.from_awq
        ),
    ),
    _pack,
    multiply,
    ("dispatch_output",),
)
SEAM = Seam(LAYERS.what, LAYERS.hooks)
MXFP4_NAMES = "{}_weight", "{}_weight_scale", ""
GPT_OSS = Layers(
    "experts of gpt-oss",
    (Kind("mxfp4_experts", "apply", *MXFP4_NAMES, _mxfp4_form, expert_weights.from_mxfp4, outputs_first=True),),
    _pack,
    multiply,
    ("dispatch_output",),
)


def _hooks_of_gpt_oss(interface: Interface) -> dict[str, Hook]:
    made = Hook(note_router, ("self", "layer_id", "config", "quant_config", "prefix"))
    return {**GPT_OSS.hooks(interface), f"{interface.gpt_oss_block}.__init__": made}


GPT_OSS_SEAM = Seam(GPT_OSS.what, _hooks_of_gpt_oss)
