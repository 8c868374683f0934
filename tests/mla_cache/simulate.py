"""Runs the kernel that writes MLA tokens on a GPU in NumPy."""

from __future__ import annotations

from typing import Any

import torch

from cute_kernels.mla.cache import plan
from cute_kernels.mla.cache.call import AppendMlaCall, check_append
from cute_kernels.mla.cache.config import WIDE_POSITIONS, WriteConfig
from cute_kernels.mla.problem import CacheShape
from layouts.kv.mla import ROPE_DIM
from simulator import Float32, Gpu, Int32, Int64, running


def simulate_append(call: AppendMlaCall) -> None:
    """Launches the kernel that `append_mla` would, every warp in turn, and writes the cache."""
    gpu = Gpu()
    shape = check_append(call)
    latent, k_rope, cache = gpu.put(call.latent), gpu.put(call.k_rope), gpu.put(call.cache)
    positions, rope = call.position_ids, call.rope
    numbers = (1.0 if rope is None else rope.attention_factor, positions is not None and positions.dtype == torch.int64)
    _run(
        plan.config_of(call),
        shape,
        (latent, k_rope, call.latent.stride(0), call.k_rope.stride(0), call.num_tokens, call.latent.element_size()),
        (cache, gpu.put(call.slot_mapping), gpu.put(positions), gpu.put(None if rope is None else rope.phase_steps())),
        numbers,
        gpu,
    )
    gpu.get(cache, call.cache)


def simulate_quantize(x: torch.Tensor, kv_format: str, rows: torch.Tensor) -> None:
    """Launches the kernel that `quantize_mla_kv` would of x [n, head_dim], and writes rows [n, row]."""
    gpu = Gpu()
    config = plan.bulk_config(x, kv_format)
    row_bytes = config.form.row_bytes(x.shape[1])
    shape = CacheShape(config.form, x.shape[0], 1, row_bytes, row_bytes)
    numbers, cache, width = gpu.put(x), gpu.put(rows), x.element_size()
    k_rope = numbers + (x.shape[1] - ROPE_DIM) * width
    source = (numbers, k_rope, x.stride(0), x.stride(0), x.shape[0], width)
    _run(config, shape, source, (cache, 0, 0, 0), (1.0, False), gpu)
    gpu.get(cache, rows)


def _run(
    config: WriteConfig,
    shape: CacheShape,
    source: tuple[int, int, int, int, int, int],
    addresses: tuple[int, int, int, int],
    numbers: tuple[float, bool],
    gpu: Gpu,
) -> None:
    """source: two addresses, two strides in elements, tokens, bytes of an element."""
    from cute_kernels.mla.cache import kernel

    latent, k_rope, latent_stride, rope_stride, tokens, width = source
    cache, slots, positions, steps = addresses
    strides = (Int64(latent_stride * width), Int64(rope_stride * width))
    given = kernel.Source(Int64(latent), Int64(k_rope), *strides, Int32(tokens))
    numbers_of = {name: Int64(int(number)) for name, number in plan.place_arguments(shape).items()}
    numbers_of["page_size"] = Int32(shape.page_size)
    place = kernel.Place(cache=Int64(cache), slots=Int64(slots), **numbers_of)
    factor, wide = numbers
    angle = kernel.Angle(Int64(positions), Int64(steps), Float32(factor), Int32(WIDE_POSITIONS * wide))
    with running(gpu):
        simulated: Any = kernel.WriteKernel(config)
        for block in range(-(-tokens // config.tokens_per_cta)):
            for warp in range(config.num_warps):
                gpu.block, gpu.warp = (block, 0, 0), warp
                simulated.kernel(given, place, angle)
