"""The supported versions of SGLang, and the names of its classes and functions in each.

SGLang moves its interfaces from one release to the next. An untested version is left alone, and the log says so.
"""

from __future__ import annotations

from dataclasses import dataclass

_SCHEMES = "sglang.srt.layers.quantization.compressed_tensors.schemes"
_MODELOPT = "sglang.srt.layers.quantization.modelopt_quant"
_GPU = "sglang.srt.hardware_backend.gpu.quantization"


@dataclass(frozen=True)
class Interface:
    """The full names of the functions and classes of an SGLang version that the plug-in replaces or extends.

    Attributes:
        tested: how this version was tested, in words.
        compressed_tensors, gptq, awq: the owners of linear layers of these checkpoints.
        compressed_tensors_fp8, compressed_tensors_fp4, modelopt_fp4, modelopt_fp4_a16: owners of layers with
            floating codes.
        compressed_tensors_experts, gptq_experts, awq_experts, mxfp4_experts: owners of expert layers.
        gpt_oss_block: the class that makes gpt-oss's experts and their router.
        mla_backend: the class of the backend of latent attention.
        attention_backends: the table of functions that make attention backends, by name.
        attention_choices: the names that the command line accepts.
        page_sizes: the function that returns the page size of a command line's backends.
        pool_class: the method that chooses the class of a pool of K and V.
        slot_bytes: the method that returns the bytes of a token.
    """

    tested: str
    compressed_tensors: str = f"{_SCHEMES}.compressed_tensors_wNa16.CompressedTensorsWNA16"
    gptq: str = f"{_GPU}.gptq_kernels.GPTQMarlinLinearKernel"
    awq: str = f"{_GPU}.awq_kernels.AWQMarlinLinearKernel"
    compressed_tensors_fp8: str = f"{_SCHEMES}.compressed_tensors_w8a16_fp8.CompressedTensorsW8A16Fp8"
    compressed_tensors_fp4: str = f"{_SCHEMES}.compressed_tensors_w4a16_nvfp4.CompressedTensorsW4A16Fp4"
    modelopt_fp4: str = f"{_MODELOPT}.ModelOptFp4LinearMethod"
    modelopt_fp4_a16: str = f"{_MODELOPT}.ModelOptNvFp4A16LinearMethod"
    compressed_tensors_experts: str = f"{_SCHEMES}.compressed_tensors_wNa16_moe.CompressedTensorsWNA16MoE"
    gptq_experts: str = f"{_GPU}.gptq_kernels.GPTQMarlinMoEKernel"
    awq_experts: str = f"{_GPU}.awq_kernels.AWQMoEKernel"
    mxfp4_experts: str = "sglang.srt.layers.quantization.mxfp4.Mxfp4MoEMethod"
    gpt_oss_block: str = "sglang.srt.models.gpt_oss.GptOssSparseMoeBlock"
    mla_backend: str = "sglang.srt.layers.attention.flashmla_backend.FlashMLABackend"
    attention_backends: str = "sglang.srt.layers.attention.attention_registry.ATTENTION_BACKENDS"
    attention_choices: str = "sglang.srt.arg_groups.choices.ATTENTION_BACKEND_CHOICES"
    page_sizes: str = "sglang.srt.arg_groups.overrides._mla_backend_page_constraints"
    pool_class: str = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class"
    slot_bytes: str = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size"


INTERFACES = {"0.5.23": Interface("Llama served on an H200, interface tests")}
"""Interfaces by SGLang's version."""


def interface_of(version: str) -> Interface | None:
    """Returns the names of SGLang's functions in ``version``; None if it is not supported. A suffix such as "+cu129" is
    ignored.
    """
    return INTERFACES.get(version.partition("+")[0])


def supported() -> str:
    """Returns the supported versions, separated by commas."""
    return ", ".join(INTERFACES)
