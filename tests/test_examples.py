"""The examples run as programs, each in a process of its own, with warnings of this package's old names as errors."""

from __future__ import annotations

import json
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


IN_TURN = """
import contextlib, json, os, runpy, sys
import cute_kernels
with contextlib.suppress(ImportError):
    import transformers, cute_kernels.integrations.transformers
    from transformers import LlamaForCausalLM
ended = {}
for path in sys.argv[1:]:
    name = os.path.basename(path)
    if not (child := os.fork()):
        for number, ending in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{name}.{ending}", os.O_WRONLY | os.O_CREAT), number)
        sys.argv = [path, *([os.getcwd()] if name == "custom_layout.py" else [])]
        runpy.run_path(path, run_name="__main__")
        sys.exit()
    ended[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(ended))
"""
"""Runs programs in forks of a process that has imported what takes seconds: most of them take less."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """A folder with what the examples printed, and their exit codes by name of file."""
    folder = tmp_path_factory.mktemp("examples")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::DeprecationWarning:__main__"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-c", IN_TURN, *map(str, EXAMPLES)]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return folder, json.loads(run.stdout)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, ended: tuple[Path, dict[str, int]]):
    if path.stem in ("awq_checkpoint", "transformers_model"):
        pytest.importorskip("transformers")
    folder, codes = ended
    assert codes[path.name] == 0, (folder / f"{path.name}.err").read_text()
    out = (folder / f"{path.name}.out").read_text()
    assert re.search(SAYS[path.stem], out), out
