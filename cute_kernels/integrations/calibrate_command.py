"""The `cute-kernels calibrate` command: its arguments and its output. It imports transformers only when it runs."""

from __future__ import annotations

import argparse
import itertools
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from cute_kernels.formats.kv import LayerFormats, format_of, format_pair
from cute_kernels.integrations.objects import Foreign
from cute_kernels.kv_cache.constants import CacheConstants

if TYPE_CHECKING:
    from cute_kernels.integrations.transformers.budget import Needle

CITIES = ("Lima", "Oslo", "Cairo", "Quito", "Hanoi", "Accra", "Dakar", "Sofia", "Tunis", "Minsk")
STEPS = 64  # that are timed


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Adds the `calibrate` command to ``commands``, the result of `add_subparsers`, and returns its parser."""
    command = commands.add_parser(
        "calibrate",
        help="find the transforms and scales of a model's KV cache on your text",
        description="Runs a model over text and writes the constants of its KV cache (transforms, scales) to a "
        "safetensors file. KVCache.set_constants, accelerate(kv_transform=...), DecodeCache(kv_transform=...) and, in "
        "vLLM, CUTE_KERNELS_VLLM_CONSTANTS read it.",
    )
    command.add_argument("model", metavar="MODEL", help="a directory, a .gguf file, or a name that transformers knows")
    command.add_argument(
        "--text",
        type=Path,
        nargs="+",
        required=True,
        metavar="FILE",
        help="text files like those that the model will read",
    )
    command.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the file to write")
    command.add_argument(
        "--kv-format",
        type=kv_format,
        metavar="NAME[,NAME]",
        help="format of the cache, or K's,V's, or a .json file of formats by layer (default: int8_token_head,int4_g4)",
    )
    command.add_argument(
        "--budget",
        type=float,
        metavar="SHARE",
        help="instead of --kv-format: choose each layer's format, so that the cache takes at most this share of BF16's "
        "bytes (such as 0.42) and loses least. -o then names a .json file of formats and a report, which kv_format= "
        "takes; constants are written beside it (.safetensors)",
    )
    command.add_argument(
        "--needles",
        type=count,
        default=8,
        metavar="N",
        help="with --budget: facts that are hidden in the text and asked for (default: 8)",
    )
    for name, default, what in (
        ("window", 1024, "tokens of a window of text; best as many as your prompts have"),
        ("windows", 32, "number of windows, spread evenly over the text"),
        ("batch", 4, "windows that the model reads at a time"),
    ):
        command.add_argument(
            f"--{name}", type=positive, default=default, metavar="N", help=f"{what} (default: {default})"
        )
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to run it")
    for name, what in (("center", "K's mean"), ("factors", "K's factors"), ("rotation", "rotations")):
        command.add_argument(f"--no-{name}", action="store_true", help=f"leave out {what}")
    command.add_argument(
        "--values",
        nargs="?",
        const="all",
        choices=("all", "factors"),
        help="also transform V: by factors, and for one scale a row (int4_g1) by a rotation",
    )
    command.add_argument("--seed", type=int, default=0, help="seed of the rotations' random signs")
    command.set_defaults(run=run)
    return command


def kv_format(text: str) -> str | tuple[str, str] | LayerFormats:
    """Parses an argument: one format for K and V, two formats with a comma between them, or a .json file of formats by
    layer."""
    names = text.split(",")
    try:
        if text.endswith(".json"):
            return LayerFormats.load(text)
        k, v = (format_of(name).name for name in format_pair(names[0] if len(names) == 1 else tuple(names)))
        return k if k == v else (k, v)
    except (OSError, TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def positive(text: str) -> int:
    """Parses an argument: an integer of at least 1."""
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, want a number of at least 1")
    return int(text)


def count(text: str) -> int:
    """Parses an argument: an integer of at least 0."""
    return 0 if text == "0" else positive(text)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command: calibrates a model, writes its constants or formats to the output file, and prints a
    summary."""
    _check(arguments)
    arguments.kv_format = arguments.kv_format or ("int8_token_head", "int4_g4")  # as `accelerate` has it
    try:
        from cute_kernels.integrations.transformers.budget import choose_formats
        from cute_kernels.integrations.transformers.calibrate import calibrate_cache
    except ImportError as error:
        raise ValueError(f"transformers: cannot be imported ({error}), want pip install 'transformers>=5.0'") from error
    tokenizer = tokenizer_of(arguments.model)
    text = tokens_of(tokenizer, arguments.text)
    windows = windows_of(text, arguments.window, arguments.windows)
    model = model_of(arguments.model, torch.device(arguments.device))
    about = {"model": str(arguments.model), "text": ", ".join(path.name for path in arguments.text)}
    batches = [{"input_ids": some.to(arguments.device)} for some in windows.split(arguments.batch)]
    calibration: dict[str, Any] = {
        "center": not arguments.no_center,
        "factors": not arguments.no_factors,
        "rotation": not arguments.no_rotation,
        "values": {None: False, "factors": "factors", "all": True}[arguments.values],
        "seed": arguments.seed,
        "about": about | {"window": str(windows.shape[1])},
    }
    if arguments.budget is not None:
        needles = needles_of(tokenizer, text, windows.shape[1], arguments.needles)
        formats, constants = choose_formats(
            model, batches, arguments.budget, needles=needles, say=partial(print, flush=True), calibration=calibration
        )
        if batches[0]["input_ids"].is_cuda:
            formats.save(arguments.output)  # before the first kernels are compiled
            formats = with_step(formats, model, constants, batches[0]["input_ids"])
        _write_formats(arguments.output, formats, constants)
    else:
        _write_constants(arguments.output, calibrate_cache(model, batches, arguments.kv_format, **calibration))
    return 0


def with_step(formats: LayerFormats, model: Foreign, constants: CacheConstants, tokens: torch.Tensor) -> LayerFormats:
    """Measures a decode step. Returns ``formats``, with the step's time in ms in their report.

    The step continues the prompts ``tokens`` [requests, tokens]. The model is accelerated in place. Errors are those of
    `accelerate`.
    """
    from cute_kernels.integrations.transformers import accelerate

    accelerate(cast("torch.nn.Module", model), kv_format=formats, kv_transform=constants)
    mask, seconds = torch.ones_like(tokens), []
    for new in (1 + STEPS, 1 + STEPS, 1):  # the first time compiles kernels and records the step
        begin = time.perf_counter()
        model.generate(tokens, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False).cpu()
        seconds.append(time.perf_counter() - begin)
    step = {"step_ms": 1000 * (seconds[1] - seconds[2]) / STEPS, "step_requests": list(tokens.shape)}
    return LayerFormats(formats.layers, {**formats.report, **step})


def _write_constants(path: Path, constants: CacheConstants) -> None:
    constants.save(path)
    print(f"{path}: {constants.num_layers} layers, {path.stat().st_size / 1024:.0f} KiB")
    for name, value in sorted(constants.about.items()):
        print(f"  {name:<12}  {value}")


def _write_formats(path: Path, formats: LayerFormats, constants: CacheConstants) -> None:
    """Writes formats by layer to ``path``, and constants, if there are any, to a .safetensors file with the same stem.
    Prints the measured losses, needles and time."""
    formats.save(path)
    report = cast("dict[str, Any]", formats.report)
    print(f"{path}: {len(formats)} layers, {report['bytes_per_token']} bytes a token")
    print(f"  {'':<28}  {'of BF16':>8}  {'KL, nats':>9}  {'top-1':>7}")
    for name, one in report["all_layers"].items():
        mark = "  chosen" if name == report["chosen"] else ""
        print(f"  {name:<28}  {one['share']:8.1%}  {one['kl']:9.5f}  {one['agreement']:7.2%}{mark}")
    runs = [(pair, len(list(same))) for pair, same in itertools.groupby(formats.layers)]
    print("  layers: " + "; ".join(f"{many} x {' + '.join(dict.fromkeys(pair))}" for pair, many in runs))
    print(f"  needles: {report['needles']['found']} of {report['needles']['of']} that exact keys and values find")
    print("  time of a step: " + (f"{ms:.2f} ms" if (ms := report["step_ms"]) else "not measured, which wants a GPU"))
    if any(transform is not None for transform in constants.transforms) or constants.scales:
        _write_constants(path.with_suffix(".safetensors"), constants)


def _check(arguments: argparse.Namespace) -> None:
    """Raises ValueError for errors that can be found before a model is loaded."""
    if arguments.budget is not None:
        if not 0 < arguments.budget <= 1:
            raise ValueError(f"--budget: got {arguments.budget:g}, want a share of BF16's bytes, above 0 and at most 1")
        if arguments.kv_format is not None:
            raise ValueError("--kv-format: got it with --budget, want it in a run after that, with the file of formats")
        if arguments.output.suffix != ".json":
            raise ValueError(f"--output: got {arguments.output}, want a .json file with --budget")
    if arguments.output.is_dir() or not arguments.output.parent.is_dir():
        raise ValueError(f"--output: got {arguments.output}, want a file in a directory that exists")
    for path in arguments.text:
        if not path.exists():
            raise ValueError(f"--text: got {path}, which does not exist, want a file of text")
    model = Path(arguments.model)
    if (model.is_absolute() or model.suffix == ".gguf") and not model.exists():
        raise ValueError(
            f"MODEL: got {model}, which does not exist, want a directory, a .gguf file, or a name known to transformers"
        )


def tokenizer_of(name: str) -> Any:
    """Loads the tokenizer of a directory, a .gguf file or a name; raises transformers' OSError if there is none."""
    from transformers import AutoTokenizer

    where, options = _source(name)
    return AutoTokenizer.from_pretrained(where, **options)


def model_of(name: str, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Loads the model of a directory, a .gguf file or a name. Its default dtype is the one in which it was saved."""
    from transformers import AutoModelForCausalLM

    where, options = _source(name)
    found = AutoModelForCausalLM.from_pretrained(where, dtype=dtype or "auto", **options)
    model = cast("torch.nn.Module", found)  # transformers declares its `to` otherwise
    return model.to(device).eval()


def _source(name: str) -> tuple[str, dict[str, Any]]:
    """Returns the path or name, and the options, by which transformers loads a model. Raises ValueError for a directory
    without config.json; transformers' own error would name a missing tokenizer."""
    path = Path(name)
    if path.is_dir() and not (path / "config.json").exists():
        raise ValueError(f"MODEL: got the directory {name} without config.json, want one that holds a saved model")
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == ".gguf" else (name, {})


def tokens_of(tokenizer: Callable[..., Mapping[str, Any]], files: Iterable[Path]) -> torch.Tensor:
    """Returns the tokens of text files, one after the other, int64 [tokens]. Raises ValueError, naming the file, if one
    is not UTF-8."""
    found = []
    for path in files:
        try:
            found += tokenizer(path.read_text(encoding="utf-8"))["input_ids"]
        except UnicodeDecodeError as error:
            raise ValueError(f"--text: got {path}, which is no UTF-8 text ({error.reason})") from error
    return torch.tensor(found, dtype=torch.int64)


def needles_of(tokenizer: Callable[..., Mapping[str, Any]], text: torch.Tensor, length: int, many: int) -> list[Needle]:
    """Makes ``many`` prompts of about ``length`` tokens. Each prompt states a number at a different depth, and asks for
    this number at the end."""
    from cute_kernels.integrations.transformers.budget import Needle

    drawn, needles = random.Random(0), []
    for i in range(many):
        city, number = CITIES[i % len(CITIES)], "".join(drawn.choices("123456789", k=5))
        told, asked, answer = (
            torch.tensor(tokenizer(part)["input_ids"], dtype=torch.int64)
            for part in (
                f"\nThe secret number of {city} is {number}.\n",
                f"\nWhat is the secret number of {city}? The secret number of {city} is ",
                number,
            )
        )
        begin = drawn.randrange(max(1, len(text) - length))
        hay = text[begin : begin + max(0, length - len(told) - len(asked) - len(answer))]
        depth = len(hay) * i // max(many - 1, 1)
        needles.append(Needle(torch.cat((hay[:depth], told, hay[depth:], asked, answer)), len(asked), len(answer)))
    return needles


def windows_of(tokens: torch.Tensor, length: int, most: int) -> torch.Tensor:
    """Cuts windows [windows, tokens] out of a text. The windows are evenly spread and do not overlap.

    A text shorter than ``length`` is one window. Raises ValueError for fewer than 16 tokens.
    """
    if len(tokens) < 16:
        raise ValueError(f"--text: got {len(tokens)} tokens, want at least 16")
    length = min(length, len(tokens))
    there = tokens[: len(tokens) // length * length].view(-1, length)
    count = min(most, len(there))
    return there[torch.arange(count) * len(there) // count]
