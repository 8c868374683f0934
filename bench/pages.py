"""What pages show of the records in bench/results: `python -m bench pages` writes it, a test compares.

The README has one short table for each family, between marks; docs/performance.md, docs/performance_layers.md and
docs/performance_steps.md have all records in full; docs/benchmarks.md lists all records with their commands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from statistics import geometric_mean, median
from typing import Any

from bench import (
    by_format,
    perplexity,
    record_list,
    smollm2,
    vllm_int4,
    vllm_rows,
)
from bench import record as records
from bench.bars import fastest_peer
from bench.command_line import RECOMMENDED
from bench.environment import ROOT
from bench.report import OURS, Record, filled, number
from bench.sections import ATTENTION, FIGURES, MODELS, WHOLE, Section
from cute_kernels.formats.kv import format_of

README = ROOT / "README.md"
PERFORMANCE, LAYERS, STEPS = (ROOT / f"docs/performance{part}.md" for part in ("", "_layers", "_steps"))
HOW = ROOT / "docs/benchmarks.md"
PICTURE = ROOT / "docs/figures/headline.svg"
GREY, GREEN = "#9aa0a6", "#2e7d4f"
PUBLISHED = ROOT / "bench/published.json"
BATCHES = (1, 32, 128, 512)
ROWS = (1, 16, 64, 256, 1024)
TOKENS = (1, 8, 32, 128, 2048)
ONE_PEER = "fp8_block"  # of the weight formats: only Marlin has it, too
ATTENDED = ("sparse", "dense")  # suites of MLA that the README shows
MLA_BATCH, MLA_HEADS = 128, (16, 64, 128)


def load(name: str) -> Record:
    """A record of bench/results."""
    return records.load(records.RESULTS / f"{name}.json")


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    cells = [head, ["---", *["---:"] * (len(head) - 1)], *lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in cells)


def origin(record: Record) -> str:
    environment = record["environment"]
    gpu, torch = environment["gpu"], environment["versions"]["torch"]
    return f"{gpu}, driver {environment.get('driver')}, torch {torch}, {str(environment['date'])[:10]}"


# -- the README -------------------------------------------------------------------------------------------------------


def _by_batch(rows: Iterable[Record], kv_format: str) -> dict[int, Record]:
    usual = {"seq_len": 8192, "num_q_heads": 8, "num_kv_heads": 1, "q_len": 1, "page_size": 0}
    rows = (row for row in rows if row["kv_format"] == kv_format and row.get("us"))
    return {row["shape"]["batch"]: row for row in rows if all(row["shape"][key] == usual[key] for key in usual)}


def headline() -> str:
    """What is faster, by how much, and what it costs: attention, serving and accuracy, each with its record."""
    main = load("main")["rows"]
    batch = max(BATCHES)
    ours, exact = _by_batch(main, "int4_g4")[batch], _by_batch(main, "bf16")[batch]
    best = fastest_peer(exact["peers"])
    assert best is not None
    us, peer = ours["us"]["median_us"], best[1].replace("SDPA cudnn", "cuDNN")
    gpu = load("main")["environment"]["gpu"]
    return (
        f"- **Attention**: a decode step of {batch} requests with 8192 cached tokens each takes **{number(us, 0)} us** "
        "over a cache of K and V in INT4, which needs a [test on your own text](#use-it). "
        f"{peer} over BF16, the fastest other kernel, takes {number(best[0], 0)} us: "
        f"**{number(best[0] / us)} times** as long. The INT4 kernel reads {number(ours['gb_per_s'] / 1000)} TB/s, "
        f"{number(100 / ours['floor_ratio'], 0)} % of what a read-only kernel reaches (`main.json`). {_short()}\n"
        f"- **Weights**: {_weights()}\n"
        f"- **Serving**: {_served()}\n"
        f"- **Accuracy**: the recommended cache, K in INT8 and V in INT4, takes {_share(RECOMMENDED)} % of BF16's "
        f"bytes at head_dim {perplexity.HEAD_DIM}. It raises {_cost(RECOMMENDED)}. INT4 for both takes "
        f"{_share(('int4_g4',) * 2)} % and raises {_cost(('int4_g4',))} (`model_accuracy.json`). "
        "The weights of this model are a GGUF of 4 bits (Q4_1). "
        "[More models, FP8 and needles](docs/accuracy.md).\n\n"
        f"Times are of one {gpu}; the [records](docs/benchmarks.md) lie in `bench/results`.\n"
    )


def _short() -> str:
    """What one request of few tokens takes of the fastest other library's time, in words."""
    rows = load("decode_short")["rows"]
    lengths, parts = [row["shape"]["seq_len"] for row in rows], []
    for row in rows:
        fastest = fastest_peer(row["peers"])
        assert fastest is not None
        parts.append(row["us"]["median_us"] / fastest[0])
    return (
        f"One request of {min(lengths)} to {max(lengths)} tokens in BF16 or FP8 takes {number(min(parts), 2)} to "
        f"{number(max(parts), 2)} of the time of the fastest of cuDNN, FlashAttention-3 and FlashInfer "
        "(`decode_short.json`)."
    )


def _weights() -> str:
    """What products of weights take of the fastest other library's time, in words."""
    ratios = by_format.beside_peers(load("linear_formats"))
    means = {form: geometric_mean(of_rows.values()) for form, of_rows in ratios.items()}
    worst = max(ratio for of_rows in ratios.values() for ratio in of_rows.values())
    count, blocks = len(ratios[ONE_PEER]), means.pop(ONE_PEER)
    least, most = min(means.values()), max(means.values())
    return (
        f"products with INT4, MXFP4, NVFP4 and FP8 weights take {number(least, 2)} to {number(most, 2)} of the time of "
        f"the fastest of Marlin, Machete and QuACK. FP8 in blocks takes {number(blocks, 2)} of the time of Marlin, its "
        f"only peer. These are geometric means of {count} problems of each format, 1 to 8192 rows in 16 bits. "
        f"The worst problem takes {number(worst, 2)} times the fastest peer's time (`linear_formats.json`)."
    )


def _share(pair: tuple[str, ...]) -> str:
    """Bytes of a cache in per cent of BF16's."""
    rows = [format_of(name).row(perplexity.HEAD_DIM).row_bytes for name in pair]
    return number(100 * sum(rows) / (2 * 2 * perplexity.HEAD_DIM), 0)


def _cost(pair: Sequence[str]) -> str:
    """What a cache costs in the perplexity of the real model, in words: as many columns to a scale as in ``pair``."""
    (cache,) = perplexity.caches_in([",".join(pair)])
    model = perplexity.models()[-1]
    cost, measured = model.cost(cache), model.measured_as(cache)
    assert cost is not None and measured is not None
    return f"{model.name}'s perplexity by {cost.lstrip('+')} (`{measured.name}` at head_dim {model.head_dim})"


def _served() -> str:
    """What the plug-in gains over the same command line without it, and with the recommended cache, in words."""
    llama, experts = "llama3-8b", "qwen3-30b-a3b"
    return (
        f"vLLM {load(LATEST)['rows'][0]['vllm']} is **{_gains(LATEST, llama, 'fp8')} times** as fast with the plug-in "
        "as without, by the same command (Llama-3-8B, 4-bit weights, FP8 cache, 8192 tokens, 32 and 1 requests). "
        f"With the recommended cache it is {_gains(LATEST, llama, ','.join(RECOMMENDED))} times as fast "
        f"(`{LATEST}.json`). Qwen3-30B-A3B: {_gains(LATEST, experts, 'fp8')} times; gpt-oss-20b, MXFP4 "
        f"experts: {_gains(LATEST, 'gpt-oss-20b', 'fp8', 'mxfp4')} times. "
        "These figures compare each engine's best runs. By medians of three runs, one request with the FP8 cache is "
        f"{_median_gain(LATEST, llama)} (Llama-3-8B), {_median_gain(LATEST, experts)} (Qwen3) and "
        f"{_median_gain(LATEST, 'gpt-oss-20b', 'mxfp4')} (gpt-oss) times as fast. "
        f"SGLang {load(SGLANG)['rows'][0]['sglang']} is {_gains(SGLANG, llama, 'fp8')} times as fast, "
        f"with the same Llama (`{SGLANG}.json`)."
    )


def _gains(record: str, model: str, cache: str, weights: str = "w4") -> str:
    """The least and the most that a model gains with a cache, over vLLM with FP8."""
    steps = _steps_of_vllm(record, model, weights)
    gains = [steps[batch, "off", "fp8"]["tpot_ms"] / steps[batch, "on", cache]["tpot_ms"] for batch in (1, 32)]
    return f"{number(min(gains))} to {number(max(gains))}"


def _median_gain(record: str, model: str, weights: str = "w4") -> str:
    """What a model gains with one request and the FP8 cache, by the medians of runs."""
    steps = _steps_of_vllm(record, model, weights)
    before, after = (median(steps[1, plugin, "fp8"]["tpot_of_turns_ms"]) for plugin in ("off", "on"))
    return number(before / after, 2)


def _longest_turn(record: str) -> str:
    """What the plug-in's slowest turn takes of its fastest one's time, with one request, at most."""
    rows = [row for row in load(record)["rows"] if row["plugin"] != "off" and row["batch"] == 1]
    turns = [each for row in rows if (each := row.get("tpot_of_turns_ms"))]
    return number(max(max(each) / min(each) for each in turns))


LATEST = "e2e_vllm33"  # of the version that is the reference
SGLANG = "e2e_sglang"
PLUGIN = {"gpt-oss-20b": "attention,moe,fusion,fused_routers"}  # the parts that were on, where not all were


def _steps_of_vllm(record: str, model: str = "llama3-8b", weights: str = "w4") -> dict[tuple[int, str, str], Record]:
    """Cases of a record's model by requests, plug-in and cache."""
    rows = [row for row in load(record)["rows"] if (row["model"], row["weights"]) == (model, weights)]
    whole = PLUGIN.get(model, "on")
    return {
        (row["batch"], "on" if row["plugin"] == whole else row["plugin"], row["kv_format"] or row["kv"]): row
        for row in rows
    }


SERVED = (
    ("Llama-3-8B, W4, the same command line", LATEST, "llama3-8b", "w4", "fp8", (1, 32)),
    ("Llama-3-8B, W4, K INT8 and V INT4", LATEST, "llama3-8b", "w4", "int8_token_head,int4_g4", (1, 32)),
    ("Llama-3-8B, W4, INT4 cache", LATEST, "llama3-8b", "w4", "int4_g4", (1, 32)),
    ("Llama-3-8B, NVFP4, the same command line", f"{LATEST}_floats", "llama3-8b", "nvfp4", "fp8", (1, 32)),
    ("Llama-3-8B, 16-bit weights, INT8 cache", "e2e_vllm", "llama3-8b", "bf16", "int8_per_token_head", (32,)),
    ("Llama-2-70B, one of 8 GPUs, W4, INT4 cache", LATEST, "llama2-70b-shard8", "w4", "int4_g4", (64,)),
    ("Qwen3-30B-A3B, W4, the same command line", LATEST, "qwen3-30b-a3b", "w4", "fp8", (1, 32)),
    ("gpt-oss-20b, MXFP4, FP8 cache", LATEST, "gpt-oss-20b", "mxfp4", "fp8", (1, 32)),
)
"""What the README shows of vLLM: words, record, model, weights, cache with the plug-in, requests."""


def decode() -> str:
    """Decode attention: formats by batch, beside the fastest 16-bit kernel and INT4 kernels of others."""
    main, cache = load("main"), load("cache")
    head = [
        "KV cache",
        "kernel",
        *(f"{batch} requests" if batch > 1 else "1 request" for batch in BATCHES),
        "over the floor",
    ]
    lines = []
    exact = _by_batch(main["rows"], "bf16")
    best = {batch: fastest_peer(exact[batch]["peers"]) for batch in BATCHES}
    names = {found[1] for found in best.values() if found}
    cells = [number(found[0]) if found else "-" for found in best.values()]
    last = max(BATCHES)
    peer = best[last]
    ratio = number(peer[0] / exact[last]["floor"]["us"], 2) if peer else "-"
    lines.append(["BF16", ", ".join(sorted(names)).replace("SDPA cudnn", "cuDNN"), *cells, ratio])
    shown = [(main, "bf16", "BF16"), (cache, "int8_token_head", "INT8"), (cache, "e4m3_token_head", "FP8")]
    shown += [(main, "int4_g4", "INT4, 4 groups"), (main, "int4_g1", "INT4, 1 group")]
    for record, name, label in shown:
        rows = _by_batch(record["rows"], name)
        cells = [f"**{number(rows[batch]['us']['median_us'])}**" if batch in rows else "-" for batch in BATCHES]
        lines.append([label, OURS, *cells, number(rows[last]["floor_ratio"], 2)])
    floors = {name: _by_batch(main["rows"], name)[last]["floor"]["us"] for name in ("int4_g1", "int4_g4")}
    notes = []
    for row in json.loads(PUBLISHED.read_text())["rows"]:
        us = row["us"]
        measured = row["date"] is not None
        mark = str(len(notes) + 1) if (note := _note(row)) not in notes else str(notes.index(note) + 1)
        notes += [] if note in notes else [note]
        cells = [number(us.get(str(batch))) if str(batch) in us else "-" for batch in BATCHES]
        groups = "1 group" if row["kv_format"] == "int4_g1" else "4 groups"
        over = number(us[str(last)] / floors[row["kv_format"]], 2) if measured else "-"
        lines.append([f"INT4, {groups}", f"{row['kernel']} [{mark}]", *cells, over])
    served = load("vllm_int4")
    vllms = {row["shape"]["batch"]: row["vllm"]["us"]["median_us"] for row in served["rows"]}
    cost = next(row for row in load("vllm_rows")["rows"] if row["name"] == vllm_rows.NAMES[0])
    lost = f"perplexity {cost['increase_percent']:+.2f} % ({smollm2.NAME}, head_dim 64)"
    notes.append(f"{vllm_int4.note(served)}; {lost}")
    cells = [number(vllms[batch]) if batch in vllms else "-" for batch in BATCHES]
    over = number(vllms[last] / floors[vllm_int4.OURS], 2)  # rows of as many bytes
    lines.append(["INT4, 1 group, rotated", f"vLLM, Triton [{len(notes)}]", *cells, over])
    said = "\n".join(f"[{index}] {note}.  " for index, note in enumerate(notes, 1))
    costs = perplexity.beside(main)
    return f'{table(head, lines)}\nus; {origin(main)}. "Over the floor": of {last} requests. {costs}\n\n{said}\n'


def _note(row: Record) -> str:
    return f"{row['gpu']}, {row['date']}: {row['source']}" if row["date"] else f"{row['gpu']}, {row['source']}"


def _bars() -> list[tuple[str, float, str]]:
    """(label, us, colour) of the picture: the largest batch, by cache."""
    main, cache, batch = load("main")["rows"], load("cache")["rows"], max(BATCHES)
    exact = _by_batch(main, "bf16")[batch]
    best = fastest_peer(exact["peers"])
    assert best is not None
    others = [row for row in json.loads(PUBLISHED.read_text())["rows"] if row["date"] and row["kv_format"] == "int4_g4"]
    fastest = min(others, key=lambda row: row["us"][str(batch)])
    bars = [(f"INT4, {fastest['kernel'].split(',')[0]}*", fastest["us"][str(batch)], GREY)]
    bars += [(f"BF16, {best[1].replace('SDPA cudnn', 'cuDNN')}", best[0], GREY)]
    shown = ((main, "bf16", "BF16"), (cache, "int8_token_head", "INT8"), (main, "int4_g4", "INT4"))
    return bars + [
        (f"{label}, {OURS}", _by_batch(rows, name)[batch]["us"]["median_us"], GREEN) for rows, name, label in shown
    ]


def picture() -> str:
    """The README's figure: bars of one batch, as SVG that is the same wherever it is made."""
    bars, batch = _bars(), max(BATCHES)
    longest = max(us for _, us, _ in bars)
    height = 74 + 30 * len(bars)
    said = f"Attention of {batch} requests over 8192 cached tokens, us"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {height}" font-family="sans-serif" font-size="14">',
        f"<title>{said}</title>",
        f'<rect width="720" height="{height}" fill="white"/>',
        f'<text x="16" y="28" font-size="16" font-weight="bold">{said}</text>',
    ]
    for index, (label, us, colour) in enumerate(bars):
        y, width = 44 + 30 * index, 440 * us / longest
        lines.append(f'<text x="200" y="{y + 16}" text-anchor="end">{label}</text>')
        lines.append(f'<rect x="210" y="{y}" width="{width:.1f}" height="22" fill="{colour}"/>')
        lines.append(f'<text x="{218 + width:.1f}" y="{y + 16}">{number(us, 0)}</text>')
    about = f"{load('main')['environment']['gpu']}; * measured in another run, see the table of caches"
    lines.append(f'<text x="16" y="{height - 10}" font-size="11" fill="#666">{about}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def layers() -> str:
    """Weight-only layers: time, in brackets cuBLAS's with 16-bit weights and the fastest other 4-bit kernel's."""
    record = load("linear")
    groups: dict[str, dict[int, Record]] = {}
    for row in record["linear"]:
        if row["format"] == "w4a16":
            groups.setdefault(f"{row['shape']['n']} x {row['shape']['k']}", {})[row["shape"]["m"]] = row
    lines = [[name, *(_layer_cell(rows[m]) for m in ROWS)] for name, rows in groups.items()]
    head = ["N x K", *(f"M = {m}" for m in ROWS)]
    return f"{table(head, lines)}\nus (cuBLAS with bf16 weights, the faster of Marlin and Machete); {origin(record)}.\n"


def _layer_cell(row: Record) -> str:
    peers = {name: peer["us"] for name, peer in row["peers"].items() if peer.get("us")}
    dense = peers.pop("cuBLAS bf16")
    return f"**{number(row['us']['median_us'])}** ({number(dense)}, {number(min(peers.values()))})"


def experts() -> str:
    """Layers of experts: time, in brackets Marlin's."""
    record = load("moe")
    by_model: dict[str, dict[int, Record]] = {}
    for row in record["moe"]:
        by_model.setdefault(row["shape"]["model"]["name"], {})[row["shape"]["tokens"]] = row
    lines = [
        [
            name,
            *(
                f"**{number(rows[t]['eager_us'])}** ({number(rows[t]['peers']['Marlin MoE'].get('layer_us'))})"
                for t in TOKENS
            ),
        ]
        for name, rows in by_model.items()
    ]
    head = ["layer", *(f"{t} tokens" if t > 1 else "1 token" for t in TOKENS)]
    return f"{table(head, lines)}\nus (vLLM's Marlin); {origin(record)}.\n"


def latent() -> str:
    """MLA decode beside FlashMLA."""
    record = load("mla")
    lines = []
    for row in record["mla"]:
        peer = row["peers"].get("FlashMLA", {})
        shape = row["shape"]
        shown = row["suite"] in ATTENDED and shape["batch"] == MLA_BATCH and shape["num_heads"] in MLA_HEADS
        if not (shown and peer.get("us")):
            continue
        seen = f"{shape['topk']} chosen of {shape['seq_len']}" if shape["topk"] else f"all of {shape['seq_len']}"
        kind = row["kv_format"].removeprefix("mla_").upper().replace("MODEL1", "FP8, MODEL1")
        cells = [kind, seen, str(shape["batch"]), str(shape["num_heads"]), str(shape["q_len"])]
        us = row["us"]["median_us"]
        lines.append([*cells, f"**{number(us)}**", number(peer["us"]), number(peer["us"] / us, 2)])
    head = ["tokens", "attended", "requests", "heads", "queries", OURS, "FlashMLA", "times as long"]
    return f"{table(head, lines)}\nus; {origin(record)}.\n"


def engines() -> str:
    """Whole models: a served one with and without the plug-in, and `generate` with and without `accelerate`."""
    generated, older = load("e2e_transformers"), load("e2e_vllm")
    lines = []
    for label, record, model, weights, kv, batches in SERVED:
        steps = _steps_of_vllm(record, model, weights)
        for batch in batches:
            before, after = steps[batch, "off", "fp8"]["tpot_ms"], steps[batch, "on", kv]["tpot_ms"]
            cells = [number(before, 2), f"**{number(after, 2)}**", number(before / after, 2)]
            lines.append([f"vLLM {steps[batch, 'on', kv]['vllm']}, {label}", str(batch), *cells])
    first = generated["rows"][0]
    last = next(row for row in generated["rows"] if row["name"] == "int4_g4 cache, W4")
    cells = [
        number(first["step_ms"], 1),
        f"**{number(last['step_ms'], 1)}**",
        number(first["step_ms"] / last["step_ms"], 1),
    ]
    version = generated["environment"]["versions"]["transformers"]
    label = f"transformers {version}, Llama-3-8B, `generate`, W4 and INT4 cache"
    if is_warm := "first_run_ms" in first:  # a first run is no baseline: its allocator meets sizes for the first time
        lines.append([label, str(first["batch"]), *cells])
    head = ["served by", "requests", "before", OURS, "times"]
    about = (
        'Milliseconds per token, prompts of 8192 tokens, random weights, CUDA graphs. "Before" is vLLM with the same '
        "weights and FP8, its fastest cache, on an H200 ([details](docs/tasks/vllm.md#what-it-brings))"
        f"{', for transformers SDPA with 16-bit weights' if is_warm else ''}. "
        "Each model was timed in a run of its own. An engine of vLLM was timed in several turns: a time is its least "
        "total less its least first token. With one request the plug-in's "
        f"slowest turn takes up to {_longest_turn(LATEST)} times the fastest one's time. "
        f"{perplexity.beside({'rows': [*load(LATEST)['rows'], *older['rows']]})} "
        "[Accuracy](docs/accuracy.md) has more."
    )
    dates = f"{origin(load(LATEST))}; vLLM 0.26: {origin(older)}; transformers: {origin(generated)}"
    return f"{table(head, lines)}\n{about} vLLM 0.33: {dates}.\n"


PARTS: dict[str, Callable[[], str]] = {
    "<!-- bench:headline -->": headline,
    "<!-- bench:engines -->": engines,
    "<!-- bench:caches -->": decode,
    "<!-- bench:layers -->": layers,
    "<!-- bench:experts -->": experts,
    "<!-- bench:latent -->": latent,
}


def readme(text: str) -> str:
    """The README with everything between its marks made anew."""
    for mark, make in PARTS.items():
        text = filled(text, mark, make())
    return text


# -- docs/performance*.md ---------------------------------------------------------------------------------------------


def performance() -> str:
    """The page of attention: every record, with its peers, floors, GPU and date."""
    return _page(
        "Performance of attention",
        "[Layers](performance_layers.md) and [decode steps](performance_steps.md) have pages of their own.",
        ATTENTION,
    )


def performance_of_layers() -> str:
    """The page of layers, a served model and what formats cost."""
    about = "[Attention](performance.md) and [decode steps](performance_steps.md) have pages of their own."
    return _page("Performance of layers and models", about, MODELS)


def performance_of_steps() -> str:
    """The page of whole decode steps."""
    about = "[A whole decode step](design/decode_step.md) says what a step is, and where its time goes."
    return _page("Performance of decode steps", about, WHOLE)


def how(text: str) -> str:
    """The page of benchmarks with the list of records."""
    return filled(text, record_list.MARK, record_list.markdown())


def _page(title: str, about: str, sections: Iterable[Section]) -> str:
    parts = [
        "<!-- made by `python -m bench pages` from bench/results; a test compares -->\n",
        f"# {title}\n",
        about,
        "Every figure was measured; each table says on which GPU and when.",
        "Peers ran in the same process, on the same tensors.",
        "The *floor* is what the fastest of a set of read-only kernels takes for the bytes that the step must read.",
        "[How a number is made](benchmarks.md#how-a-number-is-made).\n",
    ]
    for heading, name, words, markdown in sections:
        if not (records.RESULTS / f"{name}.json").exists():
            continue  # nobody has made that record yet
        parts += [f"## {heading}\n", f"{words}\n"]
        parts += [f"![{seen}](figures/{figure}.svg)\n" for figure, seen in FIGURES.get(name, {}).items()]
        parts.append(markdown(load(name)))
    return "\n".join(parts).rstrip() + "\n"


def write() -> list[str]:
    """Writes all; returns the names of files that changed."""
    changed: list[str] = []
    wanted: dict[Any, str] = {README: readme(README.read_text()), PERFORMANCE: performance(), PICTURE: picture()}
    wanted |= {LAYERS: performance_of_layers(), STEPS: performance_of_steps(), HOW: how(HOW.read_text())}
    for path, text in wanted.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            changed.append(str(path.relative_to(ROOT)))
    return changed
