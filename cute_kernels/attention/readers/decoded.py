"""Reads rows of any format that can turn its codes into exact fp16 numbers. A new format needs no readers of its own.

Such a row is an fp32 scale for each group of columns and then the codes. A lane takes a run of codes: the fewest words
that hold whole codes (:meth:`layouts.kv.tile.RowTile.run_codes`). The format's class turns the run into packed pairs.
Scales are not multiplied into the elements, as in :mod:`.bytes`. The readers :mod:`.int4` and :mod:`.bytes` are faster,
since they keep more of a format's arithmetic out of the loop. Tests compare them with this reader.
"""

from __future__ import annotations

from typing import Any, Protocol

from cutlass import Int32, Int64, Uint32

from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.attention.readers.common import Query, State
from cute_kernels.attention.readers.rows import RowKeyReader, RowValueReader
from cute_kernels.device import ptx
from cute_kernels.formats.kv import KvFormat, load_code

LOAD_WORDS = 4  # of queries at a time


class Codes(Protocol):
    """The protocol of objects that turn codes into numbers. `DecodeReader.codes` names their class, which takes no
    arguments."""

    def pairs(self, words: list[Any]) -> list[Any]:
        """Returns the exact numbers of a run's codes as packed pairs of fp16, in order. A pair has two neighbouring
        codes. words: the run's words.
        """
        ...


def codes_of(form: KvFormat) -> Codes:
    """Returns the object that makes numbers of a format's codes."""
    assert form.decode is not None and form.decode.codes is not None, f"{form.name} names no codes"
    return load_code(form.decode.codes)()


class DecodedKeyReader(RowKeyReader):
    """The key reader of decoded rows: a lane's run of codes is multiplied with the queries of the same columns."""

    code_unit = 1.0
    sum_factor = None

    def __init__(self, config: DecodeConfig):
        super().__init__(config)
        self.codes = codes_of(config.formats[0])
        self.lane_codes = self.tile.run_codes
        self.pairs = tuple((code, code + 1) for code in range(0, self.lane_codes, 2))
        self.factors = (1.0,) * len(self.pairs)

    def fetch_query(self, addresses, given_scale: Int64, lane: Int32) -> Query:
        """Starts loading the query columns of a lane, in every block of queries. addresses: for each block, the address
        of the lane's query head.
        """
        column_bytes = 2 * self.lane_codes
        first = lane % 4 * column_bytes

        def load(address, unit: int) -> list[Any]:
            words: list[Any] = []
            for offset in range(0, column_bytes, 4 * LOAD_WORDS):
                count = min(LOAD_WORDS, (column_bytes - offset) // 4)
                words += self.load_queries(address + first, unit * 4 * column_bytes + offset, count)
            return words

        return Query([[load(address, unit) for unit in range(self.tile.k_units)] for address in addresses])

    def unit_operands(self, state: State, low_row, high_row):
        low, high = (self.codes.pairs(_listed(words)) for words in (low_row, high_row))
        return [[low[i], high[i], low[i + 1], high[i + 1]] for i in range(0, len(low), 2)]


class DecodedValueReader(RowValueReader):
    """The value reader of decoded rows. Decoding gives pairs of one token's neighbouring columns. An MMA takes pairs of
    two tokens in one column. Byte permutes turn the two tokens' decoded pairs into such pairs.
    """

    def __init__(self, config: DecodeConfig):
        super().__init__(config)
        self.codes = codes_of(config.formats[1])
        assert self.lane_codes == self.tile.run_codes  # `tiles.cannot_read` has said so

    def code_pairs(self, state: State, even, odd):
        found = zip(self.codes.pairs(_listed(even)), self.codes.pairs(_listed(odd)), strict=True)
        return [ptx.prmt(*pair, Uint32(select)) for pair in found for select in (0x5410, 0x7632)]


def _listed(words) -> list[Any]:
    return words if isinstance(words, list) else [words]
