"""Byte formats of quantised KV-cache rows: each one object that describes, quantises, packs, unpacks, verifies itself."""

from layouts.kv.format import Field, KvFormat
from layouts.kv.int4 import Int4Row

__all__ = ["Field", "Int4Row", "KvFormat"]
