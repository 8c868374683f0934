"""MLA decode from the bytes up, in float64 NumPy, written apart from the package: no torch formats, no batching."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch


def e4m3(code: int) -> float:
    """The number of an OCP E4M3 byte (no infinities, one NaN)."""
    sign, exponent, mantissa = -1 if code & 0x80 else 1, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


_E4M3 = np.array([e4m3(code) for code in range(256)])


def _bf16(raw: np.ndarray) -> np.ndarray:
    return (raw.view("<u2").astype("<u4") << 16).view("<f4").astype(np.float64)


@dataclass(frozen=True)
class Bytes:
    """A cache as memory: page p begins at byte p * page_stride."""

    kv_format: str
    memory: np.ndarray
    page_size: int
    page_stride: int
    head_dim: int

    @classmethod
    def of(cls, kv_format: str, cache: torch.Tensor) -> Bytes:
        """Of a cache [num_pages, page_size, row] whose pages do not overlap."""
        width = cache.element_size()
        stride = cache.stride(0) * width
        flat = torch.as_strided(cache, ((cache.shape[0] - 1) * cache.stride(0) + cache[0].numel(),), (1,))
        head_dim = {"mla_fp8": 576, "mla_model1": 512}.get(kv_format, cache.shape[2])
        return cls(kv_format, flat.view(torch.uint8).numpy(), cache.shape[1], stride, head_dim)

    def token(self, slot: int) -> np.ndarray:
        """The numbers of the token at page * page_size + offset, float64 [head_dim]."""
        page, offset = divmod(slot, self.page_size)
        start = page * self.page_stride
        if self.kv_format == "mla_fp8":
            raw = self.memory[start + 656 * offset :][:656]
            scales = raw[512:528].copy().view("<f4").astype(np.float64)
            return np.concatenate([_E4M3[raw[:512]] * scales.repeat(128), _bf16(raw[528:].copy())])
        if self.kv_format == "mla_model1":
            raw = self.memory[start + 576 * offset :][:576]
            exponents = self.memory[start + 576 * self.page_size + 8 * offset :][:7].astype(np.float64)
            return np.concatenate([_E4M3[raw[:448]] * (2.0 ** (exponents - 127)).repeat(64), _bf16(raw[448:].copy())])
        raw = self.memory[start + 2 * self.head_dim * offset :][: 2 * self.head_dim].copy()
        return _bf16(raw) if self.kv_format == "mla_bf16" else raw.view("<f2").astype(np.float64)


def attend(
    q: np.ndarray, tokens: Iterable[np.ndarray], scale: float, sink: float | None = None
) -> tuple[np.ndarray, float, float]:
    """One query of one head [head_dim] over its tokens: (out [512], lse without the sink, greatest scaled score)."""
    rows = list(tokens)
    if not rows:
        return np.zeros(512), math.inf, -math.inf
    scores = [scale * float(np.dot(q, row)) for row in rows]
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    lse = top + math.log(sum(weights))
    out = sum(weight * row[:512] for weight, row in zip(weights, rows, strict=True)) / sum(weights)
    if sink is not None and sink != -math.inf:
        out = out * 0.0 if sink == math.inf else out / (1 + math.exp(sink - lse))
    return np.asarray(out), lse, top
