"""Whether a real model's answers stay with a small KV cache: `python -m bench accuracy --beside-fp8`.

Each text is prefilled once, exactly. The cache behind it then goes through a format, as the library does it, and what
follows is read token by token from that cache: teacher-forced, so that all of it is one pass. Every row is beside the
same model with a BF16 cache, and beside FP8 (E4M3 per tensor), which is what engines offer:

- **continuations** of 2k and 8k tokens: KL of the next token's distribution, and how often the likeliest token agrees;
- **needles** at several depths of the same texts, numbers and words: of those that BF16 finds, how many are found;
- **a second turn**: a chat whose first answer and second question lie in the cache, and the answer to the second.

A format keeps the answers if its agreement is at least 0.99 of FP8's and its KL at most twice FP8's, at both lengths.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench import smollm2
from bench.model_accuracy import (
    BOTH,
    CALIBRATED,
    KIVI,
    MOMENTS_SHARE,
    PLAIN,
    SCALED,
    Prepared,
    Say,
    Way,
    moments_of,
    prepare,
    store_of,
    stored,
)
from bench.record import Recorder
from cute_kernels.kv_cache.constants import CacheConstants
from cute_kernels.kv_cache.vllm_rows import vllm_transform

UNIT, AS_VLLM = "scale 1", "rotated as vLLM does"
REFERENCE, FP8 = Way("bf16", "bf16"), Way("e4m3_tensor", "e4m3_tensor", SCALED)
WAYS = (
    REFERENCE,
    FP8,
    Way("e4m3_tensor", "e4m3_tensor", UNIT),
    Way("e4m3_token_head", "e4m3_token_head"),
    Way("int8_token_head", "int8_token_head"),
    Way("int8_token_head", "int4_g4"),
    *(Way("int8_token_head", "int4_g2", method) for method in (PLAIN, CALIBRATED, BOTH)),
    Way("e4m3_token_head", "int4_g2"),
    Way("e4m3_tensor", "int4_g2", SCALED),
    *(Way(name, name, method) for name in ("int4_g4", "int4_g2") for method in (PLAIN, CALIBRATED)),
    *(Way("int4_g1", "int4_g1", method) for method in (AS_VLLM, CALIBRATED)),
    *(Way(KIVI, "int4_g2", method) for method in (PLAIN, CALIBRATED)),
)
LEAST_AGREEMENT, MOST_KL = 0.99, 2.0  # of FP8's: what keeps a model's answers
ANSWERS = ("marble", "copper", "velvet", "harbor", "meadow", "lantern", "pepper", "willow", "anchor", "cedar")
PLACES = ("Lima", "Oslo", "Cairo", "Quito", "Hanoi", "Accra", "Dakar", "Sofia", "Tunis", "Minsk")
QUESTIONS = ("Summarise this page.", "Now explain its most important rule to a beginner, with an example.")


@dataclass(frozen=True)
class Plan:
    """How much is measured. texts: how many of each length; tokens: of a continuation."""

    texts: dict[int, int]
    tokens: int
    needles: int
    chats: int
    page: int
    answer: int
    calibration: int
    window: int
    ways: Sequence[Way]


FULL = Plan(
    {2048: 8, 8192: 4}, tokens=512, needles=8, chats=6, page=1024, answer=64, calibration=24, window=1024, ways=WAYS
)
QUICK = Plan({96: 1}, 16, 2, 1, 32, 4, 2, 64, (REFERENCE, FP8, WAYS[7]))


@dataclass(frozen=True)
class Branch:
    """Tokens, int64 [tokens], that go on from a text; the last ``scored`` of them are predicted.

    kind: "next" (a continuation), "number", "word" (needles), or "turn".
    """

    kind: str
    tokens: torch.Tensor
    scored: int


@dataclass(frozen=True)
class Case:
    """A text, int64 [tokens], that is prefilled, and what may go on from it."""

    text: torch.Tensor
    branches: tuple[Branch, ...]


# -- texts ------------------------------------------------------------------------------------------------------------


def case_of(tokenizer: Any, text: torch.Tensor, tokens: int, needles: int, seed: int) -> Case:
    """A text with needles at even depths, numbers and words by turns, and branches: its own end, a question each."""
    chosen = random.Random(seed)
    places, answers = chosen.sample(PLACES, needles), chosen.sample(ANSWERS, needles)
    told, branches = [], [Branch("next", text[-tokens:], tokens - 1)]
    for i, (place, word) in enumerate(zip(places, answers, strict=True)):
        kind = ("number", "word")[(i + seed) % 2]
        answer = "".join(chosen.choices("123456789", k=5)) if kind == "number" else f" {word}"
        space = "" if answer.startswith(" ") else " "
        parts = (
            f"\nThe secret {kind} of {place} is{space}{answer}.\n",
            f"\nWhat is the secret {kind} of {place}? The secret {kind} of {place} is{space}",
            answer,
        )
        line, question, wanted = (_tokens(tokenizer, part) for part in parts)
        told.append(line)
        branches.append(Branch(kind, torch.cat((question, wanted)), len(wanted)))
    hay = text[: len(text) - tokens - sum(map(len, told))]
    cuts = [len(hay) * i // max(needles - 1, 1) for i in range(needles)]
    pieces = [
        part for (a, b), line in zip(itertools.pairwise([0, *cuts]), told, strict=True) for part in (hay[a:b], line)
    ]
    return Case(torch.cat((*pieces, hay[cuts[-1] :])), tuple(branches))


@torch.no_grad()
def chat_of(model: Any, tokenizer: Any, page: torch.Tensor, answer: int) -> Case:
    """A chat over a page of text, whose answers the exact model gives: the page and the first question are prefilled;
    the branch holds the first answer, the second question, and the answer that is scored."""
    from transformers import DynamicCache

    def said(role: str, text: str) -> torch.Tensor:
        return _tokens(tokenizer, f"<|im_start|>{role}\n{text}")

    end = _tokens(tokenizer, "<|im_end|>\n")
    first = (said("user", f"{QUESTIONS[0]}\n\n"), page, end, said("assistant", ""))
    second = (end, said("user", QUESTIONS[1]), end, said("assistant", ""))
    cache, answers = DynamicCache(), []
    with stored(model, None):
        for prompt in (torch.cat(first), torch.cat(second)):
            token, given = prompt, []
            for _ in range(answer):
                logits = model(token[None], past_key_values=cache, logits_to_keep=1).logits
                token = logits[0, -1].argmax()[None]
                given.append(token)
            answers.append(torch.cat(given))
    return Case(torch.cat(first), (Branch("turn", torch.cat((answers[0], *second, answers[1])), answer),))


def _tokens(tokenizer: Any, text: str) -> torch.Tensor:
    return torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)


# -- a cache behind a text --------------------------------------------------------------------------------------------


@torch.no_grad()
def distributions(model: Any, case: Case, ways: Sequence[Prepared]) -> Iterator[list[torch.Tensor]]:
    """Of each way, each branch's log probabilities of its scored tokens: fp32 [scored, vocabulary].

    The text's K and V are computed once, exactly, and go through a way's format before the branches read them.
    """
    from transformers import DynamicCache

    cache = DynamicCache()
    with stored(model, None):
        model(case.text[None], past_key_values=cache, logits_to_keep=1)
    length, lengths = len(case.text), [len(branch.tokens) for branch in case.branches]
    tokens = torch.cat([branch.tokens for branch in case.branches])[None]
    positions = torch.cat([length + torch.arange(count) for count in lengths])[None]
    mask = mask_of(length, lengths)
    for way in ways:
        with branching(model, way, mask):
            logits = model(tokens, past_key_values=cache, position_ids=positions).logits[0]
        cache.crop(length - cache.get_seq_length())
        yield [
            part[-branch.scored - 1 : -1].float().log_softmax(-1)
            for part, branch in zip(logits.split(lengths), case.branches, strict=True)
        ]


def mask_of(length: int, lengths: Sequence[int]) -> torch.Tensor:
    """bool [branches' tokens, length + branches' tokens]: a query sees the text, and what its branch has so far."""
    own = torch.block_diag(*[torch.ones(count, count).tril() for count in lengths]).bool()
    return torch.cat((torch.ones(len(own), length, dtype=torch.bool), own), 1)


@contextmanager
def branching(model: Any, prepared: Prepared, mask: torch.Tensor) -> Iterator[None]:
    """A model whose attention reads a cache in a way's format, and sees what ``mask`` says."""
    from cute_kernels.integrations.transformers.calibrate import attending

    store = store_of(prepared.way, prepared.constants)

    def attend(module: Any, query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in store(module.layer_idx, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=options.get("scaling")
        )
        return out.transpose(1, 2).contiguous(), None

    with attending(model, attend):
        yield


# -- figures ----------------------------------------------------------------------------------------------------------


def prepared_ways(model: Any, windows: torch.Tensor, ways: Sequence[Way], say: Say) -> list[Prepared]:
    """Each way with its constants; moments and scales come from the windows."""
    moments = moments_of(model, windows, 2)
    config, found = model.config, []
    for way in ways:
        if way.method == UNIT:
            one = torch.ones(1)
            layers = config.num_hidden_layers
            found.append(Prepared(way, CacheConstants((None,) * layers, ((one, one),) * layers)))
        elif way.method == AS_VLLM:
            transform = vllm_transform(config.num_key_value_heads, config.hidden_size // config.num_attention_heads)
            found.append(Prepared(way, CacheConstants((transform,) * config.num_hidden_layers)))
        else:
            found.append(prepare(model, windows, way, 2, moments=moments))
        say(f"{way.name}: ready")
    return found


def answers_of(case: Case, right: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """What a way's distributions say of each branch beside the reference's: KL and agreement, or whether the needle is
    found by either."""
    rows: list[dict[str, Any]] = []
    for branch, p, q in zip(case.branches, right, found, strict=True):
        if branch.kind in ("number", "word"):
            wanted = branch.tokens[-branch.scored :]
            hits = {name: bool((x.argmax(-1) == wanted).all()) for name, x in (("expected", p), ("found", q))}
            rows.append({"kind": branch.kind, **hits})
            continue
        kl = (p.exp() * (p - q)).sum(-1).double()
        agreed = int((p.argmax(-1) == q.argmax(-1)).sum())
        rows.append({"kind": branch.kind, "kl": float(kl.sum()), "agreed": agreed, "tokens": len(kl)})
    return rows


def figures(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All texts' answers of one length together: mean KL in nats, agreement, needles."""
    told: dict[str, Any] = {}
    predicted = [row for row in answers if "kl" in row]
    count = sum(row["tokens"] for row in predicted)
    if count:
        agreement = sum(row["agreed"] for row in predicted) / count
        told |= {"kl": sum(row["kl"] for row in predicted) / count, "agreement": agreement, "tokens": count}
        told["agreement_error"] = (agreement * (1 - agreement) / count) ** 0.5
    for kind in ("number", "word"):
        asked = [row for row in answers if row["kind"] == kind]
        expected = [row for row in asked if row["expected"]]
        if asked:
            told[kind] = {"found": sum(row["found"] for row in expected), "of": len(expected), "asked": len(asked)}
    return told


def keeps_answers(row: dict[str, Any], fp8: dict[str, Any], lengths: Sequence[str]) -> bool:
    """Whether a row agrees with BF16 nearly as often as FP8 does, at every length, at no more than twice its KL."""
    pairs = [(row[length], fp8[length]) for length in lengths]
    return all(
        own["agreement"] >= LEAST_AGREEMENT * other["agreement"] and own["kl"] <= MOST_KL * other["kl"]
        for own, other in pairs
    )


# -- the run ----------------------------------------------------------------------------------------------------------


def run(recorder: Recorder, plan: Plan, say: Say) -> None:
    """Measures every way on every text of SmolLM2's.

    Raises:
        smollm2.MissingModelError: the weights are not installed.
    """
    model, tokenizer = smollm2.load(smollm2.find(), torch.device("cpu"))
    measure(recorder, plan, model, tokenizer, smollm2.read(tokenizer, plan.window, plan.calibration, 1), say)


def measure(recorder: Recorder, plan: Plan, model: Any, tokenizer: Any, text: smollm2.Text, say: Say) -> None:
    """Measures every way on every text and records it, text by text."""
    ways = prepared_ways(model, text.calibration, plan.ways, say)
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    about = {
        "name": smollm2.NAME,
        "head_dim": head_dim,
        "calibration_windows": len(text.calibration[::MOMENTS_SHARE]),
        "window": plan.window,
    }
    sizes = {"continuation": plan.tokens, "needles_each": plan.needles, "page": plan.page, "answer": plan.answer}
    measured = dict.fromkeys([*map(str, plan.texts), "turn"], 0)  # texts of each kind, so far
    recorder.set("model", about | sizes | {"texts": measured})
    for way in plan.ways:
        share = way.bytes_per_token(head_dim) / REFERENCE.bytes_per_token(head_dim)
        formats = {"k_format": way.k_format, "v_format": way.v_format, "method": way.method}
        recorder.add_row({"suite": "beside_fp8", "name": way.name, **formats, "share_of_bf16": round(share, 4)})
    answers: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for group, make in _cases(model, tokenizer, text.rest, plan):
        case, right = make(), None
        for prepared, row, found in zip(ways, recorder.data["rows"], distributions(model, case, ways), strict=True):
            right = found if right is None else right  # the first way is the reference
            own = answers.setdefault((group, prepared.way.name), [])
            own += answers_of(case, right, found)
            row[group] = figures(own)
        measured[group] += 1
        _judge(recorder, [str(length) for length in plan.texts])
        say(f"{group}: {len(case.text)} tokens, {recorder.seconds():.0f} s")


def _judge(recorder: Recorder, lengths: Sequence[str]) -> None:
    rows = recorder.data["rows"]
    fp8 = next(row for row in rows if row["name"] == FP8.name)
    for row in rows if all(length in fp8 for length in lengths) else ():
        row["keeps_answers"] = keeps_answers(row, fp8, lengths)
    recorder.save()


def _cases(model: Any, tokenizer: Any, rest: torch.Tensor, plan: Plan) -> list[tuple[str, Callable[[], Case]]]:
    """(group, what makes a case) of all texts, none of them twice. Groups take turns: a run that is cut has all."""
    found: list[tuple[float, str, Callable[[], Case]]] = []
    begin = 0
    for length, count in (*plan.texts.items(), (plan.page, plan.chats)):
        for i in range(count):
            part = rest[begin : begin + length]
            begin += length
            if length == plan.page:
                found.append((i / count, "turn", partial(chat_of, model, tokenizer, part, plan.answer)))
            else:
                make = partial(case_of, tokenizer, part, plan.tokens, plan.needles, i)
                found.append((i / count, str(length), make))
    return [(group, make) for _, group, make in sorted(found, key=lambda one: one[0])]
