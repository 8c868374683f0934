"""KV cache formats: the contents of a row of the cache, and which code reads and writes it. A format is one object.

A row is one token of one KV head: its bytes are described, packed and proved by :mod:`layouts.kv`. Scales lie in the
row, beside the cache (given to every call), or nowhere. Families ask a format what it can do and never which one it
is; `register` adds one from any file, as docs/add_kv_format.md shows. Those that ship have a module each here, named
below: a kernel's key has the modules of its own formats.

Device code is named as "module:attribute" and imported when a kernel is compiled: who loads kernels from a cache never
imports the compiler.
"""

from cute_kernels.formats.kv import channel_blocks, dense, int4, one_byte
from cute_kernels.formats.kv.base import (
    GIVEN_SCALES,
    GROUP_UNIT,
    HEAD_DIMS,
    DecodeReader,
    ExtendReader,
    KvFormat,
    load_code,
)
from cute_kernels.formats.kv.by_layer import LayerFormats, check_layers, formats_of_layer, told_formats
from cute_kernels.formats.kv.channel_blocks import CHANNEL_BLOCKS, WAITING
from cute_kernels.formats.kv.registry import (
    ALIASES,
    FORMATS,
    code_of,
    format_of,
    format_pair,
    modules_of,
    names,
    register,
    ship,
)

for _module in (dense, int4, one_byte, channel_blocks):
    ship(_module)

__all__ = [
    "ALIASES",
    "CHANNEL_BLOCKS",
    "FORMATS",
    "GIVEN_SCALES",
    "GROUP_UNIT",
    "HEAD_DIMS",
    "WAITING",
    "DecodeReader",
    "ExtendReader",
    "KvFormat",
    "LayerFormats",
    "check_layers",
    "code_of",
    "format_of",
    "format_pair",
    "formats_of_layer",
    "load_code",
    "modules_of",
    "names",
    "register",
    "told_formats",
]
