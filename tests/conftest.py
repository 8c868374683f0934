"""Tests under tests/gpu need a CUDA GPU: there they run, elsewhere each is reported as skipped with the reason."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parent / "gpu"


@functools.cache
def reason_without_gpu() -> str | None:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "torch finds no CUDA GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        reason = reason_without_gpu() if item.get_closest_marker("gpu") else None
        if reason:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA GPU: {reason}"))
