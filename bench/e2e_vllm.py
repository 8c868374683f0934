"""A model served by an engine, with and without the plugin: time per output token, to first token, requests that fit.

Weights are random (vLLM's "dummy" ones), so nothing is downloaded. A start takes more than a minute: each case runs in
a process of its own, is recorded at once, and is skipped where the record has it. `python -m bench e2e --engine vllm`.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from bench import e2e_mixed
from bench.e2e_cases import WEIGHTS, Case, cache_bytes, environment_of, model_folder, prompts_of, warm_up_prompt
from bench.e2e_models import MODELS
from bench.environment import ROOT, environment
from bench.record import Recorder
from bench.report import in_markdown
from bench.step_kernels import by_part, profile_step
from bench.turns import Turn, in_turns
from cute_kernels.integrations.vllm.environment import SEAMS

NEW_TOKENS = 64
TURNS = 3
"""Of an engine that others are beside; the least counts. An engine alone has one."""
SAMPLES = 3  # of a turn
DEFAULT_CASES = (
    "llama3-8b:w4:fp8:off",
    "llama3-8b:w4:fp8:on",
    "llama3-8b:w4:int8_per_token_head:on",
)


def run(recorder: Recorder, cases: Iterable[Case], say: Callable[[str], None], limit_s: int = 300) -> None:
    """Runs what the record does not have yet; a case that fails is recorded as a failure, and the next one begins."""
    done = {row["case"] for row in recorder.data["rows"]}
    for case in cases:
        if case.name in done:
            say(f"{case.name}: recorded already")
            continue
        say(f"{case.name}: starting")
        try:
            for row in measure_apart(case, limit_s):
                recorder.add_row(row)
                say(line_of(row))
        except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            say(f"{case.name}: {recorder.add_failure(case.name, error)}")


def run_together(recorder: Recorder, cases: Iterable[Case], say: Callable[[str], None], limit_s: int = 300) -> None:
    """Like `run`; engines start side by side and are timed one after the other, so all of them must fit the GPU.

    Their rows say nothing of starts and of tokens that fit. limit_s: for all of them.
    """
    done = {row["case"] for row in recorder.data["rows"]}
    waiting = [replace(case, beside=True) for case in cases if case.name not in done]
    with tempfile.TemporaryDirectory(prefix="e2e_vllm_") as scratch:
        started = {}
        for index, case in enumerate(waiting):
            folder = Path(scratch, str(index))
            folder.mkdir()
            started[folder] = (case, start_process(case, folder))
            say(f"{case.name}: starting")

        def record(folder: Path) -> None:
            case, process = started[folder]
            try:
                rows = rows_of(process, folder)
            except (OSError, RuntimeError, ValueError) as error:
                say(f"{case.name}: {recorder.add_failure(case.name, error)}")
                return
            for row in rows:
                recorder.add_row(row)
                say(line_of(row))

        in_turns({folder: process for folder, (_, process) in started.items()}, limit_s, record, TURNS)


def start_process(case: Case, folder: Path, tree: Path = ROOT) -> subprocess.Popen[bytes]:
    """A process that measures a case, with the plugin found as an entry point.

    folder: for what it writes, its log. tree: the checkout whose package and benchmark it runs.
    """
    command = [sys.executable, "-m", f"bench.e2e_{case.engine}", json.dumps(case.chosen()), str(folder)]
    with open(folder / "log", "w") as log:
        return subprocess.Popen(command, cwd=tree, env=environment_of(case, folder, tree), stdout=log, stderr=log)


def rows_of(process: subprocess.Popen[bytes], folder: Path) -> list[dict[str, Any]]:
    """What an ended process measured. Its log goes on to the file that BENCH_E2E_LOG names, if any.

    Raises:
        RuntimeError: it failed; the message has the end of its log.
    """
    log = (folder / "log").read_text(errors="replace")
    if "BENCH_E2E_LOG" in os.environ:
        with open(os.environ["BENCH_E2E_LOG"], "a") as kept:
            kept.write(log)
    result = folder / "rows.json"
    if process.returncode or not result.is_file():
        raise RuntimeError(f"the engine's process ended with status {process.returncode}\n{log[-3000:]}")
    return json.loads(result.read_text())


def measure_apart(case: Case, limit_s: int) -> list[dict[str, Any]]:
    """The rows of a case, measured by a process of its own."""
    with tempfile.TemporaryDirectory(prefix="e2e_vllm_") as scratch:
        folder = Path(scratch)
        process = start_process(case, folder)
        try:
            process.wait(timeout=limit_s)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        return rows_of(process, folder)


def line_of(row: dict[str, Any]) -> str:
    fit = "" if row["tokens_that_fit"] is None else f"; {row['tokens_that_fit']} tokens fit"
    per_token, first, other = f"{row['tpot_ms']:.3f} ms", f"{row['ttft_s']:.2f} s", f"{row['ttft_hit_s']:.3f} s"
    first = f"{first} (99 of 100), {other} (half)" if row.get("mixed") else f"{first}, after a prefix hit {other}"
    return f"{row['case']}, {row['batch']} requests: {per_token} per token, first token after {first}{fit}"


def text(data: dict[str, Any]) -> str:
    """The recorded rows as a Markdown table."""
    lines = ["| case | requests | ms per token | tokens/s | first token, s | tokens that fit | start, s |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in data["rows"]:
        fit, start = ("" if row[name] is None else f"{row[name]:.0f}" for name in ("tokens_that_fit", "start_s"))
        lines.append(
            f"| {row['case']} | {row['batch']} | {row['tpot_ms']:.3f} | {row['tokens_per_s']:.0f} | "
            f"{row['ttft_s']:.2f} | {fit} | {start} |"
        )
    return "\n".join(lines)


MARK = "<!-- bench:e2e -->"
MARK_LATEST = "<!-- bench:e2e-latest -->"
MARK_FLOATS = "<!-- bench:e2e-floats -->"
MARK_TWO_GPUS = "<!-- bench:e2e-two-gpus -->"
MARK_SGLANG = "<!-- bench:e2e-sglang -->"
MARK_STEP = "<!-- bench:e2e-step -->"
ENGINE_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}
MODEL_NAMES = {
    "llama3-8b": "Llama-3-8B",
    "llama2-70b-shard8": "Llama-2-70B, one of 8 GPUs",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "gpt-oss-20b": "gpt-oss-20b",
}
MIXED = ", arriving (first token: of 99 in 100, of half)"


def markdown(record: dict[str, Any]) -> str:
    """The table of a record: of each model, its weights and batch every case, the engine's own first, and how much
    faster the others are than the best of those."""
    engine = record.get("engine", "vllm")
    name = ENGINE_NAMES[engine]
    groups: dict[tuple[int, ...], list[dict[str, Any]]] = {}
    for row in sorted(record["rows"], key=lambda row: (row["plugin"] != "off", row["tpot_ms"])):
        place = list(MODELS).index(row["model"]), row.get("gpus", 1), -WEIGHTS.index(row["weights"]), row["batch"]
        groups.setdefault((*place, row.get("mixed", False)), []).append(row)
    lines = []
    for _, rows in sorted(groups.items()):
        model, batch = MODEL_NAMES[rows[0]["model"]], f"{rows[0]['batch']}{MIXED if rows[0].get('mixed') else ''}"
        model += f" on {rows[0]['gpus']} GPUs" if rows[0].get("gpus", 1) > 1 else ""
        own = min((row["tpot_ms"] for row in rows if row["plugin"] == "off"), default=None)
        for row in rows:
            served = name if row["plugin"] == "off" else _plugin_of(row["plugin"])
            weights = {"w4": "W4", "w8": "W8"}.get(row["weights"], row["weights"])
            gain = "" if own is None or row["plugin"] == "off" else f"{own / row['tpot_ms']:.2f}"
            pages = f" in pages of {row['block_size']}" if row.get("block_size") else ""
            cells = [model, batch, served, f"{weights}, {row['kv_format'] or row['kv']}{pages}"]
            fit = "" if row["tokens_that_fit"] is None else f"{row['tokens_that_fit'] / 1e6:.2f} M"
            first = f"{row['ttft_s']:.2f}", f"{row['ttft_hit_s']:.3f}"
            lines.append([*cells, f"{row['tpot_ms']:.2f}", f"{row['tokens_per_s']:.0f}", gain, *first, fit])
    head = ("model", "requests", "served by", "weights, KV", "ms per token", "tokens/s", f"times {name}'s best")
    head += ("first token, s", "after a prefix hit, s", "fit")
    rows = record["rows"]
    versions = ", ".join(sorted({row[engine] for row in rows}))
    about = (
        f"{name} {versions}, random weights, prompts of {rows[0]['context']} tokens, CUDA graphs on; "
        "fit: tokens that the cache has room for."
    )
    return in_markdown(record, head, lines, about)


def _plugin_of(seams: str) -> str:
    """What served a row by these seams, as a case names them."""
    named = seams.split(",")
    bits = ", activations in 16 bits" if "float_linear" in named else ""
    return f"plugin{bits}" if seams == "on" or {*named} == {*SEAMS} else f"plugin, {seams} alone{bits}"


def step_markdown(record: dict[str, Any]) -> str:
    """Where the time of the first model's recorded steps goes, by what kernels are for."""
    first = record["rows"][0]
    alike = [row for row in record["rows"] if (row["model"], row["weights"]) == (first["model"], first["weights"])]
    rows = [row for row in alike if row.get("step")]
    parts = [by_part(row["step"]) for row in rows]
    named = [name for name in parts[0] if any(part[name] for part in parts)]
    lines = [[name, *(f"{part[name]:.0f}" for part in parts)] for name in named]
    lines.append(["all kernels", *(f"{sum(part.values()):.0f}" for part in parts)])
    head = ["us of a step", *(_column(row) for row in rows)]
    about = "kernels as torch's profiler sees them, which lets none begin before the one before has ended."
    return in_markdown(record, head, lines, about)


def _column(row: dict[str, Any]) -> str:
    served = "vLLM" if row["plugin"] == "off" else "plug-in"
    return f"{served}, {row['kv_format'] or row['kv']}, {row['batch']} req."


# -- in the engine's process ------------------------------------------------------------------------------------------


@dataclass
class Decoding:
    """What was measured of a batch, in seconds.

    Prefix caching serves its prompts again, so that a second run is decoding alone: the time per token is that of
    NEW_TOKENS more.

    Attributes:
        llm: the engine. prompts: of the batch.
        cold: the first token of prompts that nobody had asked for. hit: of prompts that are in the cache.
        all_tokens: the first, and NEW_TOKENS more.
        turns: of each turn the time per token.
    """

    llm: Any
    prompts: Sequence[Any]
    cold: float = 0.0
    hit: float = math.inf
    all_tokens: float = math.inf
    turns: list[float] = field(default_factory=list)

    @property
    def per_token(self) -> float:
        """Between tokens. The least of both times, not of their differences, which noise alone makes less."""
        return (self.all_tokens - self.hit) / NEW_TOKENS

    def measure(self) -> None:
        """Takes the least of what was measured before and is now."""
        self.cold = self.cold or self._seconds(1)
        self.add([(self._seconds(1), self._seconds(1 + NEW_TOKENS)) for _ in range(SAMPLES)])

    def add(self, turn: Iterable[tuple[float, float]]) -> None:
        """Another turn's measurements: of the first token, and of NEW_TOKENS more."""
        hit, all_tokens = map(min, zip(*turn, strict=True))
        self.turns.append((all_tokens - hit) / NEW_TOKENS)
        self.hit, self.all_tokens = min(self.hit, hit), min(self.all_tokens, all_tokens)

    def _seconds(self, tokens: int) -> float:
        """How long the engine takes for so many tokens of each request."""
        sampling, begin = e2e_mixed.greedy(tokens), time.perf_counter()
        self.llm.generate(self.prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begin


Measured: TypeAlias = Decoding | e2e_mixed.MixedLoad


def take_turns(case: Case, decoding: Iterable[Measured], turn: Turn) -> None:
    """Measures each batch, when it is the engine's turn."""
    alone = 2 if case.mixed else 1  # in its first turn a mixed load meets kernels that are still to be compiled
    for number in range(TURNS if case.beside else alone):
        if case.beside:
            turn.wait(number)
        for each in decoding:
            each.measure()
        turn.end(number)


def row_of(case: Case, batch: int, measured: Measured) -> dict[str, Any]:
    """What is recorded of a batch, whichever engine served it."""
    import torch

    return {
        **asdict(case),
        "case": case.name,
        "batch": batch,
        "tpot_ms": measured.per_token * 1e3,
        "tokens_per_s": batch / measured.per_token,
        "ttft_s": measured.cold,
        "ttft_hit_s": measured.hit,
        "tpot_of_turns_ms": [each * 1e3 for each in measured.turns],
        "commit": environment()["commit"],
        "gpu": torch.cuda.get_device_name(),
    }


SCALES = {"weight_scale": 1.0, "weight_scale_inv": 2.0**-12, "weight_global_scale": 2.0**12}
"""Values of scales, by the names of tensors: vLLM's dummy ones may be negative, as no checkpoint's are."""


def keep_scales_positive() -> None:
    """Makes scales of vLLM's dummy weights those of `SCALES`. Needs vLLM 0.30 or later."""
    from vllm.model_executor.model_loader import dummy_loader

    usual = dummy_loader.initialize_single_dummy_weight

    def initialize(tensor: Any, *arguments: Any, name: str = "", **options: Any) -> None:
        usual(tensor, *arguments, name=name, **options)
        if name in SCALES:
            tensor.fill_(SCALES[name])

    dummy_loader.initialize_single_dummy_weight = initialize


def measure(case: Case, folder: Path, turn: Turn) -> list[dict[str, Any]]:
    """Starts the engine and measures each batch, when it is its turn."""
    import vllm

    if case.weights in ("nvfp4", "fp8_block"):
        keep_scales_positive()
    beside = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": cache_bytes(case)}
    memory: dict[str, Any] = beside if case.beside else {"gpu_memory_utilization": 0.9}
    memory |= {"block_size": case.block_size} if case.block_size else {}
    memory |= {"tensor_parallel_size": case.gpus, "distributed_executor_backend": "mp"} if case.gpus > 1 else {}
    start = time.perf_counter()
    llm = vllm.LLM(
        model=str(model_folder(case, folder)),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=case.context + 256,
        kv_cache_dtype=case.kv,
        max_num_seqs=max(case.batches),
        enable_prefix_caching=True,
        disable_log_stats=True,
        **memory,
    )
    start_s = time.perf_counter() - start
    print(f"{case.name}: started in {start_s:.1f} s", flush=True)
    cache = llm.llm_engine.vllm_config.cache_config
    llm.generate([{"prompt_token_ids": warm_up_prompt(case)}], e2e_mixed.greedy(2), use_tqdm=False)
    decoding: dict[int, Measured] = {}
    for batch, prompts in ({} if case.mixed else prompts_of(case)).items():
        decoding[batch] = Decoding(llm, [{"prompt_token_ids": each} for each in prompts])
    if case.mixed:
        decoding[e2e_mixed.REQUESTS] = e2e_mixed.MixedLoad(llm, e2e_mixed.arrivals(case.context))
    take_turns(case, decoding.values(), turn)
    rows = []
    for batch, each in decoding.items():
        rows.append(
            {
                **row_of(case, batch, each),
                "tokens_that_fit": None if case.beside else cache.num_gpu_blocks * cache.block_size,
                "start_s": start_s,
                "vllm": vllm.__version__,
                **(
                    {"step": profile_step(llm, list(each.prompts))}
                    if case.kernels and case.gpus == 1 and isinstance(each, Decoding)
                    else {}
                ),
            }
        )
        print(line_of(rows[-1]), flush=True)
    if case.gpus > 1:
        llm.llm_engine.engine_core.shutdown()  # its processes would live as long as this one
        _kept.append(llm)
    return rows


_kept: list[Any] = []
"""Engines of several processes, until this one ends: freeing them may wait for ever for processes that are gone."""


def write_rows(
    fields: dict[str, Any], place: Path, measured: Callable[[Case, Path, Turn], list[dict[str, Any]]]
) -> int:
    """Measures the case of these fields by ``measured`` and writes its rows to ``place``/rows.json."""
    case = Case(**{**fields, "batches": tuple(fields.get("batches", Case.batches))})
    with tempfile.TemporaryDirectory(prefix="e2e_model_") as folder:
        (place / "rows.json").write_text(json.dumps(measured(case, Path(folder), Turn(place))))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures a case and writes its rows to FOLDER/rows.json: what `measure_apart` starts."""
    parser = argparse.ArgumentParser(description=str(main.__doc__))
    parser.add_argument("case", type=json.loads, metavar="CASE", help="a JSON object, the fields of Case")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    options = parser.parse_args(arguments)
    status = write_rows(options.case, options.folder, measure)
    if _kept:
        sys.stdout.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
