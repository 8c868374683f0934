"""FP8 E5M2 KV rows: the high byte of an fp16, without a scale."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layouts.kv.format import Field, KvRow, bytes_of, check_part, check_positive_int, finite, reinterpret

E5M2_MAX = 57344.0


@dataclass(frozen=True)
class Fp8E5M2(KvRow):
    """One row: ``head_dim`` E5M2 bytes. Each byte is the high byte of an fp16 number whose low byte is 0.

    Rounds to nearest even, or towards zero with ``truncate`` (which drops the low byte of the fp16). Magnitudes above
    57344 saturate to 57344.

    Error, for |x| <= 57344: ``max(|x| / 8, 2**-17)``, twice that with ``truncate``.

    Args:
        head_dim: elements per row.
        truncate: round towards zero.
    """

    head_dim: int
    truncate: bool = False

    def __post_init__(self) -> None:
        check_positive_int("head_dim", self.head_dim)

    @property
    def name(self) -> str:
        """``e5m2`` or ``e5m2_truncate``."""
        return "e5m2_truncate" if self.truncate else "e5m2"

    @property
    def fields(self) -> tuple[Field, ...]:
        """The codes."""
        return (Field("codes", "e5m2", 0, self.head_dim, "high byte of an fp16"),)

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Converts floating [..., head_dim] to uint8 rows [..., head_dim]; errors as `KvRow.check_input`."""
        self.check_no_scale(scale)
        self.check_input(x)
        values = finite(x, E5M2_MAX).float()
        if not self.truncate:
            return bytes_of(values.to(torch.float8_e5m2))
        toward_zero = values.half()
        over = toward_zero.float().abs() > values.abs()
        halves = toward_zero.view(torch.int16) - over.to(torch.int16)
        return (halves >> 8).view(torch.uint8).unflatten(-1, (-1, 2))[..., 0].contiguous()

    def dequantize(
        self, rows: torch.Tensor, dtype: torch.dtype = torch.float32, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Converts uint8 rows [..., head_dim] to ``dtype`` [..., head_dim]. The result is exact unless the dtype is
        narrower than fp16.
        """
        self.check_no_scale(scale)
        self.check_output_dtype(dtype)
        return self.unpack(rows)[0].to(dtype)

    def pack(self, *parts: torch.Tensor) -> torch.Tensor:
        """Packs (codes float8_e5m2 [..., head_dim],) into uint8 rows."""
        if len(parts) != 1:
            raise ValueError(f"pack got {len(parts)} parts; want 1: codes")
        check_part(parts[0], "codes", torch.float8_e5m2, self.head_dim)
        return bytes_of(parts[0]).clone()

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Splits uint8 rows [..., head_dim] into (codes float8_e5m2 [..., head_dim],)."""
        self.check_rows(rows)
        return (reinterpret(rows, torch.float8_e5m2),)

    def error_bound(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the bound of the class's docstring for each element, float64 [..., head_dim]."""
        self.check_no_scale(scale)
        self.check_input(x)
        size = x.double().abs()
        bound = torch.maximum(size / 8, torch.full_like(size, 2**-17)) * (2 if self.truncate else 1)
        return bound + (size - E5M2_MAX).clamp(min=0)
