"""A model served with the plugin gives what vLLM's own kernels give; needs vLLM. `serve_vllm` has the engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.e2e_vllm import Case, environment_of
from tests.gpu.serve_vllm import Scenario

pytestmark = pytest.mark.gpu
pytest.importorskip("vllm")

ROOT = Path(__file__).resolve().parents[2]
OURS, VLLMS = "CuteKernelsAttentionImpl", "FlashAttentionImpl"
SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
WINDOW = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 100}

SCENARIOS: dict[str, dict[str, Scenario]] = {
    # A process of vLLM's for each of these; FAMILY.NAME is a scenario.
    "": {
        "theirs": Scenario(),
        "theirs-cut": Scenario(chunk=384),
        "fp16": Scenario(kv_format="fp16"),
        "fp16-cut": Scenario(kv_format="fp16", chunk=384),
        "speculation": Scenario(kv_format="fp16", engine={"speculative_config": SPECULATION}),
        "int8": Scenario("int8_per_token_head"),
        "fp8-rows": Scenario("fp8_per_token_head"),
        "fp8": Scenario("fp8"),
        "int4": Scenario(kv_format="int4_g4"),
        "window-theirs": Scenario(model=WINDOW),
        "window": Scenario(kv_format="fp16", model=WINDOW),
        "pair": Scenario(kv_format="fp16", what="beside_another"),
        "long": Scenario(kv_format="int4_g4", what="serve_long", tokens=16384),
    },
    "invariant": {
        "theirs": Scenario(),
        "theirs-cut": Scenario(chunk=384),
        "whole": Scenario(kv_format="fp16"),
        "cut": Scenario(kv_format="fp16", chunk=384),
        "int4": Scenario(kv_format="int4_g4"),
        "int4-cut": Scenario(kv_format="int4_g4", chunk=384),
    },
    "two": {
        "theirs": Scenario(),
        "theirs-cut": Scenario(chunk=384),
        "fp16": Scenario(kv_format="fp16", engine={"tensor_parallel_size": 2}),
    },
}
ENVIRONMENTS = {"": {}, "invariant": {"VLLM_BATCH_INVARIANT": "1"}, "two": {}}


class Served:
    """What scenarios gave; those of a family run when the first of them is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs: dict[str, str] = {}

    def __call__(self, name: str, family: str = "") -> dict[str, Any]:
        place = self.folder / f"served-{family}"
        if family not in self.logs:
            place.mkdir(exist_ok=True)
            self.logs[family] = self._run(family, place)
        try:
            found = json.loads((place / f"{name}.json").read_text())
        except FileNotFoundError:
            raise AssertionError(f"{name} was not reached\n{self.logs[family][-6000:]}") from None
        assert "failed" not in found, found["failed"]
        return found

    def _run(self, family: str, place: Path) -> str:
        """Runs a family's scenarios, unless they lie there; what the engines said."""
        missing = {
            name: asdict(each) for name, each in SCENARIOS[family].items() if not (place / f"{name}.json").exists()
        }
        if not missing:
            return ""
        environment = environment_of(Case("llama3-8b", "bf16", "auto", "on"), place) | ENVIRONMENTS[family]
        with open(place / "log", "w+") as log:
            subprocess.run(
                [sys.executable, "-m", "tests.gpu.serve_vllm", json.dumps(missing), str(place)],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
                timeout=500,
                check=False,
            )
            log.seek(0)
            return log.read()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    """OUT in the environment names a folder to keep results in, and to take them from."""
    return Served(Path(os.environ["OUT"]) if "OUT" in os.environ else tmp_path_factory.mktemp("served"))


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
def own(served: Served) -> Difference:
    """What runs of vLLM's own kernels differ by, where prompts are cut otherwise."""
    assert served("theirs")["attention"] == [VLLMS]
    found = difference(served("theirs-cut"), served("theirs"))
    print("vLLM against itself:", found)
    return found


@pytest.mark.parametrize(
    ("name", "theirs", "factor"),
    [
        ("fp16", "theirs", 2.0),
        ("fp16-cut", "theirs", 2.0),
        ("speculation", "theirs", 2.0),
        ("window", "window-theirs", 2.0),
        # Smaller caches differ by what their formats lose.
        ("int8", "theirs", 16.0),
        ("fp8-rows", "theirs", 64.0),
        ("fp8", "theirs", 64.0),
        ("int4", "theirs", 128.0),
    ],
)
def test_tokens_are_those_of_vllms_own_attention(
    served: Served, own: Difference, name: str, theirs: str, factor: float
):
    ours = served(name)
    assert ours["attention"] == [OURS]
    assert ours["replaced"] == [["linear", None], ["attention", None], ["moe", None], ["mla", None]]
    found = difference(ours, served(theirs))
    print(f"{name}:", found)
    assert_as_close(found, own, factor)


def test_a_window_that_is_ignored_would_be_noticed(served: Served, own: Difference):
    found = difference(served("window-theirs"), served("theirs"))
    assert sorted(found.logprobs)[len(found.logprobs) // 2] > 10 * max(own.logprobs) or len(found.parted) > 20


def test_two_engines_of_a_process_give_what_each_does_alone(served: Served):
    pair, alone = served("pair"), served("fp16")
    assert [one["tokens"] for one in pair["results"]] == [one["tokens"] for one in pair["others"]]
    found = difference(pair, alone)
    assert max(found.logprobs) < 0.02 and max(found.parted, default=0.0) < 0.02, str(found)


def test_memory_stays_as_it_is_while_requests_come_and_go(served: Served):
    found = served("long")
    assert found["finished"] > 300 and found["aborted"] > 20, found
    second, last = found["memory"][1], found["memory"][-1]
    assert last["gpu"] - second["gpu"] <= 16 << 20, found["memory"]
    assert last["host"] - second["host"] <= 64 << 20, found["memory"]


@pytest.mark.parametrize("form", ["", "int4-"])
def test_a_tokens_result_does_not_depend_on_how_prompts_are_cut(served: Served, form: str):
    """VLLM_BATCH_INVARIANT: bit for bit, with other chunks, other neighbours and prefixes from the cache."""
    print("vLLM's own:", difference(served("theirs-cut", "invariant"), served("theirs", "invariant")))
    whole, cut = served(form.rstrip("-") or "whole", "invariant"), served(f"{form}cut", "invariant")
    assert whole["attention"] == [OURS]
    found = difference(cut, whole)
    assert found.parted == [] and max(found.logprobs) == 0.0, str(found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_what_one_does(served: Served):
    theirs = served("theirs", "two")
    own, found = difference(served("theirs-cut", "two"), theirs), difference(served("fp16", "two"), theirs)
    print("vLLM against itself:", own, "\ntwo GPUs:", found)
    assert_as_close(found, own, 3.0)
