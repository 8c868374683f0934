"""Where the benchmarks enter the package: its public call, and one chosen configuration of its kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cute_kernels
from bench.workloads import DecodeInputs


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
            **options,
        )

    return call


def config_for(inputs: DecodeInputs) -> Any:
    """The `DecodeConfig` that the public call takes for these inputs."""
    from cute_kernels.attention.ops import config_for as choose

    return choose(inputs.q, inputs.k_cache, inputs.kv_format)


def bind_config(config: Any, inputs: DecodeInputs, num_splits: int | None = None) -> Callable[[], torch.Tensor]:
    """The kernel compiled for `config` on these inputs; splits as the public call chooses them unless given."""
    from cute_kernels.attention.ops import run_config

    out = torch.empty_like(inputs.q)

    def call() -> torch.Tensor:
        return run_config(
            config, inputs.q, inputs.k_cache, inputs.v_cache, inputs.seq_lens, num_splits=num_splits, out=out
        )

    return call
