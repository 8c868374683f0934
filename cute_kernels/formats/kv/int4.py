"""The INT4 formats, with a scale and a shift for each group of columns."""

from __future__ import annotations

import torch

from cute_kernels.formats.kv.base import READERS, WRITERS, DecodeReader, ExtendReader, KvFormat
from layouts.kv.int4 import Int4Row

INT4_UNIT = 2.0  # of extend's tiles, which hold half of the values: fp16 has room for all that quantising makes


def _int4(num_groups: int) -> KvFormat:
    """Makes the format of INT4 rows with ``num_groups`` (fp16 scale, fp16 shift) pairs in front
    (:class:`layouts.kv.int4.Int4Row`)."""
    keys, values = f"{READERS}.int4:Int4KeyReader", f"{READERS}.int4:Int4ValueReader"
    return KvFormat(
        f"int4_g{num_groups}",
        "u4",
        4,
        (torch.uint8,),
        f"{WRITERS}:NibbleRow",
        make_row=lambda head_dim: Int4Row(head_dim, num_groups),
        num_groups=num_groups,
        header_bytes=4 * num_groups,
        decode=DecodeReader(keys, values, "int4"),
        extend=ExtendReader("cute_kernels.attention.loads.rows:Int4Words", "groups", "int4", INT4_UNIT),
    )


FORMS = tuple(_int4(groups) for groups in (1, 2, 4, 8))
