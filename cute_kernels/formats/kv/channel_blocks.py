"""The format of keys in blocks: the tokens of a block share scales, one for each column."""

from __future__ import annotations

import torch

from cute_kernels.formats.kv.base import READERS, WRITERS, DecodeReader, KvFormat
from layouts.kv.channel_blocks import BLOCK_TOKENS, ChannelBlocks

CHANNEL_BLOCKS = KvFormat(
    "int4_channel32",
    "u4",
    4,
    (torch.uint8,),
    "cute_kernels.kv_cache.channel_blocks_kernel:ColumnPair",
    make_row=ChannelBlocks,
    header_bytes=4,
    decode=DecodeReader(f"{READERS}.channel_blocks:ChannelBlockKeyReader", None, "int4"),
    block_tokens=BLOCK_TOKENS,
)
"""KIVI's format of keys. It is not in `FORMATS`, whose formats are for K and V, and whose rows are written token by
token."""

WAITING = KvFormat("fp16_waiting", "fp16", 16, (torch.float16,), f"{WRITERS}:WaitingRow", by_token=True)
"""The format in which `append_kv` hands keys to the kernel that fills blocks: [tokens, 1, num_kv_heads, head_dim]."""

BESIDE = (CHANNEL_BLOCKS, WAITING)
