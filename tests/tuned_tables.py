"""Tuned tables for tests: none at first, and choices made up for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cute_kernels.gemm.tuned import Candidate
from cute_kernels.runtime import tuned as tables
from cute_kernels.runtime.tuned import Choice, TunedTable

GPU = "NVIDIA H200"


@contextmanager
def no_tables(patch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """As on a machine that has none, whose own and shipped ones would lie in ``folder``."""
    patch.setenv("CUTE_KERNELS_CACHE_DIR", str(folder / "cache"))
    patch.delenv(tables.VARIABLE, raising=False)
    patch.setattr(tables, "SHIPPED", folder / "shipped")
    tables.tables.cache_clear()
    yield
    tables.tables.cache_clear()


def choice(candidate: Candidate[Any], **changes: Any) -> Choice:
    kernel, config, cut = candidate.name
    return Choice(**{"kernel": kernel, "config": config, "cut": cut, "us": 1.0, "model_us": 2.0, **changes})


def table(entries: dict[str, Choice], **changes: Any) -> TunedTable:
    return TunedTable(**{"gpu": GPU, "dsl": None, "entries": entries, **changes})
