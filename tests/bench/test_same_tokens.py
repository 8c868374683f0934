"""The table of greedy tokens."""

from __future__ import annotations

import pytest

from bench import same_tokens


def test_a_model_is_a_row_with_its_ties_and_errors():
    errors = {"bf16": 0.004, "e4m3_token_head": 0.012, "int8_token_head": 0.006, "int4_g4": 0.034}
    rows = [
        {"name": "b", "beside": "sdpa", "steps": 256, "same": [256, 9], "margins": [0.017], "logits": errors},
        {"name": "a", "beside": "eager", "steps": 256, "same": [256, 256], "margins": [], "logits": {"mla_fp8": 0.02}},
    ]
    environment = {
        "gpu": "GPU",
        "versions": {"torch": "2", "transformers": "5"},
        "commit": "0" * 10,
        "date": "2026-11-26",
    }
    lines = same_tokens.markdown({"rows": rows, "environment": environment}).splitlines()
    assert lines[0] == "| model | compared with | same tokens, of 256 | tie | 16 bits | FP8 | INT8 | INT4 |"
    assert lines[2] == "| a | eager | 256, 256 | - | - | 0.020 | - | - |"
    assert lines[3] == "| b | sdpa | 256, 9 | 0.017 | 0.004 | 0.012 | 0.006 | 0.034 |"


def test_a_record_without_models_is_no_table():
    with pytest.raises(ValueError, match="record: got no model"):
        same_tokens.markdown({"rows": []})
