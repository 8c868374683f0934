"""Plans of writes: the configuration, the compiled function and the launch arguments that calls have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_kernels.arguments import check_aligned
from cute_kernels.kv_cache.config import divisor_of
from cute_kernels.mla.cache.arguments import WRITE
from cute_kernels.mla.cache.call import BULK_DTYPES, DTYPES, AppendMlaCall
from cute_kernels.mla.cache.compile import WriteSpec
from cute_kernels.mla.cache.config import WIDE_POSITIONS, WriteConfig
from cute_kernels.mla.checks import check_distances
from cute_kernels.mla.formats import format_of
from cute_kernels.mla.problem import CacheShape
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.operator import Plan


def config_of(call: AppendMlaCall) -> WriteConfig:
    """Returns the configuration of the kernel for an append."""
    style = "none" if call.rope is None else call.rope.style
    return WriteConfig(call.kv_format, call.head_dim, DTYPES[call.latent.dtype], style)


def make_plan(call: AppendMlaCall, shape: CacheShape) -> Plan[[AppendMlaCall], None]:
    """Makes the plan of a checked call that has tokens."""
    config, device = config_of(call), call.latent.device
    check_alignment(config, shape, latent=call.latent, k_rope=call.k_rope, cache=call.cache)
    positions, index = call.position_ids, call.latent.get_device()
    steps = None if call.rope is None else call.rope.phase_steps(device)
    fixed = place_arguments(shape) | {
        "phase_steps": 0 if steps is None else steps.data_ptr(),
        "rope_factor": 1.0 if call.rope is None else call.rope.attention_factor,
        "mode": WIDE_POSITIONS if positions is not None and positions.dtype == torch.int64 else 0,
    }
    send = WRITE.bound(function_of(config, index), fixed)

    def launch(call: AppendMlaCall) -> None:
        positions = call.position_ids
        send(
            latent=call.latent,
            k_rope=call.k_rope,
            cache=call.cache.data_ptr(),
            slots=call.slot_mapping.data_ptr(),
            position_ids=0 if positions is None else positions.data_ptr(),
        )

    return Plan(index, launch, (config,), (steps,))


def place_arguments(shape: CacheShape) -> dict[str, int | float]:
    """Returns the launch arguments that say where a cache's tokens lie, by name."""
    return {
        "num_slots": shape.num_slots,
        "page_size": shape.page_size,
        "page_divisor": divisor_of(shape.page_size),
        "page_stride": shape.page_stride,
        "token_stride": shape.token_stride,
    }


def check_alignment(config: WriteConfig, shape: CacheShape, **tensors: torch.Tensor) -> None:
    """Raises ValueError unless tensors are aligned for the kernel's vectors."""
    for name, tensor in tensors.items():
        unit = config.unit if name in ("latent", "cache") else 2 * tensor.element_size()
        check_aligned(name, tensor, unit)
        if name != "cache" and tensor.shape[0] > 1 and tensor.stride(0) * tensor.element_size() % unit:
            raise ValueError(f"{name}: got strides {tensor.stride()}, want tokens on multiples of {unit} bytes")
    check_distances("cache", shape, config.unit)


def bulk_config(x: torch.Tensor, kv_format: str) -> WriteConfig:
    """Returns the configuration of the kernel that quantises x [..., head_dim]."""
    form = format_of(kv_format)
    row = form.row_bytes(x.shape[-1])
    return WriteConfig(kv_format, x.shape[-1], BULK_DTYPES[x.dtype], placed=False, unit=16 if row % 16 == 0 else 8)


def function_of(config: WriteConfig, device_index: int | None) -> Callable[..., Any]:
    """Returns the compiled kernel for a device."""
    return load(WriteSpec(config), arch_of(device_index))
