"""Random calls of decode attention, on any device, and how far a result is from the fp64 reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from cute_kernels import decode_attention
from cute_kernels.attention.reference import decode_attention_reference
from cute_kernels.kv_formats import Int4Format, format_of

FORMATS = ("bf16", "fp16", "int4_g1", "int4_g2", "int4_g4", "int4_g8")
Q_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3}  # of a request's output, in the 2-norm
LSE_TOLERANCE = 1e-4  # absolute


@dataclass(frozen=True)
class Call:
    """The tensors of one call."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    seq_lens: torch.Tensor
    kv_format: str

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k_cache, self.v_cache, self.seq_lens

    def run(self, **options: Any) -> Any:
        """The public call."""
        return decode_attention(*self.tensors, kv_format=self.kv_format, **options)

    def reference(self, softmax_scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) in fp64."""
        return decode_attention_reference(
            *self.tensors, kv_format=self.kv_format, softmax_scale=softmax_scale, compute_dtype=torch.float64
        )

    def row(self, index: int) -> Call:
        """One request alone."""
        part = slice(index, index + 1)
        q, k_cache, v_cache, seq_lens = (tensor[part] for tensor in self.tensors)
        return Call(q, k_cache, v_cache, seq_lens, self.kv_format)

    def with_lengths(self, lengths: Sequence[int]) -> Call:
        return replace(self, seq_lens=torch.tensor(lengths, dtype=torch.int32, device=self.q.device))


def make_call(
    kv_format: str,
    lengths: Sequence[int],
    *,
    num_kv_heads: int = 1,
    group: int = 8,
    head_dim: int = 128,
    max_seq_len: int | None = None,
    q_dtype: str = "bf16",
    device: str | torch.device = "cpu",
    seed: int = 0,
    poison: bool = True,
) -> Call:
    """Standard normal q, k, v, made on the device; what lies past the lengths is NaN (16-bit) or 0xFF (INT4).

    q_dtype is the cache's where that is 16-bit. max_seq_len: default the greatest length.
    """
    batch, tokens = len(lengths), max(lengths, default=0) if max_seq_len is None else max_seq_len
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    q = normal(batch, 1, num_kv_heads * group, head_dim).to(Q_DTYPES.get(kv_format, Q_DTYPES[q_dtype]))
    k, v = (store(normal(batch, tokens, num_kv_heads, head_dim), kv_format) for _ in range(2))
    call = Call(q, k, v, torch.tensor(lengths, dtype=torch.int32, device=device), kv_format)
    if poison:
        poison_past_lengths(call)
    return call


def store(x: torch.Tensor, kv_format: str) -> torch.Tensor:
    """Floating [..., head_dim] as cache rows."""
    form = format_of(kv_format)
    return form.row(x.shape[-1]).quantize(x) if isinstance(form, Int4Format) else x.to(form.cache_dtype)


def poison_past_lengths(call: Call) -> None:
    """Makes everything that must not be read count as much as it can."""
    for row, length in enumerate(call.seq_lens.tolist()):
        for cache in (call.k_cache, call.v_cache):
            cache[row, length:] = 0xFF if cache.dtype == torch.uint8 else torch.nan


def relative_errors(out: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Per request: norm of the difference over norm of the reference; a reference of 0 allows 0 only (error inf)."""
    difference = (out.double() - want).flatten(1).norm(dim=1)
    size = want.flatten(1).norm(dim=1)
    return torch.where(difference == 0, 0.0, difference / size)


def assert_close(
    call: Call,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    lse_slack: float = 0.0,
) -> None:
    """``out`` (and ``lse``) are what the fp64 reference gives, within the tolerance of q's dtype.

    The error of a call is the root mean square of its requests' relative errors: a request of few tokens has few
    roundings, which may all go one way. lse_slack: relative to the LSE, for scores so large that fp32 itself is coarser
    than the absolute tolerance.
    """
    want, want_lse = call.reference(softmax_scale)
    empty = call.seq_lens <= 0
    assert not out[empty].any(), "the output of a request without tokens is 0"
    errors = relative_errors(out, want)[~empty]
    error = float(errors.square().mean().sqrt()) if errors.numel() else 0.0
    assert error <= TOLERANCE[call.q.dtype], f"relative error {error:.2e}, of the requests: {errors.tolist()}"
    if lse is not None:
        assert torch.all(lse[empty] == -torch.inf), "the LSE of a request without tokens is -inf"
        excess = ((lse.double() - want_lse).abs() - lse_slack * want_lse.abs())[~empty]
        worst = float(excess.max()) if excess.numel() else 0.0
        assert worst <= LSE_TOLERANCE, f"LSE is off by {worst:.2e}"
