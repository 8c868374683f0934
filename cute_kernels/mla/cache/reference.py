"""The reference of appending and quantising MLA tokens in PyTorch: the implementation on the CPU."""

from __future__ import annotations

import torch

from cute_kernels.mla.cache.call import AppendMlaCall
from cute_kernels.mla.problem import CacheShape


def append_mla_reference(call: AppendMlaCall, shape: CacheShape) -> None:
    """Writes the tokens of a checked call to their slots, except tokens whose slots are outside the cache."""
    rows = call.form.quantize(tokens_of(call))
    inside = (call.slot_mapping >= 0) & (call.slot_mapping < shape.num_slots)
    call.form.scatter(call.cache, call.slot_mapping[inside], rows[inside])


def tokens_of(call: AppendMlaCall, compute_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the numbers to quantise, [tokens, head_dim]: latent columns unchanged, RoPE columns rotated."""
    k_rope = call.k_rope.to(compute_dtype)
    if call.rope is not None and call.position_ids is not None:
        k_rope = call.rope.apply(k_rope.unsqueeze(1), call.position_ids).squeeze(1)
    return torch.cat((call.latent.to(compute_dtype), k_rope), dim=1)
