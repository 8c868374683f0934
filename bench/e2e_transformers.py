"""A model's decode step through transformers' `generate`: its own SDPA, and `accelerate` with each cache.

Random weights in Llama-3-8B's shape; every case is a run of `generate` over the same prompts, whose steps are timed
from one forward pass to the next, host work included.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.record import Recorder
from bench.report import aligned, in_markdown, number

LLAMA_3_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "eos_token_id": None,
    "pad_token_id": 0,
}
SKIPPED_STEPS = 8  # of those that are timed: the first run as usual, one is recorded


@dataclass(frozen=True)
class Case:
    """One way to generate. kv_format None: transformers' own SDPA and DynamicCache; cuda_graphs False: launched anew at
    every step."""

    name: str
    kv_format: str | None = None
    weights: str | None = None
    cuda_graphs: bool = True


CASES = (
    Case("transformers, SDPA"),
    Case("bf16 cache, eager", "bf16", cuda_graphs=False),
    Case("int4_g4 cache, eager", "int4_g4", cuda_graphs=False),
    Case("bf16 cache", "bf16"),
    Case("int4_g4 cache", "int4_g4"),
    Case("int4_g4 cache, W4", "int4_g4", "w4g128"),  # last: the weights stay quantised
)


def make_model(layers: int, device: str = "cuda") -> Any:
    """The model in bf16, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(LlamaConfig(**{**LLAMA_3_8B, "num_hidden_layers": layers})).eval()
    finally:
        torch.set_default_dtype(torch.float32)


@torch.inference_mode()
def measure(model: Any, prompt: torch.Tensor, steps: int) -> dict[str, Any]:
    """Times of the decode steps of one `generate`, in ms, and its tokens."""
    from transformers import StoppingCriteriaList

    moments: list[float] = []

    def stop(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        torch.cuda.synchronize()
        moments.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    torch.cuda.reset_peak_memory_stats()
    sequences = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=steps,
        do_sample=False,
        stopping_criteria=StoppingCriteriaList([stop]),
    )
    gaps = [1e3 * (after - before) for before, after in itertools.pairwise(moments)][SKIPPED_STEPS:]
    return {
        "step_ms": statistics.median(gaps),
        "worst_ms": max(gaps),
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9,
        "tokens": sequences[:, prompt.shape[1] :].tolist(),
    }


def run(
    recorder: Recorder,
    say: Callable[[str], None],
    *,
    batch: int = 16,
    context: int = 8192,
    steps: int = 40,
    layers: int = 32,
    cases: Iterable[Case] = CASES,
) -> None:
    """Measures the cases one after the other and records them."""
    import cute_kernels.integrations.transformers as ck

    model = make_model(layers)
    prompt = torch.randint(1, LLAMA_3_8B["vocab_size"], (batch, context), device="cuda")
    rows = []
    for case in cases:
        if case.kv_format is None:
            ck.restore(model)
            model.set_attn_implementation("sdpa")
        else:
            ck.accelerate(model, kv_format=case.kv_format, weights=case.weights, cuda_graphs=case.cuda_graphs)
        row = {**asdict(case), "batch": batch, "context": context, "layers": layers, **measure(model, prompt, steps)}
        replay = getattr(model.__dict__.get("forward"), "replays", 0)
        row["replays"], row["reason"] = replay, getattr(model.__dict__.get("forward"), "reason", None)
        rows.append(row)
        say(f"{case.name}: {row['step_ms']:.2f} ms a step, {row['memory_gb']:.1f} GB, {replay} replays")
        ck.restore(model)
        gc.collect()
        torch.cuda.empty_cache()
        recorder.set("rows", rows)


def text(data: dict[str, Any]) -> str:
    """The record as a table."""
    first = data["rows"][0]
    rows = [["", "ms a step", "tokens/s", "times", "GB", "same tokens"]]
    for row in data["rows"]:
        ours, theirs = (itertools.chain.from_iterable(one["tokens"]) for one in (row, first))
        same = statistics.fmean(one == other for one, other in zip(ours, theirs, strict=True))
        rate = 1e3 * row["batch"] / row["step_ms"]
        cells = [number(row["step_ms"]), number(rate), number(first["step_ms"] / row["step_ms"])]
        rows.append([row["name"], *cells, number(row["memory_gb"]), f"{same:.0%}"])
    return "\n".join(aligned(rows))


MARK = "<!-- bench:e2e-transformers -->"


def markdown(record: dict[str, Any]) -> str:
    """The record as a Markdown table. Raises ValueError if nothing was measured."""
    rows = record.get("rows", [])
    if not rows:
        raise ValueError("record: got no measured case, want some")
    lines = []
    for row in rows:
        rate, times = 1e3 * row["batch"] / row["step_ms"], rows[0]["step_ms"] / row["step_ms"]
        cells = [f"**{number(row['step_ms'])}**", number(rate, 0), number(times), number(row["memory_gb"])]
        lines.append([row["name"], *cells])
    first, versions = rows[0], record["environment"]["versions"]
    shape = f"{first['batch']} requests of {first['context']} tokens, Llama-3-8B's shape, {first['layers']} layers"
    graphs = 'steps are recorded as CUDA graphs where "eager" does not say otherwise'
    about = f"transformers {versions['transformers']}; {shape}, random weights; {graphs}."
    return in_markdown(record, ["`generate` with", "ms a step", "tokens/s", "times", "GB"], lines, about)
