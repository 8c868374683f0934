"""`ExportedSequence`, the rows of a sequence that are moved from one cache to another: to another GPU, to the host, or
to a store of prefixes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from cute_kernels.arguments import check_dtype, check_shape, check_tensors, shape_of
from cute_kernels.formats.kv import KvFormat
from cute_kernels.formats.kv.transforms import CacheTransform, key_of


@dataclass(frozen=True)
class ExportedSequence:
    """A sequence's rows of all layers, byte for byte as in the cache, with the layers' keys.

    Attributes:
        k, v: rows of K and of V, [num_layers, tokens, num_kv_heads, row].
        keys: `KVCache.keys` of the source cache. A layer's key stands for its formats, sizes, scales and transform.
    """

    k: torch.Tensor
    v: torch.Tensor
    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        check_tensors(k=self.k, v=self.v)
        for name, rows in (("k", self.k), ("v", self.v)):
            if rows.dim() != 4 or rows.shape[:3] != (len(self.keys), *self.k.shape[1:3]):
                wanted = f"[{len(self.keys)}, tokens, num_kv_heads, row], K and V alike"
                raise ValueError(f"{name}: got shape {shape_of(rows)}, want {wanted}")

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence."""
        return self.k.shape[1]

    def check_for(self, keys: tuple[str, ...], pages: Mapping[str, torch.Tensor], num_kv_heads: int) -> None:
        """Raises TypeError or ValueError unless a cache with these keys, and with K's and V's ``pages``, can read the
        rows. The message names the first layer, or the tensor, that differs.
        """
        if len(keys) != len(self.keys):
            raise ValueError(f"exported: got rows of {len(self.keys)} layers, want {len(keys)}")
        for layer, (written, read) in enumerate(zip(self.keys, keys, strict=True)):
            if written != read:
                raise ValueError(f"exported: got layer {layer} written with {written}, want {read}, as the cache reads")
        for name, rows in (("k", self.k), ("v", self.v)):
            check_dtype(name, rows, pages[name].dtype, why=", that of the cache")
            check_shape(name, rows, len(keys), "tokens", num_kv_heads, pages[name].shape[-1])


def layer_key(
    formats: tuple[KvFormat, KvFormat],
    head_dims: tuple[int, int],
    num_kv_heads: int,
    scales: tuple[torch.Tensor | None, torch.Tensor | None],
    transform: CacheTransform | None,
) -> str:
    """Returns a layer's key, which stands for its formats, sizes, scales and transform. Two layers have equal keys if,
    and only if, each can read the other's rows.
    """
    parts = [f"{form.name} x {dim}" for form, dim in zip(formats, head_dims, strict=True)]
    parts.append(f"{num_kv_heads} heads")
    for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
        if scale is not None:
            digest = hashlib.sha256(scale.detach().float().cpu().contiguous().numpy().tobytes())
            parts.append(f"{name} {digest.hexdigest()[:16]}")
    return ", ".join([*parts, f"transform {key_of(transform)}"])
