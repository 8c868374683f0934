"""New results are what torch would make them."""

from __future__ import annotations

import pytest
import torch

from cute_kernels.runtime import memory


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (2, 1, 4, 1), (0, 4), (5, 0, 2)], ids=str)
def test_a_blank_is_contiguous(shape):
    want = torch.empty(shape, dtype=torch.float16)
    assert memory.blank(torch.Size(shape), torch.float16) == (shape, want.stride(), torch.float16)


@pytest.mark.parametrize(
    ("dtype", "view"),
    [
        (torch.bfloat16, None),
        (torch.uint8, None),
        (torch.int8, None),  # native checks take signed bytes for unsigned ones
        (torch.float8_e4m3fn, torch.uint8),
        (torch.float8_e5m2, torch.uint8),
    ],
)
def test_codes_are_bytes_to_kernels(dtype, view):
    assert memory.byte_view(torch.empty(4, dtype=dtype)) is view


def test_the_allocator_is_inductors_where_torch_has_it():
    guards = torch._C._dynamo.guards  # pyright: ignore[reportAttributeAccessIssue]
    assert memory.empty_strided is guards._empty_strided_cuda
    assert guards._empty_strided_cpu((2, 3), (3, 1), torch.int32).stride() == (3, 1)
