"""The reader of a configuration: the one place that maps a cache format to its device code."""

from cute_kernels.attention.config import DecodeConfig
from cute_kernels.attention.reader_int4 import Int4Reader
from cute_kernels.kv_formats import Int4Format


def make_reader(config: DecodeConfig):
    """The object whose methods turn shared-memory tiles of ``config.kv_format`` into MMA operands."""
    if isinstance(config.format, Int4Format):
        return Int4Reader(config)
    from cute_kernels.attention.reader_dense import DenseReader

    return DenseReader(config)
