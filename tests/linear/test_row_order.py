"""One row in act-order on its way to limbs: every warp of a CTA in NumPy."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cute_kernels.formats.weights import integers
from cute_kernels.gemm import product
from cute_kernels.gemm.choice import chosen
from cute_kernels.gemm.problem import LinearProblem
from cute_kernels.gemm.wgmma.config import WgmmaConfig
from cute_kernels.gemm.wgmma.mainloops import LIMB_GROUP, ORDERED, ResidentLimbs
from cute_kernels.gemm.wgmma.resident_rows import STEP_ROWS, ResidentRows, room_of
from cute_kernels.gemm.wgmma.resident_schedule import resident_configs, with_factors
from cute_kernels.gemm.wgmma.results import WGMMA_N_STEP, dsmem
from cute_kernels.gemm.wgmma.row_order import LINE_BYTES, PLACE_BYTES
from cute_kernels.gemm.wgmma.schedule import TileSchedule
from simulator import LANES, Int32, Uint32, Warp, running

X = 1 << 10
CONFIG = WgmmaConfig(
    integers(4), "bf16", tile_m=8, block_k=128, num_stages=4, warpgroups=4,
    mainloop=ResidentLimbs(32, loads=True), reduction=dsmem(2, 2),
)  # fmt: skip


class OrderWarp(Warp):
    """Whose conditions are numbers, and which has loads of two bytes of shared memory."""

    def load_global_if(self, condition, address, offset: int, num_words: int = 4, *, constant: bool = True):
        return super().load_global_if(np.asarray(condition) != 0, address, offset, num_words, constant=constant)

    def load_shared_part(self, address, offset: int, num_bytes: int):
        assert num_bytes == 2
        return Uint32(self.shared_memory.view(np.uint16)[(np.asarray(address) + offset) // 2])


def limb_lines(k_blocks: int) -> np.ndarray:
    """Addresses of the lines that limbs of the rows of a step are stored to."""
    rows = [half * WGMMA_N_STEP + row for half in range(2) for row in range(STEP_ROWS)]
    starts = [X + block * PLACE_BYTES + row * LINE_BYTES for block in range(k_blocks) for row in rows]
    return (np.array(starts)[:, None] + np.arange(LINE_BYTES)).reshape(-1)


@pytest.mark.parametrize("warpgroups", [2, 4])
@pytest.mark.parametrize(
    ("k", "begin", "end"), [(8192, 0, 32), (8192, 32, 64), (4096, 16, 32), (128, 0, 1), (640, 0, 3), (640, 3, 5)]
)
def test_inputs_are_those_of_the_order(k: int, begin: int, end: int, warpgroups: int):
    """Limbs of other warps may be stored before: they lie elsewhere."""
    config = with_factors(replace(CONFIG, warpgroups=warpgroups), ORDERED)
    assert config is not None
    generator = torch.Generator().manual_seed(k + begin)
    x, order = torch.randn(1, k, generator=generator).bfloat16(), torch.randperm(k, generator=generator).int()
    memory = np.concatenate([each.view(torch.uint8).numpy().reshape(-1) for each in (x, order)])
    warp = OrderWarp(np.full(1 << 17, 0xFF, np.uint8), memory)
    subject = ResidentRows(room_of(config))
    source: Any = SimpleNamespace(address=0, rows=1, row_pieces=k // 8, factors=SimpleNamespace(address=2 * k))
    place = SimpleNamespace(x_address=X)
    wanted = x[0, order.long()].view(torch.int16).numpy().view(np.uint16)
    seen: set[int] = set()
    with running(warp):
        for number in range(config.consumer_warps):
            subject.order.bring(source, place, number, Int32(LANES))
        written = np.flatnonzero(warp.shared_memory != 0xFF)
        assert written.max() < X + config.mainloop.x_bytes(config)
        warp.shared_memory[limb_lines(config.mainloop.k_blocks)] = 0xAA
        bits = int(np.asarray(subject.step_bits(Int32(np.full(1, end - begin))))[0])
        for step in range(1 << bits):
            row, k_block = (np.asarray(one) for one in subject.place(bits, step, Int32(LANES)))
            numbers = subject.load_order(source, begin, bits, step, Int32(LANES))
            words = np.stack([np.asarray(word) for word in subject.order.gather(place, numbers)], axis=-1)
            for lane in np.flatnonzero((row == 0) & (begin + k_block < end)):
                first = (begin + k_block[lane]) * LIMB_GROUP
                blocks = [lane % 4 + int(subject.half(np.int32(lane), half)) * 4 for half in range(2)]
                inputs = np.concatenate([first + block * 16 + np.arange(16) for block in blocks])
                assert np.array_equal(words[lane].view(np.uint16), wanted[inputs])
                seen |= set(inputs.tolist())
    assert seen == set(range(begin * LIMB_GROUP, end * LIMB_GROUP))


def test_one_row_whose_limbs_warps_load_is_put_in_order():
    ordered = with_factors(CONFIG, ORDERED)
    assert ordered is not None and ordered.smem_bytes == CONFIG.smem_bytes and ordered.name != CONFIG.name
    assert with_factors(replace(CONFIG, mainloop=ResidentLimbs(32)), ORDERED) is None
    assert "loaded by warps" in (replace(CONFIG, mainloop=ResidentLimbs(32, factors=ORDERED)).can_implement() or "")
    large = replace(CONFIG, tile_m=16, warpgroups=2, n_tiles=2, reduction=dsmem(2))
    assert "16 rows are not ordered" in (
        replace(large, mainloop=ResidentLimbs(16, loads=True, factors=ORDERED)).can_implement() or ""
    )
    wide = replace(ordered, reduction=dsmem(3, 2))
    assert "has room for 2 times its part" in (wide.can_implement() or "")
    schedule = product.factored(TileSchedule(CONFIG, 64, 1, 64, 2, 128), ORDERED)
    assert schedule is not None and schedule.config == ordered
    assert product.factored(TileSchedule(CONFIG, 64, 1, 65, 3, 128), ORDERED) is None


@pytest.mark.parametrize(("n", "k"), [(8192, 8192), (4096, 4096), (6144, 4096), (28672, 4096), (8192, 3584)])
def test_products_of_one_row_have_a_kernel_that_takes_the_order(n: int, k: int):
    """And room for the row: each CTA has half of K, and two k blocks of x lie in the place of one of limbs."""
    schedule = product.factored(chosen(LinearProblem(1, n, k, k, integers(4), "bf16")), ORDERED)
    assert schedule is not None
    assert -(-k // (2 * LIMB_GROUP)) <= schedule.split_k_blocks <= schedule.config.mainloop.k_blocks


def test_every_shape_of_one_row_but_that_of_long_rows_can_be_ordered():
    """Of those a launch before is faster: as measured, 0.5 us more than plain for 0.9."""
    for k, most in ((4096, 32), (14336, 64)):
        found = [
            one for one in resident_configs(LinearProblem(1, 4096, k, k, integers(4), "bf16")) if one.mainloop.loads
        ]
        assert max(one.mainloop.k_blocks for one in found) == most
        for one in found:
            assert (with_factors(one, ORDERED) is None) == (one.mainloop.k_blocks > 32)
