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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bench import smollm2
from bench.accuracy import in_dtype
from bench.record import Recorder
from cute_kernels.formats.kv import format_of
from cute_kernels.formats.weights import weight_format
from cute_kernels.gemm import quantize_activations, quantize_weight
from cute_kernels.gemm.operands.fp8 import dequantize_activations
from cute_kernels.gemm.operands.fp8_config import x_group
from cute_kernels.kv_cache.constants import CacheConstants
from layouts.kv.int4 import Int4Row

if TYPE_CHECKING:
    from cute_kernels.integrations.transformers.calibrate import CacheMoments

Say = Callable[[str], None]
Store = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class OtherTextError(ValueError):
    """A record that a run was to go on with is of another text than the run's."""


PLAIN, CENTRED, ROTATED, CALIBRATED = "plain", "centred", "centred, rotated", "calibrated"
BOTH, SCALED = "calibrated with V", "calibrated scale"
PARTS: dict[str, dict[str, Any]] = {
    CENTRED: {"factors": False, "rotation": False},
    ROTATED: {"factors": False},
    CALIBRATED: {},
    SCALED: {"center": False, "factors": False, "rotation": False},
    BOTH: {"values": "factors"},
}
WITH_VALUES, ONE_GROUP = (CALIBRATED, BOTH), ("int4_g1",)  # where V is rotated, too
KIVI, KIVI_TOKENS = "kivi32", 32
"""K a channel over 32 tokens, 4 bits and (fp16 scale, fp16 shift) a block: the rows of "int4_channel32" over a whole
window, in PyTorch. A cache is better than that: it keeps the newest block in 16 bits."""
WAYS_AT_A_TIME = 4  # that are measured before their rows are recorded
MOMENTS_SHARE = 3  # one calibration window in so many is enough for moments
CITIES = ("Lima", "Oslo", "Cairo", "Quito", "Hanoi", "Accra", "Dakar", "Sofia", "Tunis", "Minsk")


@dataclass(frozen=True)
class Way:
    """A way to store K and V, or weights. method: PLAIN, or what `calibrate_cache` may use; rounds: whether products
    with the weights have activations in FP8."""

    k_format: str = "fp32"
    v_format: str = "fp32"
    method: str = PLAIN
    weights: str | None = None
    rounds: bool = False

    @property
    def name(self) -> str:
        if self.weights is not None:
            return f"weights {self.weights}{', activations in FP8' if self.rounds else ''}"
        formats = self.k_format if self.k_format == self.v_format else f"{self.k_format} + {self.v_format}"
        return formats if self.method == PLAIN else f"{formats}, {self.method}"

    @property
    def formats(self) -> tuple[str, str]:
        return self.k_format, self.v_format

    @property
    def constants_formats(self) -> tuple[str, str]:
        """Formats whose transforms suit the rows: KIVI's blocks have as many numbers as a group of 32 columns."""
        return ("int4_g2" if self.k_format == KIVI else self.k_format), self.v_format

    def bytes_per_token(self, head_dim: int) -> int:
        """Of K and V of one KV head."""
        k_format, v_format = self.formats
        of_v = format_of(v_format).row_bytes(head_dim)
        if k_format == KIVI:
            return head_dim * Int4Row(KIVI_TOKENS).row_bytes // KIVI_TOKENS + of_v
        return format_of(k_format).row_bytes(head_dim) + of_v


WAYS = (
    *(Way(name, name) for name in ("bf16", "int8_token_head", "e4m3_token_head", "e5m2")),
    *(Way("int8_token_head", name) for name in ("int4_g4", "int4_g2", "int4_g1")),
    *(Way("int8_token_head", name, method) for name in ("int4_g2", "int4_g4") for method in (CALIBRATED, BOTH)),
    *(
        Way(name, name, method)
        for name, methods in (
            ("int4_g4", (PLAIN, CENTRED, CALIBRATED, BOTH)),
            ("int4_g2", (PLAIN, CENTRED, ROTATED, CALIBRATED, BOTH)),
            ("int4_g1", (PLAIN, CENTRED, CALIBRATED)),
        )
        for method in methods
    ),
    *(Way(KIVI, "int4_g2", method) for method in (PLAIN, ROTATED, CALIBRATED)),
    *(Way(weights=name) for name in ("w8g64", "w4g64", "w4g32", "w4g32z")),
)

OF_WEIGHTS = tuple(
    Way(weights=name, rounds=rounds)
    for name in ("fp8", "fp8_block", "w4g32", "mxfp4", "nvfp4")
    for rounds in (False, True)
    if (name, rounds) != ("nvfp4", True)  # which has no products in FP8
)


@dataclass(frozen=True)
class Plan:
    """How much is measured: windows of tokens, needles at each length."""

    window: int
    calibration_windows: int
    test_windows: int
    batch: int
    ways: Sequence[Way]
    needle_lengths: Sequence[int]
    needles: int
    decoded: Sequence[Way]
    decoded_windows: int
    decoded_tokens: int


def plan_for(device: torch.device, quick: bool, decode: bool = True, weights: bool = False) -> Plan:
    """``quick``: each part once, on a few tokens, for tests. ``decode``: some windows by the operators as well.
    ``weights``: formats of weights instead of caches."""
    if weights:
        window, windows, ways = (64, 2, OF_WEIGHTS[:2]) if quick else (512, 6, OF_WEIGHTS)
        return Plan(window, 1, windows, 2, ways, (), 0, (), 0, 0)
    if quick:
        some = (
            Way("bf16", "bf16"),
            Way("int4_g4", "int4_g4"),
            Way(KIVI, "int4_g2", CALIBRATED),
            Way("int4_g1", "int4_g1", BOTH),
            WAYS[-1],
        )
        return Plan(64, 2, 2, 2, some, (128,), 1, (some[1], some[3]) if decode else (), 1, 4)
    if device.type == "cuda":
        decoded = [way for way in WAYS if way.method in WITH_VALUES and way.k_format != KIVI and decode]
        return Plan(1024, 120, 88, 8, WAYS, (8000,), 10, decoded, 8, 48)
    return Plan(512, 4, 4, 2, WAYS, (), 0, (), 0, 0)


# -- a way at work ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepared:
    """A way with what it knows beforehand: a cache's constants, or other weights of some layers."""

    way: Way
    constants: CacheConstants | None = None
    weights: tuple[tuple[torch.nn.Linear, torch.Tensor], ...] = ()


def moments_of(model: Any, windows: torch.Tensor, batch: int) -> CacheMoments:
    """What all methods of calibration begin with."""
    from cute_kernels.integrations.transformers.calibrate import gather_moments

    return gather_moments(model, _parts(windows, batch))


def _parts(windows: torch.Tensor, batch: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": part} for part in windows[::MOMENTS_SHARE].split(batch)]


def prepare(
    model: Any,
    windows: torch.Tensor,
    way: Way,
    batch: int,
    moments: CacheMoments | None = None,
) -> Prepared:
    """What the way's method finds on calibration windows, or makes of the model's weights.

    moments: those of `moments_of`, where more than one way wants them.
    """
    from cute_kernels.integrations.transformers.calibrate import calibrate_cache

    if way.weights is not None:
        return Prepared(way, weights=tuple(_dequantised(model, way.weights)))
    if way.method == PLAIN:
        return Prepared(way)
    options = dict(PARTS[way.method])
    if way.v_format in ONE_GROUP and way.method in WITH_VALUES:
        options["values"] = True
    constants = calibrate_cache(model, _parts(windows, batch), way.constants_formats, moments=moments, **options)
    return Prepared(way, constants)


def _dequantised(model: Any, text: str) -> Iterator[tuple[torch.nn.Linear, torch.Tensor]]:
    """Every Linear layer but the head, and what a format of that name leaves of its weight."""
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and not name.endswith("lm_head"):
            packed = quantize_weight(layer.weight.data, format=text, dtype=torch.bfloat16)
            yield layer, packed.dequantize(torch.float32).to(layer.weight.device)


def _rounded_inputs(way: Way) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """A hook of layers that rounds their inputs to E4M3, as products in FP8 do."""
    assert way.weights is not None
    group = x_group(weight_format(way.weights))

    def hook(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (dequantize_activations(*quantize_activations(inputs[0], group), group),)

    return hook


def store_of(way: Way, constants: CacheConstants | None) -> Store:
    """What a layer's k and v [batch, heads, tokens, head_dim] are after the cache."""
    k_form, v_form = (_kivi if name == KIVI else _rounding(name) for name in way.formats)

    def store(layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        transform = None if constants is None else constants.transforms[layer]
        scales = constants.scales[layer] if constants is not None and constants.scales else (None, None)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        if transform is not None:
            k, v = transform.keys(k), transform.values(v)
        k, v = k_form(k, scales[0]), v_form(v, scales[1])
        if transform is not None:
            k, v = transform.original_keys(k), transform.restore(v)
        return k.transpose(1, 2), v.transpose(1, 2)

    return store


def _rounding(name: str) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """What a format's rows [..., columns] are read as, with the scale beside them."""
    form = format_of(name)
    return lambda x, scale: form.dequantize(form.quantize(x, scale), x.shape[-1], x.dtype, scale)


def _kivi(k: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """K [batch, tokens, heads, columns] as KIVI's blocks are read; tokens that fill no block stay as they are.

    A token's own block counts as written, though a cache would keep the newest one in 16 bits until it is full.
    """
    row, whole = Int4Row(KIVI_TOKENS), k.shape[1] // KIVI_TOKENS * KIVI_TOKENS
    blocks = k[:, :whole].unflatten(1, (-1, KIVI_TOKENS)).movedim(2, -1)
    read = row.dequantize(row.quantize(blocks), k.dtype).movedim(-1, 2).flatten(1, 2)
    return torch.cat((read, k[:, whole:]), 1)


@contextmanager
def stored(model: Any, store: Store | None) -> Iterator[None]:
    """A model whose attention reads what ``store`` makes of keys and values."""
    from cute_kernels.integrations.transformers.attend import attention
    from cute_kernels.integrations.transformers.calibrate import attending

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        if store is not None:
            key, value = store(module.layer_idx, key, value)
        mask = args[0] if args else options.get("attention_mask")
        if mask is None and query.shape[2] == key.shape[2]:
            return _causal(query, key, value, options.get("scaling")), None
        return attention(module, query, key, value, *args, **options)

    with attending(model, attend):
        yield


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Causal attention of a whole window. With each KV head repeated, SDPA has a kernel that keeps no scores; with
    grouped queries in fp32 it has none."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return out.transpose(1, 2).contiguous()


@contextmanager
def changed(model: Any, prepared: Prepared | None) -> Iterator[None]:
    """A model as a way has it; None: with exact weights, K and V."""
    weights = () if prepared is None else prepared.weights
    store = None
    if prepared is not None and prepared.way.weights is None:
        store = store_of(prepared.way, prepared.constants)
    before = [layer.weight.data for layer, _ in weights]
    hooks = []
    try:
        for layer, weight in weights:
            layer.weight.data = weight
            if prepared is not None and prepared.way.rounds:
                hooks.append(layer.register_forward_pre_hook(_rounded_inputs(prepared.way)))
        with stored(model, store):
            yield
    finally:
        for hook in hooks:
            hook.remove()
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
    own = str(text.about["sha256"])
    before = str(recorder.data.get("model", {}).get("sha256", own))
    if before != own:
        raise OtherTextError(f"the record's text has sha256 {before[:12]}, this machine's {own[:12]}")
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    calibration, test = text.calibration.to(device), text.test.to(device)
    needles = {
        length: needles_of(tokenizer, text.rest, length, plan.needles) for length in plan.needle_lengths if plan.needles
    }
    rows = {row["name"]: row for row in recorder.data["rows"]}
    lacking = [way for way in plan.ways if way.name not in rows or (needles and "needles" not in rows[way.name])]
    moments = None
    if any(way.method != PLAIN for way in lacking):
        moments = moments_of(model, calibration, plan.batch)
    ways: list[Prepared] = []
    for some in _at_a_time(lacking):
        for way in some:
            ways.append(prepare(model, calibration, way, plan.batch, moments))
            constants = ways[-1].constants
            if constants is not None:
                say(f"{way.name}: {constants.about['method']}")
        new = [prepared for prepared in ways[-len(some) :] if prepared.way.name not in rows]
        if not new:
            continue
        exact, found = measure(model, test, new, plan.batch)
        about = {"name": smollm2.NAME, "head_dim": head_dim, "perplexity": math.exp(float(exact.mean())), **text.about}
        recorder.set("model", about)
        for prepared, (loss, kl) in zip(new, found, strict=True):
            row = _row(prepared.way, head_dim) | _increase(loss, exact) | _divergence(kl)
            rows[row["name"]] = row
            recorder.add_row(row)
            say(
                f"{row['name']}: {row['increase_percent']:+.2f} ± {row['increase_error_percent']:.2f} %, "
                f"KL {row['kl']:.5f}"
            )
    _find_needles(recorder, model, needles, ways, device, say)
    _in_order(recorder, plan.ways)
    if plan.decoded:
        windows = test[: plan.decoded_windows, : plan.decoded_tokens + 1]
        _decode_all(recorder, model, windows, [one for one in ways if one.way in plan.decoded], say)


def _at_a_time(ways: Sequence[Way]) -> Iterator[Sequence[Way]]:
    """Ways in the parts that they are measured in before rows are recorded."""
    return (ways[i : i + WAYS_AT_A_TIME] for i in range(0, len(ways), WAYS_AT_A_TIME))


def _find_needles(
    recorder: Recorder,
    model: Any,
    needles: dict[int, list[Needle]],
    ways: Sequence[Prepared],
    device: torch.device,
    say: Say,
) -> None:
    """The needles of every way that are not recorded yet, after all rows: a run that is cut lacks them alone."""
    if not needles or not ways:
        return
    if "needles" not in recorder.data:
        with changed(model, None):
            exact = {str(length): _retrieved(model, some, device) for length, some in needles.items()}
        recorder.set("needles", exact)
    rows = {row["name"]: row for row in recorder.data["rows"]}
    for prepared in ways:
        row = rows[prepared.way.name]
        if "needles" not in row:
            with changed(model, prepared):
                row["needles"] = {str(length): _retrieved(model, some, device) for length, some in needles.items()}
            recorder.save()
            say(f"{prepared.way.name}: needles {row['needles']}")


def _in_order(recorder: Recorder, ways: Sequence[Way]) -> None:
    """Rows in the order of the ways, whichever run has measured them; others after them."""
    place = {way.name: i for i, way in enumerate(ways)}
    recorder.data["rows"].sort(key=lambda row: place.get(row["name"], len(place)))
    recorder.save()


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
        return row | {"weights": way.weights, "activations": "fp8" if way.rounds else None}
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
