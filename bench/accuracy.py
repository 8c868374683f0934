"""What a KV cache format costs in accuracy: `python -m bench accuracy`.

Every format, and some ways to use it better, is measured four times against exact K and V:

- Gaussian K, V and Q;
- the same with outlier channels in K, and Q small in the same channels so that the scores are those of the Gaussian;
- Q, K and V captured from a small Llama that the bench trains here on real text;
- that model's perplexity on held-back text, each byte predicted from keys and values that went through the format.

Errors are of the attention's output (norm over norm) and of its weights (KL divergence, nats). With the operators at
hand the same text is also decoded token by token through `KVCache`, to see that the kernels do what was measured.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench import corpus, small_llama
from bench.record import Recorder
from bench.small_llama import Say, Scale
from cute_kernels.formats.kv import FORMATS, KvFormat, format_of
from cute_kernels.kv_cache import KVCache, compute_kv_scale, smooth_keys

PERCENTILE = 99.9
ALPHA = 0.5
OUTLIERS = {3: 20.0, 38: 100.0, 64: 30.0, 101: 50.0}  # channel -> how many times the others' magnitude
CORPUS_BYTES = {"cuda": 48 << 20, "cpu": 8 << 20}
QUERIES = 64  # of each window, at which errors are taken
PAGE_SIZE = 64


@dataclass(frozen=True)
class Variant:
    """A way to store K and V. percentile: of magnitudes that given scales cover, None for all. smooth: K's channels."""

    k_format: str
    v_format: str
    percentile: float | None = None
    smooth: bool = False

    @property
    def name(self) -> str:
        formats = self.k_format if self.k_format == self.v_format else f"{self.k_format} + {self.v_format}"
        return formats + (f", {self.percentile}th percentile" if self.percentile else "") + ", smoothed" * self.smooth

    @property
    def formats(self) -> tuple[KvFormat, KvFormat]:
        return format_of(self.k_format), format_of(self.v_format)

    def bytes_per_token(self, head_dim: int) -> int:
        """Of K and V of one KV head."""
        return sum(form.row_bytes(head_dim) for form in self.formats)


SMOOTHED = ("int4_g1", "int4_g4", "int8_tensor", "int8_head", "int8_token_head", "e4m3_token_head")
PAIRS = (("int8_token_head", "int4_g4"), ("e4m3_head", "int4_g4"))
VARIANTS = (
    *(Variant(name, name) for name in FORMATS),
    *(Variant(name, name, percentile=PERCENTILE) for name, form in FORMATS.items() if form.given_scale),
    *(Variant(name, name, smooth=True) for name in SMOOTHED),
    *(Variant(*pair) for pair in PAIRS),
)


@dataclass(frozen=True)
class Calibration:
    """What a variant knows beforehand. factors [num_kv_heads, head_dim] or None; scales of K and V or None."""

    factors: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


@dataclass(frozen=True)
class Sample:
    """Attention's inputs, fp32.

    q: [batch, queries, num_q_heads, head_dim]. k, v: [batch, tokens, num_kv_heads, head_dim]. positions: int64
    [queries]; the query at position p sees keys 0 to p.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor


# -- a variant at work ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HalfSplit:
    """Which columns the model's RoPE rotates together."""

    rotary_dim: int
    interleaved: bool = False


def calibrate(variant: Variant, sample: Sample, rotary: bool) -> Calibration:
    """Smoothing factors and scales from a sample that is not the one measured. rotary: K went through RoPE."""
    k, factors = sample.k, None
    if variant.smooth:
        rope = HalfSplit(k.shape[-1]) if rotary else None
        factors = smooth_keys(k, sample.q, alpha=ALPHA, rope=rope)
        k = k / factors
    method = {} if variant.percentile is None else {"method": "percentile", "percentile": variant.percentile}
    k_scale, v_scale = (
        compute_kv_scale(x, kv_format=form.name, **method) if form.given_scale else None
        for x, form in zip((k, sample.v), variant.formats, strict=True)
    )
    return Calibration(factors, k_scale, v_scale)


def through(
    variant: Variant, known: Calibration, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V as attention sees them behind the cache: [..., heads, head_dim], in their own dtypes."""
    q, k = smoothed(known.factors, q, k)
    k_form, v_form = variant.formats
    return q, round_trip(k_form, k, known.k_scale), round_trip(v_form, v, known.v_scale)


def smoothed(factors: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """q * f and k / f: what projections with the factors folded in would give."""
    if factors is None:
        return q, k
    per_q_head = factors.repeat_interleave(q.shape[-2] // k.shape[-2], dim=0)
    return (q * per_q_head).to(q.dtype), (k / factors).to(k.dtype)


def round_trip(form: KvFormat, x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """Quantised and dequantised: [..., num_kv_heads, head_dim] in x's dtype."""
    return form.dequantize(form.quantize(x.float(), scale), x.shape[-1], x.dtype, scale)


# -- errors of attention ----------------------------------------------------------------------------------------------


def errors(variant: Variant, known: Calibration, sample: Sample) -> dict[str, float]:
    """Relative error of the attention's output and KL divergence of its weights, in fp64."""
    exact_log, exact = attend(sample.q, sample.k, sample.v, sample.positions)
    found_log, found = attend(*through(variant, known, sample.q, sample.k, sample.v), sample.positions)
    terms = torch.where(exact_log == -torch.inf, 0.0, exact_log.exp() * (exact_log - found_log))
    return {"error": float((found - exact).norm() / exact.norm()), "kl": float(terms.sum(-1).mean())}


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log weights [batch, num_q_heads, queries, tokens] and output [batch, queries, num_q_heads, head_dim], fp64."""
    q, k, v = q.double(), *(x.double().repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    unseen = torch.arange(k.shape[1], device=k.device) > positions[:, None]
    log_weights = scores.masked_fill(unseen, -torch.inf).log_softmax(-1)
    return log_weights, torch.einsum("bhqk,bkhd->bqhd", log_weights.exp(), v)


def gaussian(tokens: int, device: torch.device, seed: int) -> Sample:
    """Independent standard normal elements: 4 requests, 8 query heads on 2 KV heads, head_dim 128."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((4, QUERIES, 8, 128), (4, tokens, 2, 128), (4, tokens, 2, 128))
    q, k, v = (torch.randn(shape, generator=generator).to(device) for shape in shapes)
    return Sample(q, k, v, torch.full((QUERIES,), tokens - 1, device=device))


def with_outliers(sample: Sample) -> Sample:
    """K's channels in `OUTLIERS` many times larger, Q's as many times smaller: the same scores."""
    factors = torch.ones(sample.k.shape[-1], device=sample.k.device)
    factors[list(OUTLIERS)] = torch.tensor(list(OUTLIERS.values()), device=factors.device)
    return replace(sample, q=sample.q / factors, k=sample.k * factors)


# -- the model --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def capture(model: Any, windows: torch.Tensor) -> list[Sample]:
    """Each layer's attention inputs over the windows, with queries spread over the later half."""
    samples = []

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        tokens = q.shape[2]
        positions = torch.linspace(tokens // 2, tokens - 1, min(QUERIES, tokens // 2), device=q.device).long()
        heads_last = [x.transpose(1, 2).float() for x in (q, k, v)]
        samples.append(Sample(heads_last[0][:, positions], heads_last[1], heads_last[2], positions))
        return small_llama.causal_attention(q, k, v)

    with small_llama.attention_through(model, attention):
        model(windows[:, :-1], use_cache=False)
    return samples


@torch.no_grad()
def losses(
    model: Any,
    windows: torch.Tensor,
    variant: Variant | None = None,
    known: Sequence[Calibration] = (),
    batch: int = 16,
) -> torch.Tensor:
    """Mean loss of each window, nats per byte, fp32 [windows]; without a variant with exact K and V.

    Every key and value goes through the format before any query, its own included, sees it: that is what decoding
    token by token computes, for all tokens at once.
    """

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if variant is not None:
            seen = through(variant, known[layer], *(x.transpose(1, 2) for x in (q, k, v)))
            q, k, v = (x.transpose(1, 2) for x in seen)
        return small_llama.causal_attention(q, k, v)

    with small_llama.attention_through(model, attention):
        parts = [
            small_llama.token_losses(model(part[:, :-1], use_cache=False).logits, part) for part in windows.split(batch)
        ]
    return torch.cat(parts).mean(-1)


@torch.no_grad()
def decode_losses(
    model: Any, windows: torch.Tensor, variant: Variant, known: Sequence[Calibration]
) -> tuple[torch.Tensor, str]:
    """As `losses`, but decoded token by token through a `KVCache`; and the cache's memory report at the end."""
    count, context = windows.shape[0], windows.shape[1] - 1
    config = model.config
    kv_format: Any = variant.k_format if variant.k_format == variant.v_format else (variant.k_format, variant.v_format)
    cache = KVCache(
        config.num_hidden_layers,
        count * -(-context // PAGE_SIZE),
        PAGE_SIZE,
        config.num_key_value_heads,
        config.head_dim,
        kv_format=kv_format,
        dtype=model.dtype,
        device=windows.device,
    )
    for layer, prepared in enumerate(known):
        if prepared.k_scale is not None or prepared.v_scale is not None:
            cache.set_scales(layer, k_scale=prepared.k_scale, v_scale=prepared.v_scale)
    batch = cache.make_batch(count)
    names = range(count)
    for name in names:
        cache.allocate(name, 0)

    def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k = smoothed(known[layer].factors, q.transpose(1, 2), k.transpose(1, 2))
        cache.append(layer, batch, k[:, 0].contiguous(), v[:, :, 0].contiguous())
        return cache.attend(layer, batch, q.contiguous())

    steps = []
    with small_llama.attention_through(model, attention):
        for position in range(context):
            cache.extend_all(names)
            batch.update(names)
            place = torch.full((count, 1), position, device=windows.device)
            token = windows[:, position : position + 1]
            steps.append(model(token, position_ids=place, use_cache=False).logits)
    return small_llama.token_losses(torch.cat(steps, dim=1), windows).mean(-1), str(cache.memory_report())


# -- the run ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    scale: Scale
    corpus_bytes: int
    synthetic_tokens: int
    captured_windows: int
    validation_windows: int
    decode_windows: int
    decode_context: int


def plan_for(device: torch.device, quick: bool, minutes: float | None) -> Plan:
    """`quick` is for tests: everything is done, nothing is learnt."""
    if quick:
        plan = Plan(small_llama.QUICK, 1 << 18, 128, 2, 4, 2, 8)
    elif device.type == "cuda":
        plan = Plan(small_llama.ON_GPU, CORPUS_BYTES["cuda"], 2048, 4, 128, 16, 128)
    else:
        plan = Plan(small_llama.ON_CPU, CORPUS_BYTES["cpu"], 512, 4, 64, 4, 32)
    if minutes is None:
        return plan
    return replace(plan, scale=replace(plan.scale, seconds=60 * minutes))


def run(recorder: Recorder, plan: Plan, device: torch.device, say: Say, decode: bool) -> None:
    """Trains the model, measures every variant, and records it all."""
    scale = plan.scale
    text = corpus.collect(plan.corpus_bytes)
    recorder.set("corpus", text.about)
    say(f"corpus: {text.about['train_bytes']} bytes, and {text.about['validation_bytes']} to validate on")
    model = small_llama.make_model(scale, device)
    millions = sum(parameter.numel() for parameter in model.parameters()) * 1e-6
    say(f"model: {scale.num_layers} layers, {millions:.1f} M parameters; training {scale.seconds:.0f} s at most")
    trained = small_llama.train(model, text.train, scale, say)
    windows, held_back = (
        small_llama.spread(part, count, scale.context).to(device)
        for part, count in ((text.train, plan.captured_windows), (text.validation, plan.validation_windows))
    )
    exact = losses(model, held_back).double()
    about = {"parameters": round(millions * 1e6), **trained, "perplexity": math.exp(exact.mean())}
    recorder.set("model", {**vars(scale), **about})
    say(f"trained: {trained['steps']} steps; perplexity {about['perplexity']:.4f} per byte with exact K and V")
    known_samples, samples = capture(model, windows), capture(model, held_back[: plan.captured_windows])
    plain = [gaussian(plan.synthetic_tokens, device, seed) for seed in (1, 0)]  # to calibrate on, to measure on
    synthetic = {"gaussian": plain, "outliers": [with_outliers(sample) for sample in plain]}
    for variant in VARIANTS:
        row = _row(variant, scale.head_dim)
        for name, (before, now) in synthetic.items():
            row[name] = errors(variant, calibrate(variant, before, rotary=False), now)
        known = [calibrate(variant, sample, rotary=True) for sample in known_samples]
        by_layer = [errors(variant, *pair) for pair in zip(known, samples, strict=True)]
        row["captured"] = {key: sum(layer[key] for layer in by_layer) / len(by_layer) for key in ("error", "kl")}
        row |= _perplexity(losses(model, held_back, variant, known).double(), exact)
        recorder.add_row(row)
        say(f"{variant.name}: perplexity {row['perplexity']:.4f}, {row['increase_percent']:+.3f} %")
    if decode:
        _decode_all(recorder, model, held_back[: plan.decode_windows, : plan.decode_context + 1], known_samples, say)


def _decode_all(recorder: Recorder, model: Any, windows: torch.Tensor, samples: Sequence[Sample], say: Say) -> None:
    """Every variant once more, through the cache and its operators, in 16 bits; a failure is recorded and passed."""
    models = {dtype: in_dtype(model, dtype) for dtype in (torch.bfloat16, torch.float16)}
    for row, variant in zip(recorder.data["rows"], VARIANTS, strict=True):
        begin = time.perf_counter()
        narrow = models[torch.float16 if "fp16" in (variant.k_format, variant.v_format) else torch.bfloat16]
        known = [calibrate(variant, sample, rotary=True) for sample in samples]
        try:
            decoded, memory = decode_losses(narrow, windows, variant, known)
        except Exception as error:
            say(f"{variant.name}: decoding failed: {recorder.add_failure(variant.name, error)}")
            continue
        at_once = losses(narrow, windows, variant, known)
        seconds = time.perf_counter() - begin
        row["decoded"] = {"loss": float(decoded.mean()), "loss_at_once": float(at_once.mean())}
        row["decoded"] |= {"difference": float((decoded - at_once).abs().max()), "seconds": round(seconds, 1)}
        row["decoded"]["memory"] = memory.splitlines()
        recorder.save()
        say(f"{variant.name}: decoded, {row['decoded']['difference']:.1e} nats off at most, {seconds:.1f} s")


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """A copy with parameters in another dtype; `Module.to` would round RoPE's frequencies too."""
    narrow = copy.deepcopy(model)
    for parameter in narrow.parameters():
        parameter.data = parameter.data.to(dtype)
    return narrow


def _row(variant: Variant, head_dim: int) -> dict[str, Any]:
    return {
        "suite": "accuracy",
        "name": variant.name,
        "k_format": variant.k_format,
        "v_format": variant.v_format,
        "percentile": variant.percentile,
        "smoothed": variant.smooth,
        "head_dim": head_dim,
        "bytes_per_token": variant.bytes_per_token(head_dim),
    }


def _perplexity(found: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """Perplexity, its increase over exact K and V, and the increase's standard error over windows, in percent."""
    difference = found - exact
    spread = float(difference.std() / math.sqrt(len(difference))) if len(difference) > 1 else 0.0
    return {
        "perplexity": math.exp(found.mean()),
        "increase_percent": 100 * math.expm1(difference.mean()),
        "increase_error_percent": 100 * spread,
    }
