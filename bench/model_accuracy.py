"""What formats and transforms of a KV cache cost a real model: `python -m bench accuracy --model`.

Three figures for each way to store K and V, all beside exact K and V in the same windows, everything else in fp32:

- **perplexity**: every token predicted from keys and values that went through the format, its own included, as decoding
  token by token has it;
- **KL** of the next token's distribution from the one with exact K and V, in nats: what changes whether or not the text
  agrees;
- **needles**: a sentence with a number somewhere in a long text, and whether all digits of it come first at its end.

Rows are the library's own: `KvFormat.quantize` and `dequantize`, `CacheTransform`, `calibrate_cache`. Some windows are
decoded token by token through the operators as well, to see that they do what was measured.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench import smollm2
from bench.accuracy import in_dtype
from bench.record import Recorder
from cute_kernels.kv_cache.constants import CacheConstants
from cute_kernels.kv_formats import format_of
from cute_kernels.linear import quantize_weight

Say = Callable[[str], None]
Store = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class OtherTextError(ValueError):
    """A record that a run was to go on with is of another text than the run's."""


PLAIN, CENTRED, ROTATED, CALIBRATED, FITTED = "plain", "centred", "centred, rotated", "calibrated", "fitted"
PARTS = {CENTRED: {"factors": False, "rotation": False}, ROTATED: {"factors": False}, CALIBRATED: {}, FITTED: {}}
WITH_VALUES, ONE_GROUP = (CALIBRATED, FITTED), ("int4_g1",)  # where V is transformed, too
MOMENTS_SHARE = 3  # one window in so many of those that a fit sees is enough for moments
CITIES = ("Lima", "Oslo", "Cairo", "Quito", "Hanoi", "Accra", "Dakar", "Sofia", "Tunis", "Minsk")


@dataclass(frozen=True)
class Way:
    """A way to store K and V, or weights. method: PLAIN, or what `calibrate_cache` may use."""

    k_format: str = "fp32"
    v_format: str = "fp32"
    method: str = PLAIN
    weights: str | None = None

    @property
    def name(self) -> str:
        if self.weights is not None:
            return f"weights {self.weights}"
        formats = self.k_format if self.k_format == self.v_format else f"{self.k_format} + {self.v_format}"
        return formats if self.method == PLAIN else f"{formats}, {self.method}"

    @property
    def formats(self) -> tuple[str, str]:
        return self.k_format, self.v_format

    def bytes_per_token(self, head_dim: int) -> int:
        """Of K and V of one KV head."""
        return sum(format_of(name).row_bytes(head_dim) for name in self.formats)


WAYS = (
    *(Way(name, name) for name in ("bf16", "int8_token_head", "e4m3_token_head", "e5m2")),
    *(Way("int8_token_head", name) for name in ("int4_g4", "int4_g2", "int4_g1")),
    Way("int8_token_head", "int4_g2", CALIBRATED),
    *(Way(name, name, method) for name in ("int4_g4", "int4_g2", "int4_g1") for method in (PLAIN, CENTRED, CALIBRATED)),
    *(Way(weights=name) for name in ("w8g64", "w4g64", "w4g32", "w4g32z")),
)
FITS = (Way("int8_token_head", "int4_g2", FITTED), *(Way(name, name, FITTED) for name in ("int4_g4", "int4_g2")))
"""Two minutes each on an H200: only where they are asked for."""


@dataclass(frozen=True)
class Plan:
    """How much is measured: windows of tokens, steps of a fit, needles at each length."""

    window: int
    calibration_windows: int
    test_windows: int
    batch: int
    fit_steps: int
    ways: Sequence[Way]
    needle_lengths: Sequence[int]
    needles: int
    decoded: Sequence[Way]
    decoded_windows: int
    decoded_tokens: int


def plan_for(device: torch.device, quick: bool, fit: bool = False) -> Plan:
    """``quick``: each part once, on a few tokens, for tests. ``fit``: ways whose numbers are fitted as well."""
    if quick:
        some = (Way("bf16", "bf16"), Way("int4_g4", "int4_g4"), FITS[-1], WAYS[-1])
        return Plan(64, 2, 2, 2, 1, some, (128,), 1, some[1:3], 1, 4)
    ways = WAYS + FITS * fit
    if device.type == "cuda":
        decoded = [way for way in ways if way.method in WITH_VALUES]
        return Plan(1024, 120, 88, 8, 120, ways, (8000,), 10, decoded, 8, 48)
    return Plan(512, 4, 4, 2, 4, ways, (), 0, (), 0, 0)


# -- a way at work ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """A way with what it knows beforehand: a cache's constants, or other weights of some layers."""

    way: Way
    constants: CacheConstants | None = None
    weights: tuple[tuple[torch.nn.Linear, torch.Tensor], ...] = ()


def prepare(model: Any, windows: torch.Tensor, way: Way, batch: int, fit_steps: int = 1) -> Prepared:
    """What the way's method finds on calibration windows, or makes of the model's weights."""
    from cute_kernels.integrations.transformers.calibrate import calibrate_cache
    from cute_kernels.integrations.transformers.fit import fit_transforms

    if way.weights is not None:
        return Prepared(way, weights=tuple(_dequantised(model, way.weights)))
    if way.method == PLAIN:
        return Prepared(way)
    parts = [{"input_ids": part} for part in windows[::MOMENTS_SHARE].split(batch)]
    options: dict[str, Any] = PARTS[way.method] | {"values": way.v_format in ONE_GROUP and way.method in WITH_VALUES}
    constants = calibrate_cache(model, parts, way.formats, **options)
    if way.method == FITTED:
        torch.set_float32_matmul_precision("high")  # TF32, for the fit alone
        parts = [{"input_ids": part} for part in windows.split(max(1, batch // 2))]
        try:
            constants = fit_transforms(model, parts, way.formats, constants, steps=fit_steps)
        finally:
            torch.set_float32_matmul_precision("highest")
    return Prepared(way, constants)


def _dequantised(model: Any, text: str) -> Iterator[tuple[torch.nn.Linear, torch.Tensor]]:
    """Every Linear layer but the head, and what "w4g32z" (bits, group, z: zero points) leaves of its weight."""
    match = re.fullmatch(r"w(4|8)g(\d+)(z?)", text)
    assert match is not None, text
    options: dict[str, Any] = {"bits": int(match[1]), "group_size": int(match[2]), "zero_point": bool(match[3])}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and not name.endswith("lm_head"):
            packed = quantize_weight(layer.weight.data, dtype=torch.bfloat16, **options)
            yield layer, packed.dequantize(torch.float32).to(layer.weight.device)


def store_of(way: Way, constants: CacheConstants | None) -> Store:
    """What a layer's k and v [batch, heads, tokens, head_dim] are after the cache."""
    forms = [format_of(name) for name in way.formats]

    def store(layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        transform = None if constants is None else constants.transforms[layer]
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if transform is not None:
            k, v = transform.keys(k), transform.values(v)
        k, v = (form.dequantize(form.quantize(x), x.shape[-1], x.dtype) for form, x in zip(forms, (k, v), strict=True))
        if transform is not None:
            k, v = transform.original_keys(k), transform.restore(v)
        return k.transpose(1, 2), v.transpose(1, 2)

    return store


@contextmanager
def stored(model: Any, store: Store | None) -> Iterator[None]:
    """A model whose attention reads what ``store`` makes of keys and values."""
    from cute_kernels.integrations.transformers.attend import attention
    from cute_kernels.integrations.transformers.calibrate import attending

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        if store is not None:
            key, value = store(module.layer_idx, key, value)
        return attention(module, query, key, value, *args, **options)

    with attending(model, attend):
        yield


@contextmanager
def changed(model: Any, prepared: Prepared | None) -> Iterator[None]:
    """A model as a way has it; None: with exact weights, K and V."""
    weights = () if prepared is None else prepared.weights
    store = None
    if prepared is not None and prepared.way.weights is None:
        store = store_of(prepared.way, prepared.constants)
    before = [layer.weight.data for layer, _ in weights]
    try:
        for layer, weight in weights:
            layer.weight.data = weight
        with stored(model, store):
            yield
    finally:
        for (layer, _), weight in zip(weights, before, strict=True):
            layer.weight.data = weight


# -- what is measured -------------------------------------------------------------------------------------------------


@torch.no_grad()
def log_probabilities(model: Any, windows: torch.Tensor) -> torch.Tensor:
    """Of every token but a window's first: fp32 [windows, tokens - 1, vocabulary]."""
    return model(windows, use_cache=False).logits[:, :-1].float().log_softmax(-1)


def losses(log_p: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
    """Mean loss of each window, nats per token, fp64 [windows]."""
    return -log_p.gather(-1, windows[:, 1:, None])[..., 0].double().mean(-1)


def divergence(exact: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Mean KL divergence of each window's next-token distributions from the exact ones, fp64 [windows]."""
    return torch.stack([(p.exp() * (p - q)).sum(-1).double().mean() for p, q in zip(exact, found, strict=True)])


def measure(
    model: Any, windows: torch.Tensor, ways: Sequence[Prepared], batch: int
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    """(exact losses, each way's (losses, divergences)), fp64 [windows]."""
    exact: list[torch.Tensor] = []
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in ways]
    for part in windows.split(batch):
        with changed(model, None):
            right = log_probabilities(model, part)
        exact.append(losses(right, part))
        for results, prepared in zip(found, ways, strict=True):
            with changed(model, prepared):
                log_p = log_probabilities(model, part)
            results.append((losses(log_p, part), divergence(right, log_p)))
            del log_p
    return torch.cat(exact).cpu(), [
        (torch.cat([loss for loss, _ in parts]).cpu(), torch.cat([kl for _, kl in parts]).cpu()) for parts in found
    ]


@dataclass(frozen=True)
class Needle:
    """A prompt, int64 [tokens], that ends with ``digits`` tokens which it has told before."""

    tokens: torch.Tensor
    digits: int


def needles_of(tokenizer: Any, text: torch.Tensor, length: int, count: int, seed: int = 0) -> list[Needle]:
    """Prompts of about ``length`` tokens, each with its needle at another depth: evenly spread, first to last."""
    chosen = random.Random(seed)
    needles = []
    for i in range(count):
        city, number = chosen.choice(CITIES), "".join(chosen.choices("123456789", k=5))
        told, asked, answer = (
            torch.tensor(tokenizer(part)["input_ids"], dtype=torch.int64)
            for part in (
                f"\nThe secret number of {city} is {number}.\n",
                f"\nWhat is the secret number of {city}? The secret number of {city} is ",
                number,
            )
        )
        room = length - len(told) - len(asked) - len(answer)
        begin = chosen.randrange(max(1, len(text) - room))
        hay = text[begin : begin + room]
        depth = len(hay) * i // max(count - 1, 1)
        needles.append(Needle(torch.cat((hay[:depth], told, hay[depth:], asked, answer)), len(answer)))
    return needles


@torch.no_grad()
def retrieve(model: Any, needle: Needle, device: torch.device) -> tuple[bool, float]:
    """(whether every digit is the likeliest token, the digits' mean loss in nats)."""
    logits = model(needle.tokens[None].to(device), use_cache=False, logits_to_keep=needle.digits + 1).logits[0, :-1]
    answer = needle.tokens[-needle.digits :].to(device)
    loss = torch.nn.functional.cross_entropy(logits.float(), answer)
    return bool((logits.argmax(-1) == answer).all()), float(loss)


# -- decoding through the operators -----------------------------------------------------------------------------------


@torch.no_grad()
def decoded_losses(model: Any, windows: torch.Tensor, way: Way, constants: CacheConstants | None) -> torch.Tensor:
    """As `losses`, fp64 [windows], of a 16-bit model that decodes token by token through a `DecodeCache`."""
    import cute_kernels.integrations.transformers as ck

    ck.register()
    before = model.config._attn_implementation
    model.set_attn_implementation(ck.ATTENTION_NAME)
    kv_format: Any = way.formats
    cache = ck.DecodeCache(kv_format, windows.shape[1], kv_transform=constants)
    try:
        steps = [
            model(windows[:, i : i + 1], past_key_values=cache).logits[:, -1].float().log_softmax(-1)
            for i in range(windows.shape[1] - 1)
        ]
    finally:
        model.set_attn_implementation(before)
    return losses(torch.stack(steps, 1), windows)


# -- the run ----------------------------------------------------------------------------------------------------------


def run(recorder: Recorder, plan: Plan, device: torch.device, say: Say) -> None:
    """Loads the model, measures every way that the record lacks, and records it all.

    Raises:
        smollm2.MissingModelError: the weights are not installed.
        OtherTextError: the record is of another text.
    """
    model, tokenizer = smollm2.load(smollm2.find(), device)
    text = smollm2.read(tokenizer, plan.window, plan.calibration_windows, plan.test_windows)
    counts = [text.about[f"{part}_windows"] for part in ("calibration", "test")]
    say(f"{smollm2.NAME}: {counts[0]} windows to calibrate, {counts[1]} to test")
    before = recorder.data.get("model", {}).get("sha256", text.about["sha256"])
    if before != text.about["sha256"]:
        raise OtherTextError(f"the record's text has sha256 {before[:12]}, this machine's {text.about['sha256'][:12]}")
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    calibration = text.calibration.to(device)
    ways, there = [], {row["name"] for row in recorder.data["rows"]}
    for way in (way for way in plan.ways if way.name not in there):
        ways.append(prepare(model, calibration, way, plan.batch, plan.fit_steps))
        constants = ways[-1].constants
        if constants is not None:
            say(f"{way.name}: {constants.about.get('fitted', constants.about['method'])}")
    exact, found = measure(model, text.test.to(device), ways, plan.batch)
    about = {"name": smollm2.NAME, "head_dim": head_dim, "perplexity": math.exp(float(exact.mean())), **text.about}
    recorder.set("model", about)
    say(f"perplexity {about['perplexity']:.4f} with exact K and V")
    needles = {
        length: needles_of(tokenizer, text.rest, length, plan.needles) for length in plan.needle_lengths if plan.needles
    }
    if needles:
        recorder.set("needles", {str(length): _retrieved(model, some, device) for length, some in needles.items()})
    for prepared, (loss, kl) in zip(ways, found, strict=True):
        row = _row(prepared.way, head_dim) | _increase(loss, exact) | _divergence(kl)
        if needles:
            with changed(model, prepared):
                row["needles"] = {str(length): _retrieved(model, some, device) for length, some in needles.items()}
        recorder.add_row(row)
        say(
            f"{row['name']}: {row['increase_percent']:+.2f} ± {row['increase_error_percent']:.2f} %, KL {row['kl']:.5f}"
        )
    if plan.decoded:
        windows = text.test[: plan.decoded_windows, : plan.decoded_tokens + 1].to(device)
        _decode_all(recorder, model, windows, [one for one in ways if one.way in plan.decoded], say)


def _retrieved(model: Any, needles: Sequence[Needle], device: torch.device) -> dict[str, float]:
    results = [retrieve(model, needle, device) for needle in needles]
    found = sum(hit for hit, _ in results)
    return {"found": found, "of": len(results), "loss": sum(loss for _, loss in results) / len(results)}


def _decode_all(
    recorder: Recorder,
    model: Any,
    windows: torch.Tensor,
    ways: Sequence[Prepared],
    say: Say,
) -> None:
    """Some ways once more, by the operators, in bf16; a failure is recorded and passed."""
    rows = {row["name"]: row for row in recorder.data["rows"]}
    narrow = in_dtype(model, torch.bfloat16)
    for prepared in ways:
        way = prepared.way
        try:
            decoded = decoded_losses(narrow, windows, way, prepared.constants)
            with changed(narrow, prepared):
                at_once = losses(log_probabilities(narrow, windows), windows)
        except Exception as error:
            say(f"{way.name}: decoding failed: {recorder.add_failure(way.name, error)}")
            continue
        far = float((decoded - at_once).abs().max())
        rows[way.name]["decoded"] = {"loss": float(decoded.mean()), "loss_at_once": float(at_once.mean())}
        rows[way.name]["decoded"]["difference"] = far
        recorder.save()
        say(f"{way.name}: decoded, {far:.1e} nats off at most")


def _row(way: Way, head_dim: int) -> dict[str, Any]:
    row: dict[str, Any] = {"suite": "model_accuracy", "name": way.name}
    if way.weights is not None:
        return row | {"weights": way.weights}
    formats = {"k_format": way.k_format, "v_format": way.v_format, "method": way.method}
    return row | formats | {"bytes_per_token": way.bytes_per_token(head_dim)}


def _increase(found: torch.Tensor, exact: torch.Tensor) -> dict[str, float]:
    """Perplexity, its increase over exact K and V, and the increase's standard error over windows, in percent."""
    difference = found - exact
    increase = math.exp(float(difference.mean()))
    return {
        "perplexity": math.exp(float(found.mean())),
        "increase_percent": 100 * (increase - 1),
        "increase_error_percent": 100 * increase * _standard_error(difference),
    }


def _divergence(kl: torch.Tensor) -> dict[str, float]:
    return {"kl": float(kl.mean()), "kl_error": _standard_error(kl)}


def _standard_error(x: torch.Tensor) -> float:
    return float(x.std() / math.sqrt(len(x))) if len(x) > 1 else 0.0
