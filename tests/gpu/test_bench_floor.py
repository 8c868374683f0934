"""The streaming floor's kernels read every word, a floor behaves like one, and timings are the GPU's alone."""

import time

import pytest
import torch

from bench.floor import SWEEP, StreamingFloor
from bench.timing import ColdL2, time_cold_in_turn


@pytest.mark.parametrize("config", SWEEP, ids=lambda config: config.name)
def test_a_changed_word_anywhere_changes_what_the_kernel_saw(config):
    """One program reads everything, so its sum is the buffer's: the guard fires for that sum and for no other."""
    pytest.importorskip("triton")
    from bench import floor_kernels

    step = config.block_bytes // 4 * config.unroll
    words = 2 * step + 16  # two whole steps and a tail
    source = torch.randint(0, 1000, (words,), dtype=torch.int32, device="cuda")
    total = int(source.sum())

    def fires(buffer: torch.Tensor) -> bool:
        sink = torch.zeros(1, dtype=torch.int32, device="cuda")
        floor_kernels.read(
            buffer,
            sink,
            block_words=config.block_bytes // 4,
            unroll=config.unroll,
            num_warps=config.num_warps,
            num_programs=1,
            never=total,
        )
        return bool(sink.item())

    assert fires(source)
    for place in (0, step - 1, step, words - 17, words - 16, words - 1):
        changed = source.clone()
        changed[place] += 1
        assert not fires(changed), f"word {place} of {words} was not read"


def test_more_bytes_take_longer_and_no_faster_than_the_memory():
    floor = StreamingFloor(ColdL2(), quick=True)
    small, large = floor(8 << 20), floor(512 << 20)
    assert 0 < small.us < large.us
    assert large.gb_per_s < 5000  # an H200's memory gives 4800 GB/s; more would mean that L2 was not cold
    assert floor(8 << 20) is small  # measured once per byte count


def test_a_call_that_takes_the_host_long_is_timed_by_what_the_gpu_does():
    word = torch.zeros(1, device="cuda")

    def slow() -> None:
        time.sleep(5e-4)
        word.add_(1)

    times = time_cold_in_turn({"slow": slow, "quick": lambda: word.add_(1)}, ColdL2())
    assert times["slow"].median_us < times["quick"].median_us + 5 < 50
