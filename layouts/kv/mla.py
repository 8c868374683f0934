"""Token formats of multi-head latent attention: 656 bytes as in DeepSeek-V3.2, 584 bytes as in FlashMLA's MODEL1, and
16-bit numbers.

In the FP8 formats, the latent columns are E4M3 codes with a scale for each tile of columns; the 64 RoPE columns are
bf16.
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
    finite,
    reinterpret,
    working_precision,
)

E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-4
ROPE_DIM = 64
BF16_MAX = torch.finfo(torch.bfloat16).max
FP16_MAX = torch.finfo(torch.float16).max


def power_of_two_scale(absmax: torch.Tensor) -> torch.Tensor:
    """Returns ``2 ** ceil(log2(max(absmax / 448, 1e-4)))``, fp32, exact: the scale that FlashMLA's quantiser chooses.

    Kernels round the scale to bf16, which does not change powers of two.
    """
    wanted = (absmax / E4M3_MAX).clamp(min=SMALLEST_SCALE)
    mantissa, exponent = torch.frexp(wanted)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.ldexp(torch.ones_like(wanted), exponent).float()


@dataclass(frozen=True)
class _MlaToken(KvRow):
    """The common part of both FP8 token formats: latent tiles in E4M3 with power-of-two scales, then RoPE columns in
    bf16."""

    head_dim: int
    latent_dim: int
    tile_size: int

    @property
    def num_tiles(self) -> int:
        """The number of tiles of the latent part. Each tile has one scale."""
        return self.latent_dim // self.tile_size

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Converts floating [..., head_dim] (latent columns, then RoPE) to uint8 [..., row_bytes]; errors as
        `check_input`."""
        self.check_no_scale(scale)
        self.check_input(x)
        clean = finite(x, BF16_MAX)
        tiles = clean[..., : self.latent_dim].unflatten(-1, (self.num_tiles, self.tile_size))
        scale = power_of_two_scale(tiles.abs().amax(-1))
        ratio = (tiles / scale.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).float()
        codes = ratio.to(torch.float8_e4m3fn).flatten(-2)
        return self._assemble(codes, scale, clean[..., self.latent_dim :].to(torch.bfloat16))

    def dequantize(
        self, rows: torch.Tensor, dtype: torch.dtype = torch.float32, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Converts uint8 [..., row_bytes] to ``dtype`` [..., head_dim]; the product is exact in float32 and float64."""
        self.check_no_scale(scale)
        self.check_output_dtype(dtype)
        codes, scale, rope = self._take_apart(rows)
        work = torch.float64 if dtype == torch.float64 else torch.float32
        tiles = codes.to(work).unflatten(-1, (self.num_tiles, self.tile_size)) * scale.to(work).unsqueeze(-1)
        return torch.cat((tiles.flatten(-2), rope.to(work)), dim=-1).to(dtype)

    def error_bound(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Returns an upper bound of each element's error, float64: ``max(|x| / 16, scale / 1024)`` for latent columns,
        ``|x| / 256 + 2**-134`` for RoPE columns.
        """
        self.check_no_scale(scale)
        self.check_input(x)
        size = working_precision(x).abs().double()
        tiles = size[..., : self.latent_dim].unflatten(-1, (self.num_tiles, self.tile_size))
        scale = power_of_two_scale(tiles.amax(-1).float()).double().unsqueeze(-1)
        latent = torch.maximum(tiles / 16, scale / 1024).flatten(-2)
        return torch.cat((latent, size[..., self.latent_dim :] / 256 + 2**-134), dim=-1)

    def _assemble(self, codes: torch.Tensor, scale: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def _take_apart(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        raise NotImplementedError


@dataclass(frozen=True)
class MlaFp8(_MlaToken):
    """DeepSeek-V3.2 token, 656 bytes: 512 E4M3, 4 fp32 scales (one per 128 columns), 64 bf16 RoPE columns."""

    head_dim: int = 576
    latent_dim: int = 512
    tile_size: int = 128

    def __post_init__(self) -> None:
        _check_fixed(self, 576, 512, 128)

    @property
    def name(self) -> str:
        """``mla_fp8``."""
        return "mla_fp8"

    @property
    def fields(self) -> tuple[Field, ...]:
        """Codes, scales, RoPE."""
        return (
            Field("latent", "e4m3", 0, 512, "x = code * scale"),
            Field("scales", "fp32", 512, 16, "powers of two, one per 128 columns"),
            Field("rope", "bf16", 528, 128, "not quantised"),
        )

    def pack(self, *parts: torch.Tensor) -> torch.Tensor:
        """Packs (codes float8_e4m3fn [..., 512], scales fp32 [..., 4], rope bf16 [..., 64]) into uint8 [..., 656]."""
        codes, scale, rope = _three(parts)
        check_part(codes, "codes", torch.float8_e4m3fn, self.latent_dim)
        check_part(scale, "scales", torch.float32, self.num_tiles)
        check_part(rope, "rope", torch.bfloat16, ROPE_DIM)
        check_leading(codes=codes, scales=scale, rope=rope)
        return torch.cat((bytes_of(codes), bytes_of(scale), bytes_of(rope)), dim=-1)

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Splits uint8 [..., 656] into (codes float8_e4m3fn, scales fp32, rope bf16)."""
        self.check_rows(rows)
        codes = reinterpret(rows[..., :512], torch.float8_e4m3fn)
        scale = reinterpret(rows[..., 512:528], torch.float32)
        return codes, scale, reinterpret(rows[..., 528:], torch.bfloat16)

    def _assemble(self, codes: torch.Tensor, scale: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        return self.pack(codes, scale, rope)

    def _take_apart(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.unpack(rows)


@dataclass(frozen=True)
class MlaModel1(_MlaToken):
    """MODEL1 token, 584 bytes: 448 E4M3, 64 bf16 RoPE columns; 7 UE8M0 scales (64 columns each) and a pad byte.

    In a page the 576 data bytes of all tokens come first, then 8 scale bytes per token: see `to_pages`. Outside of
    pages, the scales of a token follow its data.
    """

    head_dim: int = 512
    latent_dim: int = 448
    tile_size: int = 64

    DATA_BYTES = 576

    def __post_init__(self) -> None:
        _check_fixed(self, 512, 448, 64)

    @property
    def name(self) -> str:
        """``mla_model1``."""
        return "mla_model1"

    @property
    def fields(self) -> tuple[Field, ...]:
        """Codes, RoPE, scales, pad."""
        return (
            Field("latent", "e4m3", 0, 448, "x = code * scale"),
            Field("rope", "bf16", 448, 128, "not quantised"),
            Field("scales", "ue8m0", 576, 7, "2 ** (byte - 127), one per 64 columns"),
            Field("pad", "u8", 583, 1, "0"),
        )

    def pack(self, *parts: torch.Tensor) -> torch.Tensor:
        """Packs (codes float8_e4m3fn [..., 448], rope bf16 [..., 64], scales and pad uint8 [..., 8]) into uint8 [...,
        584]."""
        codes, rope, scale = _three(parts)
        check_part(codes, "codes", torch.float8_e4m3fn, self.latent_dim)
        check_part(rope, "rope", torch.bfloat16, ROPE_DIM)
        check_part(scale, "scales", torch.uint8, 8)
        check_leading(codes=codes, rope=rope, scales=scale)
        return torch.cat((bytes_of(codes), bytes_of(rope), scale), dim=-1)

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Splits uint8 [..., 584] into (codes float8_e4m3fn, rope bf16, scales and pad uint8)."""
        self.check_rows(rows)
        codes = reinterpret(rows[..., :448], torch.float8_e4m3fn)
        rope = reinterpret(rows[..., 448:576], torch.bfloat16)
        return codes, rope, rows[..., 576:].contiguous()

    def page_bytes(self, page_size: int, alignment: int = 1) -> int:
        """Returns the bytes of a page of ``page_size`` tokens, rounded up to ``alignment`` (FlashMLA's tests use
        576). Both are positive ints."""
        check_positive_int("page_size", page_size)
        check_positive_int("alignment", alignment)
        return -(-page_size * self.row_bytes // alignment) * alignment

    def to_pages(self, rows: torch.Tensor, alignment: int = 1) -> torch.Tensor:
        """Converts uint8 tokens [..., page_size, 584] to pages [..., page_bytes]; padding is 0."""
        self.check_rows(rows)
        if rows.ndim < 2:
            raise ValueError(f"rows has shape {tuple(rows.shape)}; want [..., page_size, {self.row_bytes}]")
        data = rows[..., : self.DATA_BYTES].flatten(-2)
        scales = rows[..., self.DATA_BYTES :].flatten(-2)
        padding = self.page_bytes(rows.shape[-2], alignment) - data.shape[-1] - scales.shape[-1]
        return torch.nn.functional.pad(torch.cat((data, scales), dim=-1), (0, padding))

    def from_pages(self, pages: torch.Tensor, page_size: int) -> torch.Tensor:
        """Converts uint8 pages [..., at least page_bytes] to tokens [..., page_size, 584]."""
        if pages.dtype != torch.uint8:
            raise TypeError(f"pages has dtype {pages.dtype}; want torch.uint8")
        if pages.ndim == 0 or pages.shape[-1] < self.page_bytes(page_size):
            wanted = self.page_bytes(page_size)
            raise ValueError(f"pages has shape {tuple(pages.shape)}; want [..., >= {wanted}] for {page_size} tokens")
        split = page_size * self.DATA_BYTES
        data = pages[..., :split].unflatten(-1, (page_size, self.DATA_BYTES))
        scales = pages[..., split : page_size * self.row_bytes].unflatten(-1, (page_size, 8))
        return torch.cat((data, scales), dim=-1)

    def _assemble(self, codes: torch.Tensor, scale: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        exponent = torch.frexp(scale)[1] - 1
        stored = torch.nn.functional.pad((exponent + 127).to(torch.uint8), (0, 1))
        return self.pack(codes, rope, stored)

    def _take_apart(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        codes, rope, stored = self.unpack(rows)
        return codes, torch.pow(2.0, stored[..., :7].double() - 127), rope


@dataclass(frozen=True)
class MlaDense(KvRow):
    """A token of 16-bit numbers: the latent columns, then 64 RoPE columns.

    Args:
        dtype: "bf16" or "fp16".
        head_dim: 576 (DeepSeek V2, V3: 512 latent columns) or 512 (MODEL1: 448).
    """

    dtype: str = "bf16"
    head_dim: int = 576

    def __post_init__(self) -> None:
        if self.dtype not in _DENSE_DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; want one of {', '.join(map(repr, _DENSE_DTYPES))}")
        if self.head_dim not in (576, 512):
            raise ValueError(f"head_dim is {self.head_dim}; want 576 or 512")

    @property
    def name(self) -> str:
        """The format's name: ``mla_bf16``, for example, or ``mla_bf16_d512`` for the narrower token."""
        return f"mla_{self.dtype}" if self.head_dim == 576 else f"mla_{self.dtype}_d{self.head_dim}"

    @property
    def latent_dim(self) -> int:
        """The number of columns in front of the RoPE columns."""
        return self.head_dim - ROPE_DIM

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the numbers."""
        return _DENSE_DTYPES[self.dtype][0]

    @property
    def limit(self) -> float:
        """The magnitude at which numbers saturate."""
        return _DENSE_DTYPES[self.dtype][1]

    @property
    def fields(self) -> tuple[Field, ...]:
        """Latent, RoPE."""
        return (
            Field("latent", self.dtype, 0, 2 * self.latent_dim),
            Field("rope", self.dtype, 2 * self.latent_dim, 2 * ROPE_DIM),
        )

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Converts floating [..., head_dim] to uint8 [..., row_bytes]; errors as `check_input`."""
        self.check_no_scale(scale)
        self.check_input(x)
        return bytes_of(finite(x, self.limit).to(self.torch_dtype))

    def dequantize(
        self, rows: torch.Tensor, dtype: torch.dtype = torch.float32, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Converts uint8 [..., row_bytes] to ``dtype`` [..., head_dim]."""
        self.check_no_scale(scale)
        self.check_output_dtype(dtype)
        self.check_rows(rows)
        return reinterpret(rows, self.torch_dtype).to(dtype)

    def pack(self, *parts: torch.Tensor) -> torch.Tensor:
        """Packs (latent [..., latent_dim], rope [..., 64]), both in the format's dtype, into uint8 [..., row_bytes]."""
        if len(parts) != 2:
            raise ValueError(f"pack got {len(parts)} parts; want 2")
        latent, rope = parts
        check_part(latent, "latent", self.torch_dtype, self.latent_dim)
        check_part(rope, "rope", self.torch_dtype, ROPE_DIM)
        check_leading(latent=latent, rope=rope)
        return torch.cat((bytes_of(latent), bytes_of(rope)), dim=-1)

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Splits uint8 [..., row_bytes] into (latent, rope)."""
        self.check_rows(rows)
        numbers = reinterpret(rows, self.torch_dtype)
        return numbers[..., : self.latent_dim], numbers[..., self.latent_dim :]

    def error_bound(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Returns an upper bound of each element's error: half a unit in the last place (``|x| / 256`` or ``|x| /
        2048``), plus half the smallest number.
        """
        self.check_no_scale(scale)
        self.check_input(x)
        info = torch.finfo(self.torch_dtype)
        return working_precision(x).abs().double() * (info.eps / 2) + info.smallest_normal * info.eps / 2


_DENSE_DTYPES = {"bf16": (torch.bfloat16, BF16_MAX), "fp16": (torch.float16, FP16_MAX)}


def _check_fixed(token: _MlaToken, head_dim: int, latent_dim: int, tile_size: int) -> None:
    found = (token.head_dim, token.latent_dim, token.tile_size)
    if found != (head_dim, latent_dim, tile_size):
        raise ValueError(
            f"head_dim, latent_dim, tile_size are {found}; this format has {(head_dim, latent_dim, tile_size)}"
        )


def _three(parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if len(parts) != 3:
        raise ValueError(f"pack got {len(parts)} parts; want 3")
    return parts[0], parts[1], parts[2]
