"""The supported versions of vLLM, and the names of its classes and functions in each.

vLLM moves its interfaces every second release. An untested version is not changed, and a log line says so.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass

DISTRIBUTION = "vllm"
QUANTIZATION = "vllm.model_executor.layers.quantization"
SCHEMES = f"{QUANTIZATION}.compressed_tensors.schemes.compressed_tensors"
COMPRESSED_TENSORS = "compressed_tensors.compressed_tensors_moe"
AUTO_EXPERTS = ((f"{QUANTIZATION}.auto_gptq", "AutoGPTQMoEMethod"), (f"{QUANTIZATION}.auto_awq", "AutoAWQMoEMethod"))


@dataclass(frozen=True)
class Interface:
    """The modules and names of a version of vLLM that the plug-in replaces.

    Attributes:
        tested: how this version was tested, in words.
        linear_kernels: the module that has the list of kernels of linear layers, and the name of the list.
        linear_scheme: the module and class of compressed-tensors layers.
        backend_priorities: the module and function that order the attention backends.
        backend_choice: the module and function that chooses a backend, and caches its choice.
        attention_layer: the module and class of attention layers.
        mla_layer: the module and class of latent attention layers.
        expert_methods: the modules and classes of the methods of expert layers.
        float_linear: for linear layers in FP8, MXFP4 and NVFP4: the module and the class of the method, the attribute
            that multiplies, and the attribute with the dtype that activations are rounded to ("" for none). Empty for
            versions whose methods have no such attribute.
        mla_backends: the modules and classes of the backends whose decoding of MLA is replaced.
        mla_gives_lse: whether the bf16 kernel of chosen tokens returns (rows, log-sum-exps) instead of only rows.
        pass_manager: the module and class that chooses the passes over a traced model.
    """

    tested: str
    linear_kernels: tuple[str, str] = ("vllm.model_executor.kernels.linear", "_POSSIBLE_KERNELS")
    linear_scheme: tuple[str, str] = (f"{SCHEMES}_wNa16", "CompressedTensorsWNA16")
    backend_priorities: tuple[str, str] = ("vllm.platforms.cuda", "_get_backend_priorities")
    backend_choice: tuple[str, str] = ("vllm.v1.attention.selector", "_cached_get_attn_backend")
    attention_layer: tuple[str, str] = ("vllm.model_executor.layers.attention.attention", "Attention")
    mla_layer: tuple[str, str] = ("vllm.model_executor.layers.attention.mla_attention", "MLAAttention")
    expert_methods: tuple[tuple[str, str], ...] = (
        (f"{QUANTIZATION}.{COMPRESSED_TENSORS}.compressed_tensors_moe_wna16", "CompressedTensorsWNA16MoEMethod"),
        *AUTO_EXPERTS,
        (f"{QUANTIZATION}.mxfp4", "GptOssMxfp4MoEMethod"),
    )
    float_linear: tuple[tuple[str, str, str, str], ...] = (
        (f"{QUANTIZATION}.fp8", "Fp8LinearMethod", "fp8_linear", "activation_quant_key"),
        (f"{SCHEMES}_w8a8_fp8", "CompressedTensorsW8A8Fp8", "fp8_linear", "activation_quant_key"),
        (f"{SCHEMES}_w8a16_fp8", "CompressedTensorsW8A16Fp8", "linear_kernel", ""),
        (f"{SCHEMES}_w4a4_nvfp4", "CompressedTensorsW4A4Fp4", "kernel", ""),
        (f"{SCHEMES}_w4a4_mxfp4", "CompressedTensorsW4A4Mxfp4", "kernel", "kernel.config.activation_quant_key"),
        (f"{QUANTIZATION}.modelopt", "ModelOptLinearMethod", "kernel", "spec.activation"),
    )
    mla_backends: tuple[tuple[str, str], ...] = (
        ("vllm.v1.attention.backends.mla.flashmla", "FlashMLABackend"),
        ("vllm.v1.attention.backends.mla.flashattn_mla", "FlashAttnMLABackend"),
        ("vllm.v1.attention.backends.mla.flashmla_sparse", "FlashMLASparseBackend"),
    )
    mla_gives_lse: bool = True
    pass_manager: tuple[str, str] = ("vllm.compilation.passes.pass_manager", "PostGradPassManager")

    def has(self, seam: str) -> bool:
        """Returns whether this version has something that a seam replaces."""
        return bool(getattr(self, seam, True))


_OLD_EXPERTS = f"{QUANTIZATION}.{COMPRESSED_TENSORS}.compressed_tensors_moe_wna16_marlin"
INTERFACES = {
    (0, 26): Interface(
        "served on an H200, interface tests",
        expert_methods=((_OLD_EXPERTS, "CompressedTensorsWNA16MarlinMoEMethod"), *AUTO_EXPERTS),
        float_linear=(),
        mla_gives_lse=False,
    ),
    **{(0, minor): Interface("interface tests") for minor in (30, 31, 32)},
    (0, 33): Interface("Llama, Qwen3 and gpt-oss served on an H200, interface tests"),
}
"""Interfaces by vLLM's (major, minor)."""


def installed() -> str | None:
    """Returns the version of vLLM that is installed, without importing it; None if there is none."""
    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return None


def interface_of(version: str) -> Interface | None:
    """Returns the known interface of a version such as "0.26.0"; None if it is not supported."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return INTERFACES.get((int(numbers[1]), int(numbers[2]))) if numbers else None


def supported() -> str:
    """Returns the supported versions, separated by commas."""
    return ", ".join(f"{major}.{minor}" for major, minor in sorted(INTERFACES))
