"""`vllm_transform`, the steps of vLLM's ``int4_per_token_head`` on K, V and q as a `CacheTransform`.

vLLM multiplies K, V and q of a head by signs s and by an unnormalised Hadamard matrix H as wide as the head: k' = H s
k. Afterwards it divides the softmax's scale and the output by head_dim. As a `CacheTransform` this is a rotation by the
normalised matrix, with k_factor = sqrt(head_dim) * s; q gets the inverse factors. vLLM writes the result as rows of
`layouts.kv.ZeroPointRow`.

The transform has two uses. To read bytes that vLLM has written, call ``ZeroPointRow(d).dequantize(rows)``, then
`original_keys` and `restore` of the transform. To write with vLLM's rotation, pass the transform to a cache of
``int4_g1`` rows. Such rows have as many bytes, but fp16 shifts instead of 4-bit zero points, so a row's range need not
contain 0.
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
        num_kv_heads: number of KV heads of the layer; all have the same signs.
        head_dim, v_head_dim: numbers of columns of K and of V (default: K's), powers of two.

    Raises:
        TypeError, ValueError: a size is no positive int or no power of two. vLLM rotates rows of other sizes in blocks
            with the same signs in each; the kernels here do not.
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
