"""A call of append as data, and its checks; errors name the argument."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.arguments import check_apart, check_dtype, check_kind, check_together, check_vector, shape_of
from cute_kernels.kv_cache.rope import Rope
from cute_kernels.mla.checks import cache_shape, form_of
from cute_kernels.mla.formats import MlaFormat, format_of
from cute_kernels.mla.problem import CacheShape
from layouts.kv.mla import ROPE_DIM

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
BULK_DTYPES = DTYPES | {torch.float32: "fp32"}
POSITION_DTYPES = (torch.int32, torch.int64)
MAX_TOKENS = 2**31 - 2**16  # rounded up to whole CTAs, they fit 32 bits


class AppendMlaCall(NamedTuple):
    """The arguments of `append_mla`, in the operator's order."""

    latent: torch.Tensor
    k_rope: torch.Tensor
    cache: torch.Tensor
    slot_mapping: torch.Tensor
    kv_format: str
    rope: Rope | None = None
    position_ids: torch.Tensor | None = None

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that every call has, by name."""
        return dict(zip(self._fields[:4], self[:4], strict=True))

    @property
    def num_tokens(self) -> int:
        return self.latent.shape[0]

    @property
    def head_dim(self) -> int:
        """Number of columns of a token, latent and RoPE together."""
        return self.latent.shape[1] + ROPE_DIM

    @property
    def form(self) -> MlaFormat:
        return format_of(self.kv_format)


def check_append(call: AppendMlaCall) -> CacheShape:
    """Returns the cache's shape; raises TypeError or ValueError unless the arguments describe an append.

    It checks shapes, dtypes, strides and devices only, so it does not wait for a GPU.
    """
    form, tensors = form_of(call.kv_format), call.tensors
    if call.position_ids is not None:
        tensors["position_ids"] = call.position_ids
    check_together(**tensors)
    _check_rows("latent", call.latent, tuple(head_dim - ROPE_DIM for head_dim in form.head_dims), form)
    _check_rows("k_rope", call.k_rope, (ROPE_DIM,), form)
    check_dtype("k_rope", call.k_rope, call.latent.dtype, why=", that of latent")
    tokens = call.num_tokens
    if call.k_rope.shape[0] != tokens:
        raise ValueError(f"k_rope: got {call.k_rope.shape[0]} tokens, want {tokens}, those of latent")
    if tokens > MAX_TOKENS:
        raise ValueError(f"latent: got {tokens} tokens, want at most {MAX_TOKENS}")
    check_vector("slot_mapping", call.slot_mapping, torch.int64, tokens, "one for each token of latent")
    _check_rope(call)
    shape = cache_shape("cache", call.cache, form, call.head_dim)
    check_apart("cache", call.cache, {name: tensor for name, tensor in tensors.items() if name != "cache"})
    return shape


def _check_rows(name: str, x: torch.Tensor, columns: tuple[int, ...], form: MlaFormat) -> None:
    wanted = " or ".join(map(str, columns))
    if x.dim() != 2 or x.shape[1] not in columns:
        raise ValueError(f"{name}: got shape {shape_of(x)}, want [tokens, {wanted}] for {form.name}")
    check_dtype(name, x, *DTYPES)
    if x.stride(1) != 1:
        raise ValueError(f"{name}: got strides {x.stride()}, want columns side by side")


def _check_rope(call: AppendMlaCall) -> None:
    rope, positions = call.rope, call.position_ids
    if rope is None:
        if positions is not None:
            raise ValueError("position_ids: got a tensor without rope, want None")
        return
    check_kind("rope", rope, Rope, "a Rope")
    if rope.rotary_dim != ROPE_DIM:
        raise ValueError(f"rope: got rotary_dim {rope.rotary_dim}, want {ROPE_DIM}, the columns of k_rope")
    if positions is None:
        raise ValueError("position_ids: got None with rope, want the tokens' positions")
    check_dtype("position_ids", positions, *POSITION_DTYPES)
    check_vector("position_ids", positions, positions.dtype, call.num_tokens, "one for each token of latent")


def check_append_values(call: AppendMlaCall, shape: CacheShape) -> None:
    """Raises ValueError if a slot is outside the cache, or if two tokens share a slot. The message names the tokens.
    Waits for the device.

    A slot of -1 is no error: its token is not written.
    """
    slots = call.slot_mapping.cpu()
    lost = torch.nonzero((slots < -1) | (slots >= shape.num_slots))
    if lost.numel():
        token = int(lost[0])
        raise ValueError(
            f"slot_mapping: token {token}: got {int(slots[token])}, want -1 or 0 to {shape.num_slots - 1}, the cache's "
            "tokens"
        )
    ordered, order = slots.sort(stable=True)
    same = torch.nonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0))
    if same.numel():
        at = int(same[0])
        raise ValueError(
            f"slot_mapping: token {int(order[at])} and token {int(order[at + 1])} both go to {int(ordered[at])}, want "
            "a slot for each"
        )
