"""Byte formats of quantised KV-cache rows: each is one object that describes, quantises, packs and verifies itself."""

from layouts.kv.format import Field, KvFormat
from layouts.kv.int4 import Int4Row

__all__ = ["Field", "Int4Row", "KvFormat"]
