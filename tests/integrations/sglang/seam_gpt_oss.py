"""Checks of gpt-oss's experts: SGLang's own block makes the layer and its router, random checkpoints fill it."""

# SGLang is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cute_kernels.formats.weights import MXFP4
from cute_kernels.gemm import pack_experts
from cute_kernels.gemm.activations import ClampedSwiglu
from cute_kernels.integrations.sglang import moe, seams
from tests.integrations.sglang.checks import check, lines
from tests.integrations.sglang.seam_moe import chosen, dispatched

COUNT, TOPK, FEATURES, HIDDEN = 5, 2, 96, 128
KIND = moe.GPT_OSS.kinds[0]


def block(backend: str = "triton_kernel", **config: Any) -> Any:
    """gpt-oss's block of experts as SGLang's model makes it for a backend, not loaded."""
    from sglang.srt.layers.moe import topk, utils
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.quantization import mxfp4
    from sglang.srt.models import gpt_oss

    kind = utils.MoeRunnerBackend(backend)

    class Layer(torch.nn.Module):
        def __init__(self, **given: Any) -> None:
            super().__init__()
            numbers = {name: given[name] for name in ("activation", "gemm1_alpha", "gemm1_clamp_limit")}
            self.moe_runner_config = MoeRunnerConfig(**({"params_dtype": torch.bfloat16} | numbers | config))
            self.top_k, self.num_local_experts = given["top_k"], given["num_experts"]
            self.hidden_size, self.intermediate_size_per_partition = HIDDEN, FEATURES
            self.quant_method: Any = mxfp4.Mxfp4MoEMethod("experts")
            self.quant_method.create_weights(
                self, COUNT, HIDDEN, FEATURES, torch.bfloat16, given["with_bias"], weight_loader=lambda *_: None
            )
            self.runner_backend, self.use_triton_kernels = kind, kind.is_triton_kernels()

    exec_ = SimpleNamespace(moe=SimpleNamespace(flashinfer_mxfp4_moe_precision="bf16", ep_num_redundant_experts=0))
    flags = SimpleNamespace(moe=SimpleNamespace(runner_backend=kind, a2a_backend=None, in_speculative_scope=False))
    shared = SimpleNamespace(shared_experts=SimpleNamespace(use_waterfill=False, num_shared_topk_slots=0))
    described = SimpleNamespace(
        hidden_size=HIDDEN,
        hidden_act="silu",
        swiglu_limit=7.0,
        num_experts_per_tok=TOPK,
        num_local_experts=COUNT,
        intermediate_size=FEATURES,
        dtype=torch.bfloat16,
    )
    with ExitStack() as stack:
        for module, name, value in (
            (gpt_oss, "get_exec", lambda: exec_),
            (mxfp4, "get_exec", lambda: exec_),
            (utils, "get_flags", lambda: flags),
            (topk, "get_flags", lambda: flags),
            (topk, "get_model", lambda: shared),
            (gpt_oss, "get_moe_impl_class", lambda config: Layer),
            (gpt_oss, "TinyGemmLinear", mock.MagicMock()),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        return gpt_oss.GptOssSparseMoeBlock(layer_id=0, config=described)


def load(layer: Any, most: int = 124) -> dict[str, torch.Tensor]:
    """Fills a layer at random. Returns weights and biases in fp64."""
    generator, exact = torch.Generator().manual_seed(0), {}
    for name in ("w13", "w2"):
        codes, scales, biases = (getattr(layer, f"{name}_weight{end}").data for end in ("", "_scale", "_bias"))
        codes.random_(0, 256, generator=generator)
        scales.random_(118, most, generator=generator)
        biases.normal_(generator=generator)
        given = codes, scales.view(torch.float8_e8m0fnu)
        exact[name] = pack_experts(MXFP4, *given, dtype=torch.bfloat16).dequantize(torch.float64)
        exact[f"{name}_bias"] = biases.double()
    return exact


def process(layer: Any, backend: str = "triton_kernel") -> Any:
    """Lets SGLang load a layer, on a server with a backend. Returns what the log says."""
    from sglang.srt.layers import moe as package
    from sglang.srt.layers.moe.utils import MoeRunnerBackend

    seams.say_once.cache_clear()
    with (
        dispatched(),
        mock.patch.object(package, "get_moe_runner_backend", lambda: MoeRunnerBackend(backend)),
        mock.patch.object(seams, "logger") as said,
    ):
        layer.quant_method.process_weights_after_loading(layer)
    return said


@check
def experts_of_gpt_oss_give_what_its_checkpoint_says() -> None:
    from sglang.srt.layers.moe.topk import TopKOutputFormat

    for backend, in_turn, most in (("triton_kernel", True, 124), ("auto", False, 124), ("auto", True, 140)):
        made = block(backend, gate_up_interleaved=in_turn)
        layer, exact = made.experts, load(made.experts, most)
        sorted_by_expert = made.topk.topk_config.output_format == TopKOutputFormat.TRITON_KERNEL
        assert sorted_by_expert == (backend == "triton_kernel")
        assert "experts of gpt-oss run here" in lines(process(layer, backend))[-1]
        assert made.topk.topk_config.output_format == TopKOutputFormat.STANDARD
        ids, x, weights = chosen(7), torch.randn(7, HIDDEN).bfloat16(), torch.rand(7, TOPK)
        ids[1, 0] = ids[3] = -1  # other GPUs' experts
        given = SimpleNamespace(hidden_states=x, topk_output=SimpleNamespace(topk_weights=weights, topk_ids=ids))
        with dispatched():
            found = layer.quant_method.apply(layer, given)
        expected = torch.zeros(7, HIDDEN, dtype=torch.float64)
        for token in range(7):
            for expert, weight in zip(ids[token].tolist(), weights[token].double(), strict=True):
                if expert >= 0:
                    both = exact["w13"][expert] @ x[token].double() + exact["w13_bias"][expert]
                    gate_and_up = (both[::2], both[1::2]) if in_turn else both.chunk(2)
                    middle = ClampedSwiglu().reference(*gate_and_up)
                    expected[token] += weight * (exact["w2"][expert] @ middle + exact["w2_bias"][expert])
        assert (found.double() - expected).abs().max() / expected.abs().max() < 2**-6, (backend, in_turn)
        packed = layer.cute_kernels_served.gate_up
        assert layer.w13_weight.data_ptr() == packed.codes.data_ptr() and len(packed) == COUNT


@check
def experts_of_gpt_oss_that_are_left_keep_their_router_and_parameters() -> None:
    from sglang.srt.layers.moe.topk import TopKOutputFormat

    def left(backend: str = "triton_kernel", made_for: str | None = None, **config: Any) -> str:
        made = block(made_for or backend, **config)
        load(made.experts)
        return kept(made, backend)

    def kept(made: Any, backend: str = "triton_kernel") -> str:
        before, router = dict(made.experts.named_parameters()), made.topk.topk_config.output_format
        with mock.patch.object(type(made.experts.quant_method), "process_weights_after_loading") as original:
            hooked = mock.Mock(wraps=lambda layer: moe.GPT_OSS.load(KIND, original, made.experts.quant_method, layer))
            made.experts.quant_method.process_weights_after_loading = hooked
            said = process(made.experts, backend)
        assert original.call_count == 1
        assert all(before[name] is now for name, now in made.experts.named_parameters())
        assert made.topk.topk_config.output_format == router
        (line,) = lines(said)
        return line

    assert "--moe-runner-backend marlin" in left("marlin", made_for="auto")
    assert "the activation situ, or its numbers" in left(activation="situ")
    assert "got torch.float16, want bf16" in left(params_dtype=torch.float16)
    unknown = block()
    load(unknown.experts)
    del vars(unknown.experts)[moe.ROUTER]
    assert "tokens sorted by experts" in kept(unknown)
    broken = block()
    load(broken.experts)
    broken.experts.w2_weight_scale.data[0] = 255  # NaN
    assert "scale" in kept(broken) and broken.topk.topk_config.output_format == TopKOutputFormat.TRITON_KERNEL
