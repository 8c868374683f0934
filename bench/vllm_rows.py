"""What `int4_per_token_head` costs a real model, in rows of vLLM and in ours: `python -m bench.vllm_rows`.

Both rotate K and V (random signs, a Hadamard matrix) and store 4 bits a number with one scale and one shift for each
row. vLLM's shift is a zero point of 4 bits, in the last bits of the scale; here it has 16. As in `bench accuracy
--model`, each window is compared with itself under exact K and V, all else in fp32. Runs on a CPU, too.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import model_accuracy, smollm2
from bench.record import RESULTS, Recorder, load
from bench.report import commit_of
from cute_kernels.formats.kv import format_of
from cute_kernels.formats.kv.transforms import CacheTransform
from cute_kernels.integrations.vllm.kv_formats import BY_DTYPE, transform_for

DTYPE = "int4_per_token_head"
NAMES = ("vLLM's rows", "this package's rows", "without rotation")
ZERO_POINT_MASK = 0xF
MARK = "<!-- bench:vllm-rows -->"


def vllms(x: torch.Tensor) -> torch.Tensor:
    """What is left of fp32 rows [..., head_dim] that vLLM 0.26 writes (`v1/attention/ops/int4_per_token_head.py`)."""
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / 15).clamp(min=1e-6)
    zero = (-low / scale).round().clamp(0, 15)
    codes = (x / scale + zero).round().clamp(0, 15)
    # The zero point takes the place of the last bits of the scale.
    bits = scale.contiguous().view(torch.int32) & ~ZERO_POINT_MASK | zero.int()
    return (codes - zero) * bits.view(torch.float32)


def ours(x: torch.Tensor) -> torch.Tensor:
    """What is left of rows in the format that serves the dtype."""
    form = format_of(BY_DTYPE[DTYPE])
    return form.dequantize(form.quantize(x), x.shape[-1], x.dtype)


def store_of(name: str, transform: CacheTransform) -> model_accuracy.Store:
    """What a layer's k and v [batch, heads, tokens, head_dim] are after the cache."""
    rows = vllms if name == NAMES[0] else ours

    def store(layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if name == NAMES[2]:
            k, v = rows(k), rows(v)
        else:
            k = transform.original_keys(rows(transform.keys(k)))
            v = transform.restore(rows(transform.values(v)))
        return k.transpose(1, 2), v.transpose(1, 2)

    return store


@torch.no_grad()
def run(recorder: Recorder, windows: int, batch: int, device: torch.device) -> None:
    """Measures and records all three, window by window beside exact K and V."""
    model, tokenizer = smollm2.load(smollm2.find(), device)
    plan = model_accuracy.plan_for(torch.device("cuda"), quick=False)
    text = smollm2.read(tokenizer, plan.window, plan.calibration_windows, plan.test_windows)
    config = model.config
    head_dim = config.hidden_size // config.num_attention_heads
    transform = transform_for(DTYPE, config.num_key_value_heads, head_dim)
    assert transform is not None
    transform = transform.to(device)
    tested = text.test[torch.linspace(0, len(text.test) - 1, windows).long()].to(device)
    losses: dict[str, list[torch.Tensor]] = {name: [] for name in ("exact", *NAMES)}
    divergences: dict[str, list[torch.Tensor]] = {name: [] for name in NAMES}
    for part in tested.split(batch):
        with model_accuracy.stored(model, None):
            exact = model_accuracy.log_probabilities(model, part)
        losses["exact"].append(model_accuracy.losses(exact, part))
        for name in NAMES:
            with model_accuracy.stored(model, store_of(name, transform)):
                found = model_accuracy.log_probabilities(model, part)
            losses[name].append(model_accuracy.losses(found, part))
            divergences[name].append(model_accuracy.divergence(exact, found))
        print(len(losses["exact"]) * batch, "of", windows, "windows", flush=True)
    exact = torch.cat(losses["exact"]).cpu()
    about = {"name": smollm2.NAME, "head_dim": head_dim, "perplexity": math.exp(float(exact.mean()))}
    recorder.set("model", {**about, **text.about, "windows": windows})
    for name in NAMES:
        lost, kl = torch.cat(losses[name]).cpu(), torch.cat(divergences[name]).cpu()
        recorder.add_row({"suite": "vllm_rows", "name": name, **_figures(lost - exact, kl)})


def _figures(difference: torch.Tensor, kl: torch.Tensor) -> dict[str, float]:
    increase, error = math.exp(float(difference.mean())), float(difference.std()) / math.sqrt(len(difference))
    return {
        "increase_percent": 100 * (increase - 1),
        "increase_error_percent": 100 * increase * error,
        "kl": float(kl.mean()),
        "kl_error": float(kl.std()) / math.sqrt(len(kl)),
    }


def markdown(record: dict[str, Any]) -> str:
    """The record as a Markdown table."""
    lines = [
        [
            row["name"],
            f"{row['increase_percent']:+.2f} ± {row['increase_error_percent']:.2f}",
            f"{row['kl']:.4f} ± {row['kl_error']:.4f}",
        ]
        for row in record["rows"]
    ]
    model, environment = record["model"], record["environment"]
    about = (
        f"{environment['gpu'] or 'CPU'}, torch {environment['versions']['torch']}, commit {commit_of(environment)}, "
        f"{str(environment['date'])[:10]}; {model['name']}, head_dim {model['head_dim']}, {model['windows']} windows "
        f"of {model['window']} tokens; perplexity {model['perplexity']:.3f} with exact K and V."
    )
    cells = [[DTYPE, "perplexity, %", "KL, nats"], ["---", "---:", "---:"], *lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in cells) + f"\n{about}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--json", type=Path, default=RESULTS / "vllm_rows.json")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run(Recorder(options.json, kind="vllm_rows"), options.windows, options.batch, device)
    print(markdown(load(options.json)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
