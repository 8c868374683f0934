"""KV cache formats. A format is one object. It describes the bytes of a cache row, and names the code that reads and
writes rows.

A row is one token of one KV head. :mod:`layouts.kv` describes and packs its bytes, and proves the layout. Scales lie in
the row, or beside the cache as an argument of every call; some formats have none. Kernels ask a format for its
properties and never compare names, so `register` can add a format from any file: see docs/add_kv_format.md. Each kind
of shipped format has its own module here, since a kernel's key has the modules of its own formats only.

Formats name device code as "module:attribute". Such code is imported only when a kernel is compiled. So a process that
loads kernels from a cache never imports the compiler.
"""

from cute_kernels.formats.code import load_code
from cute_kernels.formats.kv import channel_blocks, dense, int4, one_byte
from cute_kernels.formats.kv.base import GIVEN_SCALES, GROUP_UNIT, HEAD_DIMS, DecodeReader, ExtendReader, KvFormat
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
