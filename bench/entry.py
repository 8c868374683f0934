"""Where the benchmarks enter the package: its public call, and one chosen configuration of its kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import cute_kernels
from bench import configured
from bench.workloads import DecodeInputs
from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.decode_schedule import DecodeSchedule


def bind(inputs: DecodeInputs, out: torch.Tensor | None = None, **options: Any) -> Callable[[], torch.Tensor]:
    """The public call on these inputs, with nothing left to pass."""

    def call() -> torch.Tensor:
        return cute_kernels.decode_attention(
            inputs.q,
            inputs.k_cache,
            inputs.v_cache,
            inputs.seq_lens,
            kv_format=inputs.kv_format,
            out=out,
            **(inputs.options | options),
        )

    return call


def schedule_for(inputs: DecodeInputs) -> DecodeSchedule:
    """What the public call chooses for these inputs: configuration, splits."""
    return configured.schedule_for(inputs.q, inputs.k_cache, inputs.kv_format)


def bind_config(config: DecodeConfig, inputs: DecodeInputs, **call: Any) -> Callable[[], torch.Tensor]:
    """The kernel compiled for `config` on these inputs, its output poisoned once.

    `call`: num_splits; what is not given is as the public call chooses it.
    """
    out = torch.full_like(inputs.q, torch.nan)
    return configured.bind_config(
        config, inputs.q, inputs.k_cache, inputs.v_cache, inputs.seq_lens, out=out, **(inputs.options | call)
    )


@dataclass(frozen=True)
class Entry:
    """What is measured, by the functions above: another implementation can be put in its place."""

    bind: Callable[..., Callable[[], torch.Tensor]] = bind
    schedule_for: Callable[[DecodeInputs], DecodeSchedule] = schedule_for
    bind_config: Callable[..., Callable[[], torch.Tensor]] = bind_config
