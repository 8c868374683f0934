"""Checks of linear layers in FP8 and NVFP4: SGLang's own schemes make the parameters, random checkpoints fill them."""

# SGLang is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from cute_kernels.integrations.sglang import float_linear, seams
from tests.integrations.sglang.checks import check, lines
from tests.integrations.vllm.seam_float_linear import PARTS, K, N, fill

SCHEMES = "sglang.srt.layers.quantization.compressed_tensors.schemes.compressed_tensors"
KINDS = ("fp8 channel", "fp8 tensor", "nvfp4", "nvfp4 w4a4", "modelopt w4a4", "modelopt a16")


def _owner(kind: str, **config: Any) -> Any:
    if kind.startswith("fp8"):
        module: Any = importlib.import_module(f"{SCHEMES}_w8a16_fp8")
        module.QuantizationStrategy = SimpleNamespace(CHANNEL="channel", TENSOR="tensor")
        return module.CompressedTensorsW8A16Fp8(getattr(module.QuantizationStrategy, kind[4:].upper()), False)
    if kind.startswith("nvfp4"):
        return importlib.import_module(f"{SCHEMES}_w4a16_nvfp4").CompressedTensorsW4A16Fp4("w4a4" in kind)
    modelopt: Any = importlib.import_module("sglang.srt.layers.quantization.modelopt_quant")
    config = {"group_size": 16, "is_checkpoint_nvfp4_serialized": True, "is_awq": False} | config
    made = modelopt.ModelOptFp4LinearMethod if "w4a4" in kind else modelopt.ModelOptNvFp4A16LinearMethod
    return made(SimpleNamespace(**config))


def made(kind: str, dtype: torch.dtype = torch.bfloat16, **config: Any) -> tuple[Any, Any, torch.Tensor]:
    """(owner, layer, weight fp64 [n, k]) of a random checkpoint, not processed."""
    layer: Any = torch.nn.Module()
    owner = _owner(kind, **config)
    sizes = {"input_size_per_partition": K, "output_partition_sizes": PARTS, "input_size": K, "output_size": N}
    owner.create_weights(layer=layer, **sizes, params_dtype=dtype, weight_loader=lambda *_, **__: None)
    return owner, layer, fill(layer)


def backend(name: str = "marlin") -> Any:
    """The server's kernels for FP4; Marlin's are SGLang's choice on Hopper."""
    from sglang.srt.layers.quantization import fp4_utils

    chosen = fp4_utils.Fp4GemmRunnerBackend(name)
    return mock.patch.object(fp4_utils, "FP4_GEMM_RUNNER_BACKEND", chosen)


def product_of(owner: Any) -> Any:
    return getattr(owner, "apply_weights", None) or owner.apply


@check
def float_layers_give_what_their_checkpoint_says_each_part_by_its_own_scale() -> None:
    for kind in KINDS:
        owner, layer, weight = made(kind)
        with backend():
            owner.process_weights_after_loading(layer)
            owner.process_weights_after_loading(layer)  # nothing was loaded since
        x, bias = torch.randn(2, 3, K).bfloat16(), torch.randn(N).bfloat16()
        expected = x.double() @ weight.T + bias.double()
        found = product_of(owner)(layer, x, bias)
        assert (found.double() - expected).abs().max() / expected.abs().max() < 2**-7, kind
        assert hasattr(layer, seams.SERVED), kind


@check
def other_float_layers_are_left_to_sglang_by_name() -> None:
    def left(kind: str, chosen: str = "marlin", dtype: torch.dtype = torch.bfloat16, **config: Any) -> str:
        owner, layer, _ = made(kind, dtype, **config)
        before, original = dict(layer.named_parameters()), mock.Mock()
        seams.say_once.cache_clear()
        found = next(each for each in float_linear.KINDS if each.owner == _owner_name(owner))
        with backend(chosen), mock.patch.object(seams, "logger") as said:
            float_linear.LAYERS.load(found, original, owner, layer)
        assert original.call_args_list == [mock.call(owner, layer)]
        assert all(before[name] is now for name, now in layer.named_parameters())
        (line,) = lines(said)
        return line

    assert "--fp4-gemm-backend flashinfer_cutlass" in left("nvfp4", "flashinfer_cutlass")
    assert "factors" in left("modelopt w4a4", is_awq=True)
    assert "nvfp4 weights for activations in torch.float16" in left("nvfp4", dtype=torch.float16)
    with mock.patch.object(seams, "capability_of", lambda device: (8, 0)):
        assert "compute capability (8, 0)" in left("fp8 channel")


def _owner_name(owner: Any) -> str:
    from cute_kernels.integrations.sglang.versions import Interface

    fields = vars(Interface)
    return next(name for name, full in fields.items() if str(full).endswith(f".{type(owner).__name__}"))


@check
def rounded_activations_stay_sglangs() -> None:
    """No hook stands around the methods of W8A8 layers."""
    hooked = float_linear.SEAM.hooks(importlib.import_module("cute_kernels.integrations.sglang.versions").Interface(""))
    assert len(hooked) == 8 and not any("w8a8" in name or "Fp8LinearMethod" in name for name in hooked)
