"""The optimisation ladder: what made INT4 decode attention fast, each step switched off again where it is a switch.

The ten steps are those that PyTorch's CUDA INT4 GQA kernel went through ("INT4 Decoding GQA CUDA Optimizations for
LLM Inference", 2024). Each is mapped to how this kernel has it: as a knob of `DecodeConfig` or of the call, then it is
measured both ways; or by construction, then there is nothing to switch off and the text says where it comes from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bench import entry
from bench.timing import Protocol, time_cold
from bench.workloads import DecodeInputs


@dataclass(frozen=True)
class Rung:
    """One optimisation. `off_config` and `off_call` undo it (fields of DecodeConfig; arguments of the call)."""

    number: int | None
    title: str
    how: str
    off_config: dict[str, Any] = field(default_factory=dict)
    off_call: dict[str, Any] = field(default_factory=dict)

    @property
    def switchable(self) -> bool:
        return bool(self.off_config or self.off_call)

    @property
    def off(self) -> str:
        """The switch, in words."""
        return ", ".join(f"{key}={value}" for key, value in (self.off_config | self.off_call).items())


# `number` is the step's number in the original list; None: not in it.
LADDER = (
    Rung(
        1,
        "Unroll K loads",
        "bytes in flight come from a ring of tiles filled by asynchronous copies, all stages but one outstanding",
        off_config={"num_stages": 2},
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
        "V travels in the same ring as K, so it is in flight while K is scored",
        off_config={"num_stages": 2, "ctas_per_sm": 1},
    ),
    Rung(
        6,
        "Group-wise INT4 with vector loads",
        "whole tiles are bulk copies whatever the row's width; off: asynchronous copies of 4 bytes per thread",
        off_config={"copy": "word"},
    ),
    Rung(
        7,
        "max(QK) from the fragment",
        "scores never leave the accumulator registers",
    ),
    Rung(
        8,
        "P written to its fragment",
        "the score accumulator's layout is the operand layout of P V, so P is its own fragment",
    ),
    Rung(
        9,
        "Swizzle P in shared memory",
        "P is never in shared memory",
    ),
    Rung(
        10,
        "Pad shared memory for dequantisation",
        "packed rows are read where the copy put them; 17- and 20-word rows fall on distinct banks (asserted in tests)",
    ),
    Rung(
        None,
        "Split the sequence",
        "as many splits as fill every SM, one launch, the last thread block of a row combines",
        off_call={"num_splits": 1},
    ),
    Rung(
        None,
        "Several thread blocks per SM",
        "one block's start, merge and end overlap another's loads",
        off_config={"ctas_per_sm": 1},
    ),
)


def measure_ladder(inputs: DecodeInputs, flush: Callable[[], None], protocol: Protocol) -> list[dict[str, Any]]:
    """Every rung for these inputs: microseconds with everything on, and with that rung off."""
    base = entry.config_for(inputs)
    timed: dict[tuple[str, int | None], float] = {}

    def time_of(config: Any, call: dict[str, Any]) -> float:
        key = (str(config), call.get("num_splits"))
        if key not in timed:
            timed[key] = time_cold(entry.bind_config(config, inputs, **call), flush, protocol).median_us
        return timed[key]

    on_us = time_of(base, {})
    return [_measure_rung(rung, base, on_us, time_of) for rung in LADDER]


def _measure_rung(
    rung: Rung, base: Any, on_us: float, time_of: Callable[[Any, dict[str, Any]], float]
) -> dict[str, Any]:
    result: dict[str, Any] = {"number": rung.number, "title": rung.title, "how": rung.how}
    if not rung.switchable:
        return result
    result |= {"off": rung.off, "on_us": round(on_us, 3)}
    try:
        config = dataclasses.replace(base, **rung.off_config)
        result["off_us"] = round(time_of(config, rung.off_call), 3)
    except Exception as error:
        result["why_not"] = f"{type(error).__name__}: {error}"
    return result
