"""8-bit KV rows with a symmetric scale: INT8 and FP8 E4M3, at every granularity of the scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from layouts.kv.format import (
    Field,
    KvRow,
    adversarial_rows,
    bytes_of,
    check_leading,
    check_part,
    check_positive_int,
    finite,
    reinterpret,
)
from layouts.numbers import quotient
from layouts.proofs import Proof, prove

SCALE_BYTES = 4
DIVISION_SLACK = 2**-15
"""The relative part of error bounds for the rounding of x / scale to fp32 before it is rounded to a code. That rounding
errs by up to 127 * 2**-24 of a step."""
FP32_MAX = torch.finfo(torch.float32).max

GRANULARITIES: dict[str, str] = {
    "tensor": "one scale, shape []",
    "channel": "per head and column, shape [num_kv_heads, head_dim]",
    "head": "per head, shape [num_kv_heads, 1]",
    "token": "per token, all heads, shape [..., 1, 1]",
    "token_head": "in the row",
    "group": "in the row, one per group of columns",
}
"""The place of the fp32 scales, by granularity. Scales of the last two granularities lie in front of the codes of each
row."""

IN_ROW = ("token_head", "group")


@dataclass(frozen=True)
class ScaledRow(KvRow):
    """The common part of `Int8` and `Fp8E4M3`: ``head_dim`` one-byte codes, x = code * scale.

    Granularities ``token_head`` and ``group`` keep their fp32 scales in the row, 4 bytes per group in front of the
    codes. With other granularities, rows share a scale, which is an argument of `quantize` and `dequantize`. The scale
    is calibrated in advance or comes from `compute_scale`. x is then [..., num_kv_heads, head_dim].

    The scale is absmax / code_max in fp32; a zero scale gives zero codes.

    Args:
        head_dim: elements per row.
        granularity: one of `GRANULARITIES`.
        num_groups: groups per row for ``group``; 1 otherwise.
    """

    head_dim: int
    granularity: str = "token_head"
    num_groups: int = 1

    code_name: ClassVar[str]
    code_dtype: ClassVar[torch.dtype]
    code_max: ClassVar[float]

    def __post_init__(self) -> None:
        check_positive_int("head_dim", self.head_dim)
        check_positive_int("num_groups", self.num_groups)
        if self.granularity not in GRANULARITIES:
            raise ValueError(f"granularity is {self.granularity!r}; want one of {tuple(GRANULARITIES)}")
        if self.num_groups > 1 and self.granularity != "group":
            raise ValueError(
                f"num_groups is {self.num_groups} with granularity {self.granularity!r}; want 1, or 'group'"
            )
        if self.head_dim % self.num_groups:
            raise ValueError(f"head_dim {self.head_dim} does not split into {self.num_groups} groups of one size")

    @property
    def name(self) -> str:
        """``int8_g4``, ``e4m3_tensor`` and the like."""
        suffix = f"g{self.num_groups}" if self.granularity == "group" else self.granularity
        return f"{self.code_name}_{suffix}"

    @property
    def scale_in_row(self) -> bool:
        """Whether rows carry their scales."""
        return self.granularity in IN_ROW

    @property
    def group_size(self) -> int:
        """Columns that share one scale of the row."""
        return self.head_dim // self.num_groups

    @property
    def fields(self) -> tuple[Field, ...]:
        """The scales of the row, if it has any, then the codes."""
        scales = SCALE_BYTES * self.num_groups if self.scale_in_row else 0
        codes = Field("codes", self.code_name, scales, self.head_dim, "one byte per column")
        return (Field("scales", "fp32", 0, scales, "absmax / code_max of each group"), codes) if scales else (codes,)

    def compute_scale(self, x: torch.Tensor) -> torch.Tensor:
        """Returns absmax / code_max at this granularity, fp32, broadcastable to x (``group``: [..., num_groups]).

        Raises:
            TypeError: x is not floating.
            ValueError: x is not [..., num_kv_heads, head_dim] ([..., head_dim] for scales in the row).
        """
        self.check_input(x)
        if not self.scale_in_row and self.granularity != "tensor" and x.ndim < 2:
            raise ValueError(f"x has shape {tuple(x.shape)}; want [..., num_kv_heads, {self.head_dim}]")
        size = finite(x, FP32_MAX).abs()
        if self.scale_in_row:
            top = size.unflatten(-1, (self.num_groups, self.group_size)).amax(-1)
        elif self.granularity == "tensor":
            top = size.amax()
        elif self.granularity == "token":
            top = size.amax((-2, -1), keepdim=True)
        else:
            top = size.flatten(0, -3).amax(0) if x.ndim > 2 else size
            top = top.amax(-1, keepdim=True) if self.granularity == "head" else top
        return quotient(top, self.code_max).float()

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Converts floating [..., head_dim] to uint8 rows [..., row_bytes].

        Args:
            x: the numbers to quantise.
            scale: a scale as `compute_scale` returns it. A scale outside the row is required. A scale in the row is
                computed if it is not given.

        Raises:
            TypeError: x is not floating, or scale is not fp32.
            ValueError: shapes do not fit, or a scale outside the row was not given.
        """
        self.check_input(x)
        if scale is None and self.scale_in_row:
            scale = self.compute_scale(x)
        step, given = self._spread(scale, x.shape)
        ratio = torch.where(step > 0, finite(x, FP32_MAX) / step, 0.0)
        codes = self._encode(ratio.clamp(-self.code_max, self.code_max))
        if not self.scale_in_row:
            return self.pack(codes)
        return self.pack(codes, given.expand(*x.shape[:-1], self.num_groups).contiguous())

    def dequantize(
        self, rows: torch.Tensor, dtype: torch.dtype = torch.float32, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Converts uint8 rows [..., row_bytes] to ``dtype`` [..., head_dim]; the product is exact in float64.

        Raises:
            TypeError: rows is not uint8, dtype is not floating, or scale is not fp32.
            ValueError: shapes do not fit, a scale is given although rows have their own, or a scale outside the rows is
                missing.
        """
        self.check_output_dtype(dtype)
        parts = self.unpack(rows)
        if self.scale_in_row and scale is not None:
            raise ValueError(f"{self.name} keeps its scales in the row; got a scale of shape {tuple(scale.shape)}")
        stored = parts[1] if self.scale_in_row else scale
        step, _ = self._spread(stored, parts[0].shape)
        work = torch.float64 if dtype == torch.float64 else torch.float32
        return (parts[0].to(work) * step.to(work)).to(dtype)

    def pack(self, *parts: torch.Tensor) -> torch.Tensor:
        """Packs (codes [..., head_dim][, scales fp32 [..., num_groups]]) into uint8 rows [..., row_bytes].

        Raises:
            TypeError: a part has another dtype.
            ValueError: wrong number of parts, or shapes do not fit.
        """
        if len(parts) != 1 + self.scale_in_row:
            names = "codes, scales" if self.scale_in_row else "codes"
            raise ValueError(f"pack got {len(parts)} parts; want {1 + self.scale_in_row}: {names}")
        check_part(parts[0], "codes", self.code_dtype, self.head_dim)
        if not self.scale_in_row:
            return bytes_of(parts[0]).clone()
        check_part(parts[1], "scales", torch.float32, self.num_groups)
        check_leading(codes=parts[0], scales=parts[1])
        return torch.cat((bytes_of(parts[1]), bytes_of(parts[0])), dim=-1)

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Converts uint8 rows [..., row_bytes] to (codes [..., head_dim][, scales fp32 [..., num_groups]])."""
        self.check_rows(rows)
        start = self.fields[-1].offset
        codes = reinterpret(rows[..., start:], self.code_dtype)
        return (codes, reinterpret(rows[..., :start], torch.float32)) if start else (codes,)

    def error_bound(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the bound of the class's docstring for each element, float64 [..., head_dim]."""
        if scale is None:
            scale = self.compute_scale(x)
        step = self._spread(scale, x.shape)[0].double()
        saturation = (x.double().abs() - self.code_max * step).clamp(min=0)
        return self._rounding_bound(x.double(), step) * (1 + DIVISION_SLACK) + saturation + 2**-140

    def _spread(self, scale: torch.Tensor | None, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (the scale broadcast to the elements of a row, the scale as given)."""
        if scale is None:
            raise ValueError(
                f"{self.name} keeps its scale outside the row; want scale ({GRANULARITIES[self.granularity]})"
            )
        if not isinstance(scale, torch.Tensor) or scale.dtype != torch.float32:
            found = scale.dtype if isinstance(scale, torch.Tensor) else type(scale).__name__
            raise TypeError(f"scale is {found}; want a float32 tensor")
        step = scale
        if self.scale_in_row:
            if scale.ndim == 0 or scale.shape[-1] != self.num_groups:
                raise ValueError(f"scale has shape {tuple(scale.shape)}; want [..., {self.num_groups}] (num_groups)")
            step = scale.unsqueeze(-1).expand(*scale.shape, self.group_size).flatten(-2)
        try:
            fits = torch.broadcast_shapes(step.shape, shape) == shape
        except RuntimeError:
            fits = False
        if not fits:
            wanted = GRANULARITIES[self.granularity]
            raise ValueError(f"scale has shape {tuple(scale.shape)} for rows of {tuple(shape)}; want {wanted}")
        return step, scale

    def _encode(self, ratio: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _rounding_bound(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _verify_error_bound(self) -> Proof:
        x = adversarial_rows(self.head_dim).unsqueeze(-2)
        scale = self.compute_scale(x)
        stored = None if self.scale_in_row else scale
        error = (self.dequantize(self.quantize(x, scale), torch.float64, stored) - x.double()).abs()
        holds = bool((error <= self.error_bound(x, scale)).all())
        return prove(holds, "|dequantize(quantize(x)) - x| <= error_bound(x)", "sampled", x.numel())


@dataclass(frozen=True)
class Int8(ScaledRow):
    """INT8 rows: ``q = clamp(round(x / scale), -127, 127)``, ties to even, so that the range is symmetric.

    Error: ``|x - x'| <= scale / 2``, plus the part of |x| that saturates if a given scale is below absmax / 127.
    """

    code_name: ClassVar[str] = "int8"
    code_dtype: ClassVar[torch.dtype] = torch.int8
    code_max: ClassVar[float] = 127.0

    def _encode(self, ratio: torch.Tensor) -> torch.Tensor:
        return ratio.round().to(torch.int8)

    def _rounding_bound(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        return torch.where(step > 0, step / 2, x.abs())


@dataclass(frozen=True)
class Fp8E4M3(ScaledRow):
    """FP8 E4M3 rows: x / scale is rounded to nearest even, and saturates at 448. Rows have no infinity and no NaN.

    Error: ``|x - x'| <= max(|x| / 16, scale / 1024)`` (half a step of 4 significant bits; half the subnormal step
    2**-9), plus the part of |x| that saturates if a given scale is below absmax / 448.
    """

    code_name: ClassVar[str] = "e4m3"
    code_dtype: ClassVar[torch.dtype] = torch.float8_e4m3fn
    code_max: ClassVar[float] = 448.0

    def _encode(self, ratio: torch.Tensor) -> torch.Tensor:
        return ratio.float().to(torch.float8_e4m3fn)

    def _rounding_bound(self, x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        return torch.where(step > 0, torch.maximum(x.abs() / 16, step / 1024), x.abs())
