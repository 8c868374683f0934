"""INT4 rows with a zero point, as vLLM's ``int4_per_token_head`` writes them.

The layout is taken from vLLM 0.33 (`vllm/v1/attention/ops/int4_per_token_head.py`, Apache-2.0). Before vLLM quantises,
it applies a Hadamard matrix with random signs. In this package, that matrix is a transform of the cache,
`cute_kernels.kv_cache.vllm_rows.vllm_transform`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layouts.kv.format import (
    Field,
    KvRow,
    bytes_of,
    check_leading,
    check_part,
    check_positive_int,
    check_range,
    finite,
    reinterpret,
)
from layouts.numbers import quotient

MAX_CODE = 15
LEAST_SCALE = 1e-6
LARGEST = 2.0**126  # the difference of two such numbers is finite in fp32
ZERO_POINT = 0xF  # bits of the word that are not the scale's


@dataclass(frozen=True)
class ZeroPointRow(KvRow):
    """One row: ``head_dim / 2`` bytes of codes, then one fp32 word: the scale, with the zero point in its low 4 bits.

    Byte j of the codes is ``q[2j] | q[2j + 1] << 4``, and x = (q - zero) * scale. Here the scale is the word without
    the 4 bits of the zero point. The scale is **after** the codes. The kernels of this package need it in front: they
    read `layouts.kv.Int4Row` with one group, which has as many bytes.

    Quantisation, in fp32: ``scale = max((max - min) / 15, 1e-6)``, ``zero = clamp(round(-min / scale), 0, 15)``, ``q =
    clamp(round(x / scale + zero), 0, 15)``; halves are rounded away from 0. Quantisation divides by the full scale,
    including its low bits. NaN becomes 0, and magnitudes saturate at 2**126.

    Error, with r = max - min and s = max(r / 15, 1e-6)::

        |x - x'| <= s / 2 + max(min, 0) + max(-max, 0) + 2**-18 * (|x| + 16 s)

    (half a step; the distance of a row's range from 0, if the range does not include 0; the 4 bits that the scale
    loses).

    Args:
        head_dim: elements per row; even.
    """

    head_dim: int

    def __post_init__(self) -> None:
        check_positive_int("head_dim", self.head_dim)
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; want an even number")

    @property
    def name(self) -> str:
        """``int4_zero_point``."""
        return "int4_zero_point"

    @property
    def fields(self) -> tuple[Field, ...]:
        """The codes, then the word."""
        half = self.head_dim // 2
        return (
            Field("codes", "u4", 0, half, "byte j = q[2j] | q[2j+1] << 4"),
            Field("scale", "fp32", half, 4, "low 4 bits: the zero point"),
        )

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Converts floating [..., head_dim] to uint8 rows [..., row_bytes].

        Raises:
            TypeError: x is not a floating tensor.
            ValueError: the last dimension of x is not head_dim.
        """
        self.check_no_scale(scale)
        self.check_input(x)
        values = finite(x, LARGEST).float()
        low, high = torch.aminmax(values, dim=-1, keepdim=True)
        step = quotient(high - low, MAX_CODE).clamp(min=LEAST_SCALE)
        zero = _rounded(-low / step)
        codes = _rounded(values * (1.0 / step) + zero)
        return self._join(codes.to(torch.uint8), step, zero.to(torch.uint8))

    def dequantize(
        self, rows: torch.Tensor, dtype: torch.dtype = torch.float32, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Converts uint8 rows [..., row_bytes] to ``dtype`` [..., head_dim].

        Raises:
            TypeError: rows is not uint8, or dtype is not floating.
            ValueError: the last dimension of rows is not row_bytes.
        """
        self.check_no_scale(scale)
        self.check_output_dtype(dtype)
        codes, step, zero = self.unpack(rows)
        work = torch.float64 if dtype == torch.float64 else torch.float32
        return ((codes.to(work) - zero.to(work)) * step.to(work)).to(dtype)

    def pack(self, *parts: torch.Tensor) -> torch.Tensor:
        """Packs (codes uint8 [..., head_dim], scale fp32 [..., 1], zero point uint8 [..., 1]) into uint8 rows. The
        scale's low 4 bits are lost.

        Raises:
            TypeError: a part has another dtype.
            ValueError: wrong number of parts or shape, or (CPU only, since it reads the data) a code above 15.
        """
        if len(parts) != 3:
            raise ValueError(f"pack got {len(parts)} parts; want 3: codes, scale, zero point")
        codes, step, zero = parts
        check_part(codes, "codes", torch.uint8, self.head_dim)
        check_part(step, "scale", torch.float32, 1)
        check_part(zero, "zero point", torch.uint8, 1)
        check_leading(codes=codes, scale=step, zero_point=zero)
        check_range(codes, 0, MAX_CODE)
        check_range(zero, 0, MAX_CODE)
        return self._join(codes, step, zero)

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Splits uint8 rows [..., row_bytes] into (codes uint8 [..., head_dim], scale fp32 [..., 1], zero point uint8
        [..., 1]).

        Raises:
            TypeError: rows is not uint8.
            ValueError: the last dimension of rows is not row_bytes.
        """
        self.check_rows(rows)
        data = rows[..., : self.head_dim // 2]
        word = reinterpret(rows[..., self.head_dim // 2 :], torch.int32)
        codes = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)
        return codes, (word & ~ZERO_POINT).view(torch.float32), (word & ZERO_POINT).to(torch.uint8)

    def error_bound(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the bound of the class's docstring for each element, float64 [..., head_dim]."""
        self.check_no_scale(scale)
        self.check_input(x)
        low, high = torch.aminmax(x.double(), dim=-1, keepdim=True)
        step = ((high - low) / MAX_CODE).clamp(min=LEAST_SCALE)
        return step / 2 + low.clamp(min=0) + (-high).clamp(min=0) + 2**-18 * (x.double().abs() + 16 * step)

    def _join(self, codes: torch.Tensor, step: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        word = (step.contiguous().view(torch.int32) & ~ZERO_POINT) | zero.to(torch.int32)
        pairs = codes.unflatten(-1, (-1, 2))
        return torch.cat((pairs[..., 0] | (pairs[..., 1] << 4), bytes_of(word)), dim=-1)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """Rounds to the nearest integer, halves up. Below 0 the rounding does not matter, since all negative numbers become
    code 0."""
    return (x + 0.5).floor().clamp(0, MAX_CODE)
