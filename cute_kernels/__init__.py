"""Low-precision LLM decode kernels for NVIDIA Hopper, in CuTe DSL."""

from cute_kernels import (
    _own_layouts,  # noqa: F401  # first: everything below imports layouts
    _weight_importers,  # noqa: F401  # gives PackedWeight its from_...
)
from cute_kernels._version import __version__
from cute_kernels.attention import (
    decode_attention,
    extend_attention,
    merge_over_ranks,
    merge_states,
    mixed_attention,
    pack_tree_mask,
)
from cute_kernels.gemm import (
    NormedRows,
    PackedWeight,
    QuantizedLinear,
    interleave_weights,
    quantize_activations,
    quantize_weight,
    quantized_layer,
    quantized_linear,
    quantized_linear_norm,
)
from cute_kernels.gemm.experts import (
    PackedExperts,
    QuantizedMoE,
    fused_moe,
    grouped_linear,
    interleave_experts,
    quantize_experts,
    stack_experts,
)
from cute_kernels.kv_cache import (
    KVCache,
    LinearScaling,
    Llama3Scaling,
    NtkScaling,
    Rope,
    YarnScaling,
    append_and_decode,
    append_kv,
    dequantize_kv,
    quantize_kv,
)
from cute_kernels.kv_cache.append_and_extend import append_and_extend
from cute_kernels.mla import mla_decode, sparse_mla_decode
from cute_kernels.mla.cache import append_mla, quantize_mla_kv
from cute_kernels.models import quantize_model
from cute_kernels.norm import layer_norm, rms_norm
from cute_kernels.runtime.device import UnsupportedGPUError

__all__ = [
    "KVCache",
    "LinearScaling",
    "Llama3Scaling",
    "NormedRows",
    "NtkScaling",
    "PackedExperts",
    "PackedWeight",
    "QuantizedLinear",
    "QuantizedMoE",
    "Rope",
    "UnsupportedGPUError",
    "YarnScaling",
    "__version__",
    "append_and_decode",
    "append_and_extend",
    "append_kv",
    "append_mla",
    "decode_attention",
    "dequantize_kv",
    "extend_attention",
    "fused_moe",
    "grouped_linear",
    "interleave_experts",
    "interleave_weights",
    "layer_norm",
    "merge_over_ranks",
    "merge_states",
    "mixed_attention",
    "mla_decode",
    "pack_tree_mask",
    "quantize_activations",
    "quantize_experts",
    "quantize_kv",
    "quantize_mla_kv",
    "quantize_model",
    "quantize_weight",
    "quantized_layer",
    "quantized_linear",
    "quantized_linear_norm",
    "rms_norm",
    "sparse_mla_decode",
    "stack_experts",
]
