"""The optimisation ladder: what made INT4 decode attention fast, each step switched off again where it is a switch.

The ten steps are those that PyTorch's CUDA INT4 GQA kernel went through ("INT4 Decoding GQA CUDA Optimizations for
LLM Inference", 2024). Each is mapped to how this kernel has it: as a knob of `DecodeConfig` or of the launch, then it
is measured both ways; or by construction, then the text says where it comes from, and what can be counted is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.entry import Entry
from bench.timing import Protocol, time_cold
from bench.workloads import DecodeInputs
from cute_kernels.attention.decode_config import DecodeConfig, tiles_of
from cute_kernels.attention.decode_schedule import DecodeSchedule
from cute_kernels.runtime.composed import changed
from layouts.banks import wavefronts
from layouts.kv.tile import WORD_BYTES, RowTile

LAUNCH_FIELDS = ("num_splits",)


@dataclass(frozen=True)
class Rung:
    """One optimisation.

    `off` undoes it: fields of DecodeConfig, and num_splits of the launch. `count` says of a
    configuration what the step does to it, where that is a number and not a time.
    """

    number: int | None
    title: str
    how: str
    off: dict[str, Any] = field(default_factory=dict)
    count: Callable[[DecodeConfig], str] | None = None

    @property
    def switch(self) -> str:
        """The switch, in words."""
        return ", ".join(f"{key}={value}" for key, value in self.off.items())

    def applied(self, schedule: DecodeSchedule) -> tuple[DecodeConfig, dict[str, int]]:
        """Configuration and launch with this step off."""
        config = {key: value for key, value in self.off.items() if key not in LAUNCH_FIELDS}
        launch = {"num_splits": schedule.num_splits}
        launch |= {key: value for key, value in self.off.items() if key in LAUNCH_FIELDS}
        return changed(schedule.config, **config), launch


def bank_counts(config: DecodeConfig) -> str:
    """Wavefronts of the reader's 32-bit loads: as the tile lays rows out, and with rows in token order, unpadded."""
    keys, values = tiles_of(config)
    assert isinstance(keys, RowTile) and isinstance(values, RowTile)

    def most(accesses: list[list[int]]) -> int:
        return max(wavefronts([WORD_BYTES * word for word in words]) for words in accesses)

    k = most([keys.k_words(j, unit) for j in range(4) for unit in range(keys.k_units)])
    v = most([values.v_words(j, odd, unit) for j in range(4) for odd in range(2) for unit in range(values.v_units)])
    plain_k = most([[lane // 4 * keys.token_words + keys.k_word(lane % 4) for lane in range(32)]])
    plain_v = most([[lane % 4 * 2 * values.token_words + values.v_word(lane // 4) for lane in range(32)]])
    padding = keys.padding_words
    return (
        f"wavefronts per load of K {k}, of V {v}, with {padding} words between copies; "
        f"rows in token order without padding: K {plain_k}, V {plain_v}"
    )


# `number` is the step's number in the original list; None: not in it.
LADDER = (
    Rung(
        1,
        "Unroll K loads",
        "bytes in flight come from a ring of tiles filled by asynchronous copies; off: one tile in flight per SM",
        off={"num_stages": 2, "ctas_per_sm": 1},
    ),
    Rung(
        2,
        "Cheaper casting of P to 16 bits",
        "P is converted two values at a time in registers, straight from the score accumulators",
    ),
    Rung(
        3,
        "No local memory for max(QK)",
        "running maxima are registers; the compiled kernel's stack is asserted to be empty",
    ),
    Rung(
        4,
        "No local memory for the row sum",
        "row sums are registers, reduced across threads once, after the last tile",
    ),
    Rung(
        5,
        "Prefetch V",
        "V travels with K in the same stage of the ring, so it is in flight long before K is scored",
    ),
    Rung(
        6,
        "Group-wise INT4 with vector loads",
        "whole tiles are bulk copies whatever the row's width; off: asynchronous copies of 4 bytes by one warp",
        off={"k_copy": "word", "v_copy": "word"},
    ),
    Rung(
        7,
        "max(QK) from the fragment",
        "scores never leave the accumulator registers",
    ),
    Rung(
        8,
        "P written to its fragment",
        "the score accumulator's layout is, after one 8x8 transpose in registers, the operand layout of P V",
    ),
    Rung(
        9,
        "Swizzle P in shared memory",
        "P is never in shared memory",
    ),
    Rung(
        10,
        "Pad shared memory for dequantisation",
        "packed rows are read where the copy put them; token order and padding make every load one wavefront",
        count=bank_counts,
    ),
    Rung(
        None,
        "Split the sequence",
        "as many splits as fill every SM, in the same launch",
        off={"num_splits": 1},
    ),
    Rung(
        None,
        "First tile before the length",
        "the first tile is asked for while the request's length is still on its way; off: length, then tile",
        off={"early_tiles": 0},
    ),
    Rung(
        None,
        "Several thread blocks per SM",
        "one block's start, merge and end overlap another's loads; off: one block with the longer ring",
        off={"ctas_per_sm": 1, "num_stages": 3, "num_slices": 8, "blocks_per_slice": 1},
    ),
)


def measure_ladder(
    inputs: DecodeInputs,
    entry: Entry,
    flush: Callable[[], None],
    protocol: Protocol,
    check: Callable[[torch.Tensor], object],
    ladder: tuple[Rung, ...] = LADDER,
) -> list[dict[str, Any]]:
    """Every rung for these inputs: microseconds with everything on, and with that rung off.

    `check` raises if an output is wrong; nothing is timed before it has passed.
    """
    schedule = entry.schedule_for(inputs)
    timed: dict[str, float] = {}

    def time_of(config: DecodeConfig, launch: dict[str, int]) -> float:
        key = f"{config} {launch}"
        if key not in timed:
            call = entry.bind_config(config, inputs, **launch)
            check(call())
            timed[key] = time_cold(call, flush, protocol).median_us
        return timed[key]

    return [_measure_rung(rung, schedule, time_of) for rung in ladder]


def _measure_rung(
    rung: Rung, schedule: DecodeSchedule, time_of: Callable[[DecodeConfig, dict[str, int]], float]
) -> dict[str, Any]:
    result: dict[str, Any] = {"number": rung.number, "title": rung.title, "how": rung.how}
    if rung.count is not None:
        result["counted"] = rung.count(schedule.config)
    if not rung.off:
        return result
    result["off"] = rung.switch
    on = schedule.config, {"num_splits": schedule.num_splits}
    off = rung.applied(schedule)
    if on == off:
        return result | {"why_not": "the schedule runs this shape so anyway"}
    try:
        result["on_us"] = round(time_of(*on), 3)
        result["off_us"] = round(time_of(*off), 3)
    except Exception as error:  # one configuration failing leaves the other steps
        result["why_not"] = f"{type(error).__name__}: {error}"
    return result
