"""A model's decode step through transformers' `generate`: its own caches, and `accelerate` with each of ours.

Random weights in Llama-3-8B's shape; every case is a run of `generate` over the same prompts, whose steps are timed
from one choice of tokens to the next, host work included. `generate` waits for the device once a step; nothing else is
waited for. Of a recorded step two parts are timed besides: the graph alone, replayed without a host between, and the
host's time in ``forward``, which is all that `accelerate` adds to a step: of steps begun ahead, and of sampled ones,
which run in order. Where a step was begun before it was asked for, ``forward`` waits for its inputs, to compare them.
That wait is no work, and comes before what is timed; the comparison is.

What a step could take is measured in the same run: the bare loop over the library in a CUDA graph (`bench.steps`), the
output layer, and transformers' own loop around a model that does nothing.
"""

from __future__ import annotations

import functools
import gc
import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch

from bench.bars import TRANSFORMERS_HOST
from bench.kernels import make_ready
from bench.record import Recorder
from bench.report import aligned, in_markdown, number
from bench.steps import MODELS, Shape, Step, StepCase, specs
from bench.timing import capture
from cute_kernels import QuantizedLinear

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
SAMPLED_CONTEXT = 128  # tokens of a prompt whose steps are sampled: what the host does does not depend on it


@dataclass(frozen=True)
class Case:
    """One way to generate. kv_format None: transformers' own SDPA, with its own cache; cuda_graphs False: launched anew
    at every step."""

    name: str
    kv_format: str | tuple[str, str] | None = None
    weights: str | None = None
    cuda_graphs: bool = True
    fuse_blocks: bool = True
    cache: str | None = None  # transformers' name of the cache that `generate` is asked for
    output_layer: str | None = None


CASES = (
    Case("transformers, SDPA"),
    Case("transformers, static cache, compiled", cache="static"),
    Case("bf16 cache, eager", "bf16", cuda_graphs=False),
    Case("int4_g4 cache, eager", "int4_g4", cuda_graphs=False),
    Case("bf16 cache", "bf16"),
    Case("int4_g4 cache", "int4_g4"),
    Case("int4_g4 cache, W4, blocks as they are", "int4_g4", "w4g128", fuse_blocks=False),  # weights stay quantised
    Case("int4_g4 cache, W4", "int4_g4", "w4g128"),
    Case("bf16 cache, W4", "bf16", "w4g128"),
    Case("e4m3_token_head cache, W4", "e4m3_token_head", "w4g128"),
    Case("int8_token_head + int4_g4 cache, W4", ("int8_token_head", "int4_g4"), "w4g128"),
    Case("int4_g4 cache, W4, output layer W8", "int4_g4", "w4g128", output_layer="w8g128"),
)
REPLAYS = 20
BATCHES, BATCHES_CONTEXT = (1, 2, 4, 8, 16, 32, 64), 2048
BATCHES_ROUNDS = 3  # in which the two caches take turns
BATCHES_CASES = (Case("bf16 cache, W4", "bf16", "w4g128"), Case("int4_g4 cache, W4", "int4_g4", "w4g128"))


def chosen(only: str, batches: Iterable[int] | None = None) -> dict[str, Any]:
    """What `run` is given for the cases in whose names ``only``, a regular expression, is found.

    Other batches are measured where they are asked for, or where all cases are.
    """
    cases = [case for case in CASES if re.search(only, case.name)]
    return {"cases": cases, "batches": tuple(batches or (() if only else BATCHES))}


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
def measure(model: Any, prompt: torch.Tensor, steps: int, cache: Any = None, do_sample: bool = False) -> dict[str, Any]:
    """Times of the decode steps of one `generate`, in ms, and its tokens. cache: transformers' name of one, or one that
    holds tokens of the prompt; None: what `generate` makes."""
    from transformers import StoppingCriteriaList

    moments: list[float] = []
    host_s: list[float] = []
    never = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)

    def stop(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        moments.append(time.perf_counter())
        return never

    name = "cache_implementation" if isinstance(cache, str) else "past_key_values"
    given = {} if cache is None else {name: cache}
    torch.cuda.reset_peak_memory_stats()
    with _timed(model, host_s):
        outputs = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=steps,
            do_sample=do_sample,
            return_dict_in_generate=True,
            stopping_criteria=StoppingCriteriaList([stop]),
            **given,
        )
    sequences = outputs.sequences
    gaps = [1e3 * (after - before) for before, after in itertools.pairwise(moments)][SKIPPED_STEPS:]
    return {
        "step_ms": statistics.median(gaps),
        "worst_ms": max(gaps),
        "graph_ms": _graph_ms(outputs.past_key_values),
        "host_us": 1e6 * statistics.median(host_s[SKIPPED_STEPS:]) if host_s else None,
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9,
        "tokens": sequences[:, prompt.shape[1] :].tolist(),
    }


@contextmanager
def _timed(model: Any, host_s: list[float]) -> Iterator[None]:
    """Within it an accelerated model's ``forward`` notes how long the host worked in it: not while it waited for its
    inputs."""
    forward = model.__dict__.get("forward")
    if forward is None:
        yield
        return

    @functools.wraps(forward)
    def timed(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.current_stream().synchronize()  # the inputs are there
        begin = time.perf_counter()
        outputs = forward(*args, **kwargs)
        host_s.append(time.perf_counter() - begin)
        return outputs

    with mock.patch.object(model, "forward", timed):
        yield


@torch.no_grad()
def measure_parts(model: Any, prompt: torch.Tensor, steps: int, kv_format: Any) -> dict[str, float]:
    """Milliseconds of what a step of W4 layers cannot do without; the model is its own, not accelerated."""
    batch, context = prompt.shape
    bare = Step(MODELS["llama3-8b"], StepCase("w4", kv_format), Shape(batch, context), layers=len(model.model.layers))
    hidden = torch.randn(batch, 1, model.config.hidden_size, device=prompt.device, dtype=model.dtype)
    found = {"bare_ms": _replays_ms(capture(bare)), "lm_head_ms": _replays_ms(capture(lambda: model.lm_head(hidden)))}
    return found | {"loop_ms": loop_ms(model, prompt, steps)}


def loop_ms(model: Any, prompt: torch.Tensor, steps: int) -> float:
    """A step of `generate` around a model that does nothing: its ``forward`` returns the same logits each time."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    shape = (len(prompt), 1, model.config.vocab_size)
    logits = torch.randn(shape, device=prompt.device, dtype=model.dtype)

    @functools.wraps(model.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)  # type: ignore[arg-type]

    model.forward = forward
    try:
        return measure(model, prompt, steps)["step_ms"]
    finally:
        del model.forward


def _replays_ms(replay: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    begin.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPLAYS


def _graph_ms(cache: Any) -> float | None:
    """Time of a recorded step alone; None if there is none. The cache's tokens are not to be used any more."""
    columns: Any = getattr(cache, "columns", None)
    steps = [step for steps in getattr(columns, "graphs", {}).values() for step in steps.values() if step is not None]
    if not steps or columns.capacity - columns.count <= REPLAYS + 1:
        return None
    return _replays_ms(steps[0].recorded.replay)


def run(
    recorder: Recorder,
    say: Callable[[str], None],
    *,
    batch: int = 16,
    context: int = 8192,
    steps: int = 40,
    layers: int = 32,
    cases: Iterable[Case] = CASES,
    batches: Iterable[int] = BATCHES,
) -> None:
    """Measures the cases one after the other and records them; then INT4 and BF16 caches at other batches."""
    batches = tuple(batches)
    of_layers = [specs(MODELS["llama3-8b"], StepCase("w4", "int4_g4"), b) for b in (batch, *batches)]
    make_ready(itertools.chain(*of_layers), say)
    model = make_model(layers)
    prompt = _prompt(batch, context)
    rows: list[dict[str, Any]] = []
    for case in cases:
        with _accelerated(model, case):
            rows.append(row := {**asdict(case), "layers": layers, **_row(model, prompt, steps, case.cache)})
        said = f"{row['memory_gb']:.1f} GB, {row['replays']} replays, {row['ahead']} ahead{_parts(row)}"
        say(f"{case.name}: {row['step_ms']:.2f} ms a step, {said}")
        recorder.set("rows", rows)
        if "parts" not in recorder.data:  # while the output layer is as it was
            recorder.set("parts", parts := measure_parts(model, prompt, steps, "int4_g4"))
            say(", ".join(f"{name} {value:.3f}" for name, value in parts.items()))
    if batches:
        recorder.set("batches", measure_batches(model, layers, batches, say))


def measure_batches(
    model: Any, layers: int, batches: Iterable[int], say: Callable[[str], None], rounds: int = BATCHES_ROUNDS
) -> list[dict[str, Any]]:
    """A row of each of `BATCHES_CASES` and batches: the median of rounds, in which the caches take turns."""
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    for _ in range(rounds):
        for case in BATCHES_CASES:
            with _accelerated(model, case):
                for batch in batches:
                    prompt = _prompt(batch, BATCHES_CONTEXT)
                    cache = _filled(model, case.kv_format, prompt)
                    found = measure(model, prompt, SKIPPED_STEPS + 24, cache)
                    about = {**asdict(case), "layers": layers, "batch": batch, "context": BATCHES_CONTEXT}
                    row = rows.setdefault((case.name, batch), about | {"rounds": []})
                    row["rounds"].append({name: value for name, value in found.items() if name != "tokens"})
                    say(f"{case.name}, {batch} requests: {found['step_ms']:.3f} ms a step{_parts(found)}")
                    del cache
                    _release()
    for row in rows.values():
        for name in ("step_ms", "graph_ms", "host_us"):
            row[name] = statistics.median(found[name] for found in row["rounds"])
    return list(rows.values())


@torch.no_grad()
def _filled(model: Any, kv_format: Any, prompt: torch.Tensor) -> Any:
    """A cache that holds all tokens of a prompt but the last, as far as a step's time can tell: its rows are zeros."""
    import cute_kernels.integrations.transformers as ck

    cache = ck.DecodeCache(kv_format, capacity=prompt.shape[1] + 256)
    model(prompt[:, :1], past_key_values=cache)  # its layers are made
    assert cache.columns is not None
    held = prompt.shape[1] - 1
    cache.columns.count = held
    cache.columns.seq_lens.fill_(held)
    for layer in cache.layers:
        layer.count = held
    return cache


def _prompt(batch: int, context: int) -> torch.Tensor:
    return torch.randint(1, LLAMA_3_8B["vocab_size"], (batch, context), device="cuda")


@contextmanager
def _accelerated(model: Any, case: Case) -> Iterator[None]:
    """Within it the model generates as a case says; weights stay quantised behind it."""
    import cute_kernels.integrations.transformers as ck

    if case.kv_format is None:
        model.set_attn_implementation("sdpa")
    else:
        options: Any = {"cuda_graphs": case.cuda_graphs, "fuse_blocks": case.fuse_blocks}
        options["output_layer"] = case.output_layer
        is_quantised = any(isinstance(layer, QuantizedLinear) for layer in model.modules())
        options["weights"] = None if is_quantised else case.weights
        ck.accelerate(model, kv_format=case.kv_format, **options)
    try:
        yield
    finally:
        ck.restore(model)
        _release()


def _row(model: Any, prompt: torch.Tensor, steps: int, cache: str | None) -> dict[str, Any]:
    batch, context = prompt.shape
    row = {"batch": batch, "context": context, **best_of_warm(lambda: measure(model, prompt, steps, cache))}
    replay = model.__dict__.get("forward")
    row |= {name: getattr(replay, name, 0) for name in ("replays", "ahead")}
    row |= {"reason": getattr(replay, "reason", None), "host_in_order_us": None}
    if row["replays"]:
        sampled = measure(model, prompt[:, :SAMPLED_CONTEXT], 3 * SKIPPED_STEPS, do_sample=True)
        row["host_in_order_us"] = sampled["host_us"]
    return row


def best_of_warm(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The faster of two runs behind a first one, with that one's time: in it the allocator meets sizes for the first
    time, at every step of a cache that grows."""
    first, *warm = run(), run(), run()
    return min(warm, key=lambda row: row["step_ms"]) | {"first_run_ms": first["step_ms"]}


def is_warm(row: dict[str, Any]) -> bool:
    """Whether a row of a record is `best_of_warm`'s, and so may be what others are compared with."""
    return "first_run_ms" in row


def _release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _parts(row: dict[str, Any]) -> str:
    if row.get("graph_ms") is None:
        return ""
    of = {name: row[name] for name in TRANSFORMERS_HOST if row.get(name) is not None}
    host = ", ".join(f"{us:.0f} us {TRANSFORMERS_HOST[name]}" for name, us in of.items())
    return f"; the graph alone {row['graph_ms']:.3f} ms, the host in forward {host}"


def text(data: dict[str, Any]) -> str:
    """The record as a table."""
    first = data["rows"][0]
    rows = [["", "ms a step", "graph, ms", "host, us", "in order", "tokens/s", "times", "GB", "same tokens"]]
    for row in data["rows"]:
        ours, theirs = (itertools.chain.from_iterable(one["tokens"]) for one in (row, first))
        same = statistics.fmean(one == other for one, other in zip(ours, theirs, strict=True))
        rate = 1e3 * row["batch"] / row["step_ms"]
        parts = ["-" if row.get(name) is None else number(row[name]) for name in ("graph_ms", *TRANSFORMERS_HOST)]
        cells = [number(row["step_ms"]), *parts, number(rate), number(first["step_ms"] / row["step_ms"])]
        rows.append([row["name"], *cells, number(row["memory_gb"]), f"{same:.0%}"])
    lines = aligned(rows)
    for bf16, int4 in pairs_of(data):
        ratio = int4["step_ms"] / bf16["step_ms"]
        lines.append(
            f"{bf16['batch']} requests: INT4 {int4['step_ms']:.3f} ms, BF16 {bf16['step_ms']:.3f} ({ratio:.2f})"
        )
    verdicts = ((bar, "met" if bar["met"] else "MISSED") for bar in data.get("bars", ()))
    return "\n".join([*lines, *(f"{bar['what']}: {bar['measured']} ({bar['bar']}) {met}" for bar, met in verdicts)])


def pairs_of(record: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(with the BF16 cache, with the INT4 cache) of each batch."""
    of_format = {
        name: {row["batch"]: row for row in record.get("batches", ()) if row["kv_format"] == name}
        for name in ("bf16", "int4_g4")
    }
    return [(row, of_format["int4_g4"][b]) for b, row in of_format["bf16"].items() if b in of_format["int4_g4"]]


MARK = "<!-- bench:e2e-transformers -->"
MARK_AHEAD = "<!-- bench:e2e-transformers-ahead -->"
MARK_BATCHES = "<!-- bench:e2e-transformers-batches -->"
PART_NAMES = {
    "bare_ms": "bare loop over the library, a CUDA graph",
    "lm_head_ms": "output layer, 16 bits",
    "loop_ms": "transformers' loop around an empty model",
}


def markdown_ahead(record: dict[str, Any]) -> str:
    """What a step of W4 layers over the INT4 cache cannot do without, and what it takes. Raises ValueError if one of
    them was not measured."""
    ours = next((row for row in record.get("rows", ()) if row["name"] == "int4_g4 cache, W4"), None)
    if ours is None or "parts" not in record:
        raise ValueError("record: got no parts of a step, or no step of the INT4 cache and W4, want both")
    parts = record["parts"]
    lines = [[name, number(parts[key], 2)] for key, name in PART_NAMES.items()]
    lines += [["their sum", number(sum(parts.values()), 2)], ["the recorded step alone", number(ours["graph_ms"], 2)]]
    lines.append(["**a step of `generate`**", f"**{number(ours['step_ms'], 2)}**"])
    first, versions = record["rows"][0], record["environment"]["versions"]
    about = (
        f"transformers {versions['transformers']}; {ours['batch']} requests of {ours['context']} tokens, W4 and INT4 "
        f"cache. Of {ours['replays']} recorded steps {ours['ahead']} were begun ahead."
    )
    if is_warm(first):
        times = number(first["step_ms"] / ours["step_ms"])
        about += f" SDPA took {number(first['step_ms'])} ms in the same run, {times} times as long."
    return in_markdown(record, ["part of a step", "ms"], lines, about)


def markdown(record: dict[str, Any]) -> str:
    """The record as a Markdown table. Raises ValueError if nothing was measured."""
    rows = record.get("rows", [])
    if not rows:
        raise ValueError("record: got no measured case, want some")
    lines, compared = [], ["times"] if is_warm(rows[0]) else []
    for row in rows:
        rate, times = (
            1e3 * row["batch"] / row["step_ms"],
            [number(rows[0]["step_ms"] / row["step_ms"]) for _ in compared],
        )
        cells = [f"**{number(row['step_ms'])}**", number(rate, 0), *times, number(row["memory_gb"])]
        host = [row[name] for name in TRANSFORMERS_HOST if row["cuda_graphs"] and row.get(name) is not None]
        lines.append([row["name"], *cells, ", ".join(number(us, 0) for us in host) or "-"])
    first, versions = rows[0], record["environment"]["versions"]
    shape = f"{first['batch']} requests of {first['context']} tokens, Llama-3-8B's shape, {first['layers']} layers"
    graphs = 'steps are recorded as CUDA graphs where "eager" does not say otherwise'
    about = f"transformers {versions['transformers']}; {shape}, random weights; {graphs}."
    about += f" host: what `accelerate` adds to a step, us, {' and '.join(TRANSFORMERS_HOST.values())}."
    return in_markdown(record, ["`generate` with", "ms a step", "tokens/s", *compared, "GB", "host"], lines, about)


def markdown_batches(record: dict[str, Any]) -> str:
    """A step with the INT4 cache beside one with the BF16 cache. Raises ValueError if no batch has both."""
    pairs = pairs_of(record)
    if not pairs:
        raise ValueError("record: got no batch with both caches, want some")
    lines = [
        [
            str(bf16["batch"]),
            number(bf16["step_ms"], 2),
            number(int4["step_ms"], 2),
            number(int4["step_ms"] / bf16["step_ms"], 2),
        ]
        for bf16, int4 in pairs
    ]
    first, versions = pairs[0][0], record["environment"]["versions"]
    shape = f"{first['context']} tokens a request, Llama-3-8B's shape, {first['layers']} layers"
    about = f"Milliseconds a step of `generate`; transformers {versions['transformers']}; W4, {shape}."
    named = {**record, "rows": record["batches"]}  # what its caches cost in perplexity stands below
    return in_markdown(named, ["requests", "BF16 cache", "INT4 cache", "INT4 / BF16"], lines, about)


TABLES: dict[str, tuple[Callable[[dict[str, Any]], str], str]] = {
    "main": (markdown, MARK),
    "ahead": (markdown_ahead, MARK_AHEAD),
    "batches": (markdown_batches, MARK_BATCHES),
}
"""What `python -m bench table --suite` makes of a record, and where it goes."""
