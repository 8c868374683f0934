"""Command line of the benchmarks; see `python -m bench --help`."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import command_line, mla_workloads, workloads
from bench import record as records
from bench.random_weights import Format
from layouts.broken_pipes import ends_with_its_reader

if TYPE_CHECKING:
    from bench.compare_rows import Row
    from bench.suites import Bench
    from cute_kernels.runtime import KernelSpec

OPTION_BATCHES = (1, 32)


@ends_with_its_reader
def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line.parser().parse_args(arguments)
    return COMMANDS[options.command](options)


def _pages(_: argparse.Namespace) -> int:
    from bench import pages

    print("\n".join(pages.write()) or "nothing changed")
    return 0


def _decode(options: argparse.Namespace) -> int:
    bench = _gpu_bench("decode", options, options.quick)
    if bench is None:
        return 2
    from bench import report, suites

    formats = options.formats or workloads.FORMATS
    if options.options:
        from bench import options as timed

        timed.run_decode(bench, options.batches or OPTION_BATCHES, formats)
        return _finish(bench.recorder, timed.text)
    if options.suite in (*command_line.OTHER_SUITES, "apart"):
        return _decode_apart(bench, options)
    chosen = command_line.SUITES if options.suite == "all" else (options.suite,)
    peers = not options.no_peers
    suites.run_host_cost(bench)
    if "main" in chosen:
        batches = tuple(options.batches or (workloads.QUICK_BATCHES if options.quick else workloads.BATCHES))
        suites.run_rows(bench, "main", workloads.main_shapes(batches), formats, peers)
    if "shapes" in chosen:
        suites.run_rows(bench, "shapes", workloads.other_shapes(options.quick), formats, False)
    if "cache" in chosen:
        suites.run_cache(bench)
    if "ladder" in chosen:
        in_int4 = [name for name in formats if name.startswith("int4")]
        suites.run_ladder(bench, (512,) if options.quick else (32, 512), in_int4)
    if peers:
        suites.run_evidence(bench)
    return _finish(bench.recorder, report.text)


def _decode_apart(bench: Bench, options: argparse.Namespace) -> int:
    from bench import decode_cases, decode_steps, report

    chosen = command_line.OTHER_SUITES if options.suite == "apart" else (options.suite,)
    steps = decode_steps.cases(options.batches or decode_steps.BATCHES, options.only) if "step" in chosen else []
    shapes = decode_cases.cases(chosen, options.formats, options.only)
    peers = not options.no_peers
    _make_ready(bench, lambda: [*decode_steps.specs(steps, bench.device), *decode_cases.specs(shapes, bench)])
    decode_steps.run(bench, steps, options.seconds)
    decode_cases.run(bench, shapes, peers, options.seconds)
    text = decode_steps.text if not shapes else lambda record: report.text(record) + "\n" + decode_steps.text(record)
    return _finish(bench.recorder, text)


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
    if options.fp8:
        from bench import linear_fp8

        chosen = options.layers or linear_fp8.LAYERS, options.rows or linear_fp8.ROWS
        _make_ready(bench, partial(linear_fp8.specs, *chosen))
        linear_fp8.run(bench, *chosen)
        return _finish(bench.recorder, linear_fp8.text)
    if options.by_format:
        from bench import by_format, format_peers

        chosen = options.layers or linear.LAYERS, options.rows or by_format.ROWS
        peers = () if options.no_peers else [one for one in format_peers.PEERS if one.name not in options.without]
        by_format.run_linear(bench, options.seconds, *chosen, peers)
        return _finish(bench.recorder, by_format.text)
    rows = options.rows or (linear.QUICK_ROWS if options.quick else linear.ROWS)
    if options.between:
        rows = linear.BETWEEN_ROWS
    peers = linear_peers.DENSE if options.no_peers else linear_peers.PEERS
    formats = options.format or [Format(bits) for bits in options.bits]
    layers = options.layers or (linear.SHARDS if options.shards else linear.LAYERS)
    _make_ready(bench, partial(linear.specs, layers, rows, formats))
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
    if options.fp8:
        from bench import moe_fp8

        layers = [dataclasses.replace(layer, tokens=tuple(options.tokens or layer.tokens)) for layer in moe_fp8.LAYERS]
        _make_ready(bench, partial(moe_fp8.specs, layers))
        moe_fp8.run(bench, layers)
        return _finish(bench.recorder, moe_fp8.text)
    if options.by_format:
        from bench import by_format

        by_format.run_experts(bench, options.seconds, options.tokens or by_format.TOKENS)
        return _finish(bench.recorder, by_format.text)
    tokens = options.tokens or (moe.QUICK_TOKENS if options.quick else moe.TOKENS)
    peers = () if options.no_peers else [peer for peer in moe_peers.PEERS if peer.name not in options.without]
    _make_ready(bench, partial(moe.specs, tokens=tokens))
    moe.run(bench, tokens=tokens, peers=peers)
    return _finish(bench.recorder, moe.text)


def _mla(options: argparse.Namespace) -> int:
    bench = _gpu_bench("mla", options, options.quick)
    if bench is None:
        return 2
    from bench import mla, mla_peers

    suites = mla_workloads.SUITES if options.suite == "all" else (options.suite,)
    _make_ready(bench, lambda: mla.specs(suites, bench.quick))
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


def _e2e(options: argparse.Namespace) -> int:
    import torch

    from bench import e2e_cases, e2e_sglang, e2e_transformers, e2e_vllm

    if not torch.cuda.is_available():
        print("python -m bench e2e serves a model on a GPU; torch sees no CUDA GPU here.", file=sys.stderr)
        return 2
    path = options.json or _default_path("e2e", torch.cuda.get_device_name())
    goes_on = path.is_file() and options.engine != "transformers"
    recorder = _recorder(path, goes_on, kind="e2e", engine=options.engine, command=sys.argv[1:])
    if recorder is None:
        return 2
    if options.engine == "steps":
        return _e2e_steps(options, recorder)
    if options.engine == "transformers":
        shape = {name: getattr(options, name) for name in ("batch", "context", "layers", "steps")}
        chosen = e2e_transformers.chosen(options.only, options.batches)
        e2e_transformers.run(recorder, _teller(recorder), **shape, **chosen)
        return _finish(recorder, e2e_transformers.text)
    usual = (e2e_sglang if options.engine == "sglang" else e2e_vllm).DEFAULT_CASES
    cases = options.case or [e2e_cases.case_of(text) for text in usual]
    cases = [dataclasses.replace(case, kernels=options.kernels, engine=options.engine) for case in cases]
    run = e2e_vllm.run_together if options.together else e2e_vllm.run
    run(recorder, cases, _teller(recorder), options.limit)
    return _finish(recorder, e2e_vllm.text)


def _e2e_steps(options: argparse.Namespace, recorder: records.Recorder) -> int:
    from bench import e2e_steps
    from bench.suites import Bench
    from bench.timing import Protocol

    models = options.models or command_line.STEP_MODELS
    for name in models:
        if name not in command_line.STEP_MODELS:
            print(f"--models: got {name!r}, want one of {', '.join(command_line.STEP_MODELS)}", file=sys.stderr)
            return 2
    bench = Bench(recorder, Protocol(samples=8), quick=True, say=_teller(recorder))
    points = e2e_steps.points(models, options.batches or e2e_steps.BATCHES, options.contexts, options.only)
    e2e_steps.run(bench, points, options.seconds)
    return _finish(recorder, e2e_steps.text)


def _compare(options: argparse.Namespace) -> int:
    import torch

    from bench import compare, compare_rows

    rows = [row for row in compare_rows.ROWS if re.search(options.only, row.name)]
    if not rows or (options.revision is None and options.base_dir is None):
        print("compare: want a revision BASE or --base-dir, and --only that matches a row", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("python -m bench compare times GPU kernels; torch sees no CUDA GPU here.", file=sys.stderr)
        return 2
    try:
        with compare.base_tree(options.revision, options.base_dir) as (tree, name):
            return _compare_with(tree, name, rows, options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2


def _compare_with(tree: Path, name: str, rows: Sequence[Row], options: argparse.Namespace) -> int:
    import torch

    from bench import compare

    path = options.json or _default_path("compare", torch.cuda.get_device_name())
    recorder = _recorder(path, kind="compare", base=name, command=sys.argv[1:], compare=[])
    if recorder is None:
        return 2
    end = time.monotonic() + options.seconds
    trees, say = {compare.BASE: tree, compare.NEW: records.ROOT}, _teller(recorder)
    found: list[compare.Verdict] = []
    try:
        found += compare.run(recorder, trees, compare.Processes(end), say, rows)
        left = end - time.monotonic()
        if compare.serves() and not options.no_served and left > compare.SERVED_SECONDS:
            found += compare.run_served(recorder, trees, say, left)
    except (compare.OutOfTimeError, RuntimeError) as error:
        say(recorder.add_failure("compare", error))
    _finish(recorder, compare.text)
    return 1 if compare.fails(found) or not found else 0


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


def _make_ready(bench: Bench, specs: Callable[..., Iterable[KernelSpec]]) -> None:
    """Loads what ``specs()`` lists, before any of it is timed."""
    from bench.kernels import make_ready

    bench.attempt("kernels", lambda: make_ready(specs(), bench.say))


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

    for name in ("resume", "weights"):
        if getattr(options, name) and not options.model:
            print(f"--{name}: got no --model, want it together with --model.", file=sys.stderr)
            return 2
    if options.beside_fp8:
        return _beside_fp8(options)
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
    kind = "weights_accuracy" if options.weights else "model_accuracy"
    recorder = _recorder(path, kind=kind, command=sys.argv[1:], device=device.type, resume=options.resume)
    if recorder is None:
        return 2
    plan = model_accuracy.plan_for(device, options.quick, not options.no_decode, options.weights)
    try:
        model_accuracy.run(recorder, plan, device, say=_teller(recorder))
    except model_accuracy.OtherTextError as error:
        print(f"--resume: {error}", file=sys.stderr)
        return 2
    return _finish(recorder, model_accuracy_report.text)


def _beside_fp8(options: argparse.Namespace) -> int:
    from bench import beside_fp8, beside_fp8_report, smollm2

    path = options.json or _default_path("beside_fp8", "cpu")
    recorder = _recorder(path, kind="beside_fp8", command=sys.argv[1:], device="cpu")
    if recorder is None:
        return 2
    try:
        beside_fp8.run(recorder, beside_fp8.QUICK if options.quick else beside_fp8.FULL, _teller(recorder))
    except smollm2.MissingModelError as error:
        print(f"--beside-fp8: {error}", file=sys.stderr)
        return 2
    return _finish(recorder, beside_fp8_report.text)


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
    from bench import report, tables

    record = options.result
    try:
        make, mark = tables.table_of(record, options.suite)
        table = make(record)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.readme is None:
        print(table.rstrip("\n"))
        return 0
    if mark is None:
        print(f"--readme: got a record of {record['kind']}, whose table no page holds; leave it out.", file=sys.stderr)
        return 2
    try:
        options.readme.write_text(report.filled(options.readme.read_text(), mark, table))
    except (OSError, ValueError) as error:
        print(f"--readme {options.readme}: {error}", file=sys.stderr)
        return 2
    print(f"{options.readme}: {mark}")
    return 0


COMMANDS = {
    "decode": _decode,
    "append": _append,
    "linear": _linear,
    "moe": _moe,
    "mla": _mla,
    "norm": _norm,
    "extend": _extend,
    "accuracy": _accuracy,
    "demo": _demo,
    "plot": _plot,
    "table": _table,
    "pages": _pages,
    "e2e": _e2e,
    "compare": _compare,
}


if __name__ == "__main__":
    sys.exit(main())
