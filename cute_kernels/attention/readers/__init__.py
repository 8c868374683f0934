"""Shared-memory tiles to MMA operands: for each cache format one reader of keys and one of values.

A key reader scores a block of 32 tokens against a warp's queries, a value reader adds up the block's rows weighted by
the probabilities; K and V may be of different formats. `int4` and `bytes` say how codes become operands, `rows` and
`swizzled` where they lie, `dense` has what needs no decoding, `common` what all share.

Every method runs in all lanes of a warp. ``g = lane // 4`` and ``t = lane % 4``; ``j`` in 0..3 numbers the row halves
of a block, so that a lane holds the tokens ``(g, j)`` as scores, and ``column`` its query heads: ``2 block + c`` for
query head ``2t + c`` of a block of 8.
"""

from typing import Any

from cute_kernels.attention.config import DecodeConfig
from cute_kernels.attention.tiles import has_headers
from cute_kernels.kv_formats import DenseFormat, Int4Format, KvFormat


def make_readers(config: DecodeConfig) -> tuple[Any, Any]:
    """The objects whose methods turn tiles of K and of V of ``config`` into scores and outputs."""
    if config.warpgroups:
        from cute_kernels.attention.readers.warpgroup import WarpgroupKeyReader, WarpgroupValueReader

        return WarpgroupKeyReader(config), WarpgroupValueReader(config)
    (make_keys, _), (_, make_values) = (_reader_classes(form) for form in config.formats)
    return make_keys(config), make_values(config)


def _reader_classes(form: KvFormat):
    """(key reader, value reader) of a format: the one place that maps formats to device code."""
    # Imported here: who reads 16-bit caches needs no decoding.
    if isinstance(form, DenseFormat):
        from cute_kernels.attention.readers.dense import DenseKeyReader, DenseValueReader

        return DenseKeyReader, DenseValueReader
    if isinstance(form, Int4Format):
        from cute_kernels.attention.readers.int4 import Int4KeyReader, Int4ValueReader

        return Int4KeyReader, Int4ValueReader
    from cute_kernels.attention.readers import bytes as byte_readers

    if has_headers(form):
        return byte_readers.RowKeyByteReader, byte_readers.RowValueByteReader
    return byte_readers.SwizzledKeyByteReader, byte_readers.SwizzledValueByteReader
