"""What the kernels must show, as data, and whether a recorded run shows it.

Bars are ratios to the streaming floor or to peers of the same run; only the smallest shapes, which are all launch and
latency, have bars in microseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bench.workloads import HEADS_FIRST

Record = dict  # a run as `bench.record.Recorder` writes it; its values are JSON

INT4_FLOOR_RATIO = {32: 1.35, 64: 1.2, 128: 1.15, 256: 1.12, 512: 1.10}
BF16_FLOOR_RATIO = {32: 1.15, 64: 1.1, 128: 1.05, 256: 1.05, 512: 1.03}
MAIN_FLOOR_RATIO = {"int4_g1": INT4_FLOOR_RATIO, "int4_g4": INT4_FLOOR_RATIO, "bf16": BF16_FLOOR_RATIO}
MAIN_MICROSECONDS = {"int4_g1": {1: 9.0}, "int4_g4": {1: 9.0}, "bf16": {1: 10.0}}
OTHER_SHAPES_FLOOR_RATIO = 1.25
INT4_SPEEDUP_BATCH, INT4_SPEEDUP = 512, 3.2
HOST_MICROSECONDS = 6.0
APPEND_KV_HEADS = 8  # with one KV head the bytes take less time than two reads of memory one after the other
APPEND_DECODE_BATCH, APPEND_DECODE_BYTES_RATIO = 512, 1.5  # beyond an empty launch, over the time of the bytes
APPEND_PREFILL_TOKENS, APPEND_PREFILL_COPY_RATIO = 65536, 1.3
EIGHT_BIT_FLOOR_RATIO = {32: 1.25, 128: 1.15, 512: 1.10}
PAGED_OVER_CONTIGUOUS = {64: 1.03, 16: 1.08}
QUERIES, QUERIES_OVER_ONE = 4, 1.15
RAGGED_FLOOR_RATIO, MHA_FLOOR_RATIO = 1.3, 1.35
# Of a case's better layout of the cache, where both were measured: a user chooses the layout.
MORE_FLOOR_RATIO, MORE_MICROSECONDS = 1.15, {"skewed": 5.0, "heads": 3.0, "blocks": 0.0}
BF16_RIVAL = "SDPA cudnn"
SHORT_PEER_RATIO = 0.9  # of the fastest peer's time, for one request of few tokens
LINEAR_FORMATS = ("w4a16", "w8a16")  # others are compared with peers alone
LINEAR_FEW_ROWS, LINEAR_FLOOR_RATIO = 16, 1.20
LINEAR_SMALL, LINEAR_SMALL_FLOOR_RATIO = (4096, 4096), 1.35  # N, K
LINEAR_PEER_RATIO = 1.03  # the noise of a run
LINEAR_MANY_ROWS, LINEAR_TFLOPS = 1024, 820
FORMAT_FLOOR_RATIO = {"mxfp4": 1.20, "nvfp4": 1.20, "fp8": 1.15, "fp8_block": 1.15}  # of few rows
FORMAT_PEER_RATIO, FORMAT_PEERS_MEAN = 1.05, 1.0
FORMAT_FEW_TOKENS, FORMAT_TOKENS_FLOOR_RATIO, FORMAT_MORE_TOKENS_FLOOR_RATIO = 4, 1.4, 1.2
FORMAT_OVER_INT4 = 1.05  # experts in MXFP4 over those in INT4 with as many groups, bytes allowed for
MOE_FEW_TOKENS, MOE_FLOOR_RATIO = 128, 1.20
MOE_MANY_TOKENS, MOE_MANY_PEER_RATIO = 2048, 1.0
MOE_PEER_RATIO = 1.03  # of fewer tokens: the noise of a run
MOE_RATES = {("Mixtral-8x7B", 8192): 620}  # TFLOPS of the first product
MOE_HOST_MICROSECONDS = 25.0
LINEAR_LARGE = ((8192, 28672), (57344, 8192))
TRANSFORMERS_OVER_SDPA, TRANSFORMERS_OVER_STATIC = 15.0, 2.5
TRANSFORMERS_OVER_PARTS, TRANSFORMERS_HOST_MICROSECONDS = 1.15, 150.0
TRANSFORMERS_HOST = {"host_us": "steps ahead", "host_in_order_us": "in order"}
TRANSFORMERS_INT4_OVER_BF16 = 1.0
# Of a served model: times the tokens/s of SGLang alone, with the same flags.
SGLANG_SAME_FLAGS = {("llama3-8b", "w4", 1): 1.4, ("llama3-8b", "w4", 32): 1.3}
# Of a served model: times the tokens/s of vLLM's best, with the same flags, with the fastest cache, and with a cache.
VLLM_SAME_FLAGS = {("llama3-8b", "w4", 1): 2.1, ("llama3-8b", "w4", 32): 1.6}
VLLM_SAME_FLAGS |= {("qwen3-30b-a3b", "w4", 1): 2.0, ("qwen3-30b-a3b", "w4", 32): 1.25}
VLLM_SAME_FLAGS |= {("gpt-oss-20b", "mxfp4", 1): 1.4, ("gpt-oss-20b", "mxfp4", 32): 1.2}
VLLM_BEST = {("llama3-8b", "w4", 1): 1.55, ("llama3-8b", "w4", 32): 1.75, ("llama3-8b", "bf16", 32): 1.15}
VLLM_WITH_CACHE = {
    ("llama3-8b", "w4", 32, "int8_token_head,int4_g4"): 1.75,
    ("llama3-8b", "w4", 32, "int4_g4"): 2.1,
    ("llama2-70b-shard8", "w4", 64, "int4_g4"): 1.85,
}
VLLM_FIRST_TOKEN, VLLM_PREFIX_HIT = 1.03, 1.10  # of vLLM's time, with the same flags
VLLM_START_SECONDS = 5.0  # with kernels compiled before; engines that start side by side are compared with each other
VLLM_MIXED, VLLM_MIXED_FIRST = 1.4, 1.0  # tokens per second, and the time that 99 of 100 requests wait at most
VLLM_LEFT = 1.01  # medians of turns, of a model whose layers are all left to it
VLLM_TOKENS_THAT_FIT = {"int4_g4": 1.55, "int4_g1": 1.8}  # of FP8's
MLA_BARS = {  # of `bench.mla_workloads`' shapes: what is judged, and its limit
    "sparse mla_fp8 b=128 h=128 s_q=2 topk=2048": ("tflops", 460),
    "sparse mla_fp8 b=148 h=128 s_q=2 topk=32768": ("tflops", 520),
    "sparse mla_fp8 b=128 h=64 s_q=1 topk=2048": ("tflops", 370),
    "sparse mla_fp8 b=128 h=16 s_q=1 topk=2048": ("tb_per_s", 2.2),
    "sparse mla_fp8 b=2 h=128 s_q=2 topk=2048": ("us", 20),
    "dense mla_bf16 b=128 h=128 s_q=2 s_k=8192": ("tflops", 660),
    "dense mla_bf16 b=128 h=64 s_q=1 s_k=8192": ("tb_per_s", 4.1),
    "dense mla_bf16 b=128 h=16 s_q=1 s_k=8192": ("tb_per_s", 4.1),
    "dense mla_bf16 b=1 h=128 s_q=1 s_k=32768": ("us", 50),
}
MLA_UNITS = {"tflops": "TFLOPS", "tb_per_s": "TB/s", "us": "us"}
MLA_PEER_RATIO = 1.0


@dataclass(frozen=True)
class Verdict:
    """One bar and one measurement. `at_most`: whether the limit is an upper one."""

    what: str
    measured: float
    limit: float
    unit: str
    at_most: bool = True

    @property
    def met(self) -> bool:
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit

    def as_dict(self) -> dict[str, object]:
        sign = "<=" if self.at_most else ">="
        return {
            "what": self.what,
            "measured": round(self.measured, 3),
            "bar": f"{sign} {self.limit:g} {self.unit}".strip(),
            "met": self.met,
        }


def judge(record: Record) -> list[Verdict]:
    """All bars that the run has measurements for."""
    rows = [row for row in record.get("rows", []) if row.get("us")]
    verdicts = [verdict for row in rows for verdict in _judge_row(row)]
    verdicts += _judge_more([row for row in rows if row["suite"] in MORE_MICROSECONDS])
    verdicts += _judge_speedup(rows)
    verdicts += _judge_cache([row for row in rows if row["suite"] in ("cache", "pages")])
    host = record.get("host_us", {}).get("eager")
    if host is not None:
        verdicts.append(Verdict("host cost of one eager call", host, HOST_MICROSECONDS, "us"))
    verdicts += [verdict for row in record.get("append", []) for verdict in _judge_append(row)]
    verdicts += [verdict for row in record.get("linear", []) for verdict in _judge_linear(row)]
    verdicts += _judge_formats(record.get("linear_formats", []))
    verdicts += [verdict for row in record.get("moe_formats", []) for verdict in _judge_expert_formats(row)]
    verdicts += [verdict for row in record.get("moe", []) for verdict in _judge_moe(row)]
    for name, us in record.get("moe_host_us", {}).items():
        verdicts.append(Verdict(f"moe: host cost of a layer, {name}", us, MOE_HOST_MICROSECONDS, "us"))
    verdicts += _judge_mla([row for row in record.get("mla", []) if row.get("us")])
    verdicts += [verdict for row in record.get("mla_append", []) for verdict in _judge_mla_append(row)]
    if record.get("engine") == "transformers":
        verdicts += _judge_transformers(record)
    if record.get("engine") == "vllm":
        verdicts += _judge_vllm(record["rows"])
    if record.get("engine") == "sglang":
        verdicts += _judge_sglang(record["rows"])
    return verdicts


def _judge_sglang(rows: list[Record]) -> list[Verdict]:
    """A served model with the plug-in beside SGLang alone, by the same flags."""
    times = {(row["model"], row["weights"], row["batch"], row["plugin"]): row["tpot_ms"] for row in rows}
    verdicts = []
    for key, wanted in SGLANG_SAME_FLAGS.items():
        if {(*key, "off"), (*key, "on")} <= times.keys():
            gain = times[(*key, "off")] / times[(*key, "on")]
            what = "{} {}, {} requests: times SGLang's".format(*key)
            verdicts.append(Verdict(what, gain, wanted, "", at_most=False))
    return verdicts


def _judge_vllm(rows: list[Record]) -> list[Verdict]:
    """A served model with the plug-in beside vLLM's best of the same weights and batch."""
    verdicts = []
    groups: dict[tuple[str, str, int], list[Record]] = {}
    loads: dict[str, dict[str, Record]] = {}
    for row in rows:
        if row.get("gpus", 1) > 1:  # machines of their own
            continue
        if row.get("mixed"):
            loads.setdefault(row["model"], {}).setdefault(row["plugin"], row)
            continue
        groups.setdefault((row["model"], row["weights"], row["batch"]), []).append(row)
    for key, group in groups.items():
        own = min((row for row in group if row["plugin"] == "off"), key=lambda row: row["tpot_ms"], default=None)
        ours = [row for row in group if row["plugin"] == "on"]
        if own is None or not ours:
            continue
        name = "{} {}, {} requests".format(*key)
        best = max((own["tpot_ms"] / row["tpot_ms"] for row in ours if not _is_left(row)), default=None)
        if best is not None and key in VLLM_BEST:
            verdicts.append(Verdict(f"{name}: times vLLM's best", best, VLLM_BEST[key], "", at_most=False))
        for row in ours:
            if (wanted := VLLM_WITH_CACHE.get((*key, row["kv_format"]))) is not None:
                times = own["tpot_ms"] / row["tpot_ms"]
                verdicts.append(Verdict(f"{name}: {row['kv_format']}", times, wanted, "", at_most=False))
            fit = VLLM_TOKENS_THAT_FIT.get(row["kv_format"])
            if fit and row["tokens_that_fit"] and own["tokens_that_fit"]:
                ratio = row["tokens_that_fit"] / own["tokens_that_fit"]
                verdicts.append(Verdict(f"{name}: tokens that fit, {row['kv_format']}", ratio, fit, "", at_most=False))
            if (row["kv"], row["kv_format"]) != (own["kv"], own["kv_format"]):
                continue
            if _is_left(row):
                left, alone = (
                    statistics.median(each.get("tpot_of_turns_ms") or [each["tpot_ms"]]) for each in (row, own)
                )
                verdicts.append(Verdict(f"{name}: nothing replaced, of vLLM's time", left / alone, VLLM_LEFT, ""))
            if key in VLLM_SAME_FLAGS:
                times = own["tpot_ms"] / row["tpot_ms"]
                verdicts.append(Verdict(f"{name}: the same flags", times, VLLM_SAME_FLAGS[key], "", at_most=False))
            first, hit = (row[part] / own[part] for part in ("ttft_s", "ttft_hit_s"))
            verdicts.append(Verdict(f"{name}: first token, of vLLM's time", first, VLLM_FIRST_TOKEN, ""))
            verdicts.append(Verdict(f"{name}: after a prefix hit, of vLLM's time", hit, VLLM_PREFIX_HIT, ""))
            if row["start_s"] and own["start_s"] and row.get("beside") == own.get("beside"):
                more = row["start_s"] - own["start_s"]
                verdicts.append(Verdict(f"{name}: start-up, more than vLLM's", more, VLLM_START_SECONDS, "s"))
    for model, load in loads.items():
        if {"on", "off"} <= load.keys():
            ours, own = load["on"], load["off"]
            times, waits = ours["tokens_per_s"] / own["tokens_per_s"], ours["ttft_s"] / own["ttft_s"]
            verdicts.append(Verdict(f"{model}, mixed load: tokens/s", times, VLLM_MIXED, "", at_most=False))
            verdicts.append(Verdict(f"{model}, mixed load: first token, 99 of 100", waits, VLLM_MIXED_FIRST, ""))
    return verdicts


def _is_left(row: Record) -> bool:
    """Whether all layers of a served model are left to vLLM."""
    return row["kv"] == "auto" and row["weights"] in ("bf16", "fp8") and not row["kv_format"]


def _judge_transformers(record: Record) -> list[Verdict]:
    """`generate` over packed caches: W4 layers with the INT4 cache against transformers' own ways and against the sum
    of what it cannot do without; INT4 against BF16 at every batch."""
    rows = {row["name"]: row for row in record.get("rows", ())}
    ours, verdicts = rows.get("int4_g4 cache, W4"), []
    for name, limit in (
        ("transformers, SDPA", TRANSFORMERS_OVER_SDPA),
        ("transformers, static cache, compiled", TRANSFORMERS_OVER_STATIC),
    ):
        if ours is not None and name in rows:
            times = rows[name]["step_ms"] / ours["step_ms"]
            verdicts.append(Verdict(f"generate: times the speed of {name}", times, limit, "", at_most=False))
    if ours is not None and "parts" in record:
        ratio = ours["step_ms"] / sum(record["parts"].values())
        what = "generate: a step over the bare step, the output layer and transformers' loop"
        verdicts.append(Verdict(what, ratio, TRANSFORMERS_OVER_PARTS, ""))
    for name, row in rows.items():
        for key, how in TRANSFORMERS_HOST.items():
            if row.get("cuda_graphs") and row.get(key) is not None:
                what = f"generate: host work added to a step, {name}, {how}"
                verdicts.append(Verdict(what, row[key], TRANSFORMERS_HOST_MICROSECONDS, "us"))
    times = {(row["kv_format"], row["batch"]): row["step_ms"] for row in record.get("batches", ())}
    for (kv_format, batch), ms in times.items():
        if kv_format == "int4_g4" and ("bf16", batch) in times:
            ratio = ms / times["bf16", batch]
            what = f"generate: a step with the INT4 cache over BF16's, {batch} requests"
            verdicts.append(Verdict(what, ratio, TRANSFORMERS_INT4_OVER_BF16, ""))
    return verdicts


def _judge_moe(row: Record) -> list[Verdict]:
    """The first product: few tokens against the floor, many by their rate, all against the fastest peer that does the
    same work: both gather rows, or neither."""
    tokens, model, first = row["shape"]["tokens"], row["shape"]["model"]["name"], row["first"]
    name, verdicts = f"moe: {row['name']}, first product", []
    if tokens <= MOE_FEW_TOKENS:
        verdicts.append(Verdict(f"{name}: ratio to the floor", first["floor_ratio"], MOE_FLOOR_RATIO, ""))
    limit = MOE_PEER_RATIO if tokens < MOE_MANY_TOKENS else MOE_MANY_PEER_RATIO
    for what, how in (("first", "rows by index"), ("in_order", "rows in order")):
        times = {peer: us for peer, found in row["peers"].items() if (us := found.get(f"{what}_us"))}
        if times and what in row:
            best = min(times, key=times.__getitem__)
            ratio = row[what]["us"] / times[best]
            verdicts.append(Verdict(f"{name}, {how}: time over {best}'s", ratio, limit, ""))
    if (model, tokens) in MOE_RATES:
        rate = MOE_RATES[model, tokens]
        verdicts.append(Verdict(f"{name}: rate", first["tflops"], rate, "TFLOPS", at_most=False))
    return verdicts


def _judge_mla(rows: list[Record]) -> list[Verdict]:
    """Each shape's own bar and each peer; all outputs by the tolerances."""
    verdicts = []
    for row in rows:
        us, name = row["us"]["median_us"], row["name"]
        if name in MLA_BARS:
            quantity, limit = MLA_BARS[name]
            measured = us if quantity == "us" else row[quantity]
            what = f"{name}: {'time' if quantity == 'us' else 'rate'}"
            verdicts.append(Verdict(what, measured, limit, MLA_UNITS[quantity], at_most=quantity == "us"))
        for peer, found in row["peers"].items():
            if found.get("us"):
                verdicts.append(Verdict(f"{name}: time over {peer}'s", us / found["us"], MLA_PEER_RATIO, ""))
    if rows:
        outside = sum(row["error"]["outside"] for row in rows)
        verdicts.append(Verdict("MLA decode: elements outside FlashMLA's tolerances", outside, 0, ""))
    return verdicts


def _judge_mla_append(row: Record) -> list[Verdict]:
    if row["shape"]["tokens"] < APPEND_PREFILL_TOKENS:
        return []
    ratio = row["us"]["median_us"] / row["copy_us"]
    return [Verdict(f"{row['name']}: time over a copy of its bytes", ratio, APPEND_PREFILL_COPY_RATIO, "")]


def _judge_linear(row: Record) -> list[Verdict]:
    """Few rows against the floor, all against the fastest peer, many by their rate."""
    shape, us, name = row["shape"], row["us"]["median_us"], f"{row['format']} {row['name']}"
    layer, verdicts = (shape["n"], shape["k"]), []
    judged = row["format"] in LINEAR_FORMATS  # by more than by peers
    if judged and shape["m"] <= LINEAR_FEW_ROWS:
        limit = LINEAR_SMALL_FLOOR_RATIO if layer == LINEAR_SMALL else LINEAR_FLOOR_RATIO
        verdicts.append(Verdict(f"{name}: ratio to the floor", row["floor_ratio"], limit, ""))
    # A peer that another process timed is compared with our time from there.
    peers = {
        peer: found.get("beside", {"us": us})["us"] / found["us"] for peer, found in row["peers"].items() if found["us"]
    }
    if peers:
        best = max(peers, key=peers.__getitem__)
        verdicts.append(Verdict(f"{name}: time over {best}'s", peers[best], LINEAR_PEER_RATIO, ""))
    if judged and shape["m"] >= LINEAR_MANY_ROWS and layer in LINEAR_LARGE and shape["bits"] == 4:
        verdicts.append(Verdict(f"{name}: rate", row["tflops"], LINEAR_TFLOPS, "TFLOPS", at_most=False))
    return verdicts


def _judge_formats(rows: list[Record]) -> list[Verdict]:
    """Products in the formats of checkpoints: few rows against the floor, all against the format's fastest peer."""
    verdicts = []
    beside: dict[str, list[float]] = {}
    for row in rows:
        for form, own in row["formats"].items():
            name, limit = f"{form} {row['name']}", FORMAT_FLOOR_RATIO.get(form)
            if limit is not None and row["shape"]["m"] <= LINEAR_FEW_ROWS:
                verdicts.append(Verdict(f"{name}: ratio to the floor", own["floor_ratio"], limit, ""))
            peers = [peer["us"] for peer in row.get("peers", {}).get(form, {}).values() if peer.get("us")]
            if peers:
                beside.setdefault(form, []).append(own["us"] / min(peers))
                verdicts.append(Verdict(f"{name}: time over the best peer's", beside[form][-1], FORMAT_PEER_RATIO, ""))
    for form, ratios in beside.items():
        mean, what = (
            statistics.geometric_mean(ratios),
            f"{form}, {len(ratios)} products: mean time over the best peer's",
        )
        verdicts.append(Verdict(what, mean, FORMAT_PEERS_MEAN, ""))
    return verdicts


def _judge_expert_formats(row: Record) -> list[Verdict]:
    """A layer of experts in MXFP4 against the floor, and against INT4 in groups of 32 on the same layer."""
    own, int4 = (row["formats"].get(form) for form in ("mxfp4", "w4g32"))
    if own is None:
        return []
    few = row["shape"]["tokens"] <= FORMAT_FEW_TOKENS
    limit = FORMAT_TOKENS_FLOOR_RATIO if few else FORMAT_MORE_TOKENS_FLOOR_RATIO
    verdicts = [Verdict(f"mxfp4 {row['name']}: ratio to the floor", own["floor_ratio"], limit, "")]
    if int4 is not None:
        ratio = own["us"] / int4["us"] * int4["bytes"] / own["bytes"]
        verdicts.append(Verdict(f"mxfp4 {row['name']}: a byte's time over INT4's", ratio, FORMAT_OVER_INT4, ""))
    return verdicts


def _judge_append(row: Record) -> list[Verdict]:
    us, shape = row["us"]["median_us"], row["shape"]
    name = f"append: {row['kv_format']} {row['name']}"
    if shape["suite"] == "decode":
        if (shape["tokens"], shape["num_kv_heads"]) != (APPEND_DECODE_BATCH, APPEND_KV_HEADS):
            return []
        ratio = (us - row["empty_launch_us"]) / row["bytes_us"]
        what = f"{name}: beyond an empty launch over the time of its bytes"
        return [Verdict(what, ratio, APPEND_DECODE_BYTES_RATIO, "")]
    if shape["tokens"] == APPEND_PREFILL_TOKENS and row.get("copy_us"):
        ratio = us / row["copy_us"]
        return [Verdict(f"{name}: time over a copy of its bytes", ratio, APPEND_PREFILL_COPY_RATIO, "")]
    return []


def fastest_peer(peers: Mapping[str, Record]) -> tuple[float, str] | None:
    """The least time of those that have one, in us, and whose it is; None if none has."""
    return min(((peer["us"], name) for name, peer in peers.items() if peer.get("us")), default=None)


def _judge_row(row: Record) -> list[Verdict]:
    kv_format, batch, us = row["kv_format"], row["shape"]["batch"], row["us"]["median_us"]
    name = f"{kv_format} {row['name']}"
    if row["suite"] in ("cache", "pages", *MORE_MICROSECONDS):
        return []
    if row["suite"] == "short":
        fastest = fastest_peer(row.get("peers", {}))
        return [Verdict(f"{name}: time over {fastest[1]}'s", us / fastest[0], SHORT_PEER_RATIO, "")] if fastest else []
    if row["suite"] != "main":
        return [Verdict(f"{name}: ratio to the floor", row["floor_ratio"], OTHER_SHAPES_FLOOR_RATIO, "")]
    verdicts = []
    if batch in MAIN_MICROSECONDS.get(kv_format, {}):
        verdicts.append(Verdict(f"{name}: time", us, MAIN_MICROSECONDS[kv_format][batch], "us"))
    if batch in MAIN_FLOOR_RATIO.get(kv_format, {}):
        limit = MAIN_FLOOR_RATIO[kv_format][batch]
        verdicts.append(Verdict(f"{name}: ratio to the floor", row["floor_ratio"], limit, ""))
    rival = row.get("peers", {}).get(BF16_RIVAL, {}).get("us") if kv_format == "bf16" else None
    if rival:
        verdicts.append(Verdict(f"{name}: time over {BF16_RIVAL}'s", us / rival, 1.0, ""))
    return verdicts


def _judge_more(rows: list[Record]) -> list[Verdict]:
    """Each case once, by the layout whose time is the least of its limit; which, where heads first was measured."""
    found: dict[tuple[str, str, str], dict[str, Verdict]] = {}
    for row in rows:
        case = row["name"].removesuffix(HEADS_FIRST)
        layout = "tokens" if case == row["name"] else "heads"
        limit = MORE_FLOOR_RATIO * row["floor"]["us"] + MORE_MICROSECONDS[row["suite"]]
        in_graph = row.get("graph_us", row["us"])["median_us"]
        verdict = Verdict(f"{row['kv_format']} {case}: time, {layout} first", in_graph, limit, "us")
        found.setdefault((row["suite"], row["kv_format"], case), {})[layout] = verdict
    verdicts = []
    for layouts in found.values():
        best = min(layouts.values(), key=lambda verdict: verdict.measured / verdict.limit)
        said = best.what if "heads" in layouts else best.what.removesuffix(", tokens first")
        verdicts.append(replace(best, what=said))
    return verdicts


def _judge_cache(rows: list[Record]) -> list[Verdict]:
    """8 bits, ragged batches and MHA against the floor; pages and several queries against the same without."""
    plain = {(row["kv_format"], row["shape"]["batch"]): row for row in rows if _is_plain(row["shape"])}
    verdicts = []
    for row in rows:
        shape, name = row["shape"], f"{row['kv_format']} {row['name']}"
        us, ratio = row["us"]["median_us"], row["floor_ratio"]
        other = plain.get((row["kv_format"], shape["batch"]), {}).get("us", {}).get("median_us")
        if shape["ragged"]:
            verdicts.append(Verdict(f"{name}: ratio to the floor", ratio, RAGGED_FLOOR_RATIO, ""))
        elif shape["num_kv_heads"] > 1:
            verdicts.append(Verdict(f"{name}: ratio to the floor", ratio, MHA_FLOOR_RATIO, ""))
        elif shape["page_size"] and other:
            limit = PAGED_OVER_CONTIGUOUS[shape["page_size"]]
            verdicts.append(Verdict(f"{name}: time over the contiguous cache's", us / other, limit, ""))
        elif shape["q_len"] == QUERIES and other:
            verdicts.append(Verdict(f"{name}: time over one query's", us / other, QUERIES_OVER_ONE, ""))
        elif row["kv_format"].startswith(("int8", "e4m3", "e5m2")):
            limit = EIGHT_BIT_FLOOR_RATIO[shape["batch"]]
            verdicts.append(Verdict(f"{name}: ratio to the floor", ratio, limit, ""))
    return verdicts


def _is_plain(shape: Record) -> bool:
    return not (shape["page_size"] or shape["ragged"] or shape["q_len"] > 1 or shape["num_kv_heads"] > 1)


def _judge_speedup(rows: list[Record]) -> list[Verdict]:
    """INT4 against the best BF16 of the run, ours or a peer's."""
    at_batch = [r for r in rows if r["suite"] == "main" and r["shape"]["batch"] == INT4_SPEEDUP_BATCH]
    bf16 = [us for row in at_batch if row["kv_format"] == "bf16" for us in _all_times(row)]
    if not bf16:
        return []
    return [
        Verdict(
            f"{row['kv_format']} {row['name']}: speed-up over the best BF16",
            min(bf16) / row["us"]["median_us"],
            INT4_SPEEDUP,
            "x",
            at_most=False,
        )
        for row in at_batch
        if row["kv_format"].startswith("int4")
    ]


def _all_times(row: Record) -> list[float]:
    return [row["us"]["median_us"], *(peer["us"] for peer in row.get("peers", {}).values() if peer.get("us"))]
