"""Quantised layers as vLLM makes them: its own methods create the parameters, random checkpoints fill them.

What is expected of a layer is worked out here from the codes, in fp64, by the formats' own definitions.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column that each nibble of an AWQ word holds, lowest first."""


@dataclass(frozen=True)
class Checkpoint:
    """A random quantised weight [n, k]; group_size 0 for one group.

    checkpoint: "ct" (compressed-tensors), "gptq" or "awq". act_order: inputs are shared out to groups at random.
    """

    checkpoint: str
    bits: int = 4
    group_size: int = 128
    zero_point: bool = False
    act_order: bool = False
    dtype: torch.dtype = torch.bfloat16
    n: int = 192
    k: int = 512

    def __str__(self) -> str:
        marks = ["zeros"] * self.zero_point + ["act_order"] * self.act_order
        dtype = str(self.dtype).removeprefix("torch.")
        return "-".join((self.checkpoint, f"w{self.bits}", f"g{self.group_size or 'channel'}", dtype, *marks))


CHECKPOINTS = (
    *(Checkpoint("ct", bits, group) for bits in (4, 8) for group in (32, 64, 128, 0)),
    *(Checkpoint("ct", bits, 128, zero_point=True) for bits in (4, 8)),
    Checkpoint("ct", 4, 128, act_order=True),
    Checkpoint("ct", 4, 64, zero_point=True, act_order=True, dtype=torch.float16),
    *(Checkpoint("gptq", bits, 128) for bits in (4, 8)),
    Checkpoint("gptq", 4, 32, act_order=True),
    Checkpoint("gptq", 4, 128, dtype=torch.float16),
    *(Checkpoint("awq", 4, group, zero_point=True) for group in (64, 128)),
    Checkpoint("awq", 4, 128, zero_point=True, dtype=torch.float16),
)


def checkpoints() -> list[Checkpoint]:
    """Those that the vLLM that is there loads: from 0.30 on it refuses act-order."""
    return [form for form in CHECKPOINTS if has_act_order() or not form.act_order]


def has_act_order() -> bool:
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig

    return "has_g_idx" in MPLinearLayerConfig.__dataclass_fields__


def linear_config(shape: tuple[int, int] = (512, 256), **changes: Any) -> Any:
    """vLLM's description of a layer [inputs, outputs]."""
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    usual: dict[str, Any] = {
        "full_weight_shape": shape,
        "partition_weight_shape": shape,
        "weight_type": scalar_types.uint4b8,
        "act_type": torch.bfloat16,
        "group_size": 128,
        "zero_points": False,
    }
    usual |= {"has_g_idx": False} if has_act_order() else {}
    return MPLinearLayerConfig(**{**usual, **changes})


@dataclass(frozen=True)
class Layer:
    """A layer whose weights are processed. apply: x [..., k] to [..., n]. weight: fp64 [n, k]. layer: vLLM's."""

    apply: Callable[[torch.Tensor], torch.Tensor]
    kernel: Any
    weight: torch.Tensor
    layer: torch.nn.Module


class Drawn(NamedTuple):
    """A random weight: codes [n, k], zeros and scales [n, groups], group_of [k]."""

    codes: torch.Tensor
    zeros: torch.Tensor
    scales: torch.Tensor
    group_of: torch.Tensor

    @property
    def weight(self) -> torch.Tensor:
        """What it stands for: fp64 [n, k]."""
        zeros, scales = self.zeros[:, self.group_of], self.scales.double()[:, self.group_of]
        return (self.codes - zeros).double() * scales


def draw(form: Checkpoint, seed: int = 0) -> Drawn:
    generator = torch.Generator().manual_seed(seed)
    groups = form.k // (form.group_size or form.k)
    top = 1 << form.bits
    codes = torch.randint(0, top, (form.n, form.k), generator=generator)
    zeros = torch.randint(0, top, (form.n, groups), generator=generator)
    if not form.zero_point:
        zeros = torch.full_like(zeros, top // 2)
    scales = (torch.rand(form.n, groups, generator=generator) * 0.01 + 0.001).to(form.dtype)
    group_of = torch.arange(form.k) // (form.group_size or form.k)
    if form.act_order:
        group_of = group_of[torch.randperm(form.k, generator=generator)]
    return Drawn(codes, zeros, scales, group_of)


def make(form: Checkpoint, device: str, seed: int = 0, **attributes: Any) -> Layer:
    """The layer of a checkpoint, made and processed by vLLM's method for it. attributes: what vLLM's layer has."""
    drawn = draw(form, seed)
    layer = torch.nn.Module()
    for name, value in attributes.items():
        setattr(layer, name, value)
    parameters = "vllm.model_executor.parameter.get_tensor_model_parallel"
    with mock.patch(f"{parameters}_rank", lambda: 0), mock.patch(f"{parameters}_world_size", lambda: 1):
        method = _METHODS[form.checkpoint](form, layer, device)
        tensors = tensors_of(form, drawn, has_act_order())
        for name, tensor in tensors.items():
            getattr(layer, name).data.copy_(tensor)
        method.process_weights_after_loading(layer)
    apply = getattr(method, "apply_weights", None) or method.apply
    return Layer(lambda x: apply(layer, x, None), method.kernel, drawn.weight, layer)


def _parts(form: Checkpoint, layer: Any) -> list[int]:
    """Output features of the layers that are one here."""
    return getattr(layer, "output_partition_sizes", [form.n])


def _compressed_tensors(form: Checkpoint, layer: torch.nn.Module, device: str) -> Any:
    from compressed_tensors.quantization import ActivationOrdering
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_wNa16 import (
        CompressedTensorsWNA16,
    )

    order = {"actorder": ActivationOrdering.GROUP if form.act_order else None} if has_act_order() else {}
    scheme = CompressedTensorsWNA16(
        strategy="group" if form.group_size else "channel",
        num_bits=form.bits,
        group_size=form.group_size or None,
        symmetric=not form.zero_point,
        **order,
    )
    with torch.device(device):
        scheme.create_weights(layer, form.n, form.k, _parts(form, layer), form.k, form.dtype, _no_loader)
    return scheme


def _gptq(form: Checkpoint, layer: torch.nn.Module, device: str) -> Any:
    from vllm.model_executor.layers.quantization import auto_gptq

    config = auto_gptq.AutoGPTQConfig(form.bits, form.group_size or -1, form.act_order, True, False, {}, {})
    with mock.patch.object(auto_gptq, "verify_marlin_supported"), torch.device(device):
        method = auto_gptq.AutoGPTQLinearMethod(config)
        parts = _parts(form, layer)
        method.create_weights(layer, form.k, parts, form.k, form.n, form.dtype, weight_loader=_no_loader)
    return method


def _awq(form: Checkpoint, layer: torch.nn.Module, device: str) -> Any:
    from vllm.model_executor.layers.quantization import auto_awq

    config = auto_awq.AutoAWQConfig(form.bits, form.group_size or -1, form.zero_point, False)
    with mock.patch.object(auto_awq, "verify_marlin_supported"), torch.device(device):
        method = auto_awq.AutoAWQMarlinLinearMethod(config)
        parts = _parts(form, layer)
        method.create_weights(layer, form.k, parts, form.k, form.n, form.dtype, weight_loader=_no_loader)
    return method


_METHODS = {"ct": _compressed_tensors, "gptq": _gptq, "awq": _awq}


def _no_loader(*_: Any, **__: Any) -> None:
    """Parameters are filled by hand."""


def tensors_of(form: Checkpoint, drawn: Drawn, has_g_idx: bool) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors by the names of the layer's parameters. has_g_idx: whether GPTQ's layers have one."""
    codes, zeros, scales, group_of = drawn
    order = tuple(range(32 // form.bits))
    if form.checkpoint == "ct":
        tensors = {"weight_packed": words(codes, form.bits, order), "weight_scale": scales}
        if form.zero_point:
            tensors["weight_zero_point"] = words(zeros.T, form.bits, order).T
        if form.act_order:
            tensors["weight_g_idx"] = group_of
        return tensors
    if form.checkpoint == "gptq":
        order_of_inputs = {"g_idx": group_of} if has_g_idx else {}
        return {"qweight": words(codes, form.bits, order).T, "scales": scales.T, **order_of_inputs}
    return {
        "qweight": words(codes.T, form.bits, AWQ_ORDER),
        "qzeros": words(zeros.T, form.bits, AWQ_ORDER),
        "scales": scales.T,
    }


def words(codes: torch.Tensor, bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """int32 words of codes along the last axis: nibble (or byte) i of a word, lowest first, is code order[i] of it."""
    parts = codes.long().unflatten(-1, (-1, len(order)))
    total = sum(parts[..., column] << (bits * place) for place, column in enumerate(order))
    assert isinstance(total, torch.Tensor)
    return torch.where(total >= 1 << 31, total - (1 << 32), total).to(torch.int32)


@dataclass(frozen=True)
class Experts:
    """A layer of experts as a method of vLLM has it once its checkpoint is loaded, and what its weights stand for.

    gate_up: fp64 [E, 2 I, K], gate's rows first. down: fp64 [E, K, I].
    """

    method: Any
    layer: torch.nn.Module
    gate_up: torch.Tensor
    down: torch.Tensor
    biases: dict[str, torch.Tensor] = field(default_factory=dict)

    def expected(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """fp64 [tokens, K]; ids that are -1 add nothing."""
        total = torch.zeros(len(x), self.down.shape[1], dtype=torch.float64, device=x.device)
        for token in range(len(x)):
            for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
                if expert >= 0:
                    sums = self.gate_up[expert].to(x.device) @ x[token].double() + self.bias("w13", expert, x.device)
                    sums = self.down[expert].to(x.device) @ self.between(sums) + self.bias("w2", expert, x.device)
                    total[token] += weight * sums
        return total

    def between(self, sums: torch.Tensor) -> torch.Tensor:
        """What vLLM's activation makes of a token's gates and ups, or of its ups alone."""
        if str(self.layer.activation.value).endswith("_no_mul"):
            from vllm.model_executor.layers.fused_moe import activation

            kind, out = activation.MoEActivation(self.layer.activation.value), torch.empty_like(sums)[None]
            return activation.apply_moe_activation(kind, out, sums[None])[0]
        numbers = (getattr(self.layer, f"swiglu_{name}", None) for name in ("limit", "alpha", "beta"))
        usual = torch.inf, 1.0, 0.0
        limit, alpha, beta = (other if each is None else each for each, other in zip(numbers, usual, strict=True))
        gate, up = sums.chunk(2)
        if self.layer.activation.value == "swigluoai":
            (gate, up), limit, alpha, beta = (sums[::2], sums[1::2]), 7.0, 1.702, 1.0
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + beta)

    def bias(self, name: str, expert: int, device: torch.device) -> torch.Tensor | float:
        found = self.biases.get(name)
        return 0.0 if found is None else found[expert].double().to(device)


NUM_EXPERTS = 5


def make_experts(
    form: Checkpoint, device: str, num_experts: int = NUM_EXPERTS, seed: int = 0, gated: bool = True
) -> Experts:
    """A layer of num_experts; form.n: features of an expert, form.k: of the model."""
    generator = torch.Generator().manual_seed(seed)
    layer = torch.nn.Module()
    order = AWQ_ORDER if form.checkpoint == "awq" else tuple(range(32 // form.bits))
    dense = []
    names = {
        "ct": ("{}_weight_packed", "{}_weight_scale", "{}_weight_zero_point"),
        "gptq": ("{}_qweight", "{}_scales", "{}_qzeros"),
        "awq": ("{}_qweight", "{}_scales", "{}_qzeros"),
    }[form.checkpoint]
    for name, (n, k) in {"w13": ((1 + gated) * form.n, form.k), "w2": (form.k, form.n)}.items():
        length, top = form.group_size or k, 1 << form.bits
        codes = torch.randint(0, top, (num_experts, n, k), generator=generator)
        zeros = torch.randint(0, top, (num_experts, n, k // length), generator=generator)
        if not form.zero_point:
            zeros = torch.full_like(zeros, top // 2)
        scales = (torch.rand(zeros.shape, generator=generator) * 0.01 + 0.001).to(form.dtype)
        group_of = torch.arange(k) // length
        dense.append((codes - zeros[..., group_of]).double() * scales.double()[..., group_of])
        if form.checkpoint == "awq":
            packed = words(codes.transpose(1, 2), form.bits, order)
        else:
            packed = words(codes, form.bits, order).transpose(1, 2)
        tensors = [packed, scales.transpose(1, 2), words(zeros.transpose(1, 2), form.bits, order)]
        for text, tensor in zip(names, tensors, strict=True):
            tensor = tensor.transpose(1, 2) if expert_source(form).outputs_first else tensor
            parameter = torch.nn.Parameter(tensor.contiguous().to(device), requires_grad=False)
            layer.register_parameter(text.format(name), parameter)
    layer.activation = SimpleNamespace(value="silu")  # type: ignore[assignment]
    layer.apply_router_weight_on_input = False  # type: ignore[assignment]
    layer._expert_routing_tables = lambda: None  # type: ignore[assignment]
    if form.checkpoint == "gptq" and not has_act_order():  # from 0.30 on, whether a checkpoint has some or not
        layer._loaded_expert_biases = set()  # type: ignore[assignment]
        layer.w13_bias = torch.nn.Parameter(torch.zeros(num_experts, 2 * form.n), requires_grad=False)
    return Experts(_expert_method(form), layer, *dense)


def _expert_method(form: Checkpoint) -> Any:
    parallel = SimpleNamespace(use_all2all_kernels=False, enable_eplb=False)
    config = SimpleNamespace(
        quant_type=SimpleNamespace(size_bits=form.bits),
        weight_bits=form.bits,
        group_size=form.group_size or -1,
        desc_act=form.act_order,
        zero_point=form.zero_point,
    )
    return SimpleNamespace(
        num_bits=form.bits,
        group_size=form.group_size or -1,
        symmetric=not form.zero_point,
        actorder="group" if form.act_order else None,
        quant_config=config,
        wna16_backend=SimpleNamespace(value=expert_source(form).backends[-1]),
        input_dtype=torch.bfloat16 if expert_source(form).outputs_first else None,  # as Humming's have it
        moe=mock.MagicMock(
            moe_parallel_config=parallel,
            moe_backend="auto",
            is_lora_enabled=False,
            experts_per_token=2,
            has_bias=False,
        ),
    )


EXPERTS = (
    ("ct", 4, 32, False, torch.bfloat16),
    ("ct", 8, 0, False, torch.bfloat16),
    ("ct", 4, 32, True, torch.float16),
    ("gptq", 4, 32, False, torch.float16),
    ("gptq", 8, 32, False, torch.bfloat16),
    ("awq", 4, 32, True, torch.float16),
)
"""Checkpoint, bits, group size, whether there are zero points, dtype."""

EXPERT_METHODS = ("ct", "gptq", "awq")
"""Kinds of checkpoint, in the order of `versions.Interface.expert_methods`."""


def expert_source(form: Checkpoint) -> Any:
    """How the vLLM that is there holds a checkpoint's experts."""
    import vllm

    from cute_kernels.integrations.vllm import moe, versions

    interface = versions.interface_of(vllm.__version__)
    assert interface is not None
    return moe.SOURCES[interface.expert_methods[EXPERT_METHODS.index(form.checkpoint)][1]]


def give_biases(layer: Experts) -> None:
    """Biases for both products, as a checkpoint fills them in."""
    generator = torch.Generator().manual_seed(5)
    for name, dense in (("w13", layer.gate_up), ("w2", layer.down)):
        layer.biases[name] = torch.randn(dense.shape[:2], generator=generator).half()
        setattr(layer.layer, f"{name}_bias", torch.nn.Parameter(layer.biases[name].clone(), requires_grad=False))
    layer.layer._loaded_expert_biases = {"w13_bias", "w2_bias"}  # type: ignore[assignment]


def serve_experts(form: Checkpoint, device: str, biased: bool = False, **attributes: Any) -> tuple[Experts, Any]:
    """(a layer, the plugin's experts) once its weights are packed, without the part that hands tokens out. attributes:
    of the layer."""
    from vllm.model_executor.layers.fused_moe import all2all_utils

    from cute_kernels.integrations.vllm import moe

    gated = not getattr(attributes.get("activation"), "value", "silu").endswith("_no_mul")
    layer = make_experts(form, device, gated=gated)
    for name, value in attributes.items():
        setattr(layer.layer, name, value)
    if biased:
        give_biases(layer)
    source = expert_source(form)
    reason = moe.reason_against(layer.method, layer.layer, source)
    assert reason is None, reason
    no_hand_out = mock.patch.object(all2all_utils, "maybe_make_prepare_finalize", lambda **_: None)
    with no_hand_out, mock.patch.object(moe.modular_kernel, "FusedMoEKernel", lambda hand_out, made: made):
        moe.process(layer.method, layer.layer, source)
    return layer, layer.method.moe_kernel


def error_of_experts(layer: Experts, made: Any, tokens: int, dtype: torch.dtype, expert_map: Any = None) -> float:
    """By how much a step's result is off, relative to the largest."""
    device = torch.device(layer.layer.w13_weight.device)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, layer.down.shape[1], generator=generator).to(dtype)
    ids = torch.rand(tokens, len(layer.down), generator=generator).argsort(1)[:, :2].int()
    weights = torch.rand(tokens, 2, generator=generator)
    output = torch.full_like(x, torch.nan, device=device)
    own = None if expert_map is None else expert_map.to(device)
    rest = (None, None, torch.empty(0), torch.empty(0), None, False)
    activation = layer.layer.activation
    made.apply(output, x.to(device), None, None, weights.to(device), ids.to(device), activation, 5, own, *rest)
    expected = layer.expected(x, ids if expert_map is None else expert_map[ids.long()], weights)
    return float((output.cpu().double() - expected).abs().max() / expected.abs().max())


@dataclass(frozen=True)
class Block:
    """A block of a model as one of some GPUs has it: vLLM's own layers, quantised as GPTQ, that loaded their part.

    qkv, gate_up, o, down: x [tokens, inputs] to [tokens, outputs] of this GPU; o's and down's are to be added up.
    """

    qkv: Callable[[torch.Tensor], torch.Tensor]
    o: Callable[[torch.Tensor], torch.Tensor]
    gate_up: Callable[[torch.Tensor], torch.Tensor]
    down: Callable[[torch.Tensor], torch.Tensor]
    kernels: tuple[Any, ...]


HIDDEN, MIDDLE, HEADS, KV_HEADS, HEAD_SIZE = 256, 512, 4, 1, 64
GROUP_OF_BLOCK = 64


def block_of(rank: int, ranks: int, dtype: torch.dtype = torch.bfloat16, bits: int = 4) -> Block:
    """The same random checkpoint whatever the number of GPUs. KV_HEADS are fewer than two GPUs: each has them all."""
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.quantization import auto_gptq

    generator = torch.Generator().manual_seed(11)
    config = auto_gptq.AutoGPTQConfig(bits, GROUP_OF_BLOCK, False, True, False, {}, {}, ["block"])
    options: dict[str, Any] = {"bias": False, "quant_config": config, "params_dtype": dtype, "prefix": "block"}
    kernels: list[Any] = []

    def fill(layer: Any, parts: dict[Any, int], inputs: int) -> Callable[[torch.Tensor], torch.Tensor]:
        for part, n in parts.items():
            codes = torch.randint(0, 1 << bits, (n, inputs), generator=generator)
            scales = torch.rand(n, inputs // GROUP_OF_BLOCK, generator=generator) * 0.02 + 0.002
            tensors = {
                "qweight": words(codes, bits, tuple(range(32 // bits))).T.contiguous(),
                "scales": scales.to(dtype).T.contiguous(),
                **({"g_idx": (torch.arange(inputs) // GROUP_OF_BLOCK).int()} if has_act_order() else {}),
                "qzeros": torch.zeros(inputs // GROUP_OF_BLOCK, n * bits // 32, dtype=torch.int32),
            }
            for name, parameter in layer.named_parameters():
                which = () if part is None else (part,)
                parameter.weight_loader(parameter, tensors[name], *which)
        layer.quant_method.process_weights_after_loading(layer)
        kernels.append(layer.quant_method.kernel)
        return lambda x: layer.quant_method.apply(layer, x, None)

    here = {"rank": lambda: rank, "world_size": lambda: ranks}
    modules = ("vllm.model_executor.parameter", "vllm.model_executor.layers.linear")
    with ExitStack() as stack:
        for module, (name, value) in itertools.product(modules, here.items()):
            stack.enter_context(mock.patch(f"{module}.get_tensor_model_parallel_{name}", value))
        stack.enter_context(mock.patch.object(auto_gptq, "verify_marlin_supported"))
        qkv = linear.QKVParallelLinear(HIDDEN, HEAD_SIZE, HEADS, KV_HEADS, **options)
        o = linear.RowParallelLinear(HEADS * HEAD_SIZE, HIDDEN, reduce_results=False, **options)
        gate_up = linear.MergedColumnParallelLinear(HIDDEN, [MIDDLE, MIDDLE], **options)
        down = linear.RowParallelLinear(MIDDLE, HIDDEN, reduce_results=False, **options)
        made = (
            fill(qkv, {"q": HEADS * HEAD_SIZE, "k": KV_HEADS * HEAD_SIZE, "v": KV_HEADS * HEAD_SIZE}, HIDDEN),
            fill(o, {None: HIDDEN}, HEADS * HEAD_SIZE),
            fill(gate_up, {0: MIDDLE, 1: MIDDLE}, HIDDEN),
            fill(down, {None: HIDDEN}, MIDDLE),
        )
    return Block(*made, kernels=tuple(kernels))
