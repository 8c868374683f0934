"""Checks of linear layers in FP8, MXFP4 and NVFP4."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import importlib
import os
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.integrations.vllm.checks import check

PARTS, K = [128, 64], 256  # output features of a fused layer's parts, and inputs
N = sum(PARTS)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
KINDS = ("fp8", "fp8 block", "ct tensor", "ct channel", "ct block", "ct w8a16 tensor", "ct w8a16 block")
KINDS += ("ct nvfp4", "ct nvfp4 a16", "ct mxfp4", "mo fp8", "mo channel", "mo block", "mo nvfp4")
ROUNDED = tuple(kind for kind in KINDS if "4" not in kind and "a16" not in kind)
"""Those whose activations vLLM rounds to FP8."""


def fits() -> bool:
    """Whether the vLLM that is there has the seam's methods; the seam is in place then."""
    import vllm

    from cute_kernels.integrations.vllm import float_linear, versions

    try:
        float_linear.replace(versions.INTERFACES[max(versions.INTERFACES)])
    except (ImportError, AttributeError):
        assert vllm.__version__.startswith("0.26"), vllm.__version__
        return False
    return True


def _method(kind: str) -> Any:
    """vLLM's method of a checkpoint, whose kernel it chooses when the layer is made."""
    from vllm.model_executor.layers.quantization import fp8, modelopt

    from cute_kernels.integrations.vllm.versions import SCHEMES

    if kind.startswith("fp8"):
        return fp8.Fp8LinearMethod(fp8.Fp8Config(True, weight_block_size=[128, 128] if "block" in kind else None))
    if kind.startswith("mo"):
        algorithms = {
            "mo fp8": "FP8",
            "mo channel": "FP8_PER_CHANNEL_PER_TOKEN",
            "mo block": "FP8_PB_WO",
            "mo nvfp4": "NVFP4",
        }
        config = SimpleNamespace(group_size=16, is_checkpoint_nvfp4_serialized=True)
        return modelopt.ModelOptLinearMethod(*modelopt.resolve(algorithms[kind], config, ""))
    if "nvfp4" in kind:
        return importlib.import_module(f"{SCHEMES}_w4a4_nvfp4").CompressedTensorsW4A4Fp4("a16" in kind)
    if "mxfp4" in kind:
        return importlib.import_module(f"{SCHEMES}_w4a4_mxfp4").CompressedTensorsW4A4Mxfp4()
    wide = "a16" in kind
    there = importlib.import_module(f"{SCHEMES}_{'w8a16' if wide else 'w8a8'}_fp8")
    strategy = getattr(there.QuantizationStrategy, kind.split()[-1].upper())
    weights = SimpleNamespace(strategy=strategy, block_structure=[128, 128] if "block" in kind else None)
    return getattr(there, "CompressedTensorsW8A16Fp8" if wide else "CompressedTensorsW8A8Fp8")(weights, False)


def made(
    kind: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", **attributes: Any
) -> tuple[Any, Any, torch.Tensor]:
    """(method, layer, weight fp64 [n, k]) of a random checkpoint, in the parameters that vLLM makes."""
    from vllm.model_executor.layers.quantization import fp8, modelopt
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Dynamic

    from cute_kernels.integrations.vllm.versions import SCHEMES

    kernel = SimpleNamespace(
        config=SimpleNamespace(activation_quant_key=kMxfp4Dynamic), input_quant_key=lambda: "any key"
    )
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=dtype))
    layer: Any = torch.nn.Module()
    for name, value in {"params_dtype": dtype, "prefix": kind, "tp_size": 1, **attributes}.items():
        setattr(layer, name, value)
    choosers = {"w8a8_fp8": "init_fp8", "w8a16_fp8": "init_wfp8_a16", "w4a4_nvfp4": "init_nvfp4"}
    choosers = {f"{SCHEMES}_{name}": f"{function}_linear_kernel" for name, function in choosers.items()}
    choosers |= {f"{SCHEMES}_w4a4_mxfp4": "init_mxfp4_linear_kernel", fp8.__name__: "init_fp8_linear_kernel"}
    choosers[modelopt.__name__] = "select_linear_kernel"
    with ExitStack() as stack:
        for module, function in choosers.items():
            there = importlib.import_module(module)
            stack.enter_context(mock.patch.object(there, function, lambda *_, **__: kernel))
            if hasattr(there, "get_current_vllm_config"):
                stack.enter_context(mock.patch.object(there, "get_current_vllm_config", lambda: config))
        parameters = "vllm.model_executor.parameter.get_tensor_model_parallel"
        stack.enter_context(mock.patch(f"{parameters}_rank", lambda: 0))
        stack.enter_context(mock.patch(f"{parameters}_world_size", lambda: 1))
        stack.enter_context(mock.patch("vllm.distributed.get_tensor_model_parallel_world_size", lambda: 1))
        method = _method(kind)
        sizes = {"input_size_per_partition": K, "output_partition_sizes": PARTS, "input_size": K, "output_size": N}
        with torch.device(device):
            method.create_weights(layer, **sizes, params_dtype=dtype, weight_loader=lambda *_, **__: None)
    return method, layer, fill(layer)


def fill(layer: Any) -> torch.Tensor:
    """Random values for all of a layer's parameters; the weight that they stand for."""
    generator = torch.Generator().manual_seed(0)
    there = {name: each.data for name, each in layer.named_parameters()}
    codes = there["weight_packed"] if "weight_packed" in there else there["weight"]
    scales = there["weight_scale_inv"] if "weight_scale_inv" in there else there["weight_scale"]
    drawn = torch.randint(0, 256, codes.shape, generator=generator, dtype=torch.uint8)
    if codes.dtype == torch.float8_e4m3fn:
        drawn = torch.where(drawn & 0x7F == 0x7F, 0, drawn)  # no NaN
        numbers = drawn.view(torch.float8_e4m3fn).double()
    else:
        numbers = FP4[torch.stack((drawn & 15, drawn >> 4), dim=-1).flatten(1).int()]
    codes.copy_(drawn.view(codes.dtype))
    if scales.dtype == torch.uint8:
        factors = torch.randint(118, 124, scales.shape, generator=generator, dtype=torch.uint8)
        scales.copy_(factors)
        factors = torch.exp2(factors.double() - 127)
    else:
        scales.copy_((torch.rand(scales.shape, generator=generator) + 0.5).to(scales.dtype))
        factors = scales.double().cpu()
    of_parts = torch.repeat_interleave(torch.arange(len(PARTS)), torch.tensor(PARTS))
    if factors.dim() == 1:
        factors = (factors[of_parts] if len(factors) == len(PARTS) else factors).unsqueeze(1)
    factors = factors.reshape(factors.shape[0], -1)
    if len(factors) < N:
        factors = factors.repeat_interleave(128, dim=0)[:N]
    weight = numbers * factors.repeat_interleave(K // factors.shape[1], dim=1)
    for name in ("weight_global_scale", "weight_scale_2"):
        if name in there:
            there[name].copy_(torch.tensor([3.0, 0.25]))
            second = there[name].double().cpu()[of_parts].unsqueeze(1)
            weight = weight / second if name == "weight_global_scale" else weight * second
    return weight


def wanted(activations: str = "16bit") -> Any:
    from cute_kernels.integrations.vllm import environment

    switches = {environment.SWITCH: "float_linear", environment.KV_FORMAT: ""}
    return mock.patch.dict(os.environ, {**switches, environment.ACTIVATIONS: activations})


def named() -> Any:
    from cute_kernels.integrations.vllm import plugin

    return mock.patch.object(plugin, "is_replaced", lambda seam: True)


def how(method: Any) -> tuple[str, str]:
    """The attribute of a method that multiplies, and the one that says what activations are rounded to."""
    from cute_kernels.integrations.vllm.versions import Interface

    return next((kernel, key) for _, name, kernel, key in Interface.float_linear if name == type(method).__name__)


def kernel_of(method: Any) -> Any:
    return getattr(method, how(method)[0])


def apply(method: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As vLLM calls a method, or a scheme."""
    product = method.apply_weights if hasattr(method, "apply_weights") else method.apply
    return product(layer, x, bias)


def error_of(method: Any, layer: Any, weight: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> float:
    generator = torch.Generator().manual_seed(1)
    x, bias = torch.randn(2, 3, K, generator=generator).to(dtype), torch.randn(N, generator=generator).to(dtype)
    given = None if kernel_of(method).is_interleaved else bias  # a gated layer has none
    expected = x.double() @ weight.T + (0 if given is None else bias.double())
    return float((apply(method, layer, x, given).double() - expected).abs().max() / expected.abs().max())


@check
def float_layers_of_every_checkpoint_give_what_it_says() -> None:
    """Each part of a fused layer by its own scale."""
    if not fits():
        return
    for kind in KINDS:
        method, layer, weight = made(kind)
        with wanted(), named():
            method.process_weights_after_loading(layer)
        assert type(kernel_of(method)).__name__ == "FloatProducts", kind
        assert error_of(method, layer, weight) < 2**-7, (kind, error_of(method, layer, weight))
        assert not hasattr(layer, "_input_quant_key"), kind
    method, layer, weight = made("fp8 block", torch.float16)
    with wanted(), named():
        method.process_weights_after_loading(layer)
    assert error_of(method, layer, weight, torch.float16) < 2**-9


@check
def activations_that_vllm_rounds_to_fp8_are_kept_where_the_environment_says_so() -> None:
    if not fits():
        return
    from cute_kernels.integrations.vllm import float_linear

    def reason(kind: str, **attributes: Any) -> str:
        method, layer, _ = made(kind, **attributes)
        with named():
            return str(float_linear.serve(*how(method), method, layer))

    with wanted(""):
        for kind in KINDS:
            assert ("activations in FP8 (in 16 bits with" in reason(kind)) is (kind in ROUNDED), kind
            assert (reason(kind) == "None") is (kind not in ROUNDED), (kind, reason(kind))


@check
def other_float_layers_are_left_to_vllm_with_a_reason() -> None:
    if not fits():
        return
    from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8DynamicTokenSym

    from cute_kernels.integrations.vllm import environment, float_linear

    def reason(method: Any, layer: Any) -> str:
        before, key = kernel_of(method), hasattr(layer, "_input_quant_key")
        found = str(float_linear.serve(*how(method), method, layer))
        assert kernel_of(method) is before and hasattr(layer, "_input_quant_key") is key
        return found

    method, layer, _ = made("ct mxfp4", torch.float16)
    with mock.patch.dict(os.environ, {environment.SWITCH: "linear", environment.KV_FORMAT: ""}):
        assert "CUTE_KERNELS_VLLM=" in reason(method, layer)
    with wanted(), named():
        assert "mxfp4 weights for activations in torch.float16" in reason(method, layer)
        method, layer, _ = made("ct mxfp4")
        layer.weight_scale.data[5] = 129  # beyond 2
        assert "e2m1g32e8m0any weights" in reason(method, layer)
        method, layer, _ = made("fp8 block", is_bmm=True)
        assert "the model's own kernels read" in reason(method, layer)
        method, layer, _ = made("mo nvfp4", _retain_weight_for_gather=True)
        assert "the model's own kernels read" in reason(method, layer)
        method, layer, _ = made("mo nvfp4")
        with mock.patch.object(float_linear, "is_pre_processed", lambda: True):
            assert "ipc_cache" in reason(method, layer)
            layer.weight.data = layer.weight.data.unsqueeze(0)  # as another process has packed it
            try:
                float_linear.serve(*how(method), method, layer)
            except ValueError as error:
                assert "got weights that this plug-in has packed" in str(error)
            else:
                raise AssertionError("packed weights were given to vLLM's kernel")
        method, layer, _ = made("ct nvfp4")
        with (
            mock.patch.object(float_linear, "ParallelLMHead", type(layer)),
            mock.patch.object(
                float_linear, "get_current_vllm_config_or_none", lambda: SimpleNamespace(lora_config=object())
            ),
        ):
            assert "LoRA" in reason(method, layer)
        method, layer, _ = made("ct channel")
        layer.weight_scale.data[5] = torch.inf
        assert "weight_scale: got values that are not finite" in reason(method, layer)
        method, layer, _ = made("fp8 block")
        layer.weight_scale_inv.data = torch.ones(3, 4)
        assert "e4m3g64f32 weights" in reason(method, layer)
        method, layer, _ = made("fp8")
        with mock.patch.object(float_linear.envs, "VLLM_BATCH_INVARIANT", True, create=True):
            assert "vLLM dequantises" in reason(method, layer)
        chosen = SimpleNamespace(
            kernel_config=SimpleNamespace(linear_backend="auto", linear_backend_per_quant={1: "x"})
        )
        with (
            mock.patch.object(float_linear, "get_current_vllm_config_or_none", lambda: chosen),
        ):
            assert "--linear-backend" in reason(method, layer)
    with wanted(""), named():
        method, layer, _ = made("ct mxfp4")
        method.kernel.config.activation_quant_key = kFp8DynamicTokenSym  # as the command line may say
        assert "activations in FP8" in reason(method, layer)


@check
def float_layers_are_loaded_again_and_dequantised_for_latent_attention() -> None:
    if not fits():
        return
    from vllm.model_executor.layers.quantization.utils.quant_utils import get_and_maybe_dequant_weights

    for kind in ("fp8 block", "fp8", "mo fp8"):
        method, layer, weight = made(kind)
        layer.input_size_per_partition, layer.quant_method = K, method
        with wanted(), named():
            method.process_weights_after_loading(layer)
            found = get_and_maybe_dequant_weights(layer, torch.bfloat16)
            assert (found.double() - weight).abs().max() <= weight.abs().max() * 2**-8, kind
            _, again, other = made(kind)
            layer.weight.data = again.weight.data.view(torch.uint8).flip(1).view(torch.float8_e4m3fn)
            scales = "weight_scale_inv" if kind == "fp8 block" else "weight_scale"
            getattr(layer, scales).data = getattr(again, scales).data.flip(-1)
            expected = other.flip(1) if kind == "fp8 block" else None
            method.process_weights_after_loading(layer)
            assert expected is None or error_of(method, layer, expected) < 2**-7, kind
            layer.weight.data = again.weight.data
            getattr(layer, scales).data = torch.full((), torch.nan)
            try:
                method.process_weights_after_loading(layer)
            except ValueError as error:
                assert "got weights loaded again that do not fit" in str(error), error
            else:
                raise AssertionError(kind)


@check
def rows_of_gates_and_ups_come_in_turn_in_every_float_format() -> None:
    if not fits():
        return
    from cute_kernels.integrations.vllm import fused_layers

    halves = [N // 2, N // 2]
    for kind in ("ct nvfp4", "ct mxfp4", "ct channel", "mo block"):
        method, layer, weight = made(kind)
        layer.prefix, layer.bias, layer.output_partition_sizes = "mlp.gate_up_proj", None, halves
        fused = mock.patch.object(fused_layers, "wanted", lambda: fused_layers.Fused(gates=True))
        with wanted(), named(), fused:
            method.process_weights_after_loading(layer)
        assert kernel_of(method).is_interleaved, kind
        assert error_of(method, layer, weight) < 2**-7, (kind, error_of(method, layer, weight))


@check
def the_switch_of_activations_is_refused_where_nobody_looks_at_it() -> None:
    from cute_kernels.integrations.vllm import doctor, environment, versions

    for seams, text in (("float_linear", "8bit"), ("1", "8bit"), ("linear,moe", "16bit")):
        with (
            mock.patch.dict(
                os.environ, {environment.SWITCH: seams, environment.ACTIVATIONS: text, environment.KV_FORMAT: ""}
            ),
            mock.patch.object(versions, "installed", lambda: "0.33.0"),
        ):
            assert "want 16bit, and the seam float_linear in" in doctor.examine().detail, seams
    with wanted():
        assert environment.keeps_activations()
    with wanted(""):
        assert not environment.keeps_activations()
