"""INT4 KV-cache rows: asymmetric 4-bit codes with an fp16 scale and shift per group of columns.

The grouped-query INT4 attention kernels of FBGEMM, xFormers and MSLK have the same byte format.
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

FP16_MAX = 65504.0
MAX_CODE = 15


@dataclass(frozen=True)
class Int4Row(KvRow):
    """One row: ``num_groups`` pairs (fp16 scale, fp16 shift), then ``head_dim / 2`` bytes of codes.

    Byte j of the codes is ``q[2j] | q[2j + 1] << 4``. Group g has the columns from ``g * group_size`` to ``(g + 1) *
    group_size - 1``, and dequantises as ``q * scale + shift``.

    Quantisation, per group: ``shift = fp16(min)``, ``scale = fp16((max - min) / 15)``, both rounded *before* the codes
    ``q = clamp(round((x - shift) / scale), 0, 15)`` (ties to even). So the codes are the best codes for the stored
    scale and shift. The scale is 0 for a constant group, and for a range below about 4.5e-7, which fp16 rounds to 0.
    Then all codes are 0 and the group dequantises to ``shift``.

    Before quantisation, numbers outside the fp16 range saturate to +-65504 and NaN becomes 0. So the header and the
    dequantised row are finite for any input.

    Error, for x in the fp16 range, with r = max - min of its group::

        |x - x'| <= r / 30 + 2**-11 * (|min| + 1.1 r) + 2**-21

    (half a step; the rounding of shift and scale; the fp16 subnormal spacing, times up to 16 steps).

    Args:
        head_dim: elements per row; even.
        num_groups: groups per row. It must divide head_dim, and the group size must be even.
    """

    head_dim: int
    num_groups: int = 1

    def __post_init__(self) -> None:
        check_positive_int("head_dim", self.head_dim)
        check_positive_int("num_groups", self.num_groups)
        if self.head_dim % (2 * self.num_groups):
            raise ValueError(
                f"head_dim {self.head_dim} does not split into {self.num_groups} groups of an even size; "
                "want head_dim a multiple of 2 * num_groups"
            )

    @property
    def name(self) -> str:
        """``int4_g<num_groups>``."""
        return f"int4_g{self.num_groups}"

    @property
    def group_size(self) -> int:
        """Columns that share one scale and shift."""
        return self.head_dim // self.num_groups

    @property
    def header_bytes(self) -> int:
        """Bytes of scales and shifts in front of the codes."""
        return 4 * self.num_groups

    @property
    def fields(self) -> tuple[Field, ...]:
        """The scale and shift of each group, then the codes."""
        header = []
        for g in range(self.num_groups):
            columns = f"columns [{g * self.group_size}, {(g + 1) * self.group_size})"
            header.append(Field(f"scale[{g}]", "fp16", 4 * g, 2, columns))
            header.append(Field(f"shift[{g}]", "fp16", 4 * g + 2, 2, columns))
        codes = Field("codes", "u4", self.header_bytes, self.head_dim // 2, "byte j = q[2j] | q[2j+1] << 4")
        return (*header, codes)

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Converts floating [..., head_dim] to uint8 rows [..., row_bytes]; rounding and saturation are described in
        the class's docstring.

        Raises:
            TypeError: x is not a floating tensor.
            ValueError: the last dimension of x is not head_dim.
        """
        self.check_no_scale(scale)
        self.check_input(x)
        groups = finite(x, FP16_MAX).unflatten(-1, (self.num_groups, self.group_size))
        low, high = torch.aminmax(groups, dim=-1)
        shift = low.half()
        scale = quotient(high - low, MAX_CODE).half()
        step = scale.to(groups.dtype).unsqueeze(-1)
        steps = (groups - shift.to(groups.dtype).unsqueeze(-1)) / step
        codes = torch.where(step > 0, steps.round().clamp(0, MAX_CODE), 0.0).to(torch.uint8)
        return self._join(codes.flatten(-2), scale, shift)

    def dequantize(
        self, rows: torch.Tensor, dtype: torch.dtype = torch.float32, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Converts uint8 rows [..., row_bytes] to ``dtype`` [..., head_dim].

        float64 is exact (the product and the sum fit); other dtypes compute in float32, where only the sum rounds,
        and round once more to ``dtype``.

        Raises:
            TypeError: rows is not uint8, or dtype is not floating.
            ValueError: the last dimension of rows is not row_bytes.
        """
        self.check_no_scale(scale)
        self.check_output_dtype(dtype)
        codes, scale, shift = self.unpack(rows)
        work = torch.float64 if dtype == torch.float64 else torch.float32
        groups = codes.unflatten(-1, (self.num_groups, self.group_size)).to(work)
        values = groups * scale.to(work).unsqueeze(-1) + shift.to(work).unsqueeze(-1)
        return values.flatten(-2).to(dtype)

    def pack(self, *parts: torch.Tensor) -> torch.Tensor:
        """Packs (codes uint8 [..., head_dim], scale fp16 [..., num_groups], shift fp16 [..., num_groups]) into uint8
        rows.

        Raises:
            TypeError: a part has another dtype.
            ValueError: wrong number of parts or shape, or (CPU only, since it reads the data) a code above 15.
        """
        if len(parts) != 3:
            raise ValueError(f"pack got {len(parts)} parts; want 3: codes, scale, shift")
        codes, scale, shift = parts
        check_part(codes, "codes", torch.uint8, self.head_dim)
        check_part(scale, "scale", torch.float16, self.num_groups)
        check_part(shift, "shift", torch.float16, self.num_groups)
        check_leading(codes=codes, scale=scale, shift=shift)
        check_range(codes, 0, MAX_CODE)
        return self._join(codes, scale, shift)

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Splits uint8 rows [..., row_bytes] into (codes uint8 [..., head_dim], scale, shift: fp16 [..., num_groups]).

        Raises:
            TypeError: rows is not uint8.
            ValueError: the last dimension of rows is not row_bytes.
        """
        self.check_rows(rows)
        header = reinterpret(rows[..., : self.header_bytes], torch.float16)
        scale, shift = header.unflatten(-1, (self.num_groups, 2)).unbind(-1)
        data = rows[..., self.header_bytes :]
        codes = torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)
        return codes, scale.contiguous(), shift.contiguous()

    def error_bound(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the bound of the class's docstring for each element, float64 [..., head_dim]."""
        self.check_no_scale(scale)
        self.check_input(x)
        low, high = torch.aminmax(x.double().unflatten(-1, (self.num_groups, self.group_size)), dim=-1, keepdim=True)
        spread = high - low
        bound = spread / 30 + 2**-11 * (low.abs() + 1.1 * spread) + 2**-21
        return bound.expand(*bound.shape[:-1], self.group_size).flatten(-2)

    def _join(self, codes: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        header = bytes_of(torch.stack((scale, shift), dim=-1).flatten(-2))
        pairs = codes.unflatten(-1, (-1, 2))
        data = pairs[..., 0] | (pairs[..., 1] << 4)
        return torch.cat((header, data), dim=-1)
