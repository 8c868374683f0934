"""256 greedy steps of every architecture by the kernels, beside transformers' own attention; and what the logits lose
with each format of the cache. ``python -m tests.gpu.same_tokens --json FILE`` writes the record of all of them.

The models are small and random. Where two choices are first different, the record has how far apart the two tokens
were: a tie is a margin that rounding alone can turn.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import cute_kernels.integrations.transformers as ck
from bench.record import Recorder
from cute_kernels.integrations.transformers.graphs import StepReplay
from cute_kernels.integrations.transformers.norms import replace_norms
from tests.integrations.architectures import DECODERS, VOCABULARY
from tests.integrations.test_accelerate import CACHES_LATENTS
from tests.integrations.test_transformers_models import LATENTS, OWN_ATTENTION

STEPS = 256
PROMPT = torch.randint(3, VOCABULARY, (3, 50), generator=torch.Generator().manual_seed(3))
PADDED = torch.ones_like(PROMPT)
PADDED[0, :17] = 0
TIE = 0.1
"""Of the logits' standard deviation: two tokens that are closer are as good as each other but for rounding."""
LATENT_DIMS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
EAGER_ONLY = ("gemma 2", "gpt-oss")
"""SDPA has no soft caps and no sinks."""
NAMES = [
    name
    for name, each in DECODERS.items()
    if each.available and name not in OWN_ATTENTION and (name not in LATENTS or CACHES_LATENTS)
]
FORMATS = ("bf16", "e4m3_token_head", "int8_token_head", "int4_g4")
FORMATS_OF_LATENTS = ("mla_bf16", "mla_fp8")
FEW_STEPS = 24


def build(name: str, device: str = "cuda") -> Any:
    """A model that reaches so many columns."""
    changes: dict[str, Any] = {"n_positions" if name == "gpt-2" else "max_position_embeddings": 512}
    if name in LATENTS:
        changes |= LATENT_DIMS
    return DECODERS[name].build(torch.bfloat16, **changes).to(device)


@torch.no_grad()
def generate(model: Any, steps: int) -> Any:
    """Greedy tokens and their logits."""
    inputs = {name: x.to(model.device) for name, x in (("input_ids", PROMPT), ("attention_mask", PADDED))}
    options: dict[str, Any] = {"max_new_tokens": steps, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    return model.generate(**inputs, **options, return_dict_in_generate=True)


def compare(name: str, steps: int = STEPS, device: str = "cuda") -> dict[str, Any]:
    """A row of the record.

    same: of each request, the steps until its choices differ. margins: of those that do, how far apart the two tokens
    were, in standard deviations of the logits. worst: the largest relative error of logits up to there.
    """
    model = build(name, device)
    attention = "eager" if name in EAGER_ONLY else "sdpa"
    model.set_attn_implementation(attention)
    replace_norms(model)
    want = generate(model, steps)
    ck.accelerate(model, kv_format="mla_bf16" if name in LATENTS else "bf16")
    got = generate(model, steps)
    same, margins, errors = [], [], []
    for request in range(len(PROMPT)):
        for step, (ours, theirs) in enumerate(zip(got.logits, want.logits, strict=True)):
            ours, theirs = ours[request].double(), theirs[request].double()
            errors.append(float((ours - theirs).norm() / theirs.norm()))
            mine, its = (x.sequences[request, PROMPT.shape[1] + step] for x in (got, want))
            if mine != its:
                margins.append(float((theirs[its] - theirs[mine]) / theirs.std()))
                same.append(step)
                break
        else:
            same.append(steps)
    replay = model.forward
    assert isinstance(replay, StepReplay)
    row = {"name": name, "beside": attention, "steps": steps, "same": same, "margins": margins, "worst": max(errors)}
    row |= {"median": sorted(errors)[len(errors) // 2], "replays": replay.replays, "ahead": replay.ahead}
    row["reason"] = replay.reason
    ck.restore(model)
    return row | forced(model, name, attention, want.sequences)


@torch.no_grad()
def forced(model: Any, name: str, attention: str, tokens: torch.Tensor) -> dict[str, Any]:
    """What the model says of every step when it is given the tokens that SDPA chose, however it would have gone on.

    differ, widest: choices that are others with the 16-bit cache, and how far apart the two tokens are at most, in
    standard deviations. logits: relative error of the first steps' logits with each format.
    """
    model.set_attn_implementation(attention)
    want = _logits(model, None, tokens)
    formats, errors, choices = FORMATS_OF_LATENTS if name in LATENTS else FORMATS, {}, {}
    for kv_format in formats:
        is_exact = kv_format == formats[0]
        ck.accelerate(model, kv_format=kv_format, cuda_graphs=is_exact)
        got = _logits(
            model, ck.DecodeCache(kv_format), tokens if is_exact else tokens[:, : PROMPT.shape[1] + FEW_STEPS]
        )
        ck.restore(model)
        few = want[:FEW_STEPS]
        errors[kv_format] = float((got[:FEW_STEPS] - few).norm() / few.norm())
        if is_exact:
            mine, its = got.argmax(-1, keepdim=True), want.argmax(-1, keepdim=True)
            margins = ((want.gather(-1, its) - want.gather(-1, mine)) / want.std(-1, keepdim=True))[mine != its]
            choices = {"steps": mine.numel(), "differ": margins.numel(), "widest": max(margins.tolist(), default=0.0)}
    return {"choices": choices, "logits": errors}


def _logits(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    """fp64 [steps, requests, vocabulary] of the steps behind the prompt."""
    columns, out = PROMPT.shape[1], []
    mask = torch.nn.functional.pad(PADDED, (0, tokens.shape[1] - columns), value=1).to(tokens.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    if cache is None:
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
    for begin, end in ((0, columns), *((n, n + 1) for n in range(columns, tokens.shape[1]))):
        given = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end], "past_key_values": cache}
        out.append(model(tokens[:, begin:end], **given).logits[:, -1].double())
    return torch.stack(out[1:])


def text(row: dict[str, Any]) -> str:
    """A row in a line."""
    choices = row["choices"]
    others = f"; of {choices['steps']} choices {choices['differ']} others, at most {choices['widest']:.3f} apart"
    ends = f"same tokens {row['same']}, ties of {[round(x, 3) for x in row['margins']]}{others}"
    errors = ", ".join(f"{name} {error:.3f}" for name, error in row["logits"].items())
    return (
        f"{row['name']}: {ends}; logits {row['worst']:.4f} at most; {errors}; {row['ahead']} of {row['replays']} ahead"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the record; 1 if a model could not be compared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    recorder = Recorder(options.json, kind="same_tokens")
    for name in options.names:
        try:
            recorder.add_row(row := compare(name, options.steps, options.device))
            print(text(row), flush=True)
        except Exception as error:
            print(f"{name}: {recorder.add_failure(name, error)[:400]}", flush=True)
    return bool(recorder.data["failures"])


if __name__ == "__main__":
    sys.exit(main())
