"""The types of the options that `KVCache`'s methods pass on to the operators."""

from __future__ import annotations

from typing import TypedDict

import torch

from cute_kernels.attention.options import CallNumbers, MaskOptions
from cute_kernels.kv_cache.rope import Rope
from cute_kernels.names import QkvBias


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


class AttendOptions(MaskOptions, CallNumbers, total=False):
    """Further options of `KVCache.attend`; :func:`cute_kernels.decode_attention` documents each."""

    attn_bias: torch.Tensor | None
    q_shift: torch.Tensor | None


class StepAttendOptions(MaskOptions, CallNumbers, NewTokenOptions, total=False):
    """Further options of `KVCache.append_and_attend`; :func:`cute_kernels.append_and_decode` documents each."""

    attn_bias: torch.Tensor | None
