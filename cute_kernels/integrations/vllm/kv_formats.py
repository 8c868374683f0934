"""Which cache formats serve vLLM's cache dtypes, and how a layer's pages are seen as caches of K and of V."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cute_kernels.integrations.vllm import environment
from cute_kernels.kv_formats import FORMATS, HEAD_DIMS, DenseFormat, KvFormat, format_of

BY_DTYPE = {
    "fp8": "e4m3_tensor",
    "fp8_e4m3": "e4m3_tensor",
    "int8_per_token_head": "int8_token_head",
    "fp8_per_token_head": "e4m3_token_head",
}
"""vLLM's `--kv-cache-dtype` and the format that means the same, in rows of as many bytes."""
OWN = ("auto", "bfloat16", "float16")
"""Dtypes of `--kv-cache-dtype` beside which the environment may name a format of this package."""


def served_dtypes() -> list[str]:
    """The cache dtypes that are served in this process."""
    return [*OWN, *BY_DTYPE] if environment.wanted_kv_format() else list(BY_DTYPE)


def own_format() -> KvFormat | None:
    """The format that the environment asks for.

    Raises:
        ValueError: there is none of that name, or it wants scales that vLLM has no place for.
    """
    name = environment.wanted_kv_format()
    if name is None:
        return None
    form = FORMATS.get(name)
    if form is None or form.given_scale not in (None, "tensor"):
        known = ", ".join(name for name, form in FORMATS.items() if form.given_scale in (None, "tensor"))
        raise ValueError(f"{environment.KV_FORMAT}: got {name!r}, want one of {known}")
    return form


def format_for(kv_cache_dtype: str) -> KvFormat:
    """The format of a layer whose cache dtype vLLM calls ``kv_cache_dtype``."""
    if kv_cache_dtype in BY_DTYPE:
        return format_of(BY_DTYPE[kv_cache_dtype])
    form = own_format()
    assert form is not None  # other dtypes are not chosen without
    return form


def is_own(kv_cache_dtype: str) -> bool:
    """Whether a layer's pages hold a format that vLLM knows nothing of: it counts their bytes."""
    return kv_cache_dtype not in BY_DTYPE


def reason_against(form: KvFormat, head_size: int, dtype: torch.dtype) -> str | None:
    """Why rows of a format do not serve a layer; None if they do."""
    if head_size not in HEAD_DIMS:
        return f"head size {head_size}; supported: {', '.join(map(str, HEAD_DIMS))}"
    if isinstance(form, DenseFormat) and form.dtype != dtype:
        return f"a {form.name} cache with queries in {dtype}"
    return None


@dataclass(frozen=True)
class Pages:
    """The shape of a layer's cache: [2, num_blocks, block_size, num_kv_heads, row bytes], K's pages, then V's."""

    form: KvFormat
    head_size: int

    def views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(K's cache, V's cache), each [num_blocks, block_size, num_kv_heads, row] in a dtype of the format."""
        dtype = self.form.cache_dtype
        as_rows = kv_cache if kv_cache.dtype == dtype else kv_cache.view(torch.uint8).view(dtype)
        k_cache, v_cache = as_rows.unbind(0)
        return k_cache, v_cache


def shape_of(num_blocks: int, block_size: int, num_kv_heads: int, row_elements: int) -> tuple[int, ...]:
    """The shape that vLLM gives a layer's pages; row_elements in the dtype that it allocates."""
    return 2, num_blocks, block_size, num_kv_heads, row_elements
