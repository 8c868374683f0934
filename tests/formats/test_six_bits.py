"""A KV format in one file: 6-bit codes with a symmetric fp32 scale in front of the row.

Nothing else in the repository knows of it. Registering it gives it append, bulk conversion and decode attention, on the
CPU and the GPU; `TestSixBits` gives it the tests that every format has. docs/add_kv_format.md goes through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("cutlass", reason="the format's device code is written in nvidia-cutlass-dsl")

from cutlass import Float32, Uint32

from cute_kernels.attention.candidates import candidate_configs
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.extend import extend_attention
from cute_kernels.attention.problem import AttentionProblem
from cute_kernels.device import numbers, ptx
from cute_kernels.formats.kv import DecodeReader, KvFormat, code_of, modules_of, register
from cute_kernels.kv_cache.rows import MAGIC, MAGIC_VALUE, ScaledRow
from cute_kernels.runtime.sources import reached
from layouts.kv.format import Field, KvRow, bytes_of, check_part, check_positive_int, finite, reinterpret
from layouts.kv.scaled import DIVISION_SLACK, FP32_MAX
from tests.formats.generic import KvFormatTests, random_cache

CODE_MAX = 31
CODE_BITS = 6
OFFSET = 32  # codes are stored as unsigned numbers, code + 32
MASK = (1 << CODE_BITS) - 1


# -- the bytes, and the reference --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SixBitRow(KvRow):
    """An fp32 scale, then ``head_dim`` codes of 6 bits: four in three bytes, the first in the lowest bits.

    x = code * scale, ``scale = absmax / 31``, ``code = round(x / scale)``, ties to even. Error: ``scale / 2``.
    """

    head_dim: int

    def __post_init__(self) -> None:
        check_positive_int("head_dim", self.head_dim)
        if self.head_dim % 4:
            raise ValueError(f"head_dim is {self.head_dim}; want a multiple of 4")

    @property
    def name(self) -> str:
        """``int6_token_head``."""
        return "int6_token_head"

    @property
    def fields(self) -> tuple[Field, ...]:
        """The scale, then the codes."""
        return Field("scale", "fp32", 0, 4), Field("codes", "u6", 4, self.head_dim * CODE_BITS // 8, "code + 32")

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Floating [..., head_dim] to uint8 rows [..., row_bytes]."""
        self.check_no_scale(scale)
        self.check_input(x)
        x = finite(x, FP32_MAX)
        top = x.abs().amax(-1, keepdim=True)
        step = (top / top.new_full((), CODE_MAX)).float()
        ratio = torch.where(step > 0, x / step, 0.0).clamp(-CODE_MAX, CODE_MAX)
        return self.pack(ratio.round().to(torch.int8), step)

    def dequantize(
        self, rows: torch.Tensor, dtype: torch.dtype = torch.float32, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """uint8 rows [..., row_bytes] to ``dtype`` [..., head_dim]; the product is exact in float64."""
        self.check_no_scale(scale)
        self.check_output_dtype(dtype)
        codes, step = self.unpack(rows)
        work = torch.float64 if dtype == torch.float64 else torch.float32
        return (codes.to(work) * step.to(work)).to(dtype)

    def pack(self, *parts: torch.Tensor) -> torch.Tensor:
        """(codes int8 [..., head_dim], scale fp32 [..., 1]) to uint8 rows."""
        codes, step = parts
        check_part(codes, "codes", torch.int8, self.head_dim)
        check_part(step, "scale", torch.float32, 1)
        four = (codes.to(torch.int32) + OFFSET).unflatten(-1, (-1, 4))
        packed = four[..., 0] | four[..., 1] << 6 | four[..., 2] << 12 | four[..., 3] << 18
        data = torch.stack([packed >> shift & 0xFF for shift in (0, 8, 16)], dim=-1).to(torch.uint8)
        return torch.cat((bytes_of(step), data.flatten(-2)), dim=-1)

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 rows [..., row_bytes] to (codes int8 [..., head_dim], scale fp32 [..., 1])."""
        self.check_rows(rows)
        three = rows[..., 4:].to(torch.int32).unflatten(-1, (-1, 3))
        packed = three[..., 0] | three[..., 1] << 8 | three[..., 2] << 16
        codes = torch.stack([(packed >> shift & MASK) - OFFSET for shift in (0, 6, 12, 18)], dim=-1)
        return codes.flatten(-2).to(torch.int8), reinterpret(rows[..., :4], torch.float32)

    def error_bound(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """The bound that the class states, per element, float64 [..., head_dim]."""
        self.check_no_scale(scale)
        step = x.double().abs().amax(-1, keepdim=True) / CODE_MAX
        return (step / 2 * (1 + CODE_MAX * DIVISION_SLACK) + 2**-140).expand(x.shape)


# -- device code -------------------------------------------------------------------------------------------------------


class SixBitWriter(ScaledRow):
    """How append packs codes: what finds scales and divides by them is `ScaledRow`'s."""

    def pack(self, ratios: list[Float32]) -> list[Uint32]:
        words: list[Any] = [Uint32(0)] * -(-len(ratios) * CODE_BITS // 32)
        for i, ratio in enumerate(ratios):
            code = numbers.bits(numbers.add(ratio, Float32(numbers.ROUNDER + OFFSET))) & MASK
            word, bit = divmod(CODE_BITS * i, 32)
            words[word] = words[word] | (code << bit)
            if bit + CODE_BITS > 32:
                words[word + 1] = words[word + 1] | (code >> (32 - bit))
        return words

    def unpack(self, words, count: int) -> list[Float32]:
        magic = [numbers.from_bits(code_at(words, i) | MAGIC) for i in range(count)]
        return [numbers.add(value, Float32(-MAGIC_VALUE - OFFSET)) for value in magic]


class SixBitCodes:
    """How attention decodes them: 16 codes of three words, as fp16 1024 + code + 32, less 1056."""

    def pairs(self, words: list[Any]) -> list[Any]:
        both = [code_at(words, i) | (code_at(words, i + 1) << 16) | 0x64006400 for i in range(0, 16, 2)]
        return [ptx.add_f16x2(pair, Uint32(0xE420E420)) for pair in both]


def code_at(words, i: int):
    """Code i, + 32, of words of codes."""
    word, bit = divmod(CODE_BITS * i, 32)
    code = words[word] >> bit
    return (code if bit + CODE_BITS <= 32 else code | (words[word + 1] << (32 - bit))) & MASK


# -- the format --------------------------------------------------------------------------------------------------------

SIX_BITS = register(
    KvFormat(
        "int6_token_head",
        codes="u6",
        code_bits=CODE_BITS,
        cache_dtypes=(torch.uint8,),
        make_row=SixBitRow,
        header_bytes=4,
        code_max=CODE_MAX,
        writer=f"{__name__}:SixBitWriter",
        decode=DecodeReader.of_codes(f"{__name__}:SixBitCodes"),
    )
)


class TestSixBits(KvFormatTests):
    forms: ClassVar = (SIX_BITS,)


# -- what a format from elsewhere has beside them ----------------------------------------------------------------------


def test_its_file_is_part_of_the_identity_of_its_kernels():
    assert modules_of("int6_token_head") == (__name__,)
    assert code_of("decode", "bf16", "int6_token_head")[-1] == f"{__name__}:SixBitCodes"
    config = candidate_configs(AttentionProblem.uniform(1, 4096, 8, 1, 128, "int6_token_head", "bf16"))[0]
    assert Path(__file__) in reached(AttentionSpec(config)).files


def test_head_dims_without_whole_runs_are_refused_by_name():
    from cute_kernels.attention import decode_attention

    rows, _, _ = random_cache(SIX_BITS, (1, 16, 2, 64), 0)
    q, length = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16), torch.tensor([16], dtype=torch.int32)
    options: Any = {"kv_format": "int6_token_head"}
    with pytest.raises(
        ValueError, match=r"groups of 64 columns \(int6_token_head at head_dim 64\) are no multiple of 128"
    ):
        decode_attention(q, rows, rows, length, **options)


def test_a_family_that_cannot_read_it_refuses_it_by_name():
    rows, _, _ = random_cache(SIX_BITS, (1, 16, 2, 128), 0)
    q, length = torch.zeros(4, 2, 128, dtype=torch.bfloat16), torch.tensor([16], dtype=torch.int32)
    bounds = torch.tensor([0, 4], dtype=torch.int32)
    options: Any = {"kv_format": "int6_token_head"}
    with pytest.raises(
        ValueError, match="got int6_token_head for k_cache, want one of those that extend attention reads: bf16, "
    ):
        extend_attention(q, rows, rows, length, cu_seqlens_q=bounds, **options)
