"""The formats of vLLM's cache dtypes, and the views of a layer's pages as caches of K and V."""

from __future__ import annotations

from dataclasses import replace

import torch

from cute_kernels.formats.kv import told_formats
from cute_kernels.formats.kv.transforms import CacheTransform
from cute_kernels.integrations.engine_cache import Formats, formats_named, row_bytes
from cute_kernels.integrations.vllm import environment
from cute_kernels.integrations.vllm.seams import layer_made

BY_DTYPE = {
    "fp8": "e4m3_tensor",
    "fp8_e4m3": "e4m3_tensor",
    "int8_per_token_head": "int8_token_head",
    "fp8_per_token_head": "e4m3_token_head",
    "int4_per_token_head": "int4_g1",
}
"""This package's format for each of vLLM's `--kv-cache-dtype`, with rows of as many bytes."""
ROTATED = ("int4_per_token_head",)
"""Dtypes whose rows vLLM multiplies with signs and a Hadamard matrix before it quantises them."""
SIGNS_SEED = 0
OWN = ("auto", "bfloat16", "float16")
"""Values of `--kv-cache-dtype` with which the environment may name a format of this package."""


def served_dtypes() -> list[str]:
    """Returns the cache dtypes that are supported in this process."""
    return [*OWN, *BY_DTYPE] if environment.wanted_kv_format() else list(BY_DTYPE)


def own_formats() -> tuple[Formats, ...]:
    """Returns the formats that the environment asks for: one for all layers, or one for each layer from a file; () if
    the environment names none.

    Raises:
        OSError, ValueError: the file does not exist, a format is unknown, or vLLM cannot store what a format needs.
            vLLM cannot store scales outside the rows, except one per tensor, nor keys that are quantised only when
            their block is full.
    """
    text = environment.wanted_kv_format()
    if text is None:
        return ()
    told = told_formats(text, environment.KV_FORMAT)
    if isinstance(told, str):
        return (laid_out(formats_named(told, environment.KV_FORMAT)),)
    found = tuple(laid_out(formats_named(",".join(pair), f"{environment.KV_FORMAT}={text}")) for pair in told.layers)
    return found if len(set(map(str, found))) > 1 else found[:1]


def laid_out(formats: Formats) -> Formats:
    """Returns formats with the order in which their pages hold heads and tokens.

    Rows with headers are sorted by head, so that a CTA can read one head's tokens as contiguous bytes. Other rows keep
    vLLM's order, which is as fast. vLLM's own variable overrides these rules.
    """
    usual = "HND" if formats.k.has_header or formats.v.has_header else "NHD"
    return replace(formats, cache_layout=environment.wanted_layout() or usual)


def described() -> str | None:
    """Returns a few words that say which cache format the environment asks for; None if it asks for none."""
    formats = own_formats()
    return f"{len(formats)} formats by layer" if len(formats) > 1 else next(map(str, formats), None)


def of_layer() -> Formats | None:
    """Returns the formats of the layer that is being made; None if all layers have one format, or if the file has no
    format for this layer.
    """
    formats, name = own_formats(), layer_made().name
    if len(formats) <= 1 or name is None:
        return None
    from vllm.model_executor.models.utils import extract_layer_index

    number = extract_layer_index(name)
    return formats[number] if number < len(formats) else None


def formats_for(kv_cache_dtype: str) -> Formats:
    """Returns the formats of a layer with this cache dtype. If the environment names formats by layer, returns those of
    the layer that is being made.

    Raises:
        ValueError: there are formats by layer, but none for this layer.
    """
    if kv_cache_dtype in BY_DTYPE:
        return laid_out(formats_named(BY_DTYPE[kv_cache_dtype], kv_cache_dtype))
    formats = own_formats()
    assert formats  # other dtypes are not chosen without
    found = formats[0] if len(formats) == 1 else of_layer()
    if found is None:
        where = f"{environment.KV_FORMAT}={environment.wanted_kv_format()}: {layer_made().name or 'pages of no layer'}"
        wanted = "want full attention in all layers, and no drafting model"
        raise ValueError(f"{where}: got formats of {len(formats)} layers, {wanted}")
    return found


def is_own(kv_cache_dtype: str) -> bool:
    """Returns whether a layer's pages hold a format unknown to vLLM, so that their bytes must be counted here."""
    return kv_cache_dtype not in BY_DTYPE


def check_dtype(kv_cache_dtype: str) -> None:
    """Refuses a format of this package together with a quantised cache dtype of vLLM.

    Raises:
        ValueError: the environment names a format, and the layer's dtype is quantised, by the command line or by the
            checkpoint's own cache scheme. vLLM uses that scheme if the command line says "auto".
    """
    named = environment.wanted_kv_format()
    if named is not None and kv_cache_dtype in BY_DTYPE:
        raise ValueError(
            f"{environment.KV_FORMAT}={named}: got a cache in {kv_cache_dtype}, of --kv-cache-dtype or the checkpoint, "
            f"want one of {', '.join(OWN)} with it"
        )


def reason_against_rotation(kv_cache_dtype: str, head_size: int) -> str | None:
    """Returns why a layer cannot have rotated rows of a dtype; None if it can, or if the dtype's rows are not
    rotated.
    """
    if kv_cache_dtype not in ROTATED or head_size in ROTATED_SIZES:
        return None
    return f"head size {head_size} with rows that are rotated; supported: {', '.join(map(str, ROTATED_SIZES))}"


def reason_against_invariance(kv_cache_dtype: str) -> str | None:
    """Returns why vLLM keeps layers of a dtype under VLLM_BATCH_INVARIANT; None if they can run here."""
    return f"a cache in {kv_cache_dtype}, which vLLM's own attention reads faster" if kv_cache_dtype in FASTER else None


FASTER = ("fp8", "fp8_e4m3")
"""Dtypes that FlashAttention-3 reads faster than extend attention if contexts may not be split.

On an H200, over 8192 tokens with 32 query heads and 8 KV heads, FlashAttention-3 takes 90 us for 1 request and 181 us
for 32; extend attention takes 124 and 270 us.
"""
ROTATED_SIZES = (64, 128)  # which attention turns back in its own launch


def transform_for(kv_cache_dtype: str, num_kv_heads: int, head_size: int) -> CacheTransform | None:
    """Returns the transform, on the CPU, that a layer's K and V get before they are quantised; None if they get none.

    The transform has random signs. Without them, values that all tokens share could add up to one large column. All
    processes have the same signs, so a cache can be handed to another process.
    """
    if kv_cache_dtype not in ROTATED:
        return None
    generator = torch.Generator().manual_seed(SIGNS_SEED)
    # vLLM makes layers with a GPU as the default device, which the generator is not of.
    drawn = torch.randint(0, 2, (num_kv_heads, head_size), generator=generator, device="cpu")
    signs = drawn.float().mul(2).sub(1)
    return CacheTransform(k_factor=signs, k_rotation=head_size, v_factor=signs, v_rotation=head_size)


def page_bytes(formats: Formats, head_size: int, block_size: int, num_kv_heads: int) -> int:
    """Returns the bytes of a page: all of K's rows, then all of V's."""
    return block_size * num_kv_heads * sum(row_bytes(formats, head_size))


def views(
    kv_cache: torch.Tensor, formats: Formats, head_size: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (K's cache, V's cache), each [num_blocks, block_size, num_kv_heads, row] in a dtype of its format, or
    [num_blocks, num_kv_heads, block_size, row] if the formats have the order "HND".

    kv_cache: [num_blocks, page] or [num_blocks, 1, block_size, content], vLLM's pages of a layer; there may be gaps
        between pages.
    """
    content = kv_cache.view(torch.uint8).view(kv_cache.shape[0], -1)
    rows = row_bytes(formats, head_size)
    block_size = content.shape[1] // (num_kv_heads * sum(rows))
    parts = content.split([block_size * num_kv_heads * row for row in rows], dim=1)
    inner = (num_kv_heads, block_size) if formats.cache_layout == "HND" else (block_size, num_kv_heads)
    k_cache, v_cache = (
        part.view(form.cache_dtype).unflatten(1, (*inner, -1))
        for part, form in zip(parts, (formats.k, formats.v), strict=True)
    )
    return k_cache, v_cache
