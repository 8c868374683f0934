"""What an argument may be by mistake: by its kind, everything that a caller gets wrong sooner or later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

OTHER_DTYPES = (
    torch.float64, torch.int64, torch.bool, torch.float32, torch.int8, torch.int32, torch.complex64, torch.float16
)  # fmt: skip
NESTED_LAYOUTS = (torch.strided, torch.jagged)


def wrong_kinds(value: Any) -> Iterator[Any]:
    """What can be no such argument at all."""
    yield object()
    if not isinstance(value, str):
        yield "nonsense"
    if isinstance(value, torch.Tensor):
        yield 7
        yield value.tolist()
        if value.dim():
            yield value.to_sparse()
            yield from (torch.nested.nested_tensor([value, value], layout=layout) for layout in NESTED_LAYOUTS)


def mistakes(value: Any) -> Iterator[Any]:
    """What may fit or not: the call either takes it or says what is wrong."""
    yield None
    yield from wrong_kinds(value)
    if isinstance(value, torch.Tensor):
        yield from _of_tensor(value)
    elif isinstance(value, bool):
        yield from (1, torch.tensor(True), float("nan"))
    elif isinstance(value, int):
        yield from (-1, 0, 1.5, True, float("nan"), torch.tensor(3), float(value), [value])
    elif isinstance(value, float):
        yield from (-1.0, 0.0, float("nan"), float("inf"), True, torch.tensor(0.5), 1, [value])
    elif isinstance(value, str):
        yield from (3, "", value.encode(), [value], (value,) * 3, (value, "x"))
    elif isinstance(value, torch.dtype):
        yield from (torch.float32, torch.int8, torch.float64, "bf16", int)
    elif isinstance(value, (tuple, list)):
        kind, items = type(value), list(value)
        yield from (3, kind(), kind([*items, items[0]]), kind(items[:-1]))
        yield from (kind([wrong, *items[1:]]) for wrong in (object(), "x", None))
    elif isinstance(value, dict):
        yield {}
        yield from ({name: tensor for name, tensor in value.items() if name != without} for without in value)
        yield dict.fromkeys(value)
    else:
        yield 3


def _of_tensor(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from (tensor.to(dtype) for dtype in OTHER_DTYPES if dtype != tensor.dtype)
    yield tensor.to("meta")
    yield from (tensor[None], tensor[..., None])
    if tensor.dim():
        yield from (tensor[0], tensor.flatten()[0], tensor.flatten()[:0])
        yield torch.stack((tensor, tensor), dim=-1)[..., 0]  # gaps between the elements
    for dim, size in enumerate(tensor.shape):
        yield torch.cat((tensor, tensor.narrow(dim, 0, 1)), dim)
        yield from (tensor.narrow(dim, 0, length).contiguous() for length in (size - 1, 0))
    if tensor.dim() > 1:
        yield tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
        yield torch.cat((tensor, tensor), 1)[:, : tensor.shape[1]]
    if tensor.is_floating_point():
        yield from (torch.full_like(tensor, extreme) for extreme in (torch.nan, torch.inf))
    elif tensor.dtype in (torch.int32, torch.int64):
        yield from (-tensor - 5, torch.full_like(tensor, 2**31 - 1))
