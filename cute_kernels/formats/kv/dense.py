"""The formats of plain 16-bit elements, bf16 and fp16."""

from __future__ import annotations

import torch

from cute_kernels.formats.kv.base import READERS, WRITERS, DecodeReader, KvFormat


def _dense(name: str, dtype: torch.dtype) -> KvFormat:
    reader = DecodeReader(f"{READERS}.dense:DenseKeyReader", f"{READERS}.dense:DenseValueReader", "dense")
    return KvFormat(name, name, 16, (dtype,), f"{WRITERS}:DenseRow", decode=reader)


FORMS = (_dense("bf16", torch.bfloat16), _dense("fp16", torch.float16))
