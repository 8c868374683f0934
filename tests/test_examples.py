"""The examples run, each as a user runs it: a program of its own, warnings of this package's old names as errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {  # that they did what they are for
    "awq_checkpoint": r"layers +as loaded +as before[\s\S]*the same tokens from",
    "context_parallel": r"2 ranks with 100 tokens each: out 0\.00\d+, log-sum-exp 0\.0000",
    "custom_layout": r"swizzled .*: 4 wavefronts, 0 conflicts[\s\S]*swizzled\.svg",
    "decode_loop": r"\{'a': 48, 'c': 48\}",
    "moe_layer": r"relative difference from 16 bits: 0\.\d+",
    "transformers_model": r"cache +transformers' +int8_token_head \+ int4_g4[\s\S]*14 of them w4g128",
    "w4_layer": r"\[2/2\] layer 2",
}


def test_there_is_an_expectation_for_each_and_the_index_names_it():
    names = {path.stem for path in EXAMPLES}
    assert names == SAYS.keys()
    index = (ROOT / "examples/README.md").read_text()
    assert {*re.findall(r"\]\((\w+)\.py\)", index)} == names


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path):
    if path.stem in ("awq_checkpoint", "transformers_model"):
        pytest.importorskip("transformers")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::DeprecationWarning:__main__"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, str(path), *([str(tmp_path)] if path.stem == "custom_layout" else [])]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert re.search(SAYS[path.stem], run.stdout), run.stdout
