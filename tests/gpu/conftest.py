"""Kernels of the GPU tests, compiled side by side before the first test that needs them."""

import pytest


@pytest.fixture(scope="session")
def kernels() -> None:
    """Every kernel of `layout_table`, in memory: from the cache, or compiled in parallel now."""
    from cute_kernels.runtime import arch_of, load_many
    from tests.gpu.layout_table import specs

    load_many(specs(), arch_of())
