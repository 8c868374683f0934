"""What of a launch stays the same from call to call: the configuration, the compiled function, its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.kv_cache.config import divisor_of
from cute_kernels.mla.formats import format_of
from cute_kernels.mla.problem import CacheShape
from cute_kernels.mla_cache.call import BULK_DTYPES, DTYPES, AppendMlaCall
from cute_kernels.mla_cache.compile import WriteSpec
from cute_kernels.mla_cache.config import WIDE_POSITIONS, WriteConfig
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of


@dataclass(frozen=True)
class AppendMlaPlan:
    """What of an append stays the same between calls of the same shapes, strides, dtypes, device and options.

    Attributes:
        function: the compiled kernel.
        phase_steps: of the angles, kept alive; None without RoPE.
        numbers: what follows the addresses in the function's arguments.
    """

    function: Callable[..., Any]
    device_index: int
    phase_steps: torch.Tensor | None
    numbers: tuple[int | float, ...]

    def launch(self, call: AppendMlaCall) -> None:
        """Launches on the current stream of the plan's device, which is the current one."""
        steps, positions = self.phase_steps, call.position_ids
        self.function(
            call.latent,
            call.k_rope,
            call.cache.data_ptr(),
            call.slot_mapping.data_ptr(),
            0 if positions is None else positions.data_ptr(),
            0 if steps is None else steps.data_ptr(),
            *self.numbers,
        )


def config_of(call: AppendMlaCall) -> WriteConfig:
    """The kernel that an append uses."""
    style = "none" if call.rope is None else call.rope.style
    return WriteConfig(call.kv_format, call.head_dim, DTYPES[call.latent.dtype], style)


def make_plan(call: AppendMlaCall, shape: CacheShape) -> AppendMlaPlan:
    """The plan of a checked call that has tokens."""
    config, device = config_of(call), call.latent.device
    check_alignment(config, shape, latent=call.latent, k_rope=call.k_rope, cache=call.cache)
    positions = call.position_ids
    return AppendMlaPlan(
        function=function_of(config, call.latent.get_device()),
        device_index=call.latent.get_device(),
        phase_steps=None if call.rope is None else call.rope.phase_steps(device),
        numbers=(
            *place_arguments(shape),
            1.0 if call.rope is None else call.rope.attention_factor,
            WIDE_POSITIONS if positions is not None and positions.dtype == torch.int64 else 0,
        ),
    )


def place_arguments(shape: CacheShape) -> tuple[int, ...]:
    """num_slots, page_size, page_divisor, page_stride and token_stride of the kernel's arguments."""
    divisor = divisor_of(shape.page_size)
    return shape.num_slots, shape.page_size, divisor, shape.page_stride, shape.token_stride


def check_alignment(config: WriteConfig, shape: CacheShape, **tensors: torch.Tensor) -> None:
    """Raises ValueError for what the kernel's vectors could not address."""
    for name, tensor in tensors.items():
        unit = config.unit if name in ("latent", "cache") else 2 * tensor.element_size()
        if tensor.data_ptr() % unit:
            raise ValueError(f"{name}: got a tensor that does not start on a multiple of {unit} bytes, want it to")
        if name != "cache" and tensor.shape[0] > 1 and tensor.stride(0) * tensor.element_size() % unit:
            raise ValueError(f"{name}: got strides {tensor.stride()}, want tokens on multiples of {unit} bytes")
    strides = {"pages": (shape.num_pages, shape.page_stride)}
    if not shape.form.split_pages:
        strides["tokens"] = (shape.page_size, shape.token_stride)
    for what, (count, stride) in strides.items():
        if count > 1 and stride % config.unit:
            raise ValueError(f"cache: got {what} {stride} bytes apart, want a multiple of {config.unit} bytes")


def bulk_config(x: torch.Tensor, kv_format: str) -> WriteConfig:
    """The kernel that quantises x [..., head_dim]."""
    form = format_of(kv_format)
    row = form.row_bytes(x.shape[-1])
    return WriteConfig(kv_format, x.shape[-1], BULK_DTYPES[x.dtype], placed=False, unit=16 if row % 16 == 0 else 8)


def function_of(config: WriteConfig, device_index: int | None) -> Callable[..., Any]:
    """The compiled kernel for a device."""
    return load(WriteSpec(config), arch_of(device_index))
