"""Byte formats of quantised KV-cache rows: each is one object that describes, quantises, packs and verifies itself."""

from layouts.kv.e5m2 import Fp8E5M2
from layouts.kv.format import Field, KvRow
from layouts.kv.int4 import Int4Row
from layouts.kv.mla import MlaDense, MlaFp8, MlaModel1
from layouts.kv.scaled import Fp8E4M3, Int8
from layouts.kv.zero_point import ZeroPointRow

__all__ = [
    "Field",
    "Fp8E4M3",
    "Fp8E5M2",
    "Int4Row",
    "Int8",
    "KvRow",
    "MlaDense",
    "MlaFp8",
    "MlaModel1",
    "ZeroPointRow",
]
