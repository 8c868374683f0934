"""The launch arguments of the kernel that writes MLA tokens.

Tensors: latent [tokens, latent_dim] and k_rope [tokens, 64], any token stride. Addresses, 0 for a missing tensor: the
cache, slots int64 [tokens], position_ids int32 or int64 [tokens] (``mode`` says which), phase_steps int64 [32].
num_slots, page_size, page_stride and token_stride (bytes) are the cache's; page_divisor: `divisor_of` page_size.
"""

from __future__ import annotations

from cute_kernels.runtime.launch_arguments import arguments, joined

WRITE = joined(
    arguments("tensor", "latent", "k_rope"),
    arguments("address", "cache", "slots", "position_ids", "phase_steps"),
    arguments("int64", "num_slots"),
    arguments("int32", "page_size"),
    arguments("int64", "page_divisor", "page_stride", "token_stride"),
    arguments("float32", "rope_factor"),
    arguments("int32", "mode"),
)
