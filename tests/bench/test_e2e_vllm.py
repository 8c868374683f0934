"""The benchmark of a served model: cases, what is run again, what the table says. No engine is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig

from bench import e2e_cases, e2e_mixed, e2e_vllm, report, step_kernels, turns, vllm_rows
from bench.__main__ import main as command
from bench.bars import judge
from bench.environment import ROOT
from bench.record import SCHEMA, Recorder


def row(case: str, batch: int, tpot_ms: float) -> dict[str, Any]:
    parsed = e2e_cases.case_of(case)
    return {
        **{name: getattr(parsed, name) for name in ("model", "weights", "kv", "plugin", "kv_format", "context")},
        "case": parsed.name,
        "batch": batch,
        "tpot_ms": tpot_ms,
        "tokens_per_s": batch / tpot_ms * 1e3,
        "ttft_s": 0.2,
        "ttft_hit_s": 0.01,
        "tokens_that_fit": 1_900_000,
        "start_s": 60.0,
        "vllm": "0.26.0",
    }


@pytest.mark.parametrize(
    ("text", "plugin", "kv_format", "batches", "block_size"),
    [
        ("llama3-8b:w4:fp8:off", "off", "", (1, 32), 0),
        ("llama3-8b:w4:auto:on:int4_g4@64", "on", "int4_g4", (64,), 0),
        ("qwen3-30b-a3b:w4:fp8:linear+moe@1,2", "linear,moe", "", (1, 2), 0),
        ("llama2-70b-shard8:w4:auto:on:int4_g4/32@64", "on", "int4_g4", (64,), 32),
        ("gpt-oss-20b:mxfp4:fp8:attention+moe", "attention,moe", "", (1, 32), 0),
        ("llama3-8b:fp8:auto:on-tp2@1", "on", "", (1,), 0),
        ("llama3-8b:w4:auto:on:int4_g4/32-tp4@1", "on", "int4_g4", (1,), 32),
    ],
)
def test_cases_have_names(text: str, plugin: str, kv_format: str, batches: tuple[int, ...], block_size: int):
    case = e2e_cases.case_of(text)
    assert (case.plugin, case.kv_format, case.batches, case.block_size) == (plugin, kv_format, batches, block_size)
    assert e2e_cases.case_of(case.name).name == case.name == text.partition("@")[0]


def test_a_mixed_load_is_a_case_of_its_own():
    case = e2e_cases.case_of("llama3-8b:w4:fp8:on@mixed")
    assert case.mixed and case.batches == (64,) and case.name == "llama3-8b:w4:fp8:on@mixed"
    assert e2e_cases.case_of(case.name) == case != e2e_cases.case_of("llama3-8b:w4:fp8:on@64")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpt2:w4:fp8:on",
        "llama3-8b:w3:fp8:on",
        "llama3-8b:mxfp4:fp8:on",
        "llama3-8b:w4:fp8",
        "llama3-8b:w4:fp8:on/x",
        "llama3-8b:w4:fp8:on-tp",
    ],
)
def test_what_is_no_case_is_refused(text: str):
    with pytest.raises(ValueError, match="want MODEL:WEIGHTS:KV:PLUGIN"):
        e2e_cases.case_of(text)
    with pytest.raises(SystemExit, match="2"):
        command(["e2e", "--case", text])


def test_recorded_cases_are_not_run_again_and_failures_do_not_end_the_run(tmp_path: Path, monkeypatch):
    recorder = Recorder(tmp_path / "record.json", kind="e2e")
    recorder.add_row(row("llama3-8b:w4:fp8:off", 1, 4.0))
    ran: list[str] = []

    def measure(case: e2e_cases.Case, limit_s: int) -> list[dict[str, Any]]:
        ran.append(case.name)
        if case.plugin == "linear":
            raise RuntimeError("the engine's process ended with status 1")
        return [row(case.name, 1, 2.0)]

    monkeypatch.setattr(e2e_vllm, "measure_apart", measure)
    cases = [e2e_cases.case_of(f"llama3-8b:w4:fp8:{plugin}") for plugin in ("off", "linear", "on")]
    e2e_vllm.run(recorder, cases, say=lambda line: None)
    assert ran == ["llama3-8b:w4:fp8:linear", "llama3-8b:w4:fp8:on"]
    data = json.loads((tmp_path / "record.json").read_text())
    assert [each["case"] for each in data["rows"]] == ["llama3-8b:w4:fp8:off", "llama3-8b:w4:fp8:on"]
    assert [each["what"] for each in data["failures"]] == ["llama3-8b:w4:fp8:linear"]


ENGINE = """
import json, os, sys, time
from pathlib import Path
from bench.turns import Turn
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
time.sleep(seconds)
if seconds < 0.1:
    sys.exit("no memory")
turn, spans = Turn(folder), []
for number in range(2):
    turn.wait(number)
    begin = time.monotonic()
    time.sleep(0.3)
    spans.append([begin, time.monotonic()])
    turn.end(number)
(folder / "rows.json").write_text(json.dumps(spans))
"""


def test_processes_that_start_side_by_side_are_timed_one_at_a_time(tmp_path: Path):
    folders = [tmp_path / name for name in ("slow", "fails", "quick")]
    processes = {}
    for folder, seconds in zip(folders, ("1.0", "0.0", "0.2"), strict=True):
        folder.mkdir()
        command = [sys.executable, "-c", ENGINE, str(folder), seconds]
        processes[folder] = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    ended: list[str] = []
    turns.in_turns(processes, 60, lambda folder: ended.append(folder.name), turns=2)
    assert ended == ["slow", "fails", "quick"]
    assert processes[folders[1]].returncode == 1
    slow, quick = (json.loads((tmp_path / name / "rows.json").read_text()) for name in ("slow", "quick"))
    in_order = [slow[0], quick[0], slow[1], quick[1]]
    assert all(one[1] <= following[0] for one, following in pairwise(in_order)), in_order


def test_the_least_of_each_time_counts_and_not_the_least_difference():
    decoding = e2e_vllm.Decoding(None, [])
    decoding.add([(0.2, 0.84), (0.4, 0.9)])
    decoding.add([(0.5, 0.86), (0.22, 1.0)])
    assert decoding.hit == 0.2 and abs(decoding.per_token - 0.01) < 1e-9
    assert decoding.turns == pytest.approx([0.01, 0.01])


def test_a_process_that_does_not_start_in_time_is_ended(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    ended: list[Path] = []
    turns.in_turns({tmp_path: process}, 0.5, ended.append)
    assert ended == [tmp_path] and process.returncode not in (None, 0)


def test_engines_beside_each_other_are_recorded_with_their_failures(tmp_path: Path, monkeypatch):
    def start(case: e2e_cases.Case, folder: Path) -> subprocess.Popen[bytes]:
        assert case.beside
        rows = json.dumps([row(case.name, 1, 2.0) | {"tokens_that_fit": None, "start_s": None}])
        fails = case.plugin == "linear"
        (folder / "log").write_text("out of memory")
        if not fails:
            (folder / "rows.json").write_text(rows)
        return subprocess.Popen([sys.executable, "-c", f"raise SystemExit({int(fails)})"])

    monkeypatch.setattr(e2e_vllm, "start_process", start)
    recorder = Recorder(tmp_path / "record.json", kind="e2e")
    cases = [e2e_cases.case_of(f"llama3-8b:w4:fp8:{plugin}") for plugin in ("off", "linear", "on")]
    said: list[str] = []
    e2e_vllm.run_together(recorder, cases, said.append)
    assert [each["case"] for each in recorder.data["rows"]] == ["llama3-8b:w4:fp8:off", "llama3-8b:w4:fp8:on"]
    assert "out of memory" in recorder.data["failures"][0]["error"]
    assert "None" not in e2e_vllm.text(recorder.data) + "".join(said)


def test_a_cache_has_room_for_the_largest_batch():
    fp8, int4 = (e2e_cases.case_of(f"llama3-8b:w4:{kv}") for kv in ("fp8:on@1,32", "auto:on:int4_g4@1,32"))
    tokens = 32 * (8192 + 256) + 4096
    assert e2e_cases.cache_bytes(fp8) == tokens * 32 * 8 * 2 * 128
    assert e2e_cases.cache_bytes(int4) == tokens * 32 * 8 * 2 * 80
    bf16 = e2e_cases.case_of("qwen3-30b-a3b:bf16:auto:off@4")
    assert e2e_cases.cache_bytes(bf16) == (4 * (8192 + 256) + 4096) * 48 * 4 * 2 * 256


def test_gpus_that_share_a_model_have_their_part_of_the_cache_and_no_multicast(tmp_path: Path):
    one, two = (e2e_cases.case_of(f"qwen3-30b-a3b:w4:fp8:on{gpus}@4") for gpus in ("", "-tp2"))
    assert (one.gpus, two.gpus) == (1, 2) and e2e_cases.case_of(two.name).gpus == 2
    assert e2e_cases.cache_bytes(two) * 2 == e2e_cases.cache_bytes(one)
    shared = e2e_cases.case_of("llama2-70b-shard8:w4:fp8:on-tp2@4")  # one KV head, which both have
    assert e2e_cases.cache_bytes(shared) == e2e_cases.cache_bytes(e2e_cases.case_of("llama2-70b-shard8:w4:fp8:on@4"))
    found = e2e_cases.environment_of(two, tmp_path)
    assert (found["NCCL_NVLS_ENABLE"], found["TORCH_SYMM_MEM_DISABLE_MULTICAST"]) == ("0", "1")
    assert found["VLLM_FLASHINFER_ALLREDUCE_BACKEND"] == "trtllm"
    with pytest.raises(ValueError, match="want heads of llama3-8b that so many GPUs can share out"):
        e2e_cases.case_of("llama3-8b:w4:fp8:on-tp3")


def test_a_process_is_told_only_what_is_not_usual(tmp_path: Path):
    """Checkouts that `bench compare` looks at may not know the other fields yet."""
    case = e2e_cases.Case("llama3-8b", "w4", "fp8", "on", batches=(1, 8), beside=True)
    assert [*case.chosen()] == ["model", "weights", "kv", "plugin", "batches", "beside"]
    usual = e2e_cases.case_of("llama3-8b:w4:fp8:on")
    assert [*usual.chosen()] == ["model", "weights", "kv", "plugin"]
    for want in (case, usual):
        told = json.loads(json.dumps(want.chosen()))
        e2e_vllm.write_rows(told, tmp_path, lambda found, *_, want=want: [{"same": found == want}])
        assert json.loads((tmp_path / "rows.json").read_text()) == [{"same": True}]


class StandIn:
    """vLLM's `LLM` and its engine: a token takes 0.1 ms, or a step."""

    def __init__(self, **given: Any) -> None:
        self.given, self.generated, self.waiting, self.ended = given, list[tuple[int, int]](), dict[str, int](), 0
        cache = SimpleNamespace(num_gpu_blocks=10, block_size=16)
        self.vllm_config, self.engine_core, self.llm_engine = SimpleNamespace(cache_config=cache), self, self
        MADE.append(self)

    def generate(self, prompts: list[dict[str, list[int]]], sampling: Any, use_tqdm: bool) -> None:
        self.generated.append((len(prompts), sampling.max_tokens))
        time.sleep(sampling.max_tokens * 1e-4)

    def reset_prefix_cache(self) -> None:
        self.generated.append((0, 0))

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        assert len(prompt["prompt_token_ids"]) + sampling.max_tokens <= self.given["max_model_len"]
        self.waiting[name] = 2

    def step(self) -> list[Any]:
        self.waiting = {name: left - 1 for name, left in self.waiting.items() if left}
        return [
            SimpleNamespace(request_id=name, finished=not left, outputs=[SimpleNamespace(token_ids=[1])])
            for name, left in self.waiting.items()
        ]

    def shutdown(self) -> None:
        self.ended += 1


MADE: list[StandIn] = []


@pytest.mark.parametrize(
    "text", ["llama3-8b:w4:fp8:on@1,2", "llama3-8b:w4:fp8:on@mixed", "qwen3-30b-a3b:w4:fp8:on-tp2@2"]
)
def test_an_engine_serves_a_prompt_before_it_is_timed(text: str, tmp_path: Path):
    case = e2e_cases.case_of(text)
    vllm = SimpleNamespace(LLM=StandIn, SamplingParams=SimpleNamespace, __version__="0.33.0")
    with (
        mock.patch.dict(sys.modules, vllm=vllm),
        mock.patch.object(torch.cuda, "get_device_name", lambda: "a GPU"),
        mock.patch.object(e2e_mixed, "SECONDS_APART", 1e-5),
        mock.patch.object(e2e_vllm, "_kept", []),
    ):
        rows = e2e_vllm.measure(case, tmp_path, turns.Turn(tmp_path))
    llm = MADE[-1]
    assert llm.generated[0] == (1, 2) and llm.ended == (case.gpus > 1)
    assert [row["batch"] for row in rows] == list(case.batches) and (tmp_path / "ended0").exists()
    assert all(row["tpot_ms"] > 0 and len(row["tpot_of_turns_ms"]) == (2 if case.mixed else 1) for row in rows)
    assert llm.given.get("tensor_parallel_size", 1) == case.gpus
    if case.mixed:  # of each load nothing is in the cache
        assert llm.generated[1:] == [(0, 0)] * 2
    else:
        assert llm.generated[1] == (case.batches[0], 1) and rows[0]["tokens_that_fit"] == 160
    assert json.loads(json.dumps(rows)) and e2e_vllm.text({"rows": rows}).count("\n") == 1 + len(rows)


def test_a_steps_kernels_are_summed_by_name():
    Launch = step_kernels.Launch
    launches = [Launch("b", 10.0, 12.0), Launch("a", 0.0, 4.0), Launch("a", 3.0, 6.0), Launch("c", 6.0, 7.0)]
    found = step_kernels.summary(launches, 2)
    assert found["span_us"] == 6.0 and found["busy_us"] == 4.5  # 0 to 7 and 10 to 12, of two steps
    assert found["kernels"][0] == {"name": "a", "count": 1.0, "us": 3.5}
    assert [kernel["name"] for kernel in found["kernels"]] == ["a", "b", "c"]
    assert step_kernels.summary([], 2)["kernels"] == []


def test_the_plugin_is_found_as_an_installed_one_is(tmp_path: Path):
    case = e2e_cases.case_of("llama3-8b:w4:fp8:off")
    environment = e2e_cases.environment_of(case, tmp_path)
    assert environment["CUTE_KERNELS_VLLM"] == "0"
    packages = environment["PYTHONPATH"].split(os.pathsep)[0]
    (found,) = distributions(path=[packages])
    (entry,) = found.entry_points.select(group="vllm.general_plugins")
    assert entry.value == "cute_kernels.integrations.vllm:register"
    from cute_kernels.integrations.vllm import register

    assert entry.load() is register


def test_a_model_has_the_configuration_of_its_case(tmp_path: Path):
    for weights in ("bf16", "w4", "w8"):
        folder = e2e_cases.model_folder(e2e_cases.case_of(f"llama3-8b:{weights}:fp8:on"), tmp_path)
        config = json.loads((folder / "config.json").read_text())
        assert config["max_position_embeddings"] >= 8192 + 256
        quantised = config.get("quantization_config")
        assert (quantised is None) == (weights == "bf16")
        if quantised is not None:
            assert quantised["config_groups"]["group_0"]["weights"]["num_bits"] == int(weights[1:])


def test_an_fp8_model_rounds_its_activations_token_by_token(tmp_path: Path):
    folder = e2e_cases.model_folder(e2e_cases.case_of("llama3-8b:fp8:fp8:on"), tmp_path)
    scheme = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    assert scheme["weights"]["strategy"] == "channel" and scheme["weights"]["type"] == "float"
    assert scheme["input_activations"]["strategy"] == "token" and scheme["input_activations"]["dynamic"]


def test_fp4_has_16_bit_activations_and_fp8_in_blocks_is_asked_to(tmp_path: Path):
    for weights in ("nvfp4", "fp8_block"):
        case = e2e_cases.case_of(f"llama3-8b:{weights}:fp8:linear+float_linear@1")
        config = json.loads((e2e_cases.model_folder(case, tmp_path) / "config.json").read_text())["quantization_config"]
        if weights == "nvfp4":
            group = config["config_groups"]["group_0"]
            assert (config["format"], group["weights"]["group_size"]) == ("nvfp4-pack-quantized", 16)
            assert "input_activations" not in group
        else:
            assert (config["quant_method"], config["weight_block_size"]) == ("fp8", [128, 128])
        (tmp_path / weights).mkdir()
        environment = e2e_cases.environment_of(case, tmp_path / weights)
        assert environment["CUTE_KERNELS_VLLM_ACTIVATIONS"] == "16bit"
    (tmp_path / "on").mkdir()
    usual = e2e_cases.environment_of(e2e_cases.case_of("llama3-8b:nvfp4:fp8:on@1"), tmp_path / "on")
    assert "CUTE_KERNELS_VLLM_ACTIVATIONS" not in usual


def test_gpt_oss_has_its_published_rotation_windows_and_mxfp4_experts(tmp_path: Path):
    folder = e2e_cases.model_folder(e2e_cases.case_of("gpt-oss-20b:mxfp4:fp8:on"), tmp_path)
    config = AutoConfig.from_pretrained(folder)
    assert type(config).__name__ == "GptOssConfig" and config.quantization_config["quant_method"] == "mxfp4"
    assert config.rope_parameters["rope_theta"] == 150000.0 and config.rope_parameters["rope_type"] == "yarn"
    assert config.layer_types == ["sliding_attention", "full_attention"] * 12 and config.num_local_experts == 32


def test_the_table_compares_with_the_best_of_vllm(tmp_path: Path, capsys):
    environment = {"gpu": "NVIDIA H200", "driver": "1", "versions": {"torch": "2.11"}, "commit": "abc", "date": "2026"}
    rows = [
        row("llama3-8b:w4:auto:on:int4_g4", 32, 5.0),
        row("llama3-8b:w4:fp8:off", 32, 10.0),
        row("llama3-8b:w4:auto:off", 32, 12.0),
        row("llama3-8b:w4:fp8:linear", 32, 8.0),
        row("llama3-8b:w4:fp8:float_linear", 32, 8.5),
        row("llama3-8b:w4:fp8:float_linear+fusion+mla+moe+attention+linear", 32, 4.0),
    ]
    record = {"schema": SCHEMA, "kind": "e2e", "environment": environment, "rows": rows, "failures": []}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(record))
    assert command(["table", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| Llama-3-8B | 32 | vLLM | W4, fp8 | 10.00 | 3200 |  |")
    assert any("plugin | W4, int4_g4 | 5.00 | 6400 | 2.00 |" in line for line in lines)
    assert any("plugin, linear alone | W4, fp8 | 8.00 | 4000 | 1.25 |" in line for line in lines)
    assert any("plugin, float_linear alone, activations in 16 bits | W4, fp8 | 8.50 |" in line for line in lines)
    assert any("plugin, activations in 16 bits | W4, fp8 | 4.00 | 8000 | 2.50 |" in line for line in lines)
    assert "plugin" in e2e_vllm.text(record) or "on" in e2e_vllm.text(record)


def test_loads_and_machines_of_their_own_are_compared_apart():
    off, on = row("llama3-8b:w4:fp8:off", 64, 10.0), row("llama3-8b:w4:fp8:on", 64, 5.0)
    mixed = [each | {"mixed": True, "tpot_ms": 3 * each["tpot_ms"]} for each in (off, on | {"tpot_ms": 8.0})]
    two = [each | {"gpus": 2, "tpot_ms": each["tpot_ms"] / 2} for each in (off, on | {"tpot_ms": 8.0})]
    environment = {"gpu": "NVIDIA H200", "driver": "1", "versions": {"torch": "2.14"}, "commit": "abc", "date": "2026"}
    table = e2e_vllm.markdown({"environment": environment, "rows": [off, on, *mixed, *two]}).splitlines()
    gains = {line.split(" | ")[0].strip("| "): line.split(" | ")[6] for line in table if " plugin " in line}
    assert gains == {"Llama-3-8B": "1.25", "Llama-3-8B on 2 GPUs": "1.25"} and "| 2.00 |" in "".join(table)
    assert "half" in e2e_vllm.line_of(mixed[0]) and "hit" not in e2e_vllm.line_of(mixed[0])
    assert judge({"engine": "vllm", "rows": two}) == []
    assert [(each.what, each.met) for each in judge({"engine": "vllm", "rows": mixed})] == [
        ("llama3-8b, mixed load: tokens/s", True), ("llama3-8b, mixed load: first token, 99 of 100", True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("start_s", "beside", "verdicts"), [(64.9, True, [True]), (65.1, True, [False]), (64.9, False, [])]
)
def test_start_ups_of_engines_that_start_alike_are_compared(start_s: float, beside: bool, verdicts: list[bool]):
    off, on = (row(f"llama3-8b:w4:fp8:{plugin}", 1, 4.0) | {"beside": True} for plugin in ("off", "on"))
    found = judge({"engine": "vllm", "rows": [off, on | {"start_s": start_s, "beside": beside}]})
    assert [each.met for each in found if "start-up" in each.what] == verdicts


def test_a_table_names_the_commit_of_every_row():
    environment = {"gpu": "NVIDIA H200", "driver": "1", "versions": {"torch": "2.14"}, "commit": "a1", "date": "2026"}
    rows = [row("llama3-8b:w4:fp8:off", 1, 4.0) | {"commit": commit} for commit in ("b2", "a1", "c3", "b2")]
    assert "commit a1 and b2 and c3," in e2e_vllm.markdown({"environment": environment, "rows": rows})


@pytest.mark.parametrize(("on", "met"), [([10.0, 10.05, 13.0], True), ([10.0, 10.2, 10.3], False)])
def test_a_model_that_is_left_to_vllm_is_judged_by_the_medians_of_turns(on: list[float], met: bool):
    rows = [row(f"llama3-8b:bf16:auto:{plugin}", 1, 10.0) | {"tpot_of_turns_ms": turns}
            for plugin, turns in (("off", [10.0, 10.0, 10.1]), ("on", on))]  # fmt: skip
    found = {each.what: each.met for each in judge({"engine": "vllm", "rows": rows})}
    assert found["llama3-8b bf16, 1 requests: nothing replaced, of vLLM's time"] == met


@pytest.mark.parametrize(
    ("page", "name", "mark", "make"),
    [
        ("tasks/vllm", "e2e_vllm33", e2e_vllm.MARK_LATEST, e2e_vllm.markdown),
        ("reference/vllm", "e2e_vllm33_floats", e2e_vllm.MARK_FLOATS, e2e_vllm.markdown),
        ("reference/vllm", "e2e_vllm33_two_gpus", e2e_vllm.MARK_TWO_GPUS, e2e_vllm.markdown),
        ("reference/vllm", "e2e_vllm", e2e_vllm.MARK, e2e_vllm.markdown),
        ("reference/vllm", "e2e_vllm", e2e_vllm.MARK_STEP, e2e_vllm.step_markdown),
        ("reference/vllm", "vllm_rows", vllm_rows.MARK, vllm_rows.markdown),
        ("tasks/sglang", "e2e_sglang", e2e_vllm.MARK_SGLANG, e2e_vllm.markdown),
    ],
    ids=["0.33", "floats", "two GPUs", "0.26", "step", "rows", "SGLang"],
)
def test_the_page_has_the_records_table(page: str, name: str, mark: str, make: Callable[[Any], str]):
    text = (ROOT / f"docs/{page}.md").read_text()
    record = json.loads((ROOT / f"bench/results/{name}.json").read_text())
    assert report.filled(text, mark, make(record)) == text


def test_bars_are_of_the_same_weights_and_batch():
    rows = [
        row("llama3-8b:w4:fp8:off", 32, 10.0),
        row("llama3-8b:w4:fp8:on", 32, 7.0),
        row("llama3-8b:w4:auto:on:int4_g4", 32, 5.0) | {"tokens_that_fit": 2_900_000, "ttft_s": 9.0},
        row("llama3-8b:bf16:fp8:off", 32, 11.0),
        row("llama3-8b:bf16:int8_per_token_head:on", 32, 10.0),
        row("llama3-8b:w4:fp8:linear", 32, 1.0),
        row("qwen3-30b-a3b:w4:fp8:on", 1, 2.0),
    ]
    found = {each.what: each for each in judge({"engine": "vllm", "rows": rows})}
    name = "llama3-8b w4, 32 requests"
    assert found[f"{name}: times vLLM's best"].measured == 2.0 and found[f"{name}: times vLLM's best"].met
    assert abs(found[f"{name}: the same flags"].measured - 10 / 7) < 1e-9
    assert not found[f"{name}: tokens that fit, int4_g4"].met  # 1.53
    assert found[f"{name}: first token, of vLLM's time"].measured == 1.0  # of the same flags
    assert not found["llama3-8b bf16, 32 requests: times vLLM's best"].met  # 1.1
    assert not any("qwen3" in what for what in found)  # vLLM's side was not measured
    assert judge({"engine": "steps", "rows": []}) == []


@pytest.mark.parametrize(
    ("case", "batch", "alone", "at_most"),
    [
        ("llama3-8b:w4:fp8:on", 1, 2.1, "the same flags"),
        ("llama3-8b:w4:fp8:on", 32, 1.6, "the same flags"),
        ("llama3-8b:w4:auto:on:int8_token_head,int4_g4", 32, 1.75, "int8_token_head,int4_g4"),
        ("llama3-8b:w4:auto:on:int4_g4", 32, 2.1, "int4_g4"),
        ("llama2-70b-shard8:w4:auto:on:int4_g4", 64, 1.85, "int4_g4"),
        ("qwen3-30b-a3b:w4:fp8:on", 1, 2.0, "the same flags"),
        ("qwen3-30b-a3b:w4:fp8:on", 32, 1.25, "the same flags"),
        ("gpt-oss-20b:mxfp4:fp8:on", 1, 1.4, "the same flags"),
        ("gpt-oss-20b:mxfp4:fp8:on", 32, 1.2, "the same flags"),
    ],
)
def test_each_case_is_judged_by_its_own_bar(case: str, batch: int, alone: float, at_most: str):
    model, weights, *_ = case.split(":")
    off, name = row(f"{model}:{weights}:fp8:off", batch, alone), f"{model} {weights}, {batch} requests: {at_most}"
    for ms, met in ((0.999, True), (1.001, False)):
        assert {each.what: each.met for each in judge({"engine": "vllm", "rows": [off, row(case, batch, ms)]})}[
            name
        ] == met


def test_a_model_that_is_left_to_vllm_is_not_asked_to_be_faster():
    rows = [row(f"llama3-8b:bf16:auto:{plugin}", 32, 10.0) for plugin in ("off", "on")]
    assert not any("best" in each.what for each in judge({"engine": "vllm", "rows": rows}))


def test_the_record_of_the_reference_is_judged_by_the_bars_of_today():
    record = json.loads((ROOT / "bench/results/e2e_vllm33.json").read_text())
    assert record["bars"] == [verdict.as_dict() for verdict in judge(record)]


def test_rows_of_vllms_int4_lose_what_their_zero_point_and_its_place_lose():
    """Of rows around zero hardly more than a code is off by; rows of one sign lose what a zero point cannot shift."""
    x = torch.randn(400, 64, generator=torch.Generator().manual_seed(4))
    left = vllm_rows.vllms(x)
    step = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) / 15
    assert ((left - x).abs() <= 1.01 * step).all()  # a zero point is off by half a step, a code by another half
    assert (left - x).pow(2).mean() < 1.2 * (step**2 / 12).mean() and not torch.equal(left, x)
    error, own = (((rows(x.abs() + 3) - x.abs() - 3) / step).abs().max() for rows in (vllm_rows.vllms, vllm_rows.ours))
    assert own < 0.6 < error


def test_kernels_are_told_apart_by_what_they_are_for():
    names = {
        "kernel_cutlass_kernel_cute_kernelsattentionkernelDecodeKernel_object": "attention",
        "void cutlass::device_kernel<flash::FlashAttnFwdCombine<cute::tuple<": "attention",
        "triton_red_fused_fused_add_rms_norm_machete_mm_2": "sums and norms",
        "triton_poi_fused_machete_mm_mul_silu_slice_1": "gate",
        "triton_poi_fused_3": "RoPE",
        "kernel_cutlass_kernel_cute_kernelslinearwgmmakernelWgmmaKernel": "products",
        "nvjet_sm90_tst_512x32_64x3_2x1_v_bz_TNT": "LM head and router",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16": "append",
        "_gumbel_sample_kernel": step_kernels.OTHER,
    }
    for name, part in names.items():
        found = step_kernels.by_part({"kernels": [{"name": name, "count": 1.0, "us": 2.0}]})
        assert found.pop(part) == 2.0 and not any(found.values()), name
