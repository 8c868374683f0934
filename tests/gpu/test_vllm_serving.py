"""A model served with the plugin gives what vLLM's own kernels give; needs vLLM. Each scenario starts an engine."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.e2e_vllm import Case, environment_of

pytestmark = pytest.mark.gpu
pytest.importorskip("vllm")

ROOT = Path(__file__).resolve().parents[2]
TIE = 0.06  # of log-probabilities: bf16 numbers that are added up in another order differ by so much
TOKENS = 12288  # that the cache has room for


@functools.cache
def served(folder: Path, plugin: str, kv: str = "auto", kv_format: str = "") -> dict[str, Any]:
    """What an engine gave, with a cache of TOKENS."""
    name = f"{plugin}-{kv}-{kv_format}"
    place = folder / name.replace(",", "+")
    place.mkdir()
    case = Case("llama3-8b", "bf16", kv, plugin, kv_format)
    scenario = {"kv": kv, "tokens": TOKENS, "block_size": 16}
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
    return tmp_path_factory.mktemp("served")


def parted(ours: dict[str, Any], theirs: dict[str, Any]) -> list[float]:
    """The margins at which two runs part, of the requests that do: a small one is a tie."""
    margins = []
    for one, other in zip(ours["results"], theirs["results"], strict=True):
        pairs = zip(one["tokens"], other["tokens"], one["margins"], other["margins"], strict=True)
        margins += next(([min(a, b)] for x, y, a, b in pairs if x != y), [])
    return margins


def test_a_bf16_cache_gives_the_tokens_of_vllms_own_attention(folder: Path):
    theirs = served(folder, "off")
    ours = served(folder, "on", "auto", "bf16")
    assert ours["replaced"] == [["linear", None], ["attention", None]]
    assert theirs["replaced"] == []
    margins = parted(ours, theirs)
    print("requests:", len(ours["results"]), "ties:", sorted(margins))
    assert all(margin < TIE for margin in margins)
    assert len(margins) < len(ours["results"]) // 3


@pytest.mark.parametrize("kv", ["int8_per_token_head", "fp8_per_token_head", "fp8"])
def test_an_8_bit_cache_parts_from_bf16_at_near_ties_alone(folder: Path, kv: str):
    margins = parted(served(folder, "on", kv), served(folder, "off"))
    print(kv, "requests that part:", len(margins), "largest margin:", max(margins, default=0.0))
    assert max(margins, default=0.0) < (0.3 if kv.startswith("int8") else 1.0)


def test_an_int4_cache_serves_every_request(folder: Path):
    ours = served(folder, "on", "auto", "int4_g4")
    assert ours["replaced"] == [["linear", None], ["attention", None]]
    assert all(len(result["tokens"]) == 24 for result in ours["results"])
    assert max(parted(ours, served(folder, "off")), default=0.0) < 2.0
