"""A weight format in one file: 4-bit codes into a book of 16 numbers, and a power of two for every 32 inputs.

Nothing else knows of it. Importing the file registers the format, and `test_formats` and the kernels take it from
there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from cute_kernels.formats.weights import WeightFormat, register
from cute_kernels.formats.weights.decoder import CodeDecoder
from layouts.numbers import ceil_log2

BOOK = (-1.0, -0.8125, -0.625, -0.46875, -0.3125, -0.1875, -0.0859375, 0.0, 0.07421875, 0.15625, 0.25, 0.34375,
        0.453125, 0.5859375, 0.75, 0.953125)  # fmt: skip
ZERO = BOOK.index(0.0)
BIAS, MOST = 127, 254  # of E8M0: a byte b is 2**(b - 127); 255 is NaN


@dataclass(frozen=True, eq=False)
class CodebookFormat(WeightFormat):
    """W = BOOK[code] * 2**(scale - 127). Activations are bf16, which has every power of two that a scale says."""

    bits: int = 4
    group_size: int = 32

    scale_bytes: ClassVar[int] = 1
    dtypes: ClassVar[tuple[str, ...]] = ("bf16",)
    decode_cost: ClassVar[float] = 2.0

    @property
    def codes_name(self) -> str:
        return "book4"

    @property
    def scales_name(self) -> str:
        return "g32e8m0"

    @property
    def pad_code(self) -> int:
        return ZERO

    # -- values --------------------------------------------------------------------------------------------------------

    def scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    def activation_dtype(self, scale_dtype: torch.dtype) -> torch.dtype:
        if scale_dtype != torch.uint8:
            raise TypeError(f"scales: got dtype {scale_dtype}, want torch.uint8, exponents of two")
        return torch.bfloat16

    def dequantize(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        book = torch.tensor(BOOK, device=codes.device)
        return torch.ldexp(book[codes.int()].double(), scales.int().unsqueeze(-1) - BIAS).float()

    def check_values(self, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        if int(scales.max()) > MOST:
            raise ValueError(f"scales: got 255, which is NaN, want exponents up to {MOST}")

    def stored_scales(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return values.log2().round().add(BIAS).clamp(0, MOST).to(torch.uint8)

    def choose_scales(self, w: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, None]:
        # A GPU's logarithms are not a CPU's: powers of two come from the bits of numbers.
        exponents = ceil_log2(w.abs().amax(dim=-1).clamp(min=2.0**-BIAS)).add(BIAS)
        return exponents.clamp(0, MOST).to(torch.uint8), None

    def choose_codes(self, w: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        book = torch.tensor(BOOK, device=w.device, dtype=torch.float64)
        middles = (book[1:] + book[:-1]) / 2
        ratio = torch.ldexp(w.double(), BIAS - scales.int().unsqueeze(-1))
        return torch.bucketize(ratio, middles).to(torch.uint8)

    # -- device --------------------------------------------------------------------------------------------------------

    def decoder(self, dtype: str, math: Any) -> CodeDecoder:
        return CodebookDecoder(math)


class CodebookDecoder(CodeDecoder):
    """Looks codes up in tables of bytes that PRMT selects from: low and high bytes of bf16, of eight codes each."""

    def __init__(self, math: Any) -> None:
        super().__init__(bits=4)
        self.math = math
        numbers = torch.tensor(BOOK).bfloat16().view(torch.int16).tolist()
        words = [[number >> shift & 0xFF for number in numbers] for shift in (0, 8)]
        # [plane][four codes] bytes of four codes in a word.
        self.planes = [[sum(plane[4 * i + j] << 8 * j for j in range(4)) for i in range(4)] for plane in words]

    def scale_word(self, word: Any) -> Any:
        # 2**-127 is subnormal in bf16: the bit below those of the exponent.
        return word << 7 | (self.math.word(1) - (word + 255 >> 8)) << 6

    def fragment(self, words: Any, step: int, rows: Any, masks: Any = None) -> list[Any]:
        math, word = self.math, words[step]
        halves = [self._four(word >> shift) for shift in (0, 16)]  # columns 0 and 1 of the four registers
        pairs = [[math.prmt(low, high, math.word(select)) for select in (0x5140, 0x7362)] for low, high in halves]
        selects = (0x5410, 0x7632)
        return [math.prmt(pairs[0][i // 2], pairs[1][i // 2], math.word(selects[i % 2])) for i in range(4)]

    def _four(self, word: Any) -> list[Any]:
        """[plane] the bytes of the four codes in the lower half of a word."""
        math = self.math
        places = word & math.word(0x7777)
        upper = math.prmt(math.word(0), math.word(0xFFFFFFFF), (word & math.word(0x8888)) >> 1)
        found = []
        for plane in self.planes:
            low, high = (math.prmt(math.word(a), math.word(b), places) for a, b in (plane[:2], plane[2:]))
            found.append(low & ~upper | high & upper)
        return found


CODEBOOK = register(CodebookFormat())
