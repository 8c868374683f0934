"""INT4 keys, with a scale and a shift for each column of a block of 32 tokens, as in KIVI (Liu et al., 2024).

A *block* is 32 tokens of one KV head. Its first position is a multiple of 32. All rows of a block are written at once,
when its last token has come. :class:`ChannelBlocks` describes their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layouts.kv.format import (
    Field,
    KvRow,
    adversarial_rows,
    bytes_of,
    check_leading,
    check_part,
    check_range,
    finite,
    reinterpret,
)
from layouts.kv.int4 import FP16_MAX, MAX_CODE, Int4Row
from layouts.proofs import Proof, prove

BLOCK_TOKENS = 32
LIMIT = FP16_MAX / 16
"""Numbers beyond +-4094 saturate, so that 16 times a shift, and a query below 64 times a scale, are fp16 numbers."""

UNIT_COLUMNS = 32  # of a row, whose scales lie together
RUN_COLUMNS = 8  # that one word of codes holds
TAIL_TOKENS = 2 * BLOCK_TOKENS
"""How many of a sequence's newest rows are kept in 16 bits; position p is in row p % 64. They are the rows of the block
that is not full and of the block before it, so up to 32 tokens can be removed."""


@dataclass(frozen=True)
class ChannelBlocks(KvRow):
    """Rows of blocks: ``head_dim / 32`` words of the block's parameters, then ``head_dim / 2`` bytes of codes.

    Byte j of the codes is ``q[2j] | q[2j + 1] << 4``, as in :class:`layouts.kv.int4.Int4Row`. The parameter words of a
    block's 32 rows, one row after the other, are one array of ``head_dim`` words. Its dimensions are [parameter p, unit
    u of 32 columns, r, run t of 8 columns]. Each word holds two fp16 scales (p = 0) or shifts (p = 1): that of column
    32 u + 8 t + r in its low half, and that of column 32 u + 8 t + r + 4 in its high half. In attention, lane t of each
    four lanes multiplies with these pairs. A row has as many bytes as a row of ``int4_g<head_dim / 32>``.

    Element (token, column) dequantises as ``q * scale + shift``. Per column of a block: ``shift = fp16(min)`` and
    ``scale = fp16((max - min) / 15)``, both rounded before ``q = clamp(round((x - shift) / scale), 0, 15)``, ties to
    even. A scale of 0 gives codes of 0. Numbers are rounded to fp16 first, since a block's rows are kept in 16 bits
    until the block is full. Numbers beyond +-4094 saturate, and NaN becomes 0.

    Error, for x in that range, with r = max - min of its column over the block::

        |x - x'| <= r / 30 + 2**-11 * (|x| + |min| + 1.2 r) + 2**-20

    (half a step; the rounding of x, shift and scale; the fp16 subnormal spacing of shift and scale, times the largest
    number of steps).

    Args:
        head_dim: elements of a row, a multiple of 32.
    """

    head_dim: int

    def __post_init__(self) -> None:
        if not isinstance(self.head_dim, int) or self.head_dim < 1 or self.head_dim % UNIT_COLUMNS:
            raise ValueError(f"head_dim is {self.head_dim}; want a multiple of {UNIT_COLUMNS}")

    @property
    def name(self) -> str:
        """``int4_channel32``."""
        return "int4_channel32"

    @property
    def header_words(self) -> int:
        """Number of parameter words of the block in each row."""
        return self.head_dim // BLOCK_TOKENS

    @property
    def fields(self) -> tuple[Field, ...]:
        """The row's part of its block's scales and shifts, then the row's codes."""
        header = 4 * self.header_words
        return (
            Field("parameters", "fp16", 0, header, "of the block: its rows' words are [scale or shift, unit, run, r]"),
            Field("codes", "u4", header, self.head_dim // 2, "byte j = q[2j] | q[2j+1] << 4"),
        )

    def half_of(self, parameter: int, column: int) -> tuple[int, int]:
        """Returns the position of the fp16 scale (0) or shift (1) of a column: (row of the block, byte of this row)."""
        unit, rest = divmod(column, UNIT_COLUMNS)
        run, place = divmod(rest, RUN_COLUMNS)
        word = ((parameter * (self.head_dim // UNIT_COLUMNS) + unit) * 4 + place % 4) * 4 + run
        return word // self.header_words, 4 * (word % self.header_words) + 2 * (place // 4)

    # -- numbers and rows ---------------------------------------------------------------------------------------------

    def waiting(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x as it is stored until its block is full: fp16, saturated at `LIMIT`, NaN as 0."""
        return finite(x, LIMIT).half()

    def quantize(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Converts floating [..., tokens, head_dim] of whole blocks to uint8 rows [..., tokens, row_bytes]."""
        self.check_no_scale(scale)
        self.check_input(x)
        blocks = self._blocks(self.waiting(x).float(), "x").transpose(-1, -2)  # [..., block, column, token]
        row = Int4Row(BLOCK_TOKENS)
        codes, step, shift = row.unpack(row.quantize(blocks))
        return self.pack(codes.transpose(-1, -2).flatten(-3, -2), step.squeeze(-1), shift.squeeze(-1))

    def dequantize(
        self, rows: torch.Tensor, dtype: torch.dtype = torch.float32, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Converts uint8 rows [..., tokens, row_bytes] of whole blocks to ``dtype`` [..., tokens, head_dim].

        float64 is exact; other dtypes compute in float32, where only the sum rounds, and round once more.
        """
        self.check_no_scale(scale)
        self.check_output_dtype(dtype)
        codes, step, shift = self.unpack(rows)
        work = torch.float64 if dtype == torch.float64 else torch.float32
        values = self._blocks(codes, "codes").to(work) * step.to(work).unsqueeze(-2) + shift.to(work).unsqueeze(-2)
        return values.flatten(-3, -2).to(dtype)

    def pack(self, *parts: torch.Tensor) -> torch.Tensor:
        """Packs (codes uint8 [..., tokens, head_dim], scale, shift fp16 [..., blocks, head_dim]) into uint8 rows."""
        if len(parts) != 3:
            raise ValueError(f"pack got {len(parts)} parts; want 3: codes, scale, shift")
        codes, scale, shift = parts
        check_part(codes, "codes", torch.uint8, self.head_dim)
        check_part(scale, "scale", torch.float16, self.head_dim)
        check_part(shift, "shift", torch.float16, self.head_dim)
        check_leading(scale=scale, shift=shift)
        check_range(codes, 0, MAX_CODE)
        if self._blocks(codes, "codes").shape[:-2] != scale.shape[:-1]:
            raise ValueError(f"scale has shape {tuple(scale.shape)}; want one row for each {BLOCK_TOKENS} of codes")
        # Columns 8 t + 4 half + r of a unit: [..., parameter, unit, t, half, r] to [..., parameter, unit, r, t, half].
        words = torch.stack((scale, shift), -2).unflatten(-1, (-1, 4, 2, 4)).movedim(-1, -3)
        header = bytes_of(words.flatten(-5).contiguous()).unflatten(-1, (BLOCK_TOKENS, -1)).flatten(-3, -2)
        return torch.cat((header, codes[..., ::2] | codes[..., 1::2] << 4), -1)

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Splits uint8 rows [..., tokens, row_bytes] of whole blocks into the parts that `pack` takes."""
        self.check_rows(rows)
        header = self._blocks(rows[..., : 4 * self.header_words], "rows").flatten(-2)
        words = reinterpret(header, torch.float16).unflatten(-1, (2, -1, 4, 4, 2)).movedim(-3, -1)
        scale, shift = words.flatten(-4).unbind(-2)
        data = rows[..., 4 * self.header_words :]
        return torch.stack((data & 0xF, data >> 4), -1).flatten(-2), scale, shift

    def error_bound(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the bound of the class's docstring for each element, float64 [..., tokens, head_dim]."""
        self.check_no_scale(scale)
        blocks = self._blocks(x.double(), "x")
        low, high = torch.aminmax(blocks, dim=-2, keepdim=True)
        extent = high - low
        rounding = blocks.abs() + low.abs() + 1.2 * extent
        return (extent / 30 + 2**-11 * rounding + 2**-20).flatten(-3, -2)

    def check_input(self, x: torch.Tensor) -> None:
        """Raises TypeError or ValueError unless x is a floating tensor [..., tokens, head_dim]."""
        super().check_input(x)
        if x.ndim < 2:
            raise ValueError(f"x has shape {tuple(x.shape)}; want [..., tokens, {self.head_dim}]")

    def _blocks(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Reshapes [..., tokens, last] to [..., blocks, 32, last]. Raises ValueError unless the tokens are whole
        blocks."""
        if x.ndim < 2 or x.shape[-2] % BLOCK_TOKENS:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; want whole blocks of {BLOCK_TOKENS} tokens in the last dimension "
                "but one"
            )
        return x.unflatten(-2, (-1, BLOCK_TOKENS))

    # -- proofs -------------------------------------------------------------------------------------------------------

    def verify(self) -> tuple[Proof, ...]:
        """Proves the claims of `KvRow.verify`, and that every parameter of a block has its own bytes."""
        return (*super().verify(), self._verify_parameters())

    def _verify_parameters(self) -> Proof:
        places = {self.half_of(parameter, column) for parameter in range(2) for column in range(self.head_dim)}
        header = 4 * self.header_words
        every = {(row, byte) for row in range(BLOCK_TOKENS) for byte in range(0, header, 2)}
        return prove(
            places == every,
            "scales and shifts of a block fill its rows' headers, one place each",
            "symbolic",
            len(every),
        )

    def _verify_bytes_round_trip(self) -> Proof:
        shape = (16 * BLOCK_TOKENS, self.row_bytes)
        rows = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        same = torch.equal(self.pack(*self.unpack(rows)), rows)
        return prove(same, "pack(unpack(rows)) returns every byte", "sampled", rows.numel())

    def _verify_error_bound(self) -> Proof:
        rows = adversarial_rows(self.head_dim).clamp(-LIMIT, LIMIT)
        columns = adversarial_rows(BLOCK_TOKENS).clamp(-LIMIT, LIMIT)  # what a channel holds over a block
        whole = rows[: len(rows) // BLOCK_TOKENS * BLOCK_TOKENS]
        times = -(-len(columns) // self.head_dim) * self.head_dim
        turned = columns.repeat(-(-times // len(columns)), 1)[:times].T.unflatten(-1, (-1, self.head_dim))
        x = torch.cat((whole, turned.transpose(0, 1).flatten(0, 1)))
        error = (self.dequantize(self.quantize(x), torch.float64) - x.double()).abs()
        holds = bool(torch.isfinite(error).all()) and bool((error <= self.error_bound(x)).all())
        return prove(holds, "|dequantize(quantize(x)) - x| <= error_bound(x)", "sampled", x.numel())
