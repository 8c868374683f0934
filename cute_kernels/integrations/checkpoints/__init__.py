"""Quantised checkpoints of other projects: single layers from their tensors, whole files, running models.

One module per format has `from_...(tensors under the checkpoint's own names, ...) -> PackedWeight`, which
`PackedWeight.from_...` offers too: `awq`, `gptq`, `compressed_tensors`, `hqq`, `torchao`, `fastertransformer`. `files`
reads safetensors and needs that package; `model` makes a running model and needs transformers. Codes are moved, never
changed: a dequantised weight is the result of the checkpoint's own formula, rounded once.
"""

from __future__ import annotations

from cute_kernels.integrations.checkpoints.awq import from_awq
from cute_kernels.integrations.checkpoints.compressed_tensors import from_compressed_tensors
from cute_kernels.integrations.checkpoints.fastertransformer import from_fastertransformer
from cute_kernels.integrations.checkpoints.files import load_quantized_linears, load_safetensors
from cute_kernels.integrations.checkpoints.gptq import from_gptq
from cute_kernels.integrations.checkpoints.hqq import from_hqq
from cute_kernels.integrations.checkpoints.kv_scales import KvScale
from cute_kernels.integrations.checkpoints.model import load_model, read_kv_scales
from cute_kernels.integrations.checkpoints.torchao import from_torchao

__all__ = [
    "KvScale",
    "from_awq",
    "from_compressed_tensors",
    "from_fastertransformer",
    "from_gptq",
    "from_hqq",
    "from_torchao",
    "load_model",
    "load_quantized_linears",
    "load_safetensors",
    "read_kv_scales",
]
