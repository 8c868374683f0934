"""A model served with the plugin gives what vLLM's own kernels give; needs vLLM. Each scenario starts an engine."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.e2e_vllm import Case, environment_of

pytestmark = pytest.mark.gpu
pytest.importorskip("vllm")

ROOT = Path(__file__).resolve().parents[2]
TOKENS = 12288  # that the cache has room for


@functools.cache
def served(
    folder: Path, plugin: str, kv: str = "auto", kv_format: str = "", chunk: int = 512, engine: str = "{}"
) -> dict[str, Any]:
    """What an engine gave, with a cache of TOKENS and prompts prefilled ``chunk`` tokens at a time.

    engine: more of its arguments, as JSON.
    """
    name = f"{plugin}-{kv}-{kv_format}-{chunk}-{hashlib.sha256(engine.encode()).hexdigest()[:6]}"
    place = folder / name.replace(",", "+")
    place.mkdir()
    case = Case("llama3-8b", "bf16", kv, plugin, kv_format)
    scenario = {"kv": kv, "tokens": TOKENS, "block_size": 16, "chunk": chunk, "engine": json.loads(engine)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.serve_vllm", json.dumps(scenario), str(place / "result.json")],
        cwd=ROOT,
        env=environment_of(case, place),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads((place / "result.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(os.environ["OUT"]) if "OUT" in os.environ else tmp_path_factory.mktemp("served")


@dataclass(frozen=True)
class Difference:
    """How two runs differ.

    Attributes:
        parted: the margin by which the best token was best, of each request whose tokens part: a small one is a tie.
        logprobs: of each token before requests part, how far its log-probabilities are apart.
    """

    parted: list[float]
    logprobs: list[float]

    def __str__(self) -> str:
        ordered = sorted(self.logprobs)
        shown = [ordered[len(ordered) * part // 100] for part in (50, 90, 99)] + ordered[-1:]
        return (
            f"{len(self.parted)} requests part, at margins up to {max(self.parted, default=0.0):.4f}; "
            f"log-probabilities differ by {', '.join(f'{value:.4f}' for value in shown)} (50, 90, 99, 100 %)"
        )


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> Difference:
    parted, logprobs = [], []
    for one, other in zip(ours["results"], theirs["results"], strict=True):
        for step, (mine, yours) in enumerate(zip(one["tokens"], other["tokens"], strict=True)):
            if mine != yours:
                parted.append(min(one["margins"][step], other["margins"][step]))
                break
            logprobs.append(abs(one["logprobs"][step] - other["logprobs"][step]))
    return Difference(parted, logprobs)


def assert_as_close(ours: Difference, own: Difference, factor: float) -> None:
    """Whether two runs differ by no more than ``factor`` times what two runs of vLLM itself differ by."""
    for part in (0.5, 0.9, 0.99):
        mine, yours = (sorted(each.logprobs)[int(len(each.logprobs) * part)] for each in (ours, own))
        assert mine <= factor * yours + 1e-4, (part, str(ours), str(own))
    largest = max(own.logprobs)
    assert max(ours.logprobs) <= 3 * factor * largest, (str(ours), str(own))
    assert max(ours.parted, default=0.0) <= 3 * factor * largest, (str(ours), str(own))


@pytest.fixture(scope="module")
def own(folder: Path) -> Difference:
    """What runs of vLLM's own kernels differ by, where prompts are cut otherwise."""
    found = difference(served(folder, "off", chunk=384), served(folder, "off"))
    print("vLLM against itself:", found)
    return found


def test_a_16_bit_cache_gives_the_tokens_of_vllms_own_attention(folder: Path, own: Difference):
    theirs, ours = served(folder, "off"), served(folder, "on", "auto", "fp16")
    assert theirs["replaced"] == []
    assert ours["replaced"] == [["linear", None], ["attention", None], ["moe", None]]
    found = difference(ours, theirs)
    print("fp16 cache:", found)
    assert_as_close(found, own, 2.0)


@pytest.mark.parametrize(
    ("kv", "kv_format", "factor"),
    [
        ("int8_per_token_head", "", 16.0),
        ("fp8_per_token_head", "", 64.0),
        ("fp8", "", 64.0),
        ("auto", "int4_g4", 128.0),
    ],
)
def test_a_smaller_cache_differs_by_what_its_format_loses(
    folder: Path, own: Difference, kv: str, kv_format: str, factor: float
):
    found = difference(served(folder, "on", kv, kv_format), served(folder, "off"))
    print(kv, kv_format, found)
    assert_as_close(found, own, factor)


SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def test_speculation_changes_no_token(folder: Path, own: Difference):
    """Drafts that are verified several tokens at a time give what one token at a time does."""
    theirs = served(folder, "off")
    ours = served(folder, "on", "auto", "fp16", engine=json.dumps({"speculative_config": SPECULATION}))
    found = difference(ours, theirs)
    print("speculation:", found)
    assert_as_close(found, own, 2.0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_what_one_does(folder: Path, own: Difference):
    found = difference(
        served(folder, "on", "auto", "fp16", engine=json.dumps({"tensor_parallel_size": 2})), served(folder, "off")
    )
    print("two GPUs:", found)
    assert_as_close(found, own, 3.0)
