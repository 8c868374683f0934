"""The benchmark of a model served by SGLang: what its engine is asked for. No engine is started."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bench import e2e_cases, e2e_sglang


def arguments(text: str, folder: Path, **changes: Any) -> dict[str, Any]:
    case = dataclasses.replace(e2e_cases.case_of(text), engine="sglang", **changes)
    return e2e_sglang.engine_arguments(case, folder)


def test_attention_is_asked_for_by_name_where_the_plug_in_is_on_and_the_cache_is_fp8(tmp_path: Path):
    asked = {
        plugin: arguments(f"llama3-8b:w4:{plugin}@1,8", tmp_path)["attention_backend"]
        for plugin in ("fp8:off", "fp8:on", "fp8:linear", "auto:on")
    }
    assert asked == {"fp8:off": None, "fp8:on": "cute_kernels", "fp8:linear": None, "auto:on": None}
    assert arguments("gpt-oss-20b:mxfp4:fp8:on@1", tmp_path)["attention_backend"] is None  # SGLang refuses it there


def test_an_engine_has_the_cases_model_cache_and_graphs(tmp_path: Path):
    found = arguments("qwen3-30b-a3b:w4:fp8:on/32@1,8", tmp_path)
    assert (found["kv_cache_dtype"], found["page_size"], found["max_running_requests"]) == ("fp8_e4m3", 32, 8)
    assert found["cuda_graph_bs_decode"] == [1, 8]
    assert found["cuda_graph_bs_prefill"] == [4, 8, 64, 512, 8192]
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3_moe"


def test_an_engine_beside_another_has_room_for_its_largest_batch_alone(tmp_path: Path):
    alone, beside = (arguments("llama3-8b:w4:fp8:on@1,8", tmp_path, beside=side) for side in (False, True))
    assert alone["max_total_tokens"] is None and beside["max_total_tokens"] == 8 * (8192 + 256) + 4096


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("llama3-8b:w4:auto:on:int4_g4", {}),
        ("llama3-8b:w4:int8_per_token_head:on", {}),
        ("llama3-8b:w4:fp8:moe", {}),
        ("llama3-8b:w4:fp8:on", {"kernels": True}),
        ("llama3-8b:w4:fp8:on@mixed", {}),
        ("llama3-8b:w4:fp8:on-tp2", {}),
    ],
)
def test_what_there_is_in_vllm_alone_is_refused(text: str, changes: dict[str, Any], tmp_path: Path):
    with pytest.raises(ValueError, match="want KV of fp8, auto and a plug-in of off, on, linear"):
        arguments(text, tmp_path, **changes)


def test_a_cases_process_is_that_of_its_engine_and_finds_both_plug_ins(tmp_path: Path):
    case = dataclasses.replace(e2e_cases.case_of("llama3-8b:w4:fp8:off"), engine="sglang")
    environment = e2e_cases.environment_of(case, tmp_path)
    assert environment["CUTE_KERNELS_SGLANG"] == "0"
    points = (tmp_path / "packages/cute_kernels_checkout-0.dist-info/entry_points.txt").read_text()
    assert "[sglang.srt.plugins]" in points and "[vllm.general_plugins]" in points
