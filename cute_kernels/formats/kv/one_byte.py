"""The formats of one byte per element: INT8, FP8 E4M3 and E5M2."""

from __future__ import annotations

import torch

from cute_kernels.formats.kv.base import READERS, WRITERS, DecodeReader, ExtendReader, KvFormat
from layouts.kv.e5m2 import Fp8E5M2
from layouts.kv.format import KvRow
from layouts.kv.scaled import IN_ROW, Fp8E4M3, Int8

_DTYPES = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_EXTEND_WORDS = {"int8": "Int8Words", "e4m3": "E4m3Words", "e5m2": "E5m2Words"}
_EXTEND_SCALES = dict.fromkeys((None, "tensor", "head", "channel"), "outside") | {"token_head": "row", "group": "row"}


def _bytes(codes: str, granularity: str | None = None, num_groups: int = 1) -> KvFormat:
    """Makes a format of one byte per element: INT8 or E4M3 with a symmetric fp32 scale, or E5M2 without scale.

    granularity: that of the scale, see :data:`layouts.kv.scaled.GRANULARITIES`; None for E5M2. num_groups: number of
    scales of a row with granularity "group". If rows hold only codes, a cache may have the codes' own dtype instead of
    uint8.
    """

    def row(head_dim: int) -> KvRow:
        if granularity is None:
            return Fp8E5M2(head_dim)
        return {"int8": Int8, "e4m3": Fp8E4M3}[codes](head_dim, granularity, num_groups)

    in_row = granularity in IN_ROW
    of_rows = f"{READERS}.bytes:{'Row' if in_row else 'Swizzled'}"
    suffix = "" if granularity is None else f"_g{num_groups}" if granularity == "group" else f"_{granularity}"
    return KvFormat(
        codes + suffix,
        codes,
        8,
        (torch.uint8,) if in_row else (torch.uint8, _DTYPES[codes]),
        f"{WRITERS}:ByteRow",
        make_row=row,
        num_groups=num_groups,
        header_bytes=4 * num_groups if in_row else 0,
        given_scale=None if in_row else granularity,
        code_max={"int8": Int8.code_max, "e4m3": Fp8E4M3.code_max}.get(codes),
        decode=DecodeReader(f"{of_rows}KeyByteReader", f"{of_rows}ValueByteReader"),
        extend=ExtendReader(
            f"cute_kernels.attention.loads.rows:{_EXTEND_WORDS[codes]}",
            _EXTEND_SCALES[granularity],
            "int4" if granularity == "group" else "bytes",
        ),
        # A scale per tensor is one per head that all heads share.
        read_as=f"{codes}_tensor" if granularity == "head" else None,
    )


FORMS = (
    *(_bytes("int8", granularity) for granularity in ("tensor", "head", "channel", "token_head")),
    *(_bytes("int8", "group", groups) for groups in (2, 4, 8)),
    *(_bytes("e4m3", granularity) for granularity in ("tensor", "head", "token_head")),
    _bytes("e5m2"),
)
