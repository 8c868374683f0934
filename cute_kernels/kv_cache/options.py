"""The types of the options that `KVCache`'s methods pass on to the operators."""

from __future__ import annotations

from typing import TypedDict

import torch

from cute_kernels.kv_cache.rope import Rope
from cute_kernels.names import QkvBias, WindowSize


class NewTokenOptions(TypedDict, total=False):
    """Options of the steps on new tokens before they are written; :func:`cute_kernels.append_kv` documents each."""

    qkv_bias: QkvBias | None
    rope: Rope | None
    position_ids: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    norm_eps: float


class AppendOptions(NewTokenOptions, total=False):
    """Further options of `KVCache.append`; :func:`cute_kernels.append_kv` documents each."""

    q: torch.Tensor | None
    q_out: torch.Tensor | None
    q_shift: torch.Tensor | None


class _BothOptions(TypedDict, total=False):
    """Options that both `KVCache.attend` and `KVCache.append_and_attend` take."""

    softmax_scale: float | None
    causal: bool
    window_size: WindowSize | None
    softcap: float | None
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    attn_bias: torch.Tensor | None
    num_splits: int | None
    out: torch.Tensor | None


class AttendOptions(_BothOptions, total=False):
    """Further options of `KVCache.attend`; :func:`cute_kernels.decode_attention` documents each."""

    q_shift: torch.Tensor | None


class StepAttendOptions(_BothOptions, NewTokenOptions, total=False):
    """Further options of `KVCache.append_and_attend`; :func:`cute_kernels.append_and_decode` documents each."""
