"""The demo: a small Llama decodes real text with its KV cache in INT4 rows, compared step by step with BF16.

The model has Llama's architecture and random weights, so what it writes is noise; what is compared is arithmetic: both
runs get the same tokens, and each step's logits and attention outputs are set against each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import cute_kernels
from bench.environment import ROOT
from bench.report import aligned, number
from cute_kernels.attention.reference import decode_attention_reference

TOLERANCE = 4e-3  # relative error (norm) of the kernel against the fp64 reference on the model's own cache
SCORE_DEVIATION = 2.5  # standard deviation of the attention scores, as in trained models rather than in random ones
INITIALIZER_RANGE = 0.02


@dataclass(frozen=True)
class Scale:
    """How large the demo is: enough context that attention matters on a GPU, seconds on a CPU."""

    batch: int
    prompt_tokens: int
    steps: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int = 128


ON_GPU = Scale(4, 8192, 32, 8, 2048, 5632, 32, 8)
ON_CPU = Scale(2, 768, 8, 2, 256, 704, 8, 2)


@dataclass
class Run:
    """One decoded continuation. logits fp32 [steps, batch, vocab]; attention fp32 [steps, layers, batch, hidden]."""

    tokens: torch.Tensor
    logits: torch.Tensor
    attention: torch.Tensor
    seconds: float
    cache: Any


def run(kv_format: str = "int4_g4", steps: int | None = None, prompt: Path | None = None) -> int:
    """Runs the demo and prints what it finds; returns a process exit code (1: the kernel disagrees)."""
    from cute_kernels.integrations import transformers as integration

    on_gpu = torch.cuda.is_available()
    scale = ON_GPU if on_gpu else ON_CPU
    device = torch.device("cuda" if on_gpu else "cpu")
    steps = steps or scale.steps
    if not on_gpu:
        print("No CUDA GPU: decode_attention runs its reference implementation (PyTorch), on a smaller model.\n")

    name, text = read_prompt(prompt)
    tokens = tokenize(text, scale.batch, scale.prompt_tokens).to(device)
    model = make_model(scale, device)
    print(describe_model(model, scale))
    opening = " ".join(text[:70].split())
    print(f"prompt: {scale.batch} requests of {scale.prompt_tokens} tokens (bytes) from {name}: {opening!r} ...")
    print(f"decode: {steps} tokens per request, greedy by the BF16 run, the same tokens through both caches\n")

    integration.register()
    model.set_attn_implementation(integration.ATTENTION_NAME)
    capacity = scale.prompt_tokens + steps + 2
    runs = {}
    forced = None
    with torch.inference_mode():
        for label in ("bf16", kv_format):
            runs[label] = decode(model, tokens, integration.DecodeCache(label, capacity), steps, forced)
            forced = runs[label].tokens
        model.set_attn_implementation("sdpa")
        exact = uncached_logits(model, tokens, runs["bf16"].tokens)
        print_steps(runs["bf16"], runs[kv_format], exact)
        agrees = print_summary(runs, device)
    if not on_gpu:
        print_kernels(kv_format)
    return 0 if agrees else 1


# -- text and model ---------------------------------------------------------------------------------------------------


def read_prompt(path: Path | None) -> tuple[str, str]:
    """The prompt's name and text: the given file, else this repository's own documents."""
    if path is not None:
        return str(path), path.read_text(errors="replace")
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "LICENSE", Path(__file__)]
    files = [file for file in files if file.is_file()]
    return ", ".join(file.name for file in files), "\n\n".join(file.read_text(errors="replace") for file in files)


def tokenize(text: str, batch: int, length: int) -> torch.Tensor:
    """Bytes as tokens, int64 [batch, length]: stretches of the text from evenly spaced starts, wrapping around."""
    data = torch.tensor(list(text.encode()), dtype=torch.int64)
    if not len(data):
        raise ValueError("prompt: got an empty text, want at least one byte")
    starts = torch.arange(batch) * len(data) // batch
    return data[(starts[:, None] + torch.arange(length)) % len(data)]


def make_model(scale: Scale, device: torch.device) -> Any:
    """A Llama with random BF16 weights, its queries scaled so that attention is peaked rather than near uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=scale.hidden_size,
        intermediate_size=scale.intermediate_size,
        num_hidden_layers=scale.num_layers,
        num_attention_heads=scale.num_q_heads,
        num_key_value_heads=scale.num_kv_heads,
        head_dim=scale.head_dim,
        max_position_embeddings=2 * scale.prompt_tokens,
        initializer_range=INITIALIZER_RANGE,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    # q and k have deviation INITIALIZER_RANGE * sqrt(hidden_size) on a normalised input; scores the square of it.
    sharpen = SCORE_DEVIATION / (INITIALIZER_RANGE**2 * scale.hidden_size)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(sharpen)
    return model


def describe_model(model: Any, scale: Scale) -> str:
    millions = sum(parameter.numel() for parameter in model.parameters()) * 1e-6
    return (
        f"model: Llama architecture, {scale.num_layers} layers, hidden {scale.hidden_size}, {scale.num_q_heads} query "
        f"heads on {scale.num_kv_heads} KV heads of {scale.head_dim}, {millions:.0f} M random weights in BF16"
    )


# -- decoding ---------------------------------------------------------------------------------------------------------


def decode(model: Any, prompt: torch.Tensor, cache: Any, steps: int, forced: torch.Tensor | None) -> Run:
    """Prefill, then `steps` single-token steps; greedy, or feeding `forced` tokens [batch, steps]."""
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda module, inputs, output: outputs.append(output[0][:, -1]))
        for layer in model.model.layers
    ]
    logits = model(prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    first = forced[:, :1] if forced is not None else logits.argmax(-1, keepdim=True)
    model(first, past_key_values=cache)  # compiles whatever a step needs, outside the clock
    for layer in cache.layers:
        layer.crop(1)
    outputs.clear()
    fed, step_logits = [first], []
    _synchronize()
    begin = time.perf_counter()
    for step in range(steps):
        logits = model(fed[-1], past_key_values=cache).logits[:, -1]
        step_logits.append(logits)
        if step + 1 < steps:
            fed.append(forced[:, step + 1 : step + 2] if forced is not None else logits.argmax(-1, keepdim=True))
    _synchronize()
    seconds = time.perf_counter() - begin
    for hook in hooks:
        hook.remove()
    attention = torch.stack(outputs).unflatten(0, (steps, -1)).float()
    return Run(torch.cat(fed, dim=1), torch.stack(step_logits).float(), attention, seconds, cache)


def uncached_logits(model: Any, prompt: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The same steps without any cache, by transformers' own attention: fp32 [steps, batch, vocab]."""
    steps = tokens.shape[1]
    logits = model(torch.cat((prompt, tokens), dim=1), use_cache=False, logits_to_keep=steps).logits
    return logits.float().transpose(0, 1)


# -- what it shows ----------------------------------------------------------------------------------------------------


def print_steps(bf16: Run, int4: Run, exact: torch.Tensor) -> None:
    """One line per step: how far INT4 is from BF16, and BF16 from the run without a cache."""
    cells = [["step", "text so far", "logits INT4/BF16", "attention INT4/BF16", "same token", "logits BF16/no cache"]]
    for step in range(len(bf16.logits)):
        same = (bf16.logits[step].argmax(-1) == int4.logits[step].argmax(-1)).sum()
        cells.append(
            [
                str(step + 1),
                repr(bytes(bf16.tokens[0, : step + 1].tolist())[-8:].decode(errors="replace")),
                f"{_error(int4.logits[step], bf16.logits[step]):.4f}",
                f"{_error(int4.attention[step], bf16.attention[step]):.4f}",
                f"{int(same)}/{bf16.logits.shape[1]}",
                f"{_error(bf16.logits[step], exact[step]):.4f}",
            ]
        )
    print("\n".join(aligned(cells)))
    print("(relative errors, norm over batch; attention: outputs of all layers)\n")


def print_summary(runs: dict[str, Run], device: torch.device) -> bool:
    """Speed, memory and bandwidth of both caches; returns whether the kernel agrees with the reference on them."""
    titles = ["", *(f"{label} cache" for label in runs)]
    lines: dict[str, list[str]] = {"tokens/s": [], "cache MB": [], "kernel against fp64 reference": []}
    agrees = True
    for label, run in runs.items():
        layer = run.cache.layers[-1]
        error = _kernel_error(layer, label, run.attention)
        agrees &= error <= TOLERANCE
        lines["tokens/s"].append(number(run.tokens.numel() / run.seconds))
        lines["cache MB"].append(number(run.cache.num_bytes * 1e-6, 2))
        lines["kernel against fp64 reference"].append(f"{error:.1e}")
    if device.type == "cuda":
        lines |= _bandwidth(runs)
    print("\n".join(aligned([titles, *([name, *values] for name, values in lines.items())])))
    first, second = runs.values()
    ratio = first.cache.num_bytes / second.cache.num_bytes
    print(f"\nThe {list(runs)[1]} cache takes {ratio:.2f} times fewer bytes than BF16.")
    if device.type != "cuda":
        print("No GB/s: without a GPU there is no kernel to time and no streaming floor to hold it against.")
    if not agrees:
        print(f"FAILED: decode_attention is further than {TOLERANCE:g} from its reference.")
    return agrees


def _layer_call(layer: Any, kv_format: str) -> tuple[torch.Tensor, Callable[..., torch.Tensor]]:
    """A query for this layer's cache, and `decode_attention` on them."""
    torch.manual_seed(1)
    head_dim = {"int4": layer.form.row(0).head_dim} if False else None
    del head_dim
    raise NotImplementedError(kv_format)


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
