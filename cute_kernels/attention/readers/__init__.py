"""Readers turn shared-memory tiles into MMA operands. Each cache format names one reader of keys and one of values.

A key reader scores a block of 32 tokens against a warp's queries. A value reader adds up the block's rows of V,
weighted by the probabilities. K and V may have different formats. `int4` and `bytes` say how codes become operands.
`rows` and `dense` say where codes lie. `dense` also reads 16-bit elements. `common` has the parts that all readers
share. `decoded` reads the rows of any format that can make fp16 numbers of its codes.

Every method runs in all lanes of a warp. ``g = lane // 4`` and ``t = lane % 4``. A block of tokens has four row halves
of 8 tokens, ``j`` = 0 to 3; a lane holds the scores of row g of each. ``column`` is an index of the lane's query heads:
column ``2 block + c`` is query head ``2t + c`` of a block of 8.
"""

from typing import Any

from cute_kernels.attention.decode_config import DecodeConfig
from cute_kernels.formats.kv import load_code


def make_readers(config: DecodeConfig) -> tuple[Any, Any]:
    """Makes (key reader, value reader) of a configuration. They compute scores from tiles of K, and outputs from tiles
    of V."""
    keys, values = (form.decode for form in config.formats)
    # `DecodeConfig.can_implement` has said so.
    assert keys is not None and values is not None and values.values is not None
    return load_code(keys.keys)(config), load_code(values.values)(config)
