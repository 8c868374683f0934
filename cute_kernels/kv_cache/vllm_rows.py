"""Expresses what vLLM's ``int4_per_token_head`` does to K, V and q as a transform of the cache.

vLLM multiplies K, V and q of a head with signs and with a Hadamard matrix as wide as the head, which is not normalised:
k' = H s k. It divides the softmax's scale and the output by head_dim afterwards. As a `CacheTransform` that is a
rotation by the normalised matrix with factors of sqrt(head_dim) times the signs, whose inverse is q's. The rows it then
writes are `layouts.kv.ZeroPointRow`.

Two uses. Bytes that vLLM has written are read as ``ZeroPointRow(d).dequantize(rows)``, then `original_keys` and
`restore` of the transform. An engine that writes rows of its own gets the same rotation for ``int4_g1`` rows, of as
many bytes: with fp16 shifts in place of 4-bit zero points, so that rows need not reach 0.
"""

from __future__ import annotations

import torch

from cute_kernels.arguments import check_count
from cute_kernels.formats.kv.transforms import CacheTransform

SIGNS_SEED = 0x9E3779B9  # of vLLM's generator, on the CPU


def vllm_transform(
    num_kv_heads: int, head_dim: int, v_head_dim: int | None = None, device: torch.device | str = "cpu"
) -> CacheTransform:
    """Returns the transform that rotates K and V as vLLM does before it quantises them.

    Args:
        num_kv_heads: of the layer; all have the same signs.
        head_dim, v_head_dim: columns of K and of V (default: K's), powers of two.

    Raises:
        TypeError, ValueError: a size is no positive int, or no power of two: vLLM rotates such rows in blocks with the
            same signs in each, and the kernels here do not.
    """
    check_count("num_kv_heads", num_kv_heads, 1)
    dims = {"head_dim": head_dim, "v_head_dim": head_dim if v_head_dim is None else v_head_dim}
    for name, dim in dims.items():
        check_count(name, dim, 1)
        if dim & (dim - 1):
            raise ValueError(f"{name}: got {dim}, want a power of two")
    k_factor, v_factor = (_factors(num_kv_heads, dim).to(device) for dim in dims.values())
    return CacheTransform(k_factor=k_factor, k_rotation=head_dim, v_factor=v_factor, v_rotation=dims["v_head_dim"])


def _factors(num_kv_heads: int, dim: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(SIGNS_SEED)
    half = torch.full((dim,), 0.5, dtype=torch.float32, device="cpu")
    signs = 2.0 * torch.bernoulli(half, generator=generator) - 1.0
    return (signs * dim**0.5).expand(num_kv_heads, dim).contiguous()
