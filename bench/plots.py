"""Figures (SVG) from a recorded run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.figures import PEER_COLOURS, Record, save
from bench.report import OURS, peer_names
from bench.step_plots import plot_steps

COLOURS = {"int4_g1": "#0b6e4f", "int4_g4": "#63a46c", "bf16": "#1f4e8c"}
FAMILY_COLOURS = {
    "bf16": "#1f4e8c",
    "fp16": "#1f4e8c",
    "int8": "#b5651d",
    "e4m3": "#8e44ad",
    "e5m2": "#c94c4c",
    "int4": "#0b6e4f",
}
PLAIN = "as it is"
VARIANT_MARKERS = {PLAIN: "o", "percentile": "s", "smoothed": "^"}
LINEAR_INCREASE = 0.02  # of perplexity, in percent: below, the axis is linear, because what is measured is noise
LAYER_COLOURS = ("#0b6e4f", "#1f4e8c", "#b5651d", "#8e44ad", "#c94c4c")


def plot(record: Record, folder: Path) -> list[Path]:
    """Writes every figure that the record has data for; returns the files."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "bench", "svg.fonttype": "none", "font.size": 10})
    folder.mkdir(parents=True, exist_ok=True)
    if record.get("engine") == "steps":
        return plot_steps(record, folder)
    main = [row for row in record["rows"] if row["suite"] == "main" and row.get("us")]
    others = [row for row in record["rows"] if row["suite"] == "shapes" and row.get("us")]
    accuracy = [row for row in record["rows"] if row["suite"] == "accuracy"]
    ladders = [ladder for ladder in record.get("ladder", []) if any("off_us" in r for r in ladder["rungs"])]
    files = []
    if main:
        files += [_plot_times(main, record, folder), _plot_ratios(main, record, folder)]
    if others:
        files.append(_plot_shapes(others, record, folder))
    if ladders:
        files.append(_plot_ladder(ladders, record, folder))
    if record.get("linear"):
        files.append(_plot_linear(record["linear"], record, folder))
    if any(row.get("us") for row in record.get("mla", [])):
        files.append(_plot_mla([row for row in record["mla"] if row.get("us")], record, folder))
    if accuracy:
        files.append(_plot_accuracy(accuracy, record, folder))
    return files


def _plot_times(rows: Sequence[Record], record: Record, folder: Path) -> Path:
    """Time over batch, ours and the peers', one panel per kind of cache."""
    figure, panels = _figure(2, share_y=True)
    kinds = {"BF16 cache": ["bf16"], "INT4 cache": ["int4_g1", "int4_g4"]}
    for panel, (title, formats) in zip(panels, kinds.items(), strict=True):
        _draw_times(panel, [row for row in rows if row["kv_format"] in formats], formats)
        panel.set_title(title)
    panels[0].set_ylabel("us per call, cold L2")
    return save(figure, record, folder / "decode_time.svg")


def _draw_times(panel: Any, rows: Sequence[Record], formats: Sequence[str]) -> None:
    for kv_format in formats:
        own = [row for row in rows if row["kv_format"] == kv_format]
        batches = [row["shape"]["batch"] for row in own]
        colour = COLOURS[kv_format]
        panel.plot(batches, [row["us"]["median_us"] for row in own], "o-", color=colour, label=f"{OURS} {kv_format}")
        floors = [row["floor"]["us"] for row in own]
        panel.plot(batches, floors, ":", color=colour, label=f"streaming floor, {kv_format}")
    for name, colour in zip(peer_names(rows), PEER_COLOURS * 4, strict=False):
        for kv_format, style in zip(formats, ("--", "-."), strict=False):
            points = [
                (row["shape"]["batch"], row["peers"][name]["us"])
                for row in rows
                if row["kv_format"] == kv_format and row.get("peers", {}).get(name, {}).get("us")
            ]
            if points:
                label = name if len(formats) == 1 else f"{name} {kv_format}"
                panel.plot(*zip(*points, strict=True), marker=".", linestyle=style, color=colour, label=label)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    _batch_axis(panel, rows)
    panel.legend(fontsize=7)
    panel.grid(True, which="major", alpha=0.3)


def _plot_ratios(rows: Sequence[Record], record: Record, folder: Path) -> Path:
    """Ratio to the streaming floor over batch: 1 means that only reading the cache costs anything."""
    figure, (panel,) = _figure(1)
    for kv_format in dict.fromkeys(row["kv_format"] for row in rows):
        own = [row for row in rows if row["kv_format"] == kv_format]
        batches = [row["shape"]["batch"] for row in own]
        panel.plot(batches, [r["floor_ratio"] for r in own], "o-", color=COLOURS.get(kv_format), label=kv_format)
    panel.axhline(1, color="black", linewidth=0.8)
    panel.set_xscale("log", base=2)
    _batch_axis(panel, rows)
    panel.set_ylabel("time / streaming floor")
    panel.set_ylim(bottom=0.9)
    panel.legend()
    panel.grid(True, alpha=0.3)
    return save(figure, record, folder / "decode_ratio.svg")


def _plot_shapes(rows: Sequence[Record], record: Record, folder: Path) -> Path:
    """Ratio to the streaming floor for every other shape."""
    figure, (panel,) = _figure(1, height=0.55 * len({row["name"] for row in rows}) + 1.5)
    names = list(dict.fromkeys(row["name"] for row in rows))
    formats = list(dict.fromkeys(row["kv_format"] for row in rows))
    for place, kv_format in enumerate(formats):
        own = {row["name"]: row["floor_ratio"] for row in rows if row["kv_format"] == kv_format}
        shift = (place - (len(formats) - 1) / 2) * 0.26
        _bars(panel, names, own, shift, height=0.24, color=COLOURS.get(kv_format), label=kv_format)
    _finish_bars(panel, names, "time / streaming floor")
    return save(figure, record, folder / "decode_shapes.svg")


def _plot_ladder(ladders: Sequence[Record], record: Record, folder: Path) -> Path:
    """How much slower each switchable step makes the kernel when it is off."""
    titles = list(dict.fromkeys(r["title"] for ladder in ladders for r in ladder["rungs"] if "off_us" in r))
    figure, (panel,) = _figure(1, height=0.25 * len(titles) * len(ladders) + 1.5)
    height = 0.8 / len(ladders)
    for place, ladder in enumerate(ladders):
        slower = {r["title"]: r["off_us"] / r["on_us"] for r in ladder["rungs"] if "off_us" in r}
        label = f"{ladder['kv_format']} B={ladder['shape']['batch']}"
        _bars(panel, titles, slower, (place - (len(ladders) - 1) / 2) * height, height=0.9 * height, label=label)
    _finish_bars(panel, titles, "time with the step off / time with all on")
    return save(figure, record, folder / "decode_ladder.svg")


def _plot_linear(rows: Sequence[Record], record: Record, folder: Path) -> Path:
    """How many times as fast as cuBLAS in 16 bits, over rows of x; dashed, the fastest of the other libraries."""
    forms = list(dict.fromkeys(row["format"] for row in rows))
    figure, panels = _figure(len(forms), share_y=True)
    for panel, form in zip(panels, forms, strict=True):
        own = [row for row in rows if row["format"] == form and _dense_us(row)]
        layers = list(dict.fromkeys((row["shape"]["n"], row["shape"]["k"]) for row in own))
        for (n, k), colour in zip(layers, LAYER_COLOURS * 2, strict=False):
            some = [row for row in own if (row["shape"]["n"], row["shape"]["k"]) == (n, k)]
            cublas = [_dense_us(row) for row in some]
            at = [row["shape"]["m"] for row in some]
            speeds = [base / row["us"]["median_us"] for base, row in zip(cublas, some, strict=True)]
            panel.plot(at, speeds, "o-", color=colour, markersize=4, label=f"{n} x {k}")
            points = [
                (m, base / min(times)) for m, base, row in zip(at, cublas, some, strict=True) if (times := _others(row))
            ]
            if points:
                panel.plot(*zip(*points, strict=True), "--", color=colour, linewidth=0.9)
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_xscale("log", base=2)
        panel.set_title(form)
        panel.set_xlabel("rows of x")
        panel.grid(True, alpha=0.3)
    dense = " and ".join(dict.fromkeys(_dense_name(row) for row in rows))
    panels[0].set_ylabel(f"{dense}'s time / time, cold L2\n(dashed: fastest other library)")
    _legend_beside(panels[-1])
    return save(figure, record, folder / "linear_speed.svg")


def _others(row: Record) -> list[float]:
    """Times of the peers that take the same weights."""
    from bench.linear_peers import DENSE

    dense = {peer.name for peer in DENSE}
    return [peer["us"] for name, peer in row["peers"].items() if name not in dense and peer["us"]]


def _dense_name(row: Record) -> str:
    """Of cuBLAS's product in the dtype of x, which a shape says where it is not bf16."""
    from bench.linear_peers import cublas_name

    return cublas_name(row["shape"].get("dtype", "bf16"))


def _dense_us(row: Record) -> float:
    """The time of cuBLAS with weights in the dtype of x; 0 if it is not in the record."""
    return row["peers"].get(_dense_name(row), {}).get("us") or 0.0


def _plot_mla(rows: Sequence[Record], record: Record, folder: Path) -> Path:
    """Rates of each shape, ours and the peers': of products, and of the tokens that are gathered."""
    names = [OURS, *peer_names(rows)]
    figure, panels = _figure(2, share_y=True, height=0.16 * len(rows) * (len(names) + 1) + 1)
    height = 0.8 / len(names)
    quantities = {"tflops": "TFLOPS", "tb_per_s": "TB/s of tokens"}
    for panel, (quantity, title) in zip(panels, quantities.items(), strict=True):
        for place, (name, colour) in enumerate(zip(names, ("#0b6e4f", *PEER_COLOURS), strict=False)):
            values = [(row if name == OURS else row["peers"].get(name, {})).get(quantity) for row in rows]
            at = [i + (place - (len(names) - 1) / 2) * height for i in range(len(rows))]
            pairs = [(y, value) for y, value in zip(at, values, strict=True) if value]
            panel.barh([y for y, _ in pairs], [x for _, x in pairs], height=0.9 * height, color=colour, label=name)
        panel.set_xlabel(title)
        panel.grid(True, axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    panels[0].set_ylim(len(rows) - 0.4, -0.6)  # the first on top
    _legend_beside(panels[-1])
    return save(figure, record, folder / "mla_rates.svg")


def _plot_accuracy(rows: Sequence[Record], record: Record, folder: Path) -> Path:
    """What a format costs over what it takes: bytes of a token, error of attention, increase of perplexity."""
    figure, panels = _figure(2, height=5.5)
    errors = [(row["captured"]["error"], 0.0) for row in rows]
    increases = [(row["increase_percent"], row["increase_error_percent"]) for row in rows]
    for panel, values in zip(panels, (errors, increases), strict=True):
        for row, (value, spread) in zip(rows, values, strict=True):
            kind, colour = _kind(row), _family_colour(row)
            panel.errorbar(
                row["bytes_per_token"],
                value,
                yerr=spread or None,
                fmt=VARIANT_MARKERS[kind],
                color=colour,
                markerfacecolor=colour if kind == PLAIN else "none",
                markersize=5,
                elinewidth=0.6,
            )
        panel.margins(x=0.12)
        panel.set_xlabel(f"bytes per token and KV head, K and V (head_dim {rows[0]['head_dim']})")
        panel.grid(True, which="major", alpha=0.3)
    panels[0].set_yscale("log")
    panels[0].set_title("attention output, relative error on captured K and V", fontsize=10)
    panels[1].set_yscale("symlog", linthresh=LINEAR_INCREASE)
    panels[1].set_title("perplexity over exact K and V, increase in %", fontsize=10)
    figure.canvas.draw()  # only now do the axes know their limits
    for panel, values in zip(panels, (errors, increases), strict=True):
        _label_points(panel, [(row, value) for row, (value, _) in zip(rows, values, strict=True)])
    for kind, marker in VARIANT_MARKERS.items():
        filled = "#444444" if kind == PLAIN else "none"
        panels[0].plot([], [], marker, color="#444444", markerfacecolor=filled, label=kind)
    panels[0].legend(fontsize=8, loc="lower left")
    return save(figure, record, folder / "accuracy.svg")


def _label_points(panel: Any, points: Sequence[tuple[Record, float]]) -> None:
    """Names plain formats beside their points, each in the first place where no point or label lies yet."""
    size, to_points = 6, 72 / panel.figure.dpi
    places = [panel.transData.transform((row["bytes_per_token"], value)) * to_points for row, value in points]
    taken = [(x - 2, y - 2, x + 2, y + 2) for x, y in places]
    for (row, value), (x, y) in zip(points, places, strict=True):
        if _kind(row) != PLAIN:
            continue
        width = 0.58 * size * len(row["name"])
        for offset in ((dx, dy) for dy in (0, 7, -7, 14, -14, 21, -21, 28, -28) for dx in (5, -5 - width)):
            left, bottom = x + offset[0], y + offset[1] - size / 2
            box = (left, bottom, left + width, bottom + size)
            if not any(box[0] < t[2] and t[0] < box[2] and box[1] < t[3] and t[1] < box[3] for t in taken):
                break
        taken.append(box)
        at, style = (row["bytes_per_token"], value), {"fontsize": size, "va": "center", "color": _family_colour(row)}
        panel.annotate(row["name"], at, offset, textcoords="offset points", annotation_clip=False, **style)


def _kind(row: Record) -> str:
    return "smoothed" if row["smoothed"] else "percentile" if row["percentile"] else PLAIN


def _family_colour(row: Record) -> str:
    """That of the formats' family; grey for pairs of different formats."""
    same = row["k_format"] == row["v_format"]
    return FAMILY_COLOURS[row["k_format"].partition("_")[0]] if same else "#444444"


def _bars(panel: Any, names: Sequence[str], values: Mapping[str, float], shift: float, **style: Any) -> None:
    """A bar for each of ``names`` that has a value, ``shift`` beside the name's place."""
    places = [i for i, name in enumerate(names) if name in values]
    panel.barh([i + shift for i in places], [values[names[i]] for i in places], **style)


def _finish_bars(panel: Any, names: Sequence[str], label: str) -> None:
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    panel.axvline(1, color="black", linewidth=0.8)
    panel.set_xlabel(label)
    _legend_beside(panel)


def _legend_beside(panel: Any) -> None:
    panel.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, frameon=False)


def _batch_axis(panel: Any, rows: Sequence[Record]) -> None:
    batches = sorted({row["shape"]["batch"] for row in rows})
    panel.set_xticks(batches, [str(batch) for batch in batches])
    panel.minorticks_off()
    panel.set_xlabel("batch (T=8192, 8 query heads on 1 KV head, D=128)")


def _figure(columns: int, share_y: bool = False, height: float = 4.2) -> tuple[Any, Sequence[Any]]:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, columns, figsize=(5.6 * columns + 1, height), sharey=share_y, squeeze=False)
    return figure, panels[0]
