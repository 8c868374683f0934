"""The portable kernel compiles for each architecture it is for, with registers for two CTAs and the MMAs it needs."""

from __future__ import annotations

import pytest

from cute_kernels.gemm.config import MMA_N
from cute_kernels.gemm.portable.compile import PortableSpec
from cute_kernels.gemm.portable.config import PortableConfig
from cute_kernels.gemm.portable.schedule import example_configs
from cute_kernels.runtime import default_cache, native
from tests import golden

pytestmark = pytest.mark.skipif(native.dsl_version() is None, reason="compiling needs nvidia-cutlass-dsl")


KERNELS = golden.worth_compiling(  # of a configuration the code is another one for each architecture
    [(config, arch) for config in example_configs() for arch in golden.PORTABLE_ARCHS],
    lambda kernel: PortableSpec(kernel[0]),
)


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, golden.Entry]]:
    """By architecture and symbol."""
    specs = {arch: [PortableSpec(config) for config, own in KERNELS if own == arch] for arch in golden.PORTABLE_ARCHS}
    return {arch: golden.measure(wanted, default_cache(), arch=arch) for arch, wanted in specs.items()}


@pytest.mark.parametrize("config, arch", KERNELS, ids=lambda part: getattr(part, "name", part))
def test_it_has_room_and_few_mmas(config: PortableConfig, arch: str, measured: dict[str, dict[str, golden.Entry]]):
    spec = PortableSpec(config)
    (kernel,) = measured[arch][spec.symbol]
    assert kernel["stack_bytes"] == kernel["spill_store_bytes"] == kernel["spill_load_bytes"] == 0
    # Two CTAs at least have room for their registers, on every one of these architectures.
    assert kernel["registers"] * config.num_threads * 2 <= 65536
    m_fragments = config.tile_m // MMA_N
    assert kernel["opcodes"]["HMMA"] == config.k_block_steps * config.n_tiles * m_fragments
    assert kernel["opcodes"]["LDSM"] == config.k_block_steps // 2 * m_fragments
