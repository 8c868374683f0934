"""Expert layers of vLLM with 4- and 8-bit weights: AWQ, GPTQ, compressed-tensors and gpt-oss checkpoints.

Each of vLLM's methods for expert layers makes a kernel of two parts: one dispatches tokens and collects results, the
other is the experts. The method still makes its own parameters. After they are loaded, they are packed, and the experts
of this module replace vLLM's. Unsupported layers keep vLLM's experts, and one log line says why.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.platforms import current_platform

from cute_kernels.formats.weights.fp4 import MXFP4_ANY
from cute_kernels.gemm.activations import ActivationFunction, ClampedSwiglu, Gelu, Relu2, Silu, Swiglu
from cute_kernels.gemm.experts.call import MAX_TOKENS
from cute_kernels.gemm.packed_experts import ExpertsForm, PackedExperts
from cute_kernels.gemm.quantize import DTYPES
from cute_kernels.integrations import expert_kernels, expert_weights
from cute_kernels.integrations.expert_weights import Stored
from cute_kernels.integrations.objects import Foreign
from cute_kernels.integrations.vllm import prepare, routers
from cute_kernels.integrations.vllm.plugin import note_served
from cute_kernels.integrations.vllm.seams import packs_here, refusal, replace_once
from cute_kernels.integrations.vllm.versions import Interface
from cute_kernels.runtime.spec import KernelSpec

MAX_EXPERTS = 512


@dataclass(frozen=True)
class Source:
    """How a method of vLLM stores its weights.

    Attributes:
        words, scales, zeros: names of parameters; "{}" stands for "w13" or "w2".
        pack: the function that packs parameters [E, inputs, outputs].
        form: a function from a method to the way in which the method stores codes. It raises ValueError, with the
            reason, for unsupported codes.
        outputs_first: whether parameters are [E, outputs, inputs].
        backends: the kernels of vLLM, by name, for which the method loads weights in this layout.
        dtype: the activations' dtype, if it differs from the scales'.
    """

    words: str
    scales: str
    zeros: str
    pack: Callable[..., PackedExperts]
    form: Callable[[Any], Stored]
    outputs_first: bool = False
    backends: tuple[str, ...] = ("MARLIN", "HUMMING")
    dtype: torch.dtype | None = None

    def tensors(self, layer: Foreign, name: str, zero_point: bool) -> tuple[torch.Tensor, torch.Tensor, Any]:
        """Returns words, scales, and zero points or None, each [E, inputs, outputs]. name: "w13" or "w2"."""
        texts = (self.words, self.scales, *((self.zeros,) if zero_point else ()))
        found = [getattr(layer, text.format(name)).data for text in texts]
        words, scales, *zeros = (x.transpose(1, 2) if self.outputs_first else x for x in found)
        return words, scales, zeros[0] if zeros else None


def _compressed_tensors_form(method: Foreign) -> Stored:
    order = getattr(method, "actorder", None)  # vLLM refuses it from 0.30 on
    in_order = getattr(order, "value", order) == "group"
    return Stored(method.num_bits, max(method.group_size, 0), not method.symmetric, in_order)


def _gptq_form(method: Foreign) -> Stored:
    config = method.quant_config
    return Stored(config.quant_type.size_bits, max(config.group_size, 0), False, bool(config.desc_act))


def _awq_form(method: Foreign) -> Stored:
    config = method.quant_config
    if not config.zero_point:
        raise ValueError("AWQ without zero points")
    return Stored(config.weight_bits, max(config.group_size, 0), True, False)


COMPRESSED = functools.partial(
    Source, *expert_weights.COMPRESSED_TENSORS, expert_weights.from_inputs_packed, _compressed_tensors_form
)
SOURCES = {
    "CompressedTensorsWNA16MarlinMoEMethod": COMPRESSED(backends=("MARLIN",)),
    "CompressedTensorsWNA16MoEMethod": COMPRESSED(outputs_first=True),
    "AutoGPTQMoEMethod": Source(*expert_weights.AUTO, expert_weights.from_inputs_packed, _gptq_form),
    "AutoAWQMoEMethod": Source(*expert_weights.AUTO, expert_weights.from_awq, _awq_form),
    "GptOssMxfp4MoEMethod": Source(
        "{}_weight",
        "{}_weight_scale",
        "",
        expert_weights.from_mxfp4,
        lambda method: expert_weights.AS_MXFP4,
        outputs_first=True,
        backends=("TRITON", "HUMMING", "MARLIN"),  # vLLM's order on Hopper; all load a checkpoint's own layout
        dtype=torch.bfloat16,
    ),
}
"""Sources by the name of the method's class."""


IN_TURN = "swigluoai"
"""vLLM's name of gpt-oss's activation. In gpt-oss's checkpoints the rows of gate and up alternate; in others the rows
of gate come first."""
UNGATED = {"silu_no_mul": Silu(), "gelu_no_mul": Gelu(), "relu2_no_mul": Relu2()}
"""Activations of experts without a gate, such as Nemotron-H's, by vLLM's names."""
ACTIVATIONS = ("silu", IN_TURN, "swigluoai_uninterleave", *UNGATED)


def activation_of(layer: Foreign) -> ActivationFunction | None:
    """Returns the activation that vLLM applies to a layer's gates and ups, or to its ups alone.

    Returns None for an activation that no kernel of this package computes.
    """
    limit, alpha, beta = (getattr(layer, f"swiglu_{name}", None) for name in ("limit", "alpha", "beta"))
    kind = layer.activation.value
    if kind == IN_TURN:  # whatever the layer says, vLLM's kernel has gpt-oss's numbers
        return ClampedSwiglu() if limit in (None, 7.0) and alpha in (None, 1.702) and beta in (None, 1.0) else None
    if kind in UNGATED and limit is alpha is beta is None:
        return UNGATED[kind]
    if kind == "silu" and alpha is beta is None:
        return Swiglu() if limit is None else ClampedSwiglu(1.0, limit, 0.0)
    if kind == "swigluoai_uninterleave" and limit is not None:
        return ClampedSwiglu(1.0 if alpha is None else alpha, limit, 0.0 if beta is None else beta)
    return None


def _gates_come_first(layer: Foreign) -> bool:
    """Returns whether a layer stores the rows of gate before the rows of up. Kernels need them to alternate."""
    return layer.activation.value not in (IN_TURN, *UNGATED)


class CuteKernelsExperts(modular_kernel.FusedMoEExpertsModular):
    """The experts as vLLM sees them: both products, and the sum over a token's experts."""

    def __init__(
        self,
        moe_config: Foreign,
        quant_config: Foreign,
        gate_up: PackedExperts,
        down: PackedExperts,
        epilogues: expert_kernels.Epilogues = expert_kernels.PLAIN,
    ) -> None:
        super().__init__(moe_config=moe_config, quant_config=quant_config)
        self.gate_up, self.down, self.epilogues = gate_up, down, epilogues
        self.batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)

    @staticmethod
    def activation_format() -> Any:
        return modular_kernel.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cuda() and current_platform.is_device_capability(90)

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return True

    @staticmethod
    def _supports_quant_scheme(weight_key: object, activation_key: object) -> bool:
        return activation_key is None

    @staticmethod
    def _supports_activation(activation: Foreign) -> bool:
        return activation.value in ACTIVATIONS

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: Foreign) -> bool:
        return not moe_parallel_config.use_all2all_kernels

    @staticmethod
    def _supports_batch_invariance() -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> Any:
        return TopKWeightAndReduceNoOP()

    def moe_problem_size(
        self, a1: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_ids: torch.Tensor
    ) -> tuple[int, int, int, int, int]:
        return len(self.gate_up), a1.shape[0], self.gate_up.out_features, a1.shape[-1], topk_ids.shape[1]

    def workspace_shapes(self, M: int, N: int, K: int, *_: object, **__: object) -> tuple[tuple[int, ...], ...]:
        return (0,), (0,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Foreign,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: object,
        apply_router_weight_on_input: bool,
    ) -> None:
        if apply_router_weight_on_input or not self._supports_activation(activation):
            raise NotImplementedError(
                f"experts: got {activation}, router weights on the input: {apply_router_weight_on_input}, want one of "
                f"{', '.join(ACTIVATIONS)}, and router weights on the output"
            )
        if expert_map is not None:  # other ranks' experts become -1, which add nothing
            topk_ids = expert_map[topk_ids.long()]
        options = self.batch_invariant, output, self.epilogues
        expert_kernels.multiply(hidden_states, self.gate_up, self.down, topk_weights, topk_ids, *options)


def reason_against(method: Foreign, layer: Foreign, source: Source) -> str | None:
    """Returns why a layer keeps vLLM's experts; None if `CuteKernelsExperts` can replace them."""
    if (left := prepare.why_left("moe")) is not None:
        return left
    try:
        form = source.form(method)
    except ValueError as error:
        return str(error)
    words, scales, _ = source.tensors(layer, "w13", zero_point=False)
    gated = layer.activation.value not in UNGATED
    n, experts = scales.shape[2] // (1 + gated), words.shape[0]
    hidden = source.tensors(layer, "w2", zero_point=False)[1].shape[2]
    names = ("wna16_backend", "wna16_moe_backend", "mxfp4_backend")
    backend = next((found for name in names if (found := getattr(method, name, None)) is not None), None)
    backend, dtype = getattr(backend, "value", backend), source.dtype or scales.dtype
    inputs = getattr(method, "marlin_input_dtype", None) or getattr(method, "input_dtype", None)
    parallel = method.moe.moe_parallel_config
    transposed = source.outputs_first and getattr(method, "is_transposed", False)  # of Marlin, in vLLM 0.30
    wrong = {
        "a GPU of another compute capability than 9.0": not CuteKernelsExperts._supports_current_device(),
        f"weights laid out for {backend}": backend not in source.backends or transposed,
        f"--moe-backend {method.moe.moe_backend}": method.moe.moe_backend != "auto",
        **form.wrong(n, hidden, gated),
        f"{experts} experts": experts > MAX_EXPERTS,
        f"activations in {dtype}": dtype not in DTYPES,
        "quantised activations": inputs is not None and inputs.itemsize == 1,
        f"the activation {layer.activation}, or its numbers": activation_of(layer) is None,
        # Other methods' parameters have room for gates.
        f"experts without gates in {type(method).__name__}": not gated and source.form is not _compressed_tensors_form,
        "a bias of one product": len(_biases(method, layer)) == 1,
        "weights on the input": bool(layer.apply_router_weight_on_input),
        "tokens sent between GPUs": bool(parallel.use_all2all_kernels),
        # Of which each GPU finds by itself whether its own experts need some.
        "zero points of experts that move between GPUs": form.zero_point and bool(parallel.enable_eplb),
        "GPUs that come and go": prepare.engine_has("parallel_config", "enable_elastic_ep"),
        "LoRA": bool(method.moe.is_lora_enabled),
    }
    return refusal(wrong)


BIASES = ("w13_bias", "w2_bias")


def _biases(method: Foreign, layer: Foreign) -> list[str]:
    """Returns the names of a layer's biases. From vLLM 0.30 on every GPTQ layer has parameters for biases, and vLLM
    records which of them a checkpoint has filled.
    """
    there = [name for name in BIASES if getattr(layer, name, None) is not None]
    loaded = getattr(layer, "_loaded_expert_biases", there)
    return there if getattr(method.moe, "has_bias", False) else [name for name in there if name in loaded]


def _asked(
    method: Foreign, gate_up: ExpertsForm, down: ExpertsForm, activation: ActivationFunction
) -> tuple[KernelSpec, ...]:
    """Returns the kernels of a layer's steps."""
    tokens, invariant = expert_kernels.tokens_of(prepare.engine_rows().all(), MAX_TOKENS), envs.VLLM_BATCH_INVARIANT
    return expert_kernels.specs(gate_up, down, method.moe.experts_per_token, tokens, bool(invariant), activation)


def process(method: Foreign, layer: Foreign, source: Source) -> str | None:
    """Packs a layer's weights and gives its method `CuteKernelsExperts`. If kernels are missing, changes nothing and
    returns a message that lists them.

    Raises:
        NotImplementedError: with EPLB, experts would move to GPUs whose kernels do not support their scales.
        ValueError: weights are loaded again, and need different kernels from those in captured graphs.
    """
    bits, group_size, zero_point, _ = source.form(method)
    packed = {}
    activation = activation_of(layer) or expert_kernels.SWIGLU
    for name, gated in (("w13", _gates_come_first(layer)), ("w2", False)):
        words, scales, zeros = source.tensors(layer, name, zero_point)
        packed[name] = source.pack(
            words,
            scales,
            zeros,
            bits=bits,
            group_size=group_size or None,
            dtype=source.dtype or scales.dtype,
            gated=gated,
        )
    forms = packed["w13"].form, packed["w2"].form
    if method.moe.moe_parallel_config.enable_eplb and MXFP4_ANY in (form.format for form in forms):
        raise NotImplementedError("--enable-eplb: got MXFP4 scales beyond 2, want none: other GPUs have other kernels")
    reason = prepare.make_ready(packed["w13"].device, lambda: _asked(method, *forms, activation))
    if reason is not None:
        return reason
    biases = _biases_of(method, layer, packed["w13"].dtype)
    packed = method.cute_kernels_experts = _kept(getattr(method, "cute_kernels_experts", packed), packed)
    biases = method.cute_kernels_biases = _kept_biases(getattr(method, "cute_kernels_biases", biases), biases)
    for name, experts in packed.items():
        _set(layer, source.words.format(name), experts.codes)
        _set(layer, source.scales.format(name), experts.scales)
        if zero_point:
            _set(layer, source.zeros.format(name), experts.zeros)
    layer.w13_weight = getattr(layer, source.words.format("w13"))
    layer.w2_weight = getattr(layer, source.words.format("w2"))
    note_served(f"moe {packed['w13'].form[:-1]} {packed['w2'].form[:-1]}")
    for name, bias in zip(BIASES, biases, strict=True):  # None: a parameter that no checkpoint filled
        if getattr(layer, name, None) is not None:
            _set(layer, name, bias)
    method.moe_quant_config = FUSED_MOE_UNQUANTIZED_CONFIG  # of activations; vLLM's experts would read the rest
    method.experts_cls = CuteKernelsExperts
    from vllm.model_executor.layers.fused_moe.all2all_utils import maybe_make_prepare_finalize

    hand_out = maybe_make_prepare_finalize(
        moe=method.moe,
        quant_config=method.moe_quant_config,
        routing_tables=layer._expert_routing_tables(),
        allow_new_interface=True,
        use_monolithic=False,
    )
    epilogues = expert_kernels.Epilogues(activation, *biases)
    experts = CuteKernelsExperts(method.moe, method.moe_quant_config, packed["w13"], packed["w2"], epilogues)
    method.moe_kernel = modular_kernel.FusedMoEKernel(hand_out, experts)
    return None


def _kept(before: dict[str, PackedExperts], now: dict[str, PackedExperts]) -> dict[str, PackedExperts]:
    """Copies ``now`` into the memory of ``before`` and returns ``before``: captured graphs read experts there.

    Raises:
        ValueError: ``now`` has another form.
    """
    old, new = ([experts.form for experts in each.values()] for each in (before, now))
    pairs = zip(old, new, strict=True)
    if [b._replace(format=a.format) if a.format.includes(b.format) else b for a, b in pairs] != old:
        got, want = (" and ".join(form.format.key for form in forms) for forms in (new, old))
        raise ValueError(f"experts: got weights loaded again in {got}, want {want}, as graphs were captured with")
    for name, experts in now.items():
        for tensor in ("codes", "scales", "zeros"):
            if (there := getattr(before[name], tensor)) is not None:
                there.copy_(getattr(experts, tensor))
    return before


Biases = tuple[torch.Tensor | None, torch.Tensor | None]


def _biases_of(method: Foreign, layer: Foreign, dtype: torch.dtype) -> Biases:
    """Returns the biases of both products, as kernels take them: in the first, elements of gate and up alternate.
    Returns (None, None) for layers without biases.
    """
    if not _biases(method, layer):
        return None, None
    first, second = (getattr(layer, name).detach().to(dtype, copy=True).contiguous() for name in BIASES)
    return expert_weights.gate_and_up_in_turn(first) if _gates_come_first(layer) else first, second


def _kept_biases(before: Biases, now: Biases) -> Biases:
    """Copies ``now`` into the memory of ``before`` and returns ``before``, as `_kept` does."""
    for old, new in zip(before, now, strict=True):
        if (old is None) != (new is None):
            raise ValueError("experts: got weights loaded again with other biases, want those of captured graphs")
        if old is not None and new is not None:
            old.copy_(new)
    return before


def _set(layer: Foreign, name: str, tensor: torch.Tensor | None) -> None:
    parameter = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
    delattr(layer, name)
    layer.register_parameter(name, parameter)


# -- the seam ---------------------------------------------------------------------------------------------------------


def replace(interface: Interface) -> str:
    """Makes vLLM's methods for expert layers use `CuteKernelsExperts`. Returns a line for the log."""
    for module, name in interface.expert_methods:
        replace_experts(module, name, SOURCES[name])
    return "experts (AWQ, GPTQ, compressed-tensors, gpt-oss; 4 and 8 bits) run here"


def replace_experts(module: str, name: str, source: Source) -> None:
    """Makes a method of vLLM build `CuteKernelsExperts` for supported layers.

    With EPLB, vLLM moves experts between GPUs by moving rows of the layer's parameters. `CuteKernelsExperts` are views
    of these parameters, and vLLM's ids of experts already refer to rows. Most of vLLM's own methods do not support
    EPLB.
    """
    owner = getattr(importlib.import_module(module), name)
    takes_part = owner.supports_eplb.fget

    def supports_eplb(method: Foreign) -> bool:
        return takes_part(method) or prepare.why_left("moe") is None

    def serve(method: Foreign, layer: Foreign) -> str | None:
        reason = reason_against(method, layer, source) or process(method, layer, source)
        if reason is not None and method.moe.moe_parallel_config.enable_eplb and not takes_part(method):
            raise NotImplementedError(f"--enable-eplb: {name}: want another method, or a layer served here: {reason}")
        if reason is None:
            routers.connect(layer)
        return reason

    if not getattr(takes_part, "is_cute_kernels", False):
        vars(supports_eplb)["is_cute_kernels"] = True
        owner.supports_eplb = property(supports_eplb)
    replace_once(module, f"{name}.process_weights_after_loading", functools.partial(packs_here, "experts", serve))
