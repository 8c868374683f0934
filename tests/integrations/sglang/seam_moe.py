"""Checks of layers of experts: SGLang's own schemes make the parameters, random checkpoints fill them."""

# SGLang is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cute_kernels.integrations.sglang import moe, rows, seams
from tests.integrations.sglang.checks import check, lines
from tests.integrations.vllm.layers import AWQ_ORDER, EXPERTS, Checkpoint, words

COUNT, TOPK, FEATURES, HIDDEN = 5, 2, 96, 128
PACKAGE = "sglang.srt.layers.quantization"


@dataclass
class Experts:
    """A layer with a checkpoint's tensors. scheme: what SGLang asks. owner: what is hooked. gate_up, down: in fp64."""

    scheme: Any
    owner: Any
    layer: Any
    gate_up: torch.Tensor
    down: torch.Tensor

    def error(self, ids: torch.Tensor, factor: float = 1.0) -> float:
        """How far the layer's result is from that in fp64, as a part of it. ids: [tokens, topk], -1 for none."""
        tokens = len(ids)
        x = torch.randn(tokens, HIDDEN, dtype=self.layer.w13_scale_dtype)
        weights = torch.rand(ids.shape)
        chosen = SimpleNamespace(topk_weights=weights, topk_ids=ids)
        given = SimpleNamespace(hidden_states=x, topk_output=chosen)
        with dispatched():
            found = self.scheme.apply_weights(self.layer, given)
        expected = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
        for token in range(tokens):
            for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
                if expert < 0:
                    continue
                gate, up = (self.gate_up[expert] @ x[token].double()).chunk(2)
                expected[token] += factor * weight * (self.down[expert] @ self.between(gate, up))
        return float((found.double() - expected).abs().max() / expected.abs().max())

    def between(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """What SGLang's Marlin makes of gates and ups."""
        config = self.layer.moe_runner_config
        alpha = config.gemm1_alpha
        limit = config.swiglu_limit if alpha is None else config.gemm1_clamp_limit
        gate, up = gate.clamp(max=limit or torch.inf), up.clamp(-(limit or torch.inf), limit or torch.inf)
        return gate * torch.sigmoid((1.0 if alpha is None else alpha) * gate) * (up + (alpha is not None))


@contextmanager
def dispatched(**given: Any) -> Iterator[None]:
    """SGLang's surroundings of a layer: what combines results, and what its server does with experts."""
    from sglang.srt import runtime_context
    from sglang.srt.layers.moe import token_dispatcher, utils

    options = {"enable_eplb": "eplb", "enable_paged_experts": "paged", "kt_weight_path": "cpu"}
    server = SimpleNamespace(moe=SimpleNamespace(**{name: given.get(short) for name, short in options.items()}))
    parallel = SimpleNamespace(dwdp_size=given.get("dwdp", 1))
    with (
        mock.patch.object(token_dispatcher, "StandardCombineInput", lambda hidden_states: hidden_states),
        mock.patch.object(utils, "get_moe_a2a_backend", lambda: SimpleNamespace(is_none=lambda: not given.get("a2a"))),
        mock.patch.object(runtime_context, "get_exec", lambda: server),
        mock.patch.object(runtime_context, "get_parallel", lambda: parallel),
        mock.patch.object(runtime_context, "get_lora", lambda: SimpleNamespace(enable_lora=given.get("lora", False))),
        mock.patch.object(rows, "is_deterministic", lambda: False),
        mock.patch.object(rows, "saves_memory", lambda: False),
    ):
        yield


def make(form: Checkpoint, **config: Any) -> Experts:
    """The layer of a checkpoint, not processed."""
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    layer: Any = torch.nn.Module()
    layer.moe_tp_size, layer.top_k, layer.intermediate_size_per_partition = 1, TOPK, FEATURES
    layer.w13_scale_dtype = form.dtype
    layer.moe_runner_config = MoeRunnerConfig(
        intermediate_size_per_partition=FEATURES, params_dtype=form.dtype, **config
    )
    scheme = _scheme(form)
    scheme.create_weights(layer, COUNT, HIDDEN, FEATURES, form.dtype, weight_loader=lambda *_, **__: None)
    kind = next(kind for kind in moe.LAYERS.kinds if kind.owner.startswith(form.checkpoint.replace("ct", "comp")))
    generator, dense = torch.Generator().manual_seed(0), []
    order = AWQ_ORDER if form.checkpoint == "awq" else tuple(range(32 // form.bits))
    for name, (n, k) in {"w13": (2 * FEATURES, HIDDEN), "w2": (HIDDEN, FEATURES)}.items():
        length, top = form.group_size or k, 1 << form.bits
        codes = torch.randint(0, top, (COUNT, n, k), generator=generator)
        zeros = torch.randint(0, top, (COUNT, n, k // length), generator=generator)
        zeros = zeros if form.zero_point else torch.full_like(zeros, top // 2)
        scales = (torch.rand(zeros.shape, generator=generator) * 0.01 + 0.001).to(form.dtype)
        group_of = torch.arange(k) // length
        dense.append((codes - zeros[..., group_of]).double() * scales.double()[..., group_of])
        packed = (
            words(codes.transpose(1, 2), form.bits, order)
            if form.checkpoint == "awq"
            else words(codes, form.bits, order).transpose(1, 2)
        )
        tensors = {kind.words: packed, kind.scales: scales.transpose(1, 2)}
        if form.zero_point:
            tensors[kind.zeros] = words(zeros.transpose(1, 2), form.bits, order)
        for text, tensor in tensors.items():
            parameter = getattr(layer, text.format(name))
            assert parameter.shape == tensor.shape, (str(form), text, parameter.shape, tensor.shape)
            parameter.data.copy_(tensor)
    return Experts(scheme, getattr(scheme, "kernel", scheme), layer, *dense)


def _scheme(form: Checkpoint) -> Any:
    if form.checkpoint == "ct":
        module: Any = importlib.import_module(f"{PACKAGE}.compressed_tensors.schemes.compressed_tensors_wNa16_moe")
        module.CompressionFormat = SimpleNamespace(pack_quantized=SimpleNamespace(value="pack-quantized"))
        weights = SimpleNamespace(
            num_bits=form.bits,
            strategy="group" if form.group_size else "channel",
            group_size=form.group_size or None,
            actorder="group" if form.act_order else None,
            symmetric=not form.zero_point,
        )
        return module.CompressedTensorsWNA16MoE(SimpleNamespace(quant_format="pack-quantized"), weights)
    config = SimpleNamespace(
        weight_bits=form.bits,
        pack_factor=32 // form.bits,
        group_size=form.group_size or -1,
        desc_act=form.act_order,
        is_sym=True,
    )
    kinds = {name: SimpleNamespace(value=name.lower()) for name in ("GROUP", "CHANNEL")}
    scales: Any = importlib.import_module("sglang.srt.layers.moe.fused_moe_triton")
    scales.FusedMoeWeightScaleSupported = SimpleNamespace(**kinds)
    module = importlib.import_module(f"{PACKAGE}.{form.checkpoint}.schemes.{form.checkpoint}_moe")
    return (module.AWQMoEScheme if form.checkpoint == "awq" else module.GPTQMarlinMoEScheme)(config)


def chosen(tokens: int) -> torch.Tensor:
    return torch.stack([torch.randperm(COUNT)[:TOPK] for _ in range(tokens)]).int()


FORMS = [
    Checkpoint(checkpoint, bits, group_size, zero_point, dtype=dtype)
    for checkpoint, bits, group_size, zero_point, dtype in EXPERTS
]


@check
def experts_of_every_checkpoint_give_what_it_says() -> None:
    torch.manual_seed(0)
    for form in FORMS:
        made = make(form, routed_scaling_factor=2.5)
        with dispatched():
            made.scheme.process_weights_after_loading(made.layer)
            made.scheme.process_weights_after_loading(made.layer)  # nothing was loaded since
        assert made.layer.cute_kernels_served.gate_up.form.dtype is form.dtype, str(form)
        elsewhere = chosen(6)
        elsewhere[1, 0] = elsewhere[3] = -1  # other GPUs' experts
        for ids in (chosen(7), elsewhere, chosen(3).long()):
            assert made.error(ids, 2.5) < (2**-6 if form.dtype == torch.bfloat16 else 2**-9), (str(form), ids)
        packed = made.layer.cute_kernels_served.gate_up.codes
        assert any(parameter.data_ptr() == packed.data_ptr() for parameter in made.layer.parameters())


@check
def limits_and_gpt_oss_activation_are_those_of_sglangs_marlin() -> None:
    torch.manual_seed(0)
    for numbers in ({"swiglu_limit": 0.05}, {"gemm1_alpha": 1.5, "gemm1_clamp_limit": 0.05}):
        made = make(Checkpoint("ct", 4, 32), **numbers)
        plain = mock.patch.object(Experts, "between", lambda self, gate, up: torch.nn.functional.silu(gate) * up)
        with dispatched():
            made.scheme.process_weights_after_loading(made.layer)
        assert made.error(chosen(7)) < 2**-6, numbers
        with plain:
            assert made.error(chosen(7)) > 2**-3, numbers


def left(
    form: Checkpoint, changes: dict[str, Any] | None = None, server: dict[str, Any] | None = None, **config: Any
) -> str:
    """The one line that says why a layer is left to SGLang, whose own methods have it then."""
    seams.say_once.cache_clear()
    made, original = make(form, **config), mock.Mock()
    for name, value in (changes or {}).items():
        setattr(made.layer, name, value)
    kind = next(kind for kind in moe.LAYERS.kinds if kind.owner.startswith(form.checkpoint.replace("ct", "comp")))
    before = dict(made.layer.named_parameters())
    with dispatched(**(server or {})), mock.patch.object(seams, "logger") as said:
        moe.LAYERS.load(kind, original, made.owner, made.layer)
        moe.LAYERS.load(kind, original, made.owner, made.layer)
    assert original.call_args_list == [mock.call(made.owner, made.layer)] * 2
    assert all(before[name] is now for name, now in made.layer.named_parameters())
    moe.LAYERS.product(original, made.owner, made.layer, "given")
    assert original.call_args == mock.call(made.owner, made.layer, "given")
    (line,) = lines(said)
    return line


@check
def other_experts_are_left_to_sglang_by_name() -> None:
    usual = Checkpoint("ct", 4, 32)
    assert "act-order" in left(Checkpoint("gptq", 4, 32, act_order=True))
    assert "act-order" in left(Checkpoint("ct", 4, 32, act_order=True))
    assert "groups of 8" in left(Checkpoint("ct", 4, 8))
    assert "the activation gelu, or its numbers" in left(usual, activation="gelu")
    for name, value in {"is_gated": False, "gemm1_alpha": 1.702, "gemm1_beta": 1.0, "gemm1_clamp_limit": 7.0}.items():
        assert "the activation silu, or its numbers" in left(usual, None, None, **{name: value}), name
    assert "biases" in left(usual, {"w13_bias": torch.zeros(1)})
    assert "weights on the input" in left(usual, apply_router_weight_on_input=True)
    assert "not added up" in left(usual, no_combine=True)
    assert "all-to-all" in left(usual, server={"a2a": True})
    assert "paged from the host" in left(usual, server={"paged": True})
    assert "KTransformers" in left(usual, server={"cpu": "/a/folder"})
    assert "DWDP" in left(usual, server={"dwdp": 2})
    assert "--enable-eplb" in left(usual, server={"eplb": True}) and "LoRA" in left(usual, server={"lora": True})
    with mock.patch.object(seams, "IN_PLACE", set()):
        assert "hooks were not seen" in left(usual)
    with mock.patch("cute_kernels.integrations.sglang.seams.capability_of", lambda device: (8, 0)):
        assert "compute capability (8, 0)" in left(usual)


@check
def sglang_hands_out_local_ids_and_takes_one_tensor_back() -> None:
    """What `_multiply` relies on, in the source of what is stood in for here."""
    from sglang.srt.layers import moe as package

    (folder,) = package.__path__
    with open(f"{folder}/token_dispatcher/standard.py") as file:
        source = file.read()
    assert "topk_output = topk_output._replace(topk_ids=topk_ids_local)" in source
    assert "(hidden_states,) = combine_input" in source and "preserving the ``-1`` drop sentinel" in source
    for name in ("hidden_states: torch.Tensor", "topk_output: TopKOutput"):
        assert name in source
    assert "layer_id" in inspect.getsource(importlib.import_module("sglang.srt.layers.moe.moe_runner.base"))
