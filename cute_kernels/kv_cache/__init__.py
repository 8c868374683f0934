"""KV caches: the append of new tokens, bulk quantisation, and `KVCache`, which owns pages and sequences. An append
includes biases, QK-norm, RoPE and the cache's transform.

Read on in `reference` (what append means), `rope`, `call`, `config`, `kernel`, `rotate`, `bulk`, `compile`, `ops`;
in `step` and `step_ops` (append, alone and with attention as one call); and in `cache`, `pages`, `batch`, `memory`,
`calibration`, `smoothing`, `moments`, `constants`, `exported`.
"""

from __future__ import annotations

from typing import Literal

import torch

from cute_kernels.formats.kv.transforms import CacheTransform
from cute_kernels.kv_cache import bulk_ops
from cute_kernels.kv_cache.batch import Batch
from cute_kernels.kv_cache.cache import KVCache
from cute_kernels.kv_cache.calibration import Calibrator, compute_kv_scale
from cute_kernels.kv_cache.constants import CacheConstants, ConstantsError
from cute_kernels.kv_cache.exported import ExportedSequence
from cute_kernels.kv_cache.memory import MemoryReport
from cute_kernels.kv_cache.moments import Moments
from cute_kernels.kv_cache.pages import OutOfPagesError
from cute_kernels.kv_cache.rope import LinearScaling, Llama3Scaling, NtkScaling, Rope, YarnScaling
from cute_kernels.kv_cache.smoothing import check_pairs, fold, smooth_keys
from cute_kernels.kv_cache.step import append_and_decode, append_kv
from cute_kernels.names import KvFormatName

__all__ = [
    "Batch",
    "CacheConstants",
    "CacheTransform",
    "Calibrator",
    "ConstantsError",
    "ExportedSequence",
    "KVCache",
    "LinearScaling",
    "Llama3Scaling",
    "MemoryReport",
    "Moments",
    "NtkScaling",
    "OutOfPagesError",
    "Rope",
    "YarnScaling",
    "append_and_decode",
    "append_kv",
    "check_pairs",
    "compute_kv_scale",
    "dequantize_kv",
    "fold",
    "quantize_kv",
    "smooth_keys",
]


def quantize_kv(
    x: torch.Tensor,
    *,
    kv_format: KvFormatName,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    transform: CacheTransform | None = None,
    operand: Literal["k", "v"] | None = None,
) -> torch.Tensor:
    """Converts numbers to cache rows, with the same bytes as the formats in :mod:`cute_kernels.formats.kv`.

    Args:
        x: bf16, fp16 or fp32 [..., num_kv_heads, head_dim]; head_dim 64, 80, 96, 128, 192, 256 or 512. It is
            contiguous, or consists of dense blocks at equal distances, such as a part of a fused projection.
        kv_format: a name in :data:`cute_kernels.formats.kv.FORMATS`.
        scale: fp32, for formats with a scale beside the cache, as for :func:`append_kv`.
        out: the tensor for the rows; contiguous, or dense blocks at equal distances, such as the pages of ``kv[:, 0]``.
        transform: the transform of the cache. Rows then hold transformed numbers, as `append_kv` writes them. Rotations
            are for head_dim 64, 128 and 256.
        operand: whether x is "k" (after RoPE) or "v"; given together with ``transform``.

    Returns:
        Rows [..., num_kv_heads, row] in the format's dtype: out, or a new tensor.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is wanted.
        UnsupportedGPUError: the kernels are not compiled for this GPU.

    CPU tensors are converted by the formats themselves.
    """
    half = None if transform is None and operand is None else bulk_ops.half_of(transform, operand)
    return bulk_ops.quantize(bulk_ops.Quantize(x, kv_format, scale, out, half))


def dequantize_kv(
    rows: torch.Tensor,
    *,
    kv_format: KvFormatName,
    head_dim: int,
    dtype: torch.dtype = torch.bfloat16,
    scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Converts cache rows to numbers, computed in fp32 and rounded once to ``dtype``.

    Args:
        rows: [..., num_kv_heads, row] in ``kv_format``; contiguous, or dense blocks at equal distances.
        kv_format: a name in :data:`cute_kernels.formats.kv.FORMATS`.
        head_dim: columns of a row.
        dtype: bf16, fp16 or fp32.
        scale: fp32, for formats with a scale beside the cache, as for :func:`append_kv`.
        out: the tensor for the numbers; contiguous, or dense blocks at equal distances.

    Returns:
        [..., num_kv_heads, head_dim] in ``dtype``: out, or a new tensor.

    Raises: as :func:`quantize_kv`.
    """
    return bulk_ops.dequantize(bulk_ops.Dequantize(rows, kv_format, head_dim, dtype, scale, out))
