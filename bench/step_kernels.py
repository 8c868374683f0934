"""Which kernels a decoding step of vLLM consists of, and how long each takes: torch's profiler over a few steps."""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

STEPS = 4
NAME = 200  # characters of a kernel's name that are kept
PARTS = (
    ("attention", r"FlashAttnFwd|attentionkernel"),
    ("sums and norms", r"triton_red_.*rms_norm|cute_kernelsnorm"),
    ("gate", r"silu"),
    ("RoPE", r"triton_poi_fused_\d+$"),
    ("experts", r"fused_moe|moe|cute_kernelsgemmexperts|Grouped(Limb|Tile)Size"),
    ("products", r"machete|marlin|cute_kernels(linear|gemm)"),
    ("LM head and router", r"nvjet|gemm"),
    ("append", r"reshape_and_cache|kv_cachekernel"),
)
"""What kernels are for, by their names, the first that fits; all others choose tokens and keep the books."""
OTHER = "sampling, bookkeeping"


@dataclass(frozen=True)
class Launch:
    """A kernel, or a copy, on the GPU: microseconds since some moment."""

    name: str
    start: float
    end: float


def profile_step(llm: Any, prompts: list[dict[str, Any]]) -> dict[str, Any]:
    """`summary` of a step in which each prompt's request decodes; their prefixes had better be in the cache."""
    import torch
    import vllm

    engine = llm.llm_engine
    sampling = vllm.SamplingParams(max_tokens=200, min_tokens=200, ignore_eos=True, detokenize=False, temperature=0.0)
    names = [f"profiled-{index}" for index in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, prompt, sampling)
    made = dict.fromkeys(names, 0)
    while min(made.values()) < 8:
        for output in engine.step():
            made[output.request_id] = len(output.outputs[0].token_ids)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(STEPS):
            engine.step()
        torch.cuda.synchronize()
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    launches = [
        Launch(event.name[:NAME], event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return summary(launches, STEPS)


def summary(launches: Iterable[Launch], steps: int) -> dict[str, Any]:
    """Of a step: "span_us" from one to the next, "busy_us" with anything running, and "kernels", the longest first,
    each with its name, how often it runs, and its microseconds in all."""
    ordered = sorted(launches, key=lambda launch: launch.start)
    if not ordered:
        return {"span_us": 0.0, "busy_us": 0.0, "kernels": []}
    busy, until = 0.0, ordered[0].start
    totals: dict[str, tuple[int, float]] = {}
    for launch in ordered:
        busy += max(0.0, launch.end - max(launch.start, until))
        until = max(until, launch.end)
        count, time = totals.get(launch.name, (0, 0.0))
        totals[launch.name] = count + 1, time + launch.end - launch.start
    kernels = [
        {"name": name, "count": count / steps, "us": time / steps}
        for name, (count, time) in sorted(totals.items(), key=lambda entry: -entry[1][1])
    ]
    return {"span_us": (until - ordered[0].start) / steps, "busy_us": busy / steps, "kernels": kernels}


def by_part(step: dict[str, Any]) -> dict[str, float]:
    """Microseconds of a step's kernels, by what they are for, of all PARTS and OTHER."""
    found = dict.fromkeys([*(name for name, _ in PARTS), OTHER], 0.0)
    for kernel in step["kernels"]:
        part = next((name for name, pattern in PARTS if re.search(pattern, kernel["name"])), OTHER)
        found[part] += kernel["us"]
    return found
