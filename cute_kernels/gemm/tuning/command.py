"""`python -m cute_kernels tune`: its arguments, and what it says."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cute_kernels.gemm.experts.schedule import MAX_EXPERTS
from cute_kernels.gemm.tuning import experts, linear
from cute_kernels.gemm.tuning.timing import ColdTimer
from cute_kernels.gemm.tuning.tuner import Step, Timer, tune
from cute_kernels.runtime import native
from cute_kernels.runtime.cache import ProgressCallback, load_many
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.tuned import TunedTable, own_path

Measurable = linear.LinearSubject | experts.ExpertsSubject
INTERRUPTED = 130  # the exit code of a program that Ctrl-C has ended
QUIET_SECONDS = 1.0  # between two lines where nobody watches


def add_parser(commands) -> argparse.ArgumentParser:
    """Adds the command to what `add_subparsers` made."""
    command = commands.add_parser(
        "tune",
        help="measure which kernels are fastest on this GPU for linear layers and experts, and use them from then on",
        description="Measures linear layers and layers of experts, and writes a table that later processes consult. "
        "What a table has already is not measured again, so an interrupted run can be taken up.",
    )
    command.add_argument("--shape", type=layer, action="append", metavar="NxK", help="out x in features (repeatable)")
    command.add_argument(
        "--experts",
        type=layer_of_experts,
        action="append",
        metavar="ExTxHxI",
        help="a layer of experts: their number, that of a token, hidden x intermediate size (repeatable)",
    )
    command.add_argument(
        "--rows", type=rows, default=linear.ROWS, metavar="M,M,...", help="rows of x, tokens of a layer"
    )
    command.add_argument(
        "--format",
        type=weight_format,
        action="append",
        metavar="w4g128",
        help="bits, group size (or 'channel'), z with zero points, -fp16 for fp16: w4g128, w8gchannel, w4g64z-fp16",
    )
    command.add_argument("-o", "--output", type=Path, metavar="FILE", help="default: in the directory of kernels")
    command.add_argument("--again", action="store_true", help="also measure what the table has")
    return command


def layer(text: str) -> tuple[int, int]:
    """(N, K) of "8192x4096"."""
    match = re.fullmatch(r"([1-9]\d*)[xX]([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, want out x in features, such as 8192x4096")
    return int(match[1]), int(match[2])


def layer_of_experts(text: str) -> tuple[int, int, int, int]:
    """(experts, topk, hidden, intermediate) of "8x2x4096x14336"."""
    match = re.fullmatch("[xX]".join(4 * [r"([1-9]\d*)"]), text)
    experts, topk, hidden, intermediate = map(int, match.groups()) if match else (0, 1, 0, 0)
    if not topk <= experts <= MAX_EXPERTS:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, want experts x experts of a token x hidden x intermediate size, such as 8x2x4096x14336, "
            f"of at most {MAX_EXPERTS} experts"
        )
    return experts, topk, hidden, intermediate


def rows(text: str) -> tuple[int, ...]:
    """(1, 16) of "1,16"."""
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"got {text!r}, want numbers of rows, such as 1,16,64")
    return tuple(map(int, text.split(",")))


def weight_format(text: str) -> linear.Format:
    """The format that "w4g128z-fp16" names."""
    match = re.fullmatch(r"w(4|8)g(32|64|128|256|channel)(z?)(-fp16|-bf16)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"got {text!r}, want one such as w4g128, w8gchannel or w4g64z-fp16")
    size = 0 if match[2] == "channel" else int(match[2])
    return linear.Format(int(match[1]), size, bool(match[3]), (match[4] or "-bf16")[1:])


def run(
    arguments: argparse.Namespace,
    show_kernel: ProgressCallback,
    make_timer: Callable[[], Timer] | None = None,
) -> int:
    """The command; 130 if it was interrupted.

    Raises UnsupportedGPUError without a GPU that there is anything to tune on, TableError for a damaged table.
    """
    arch = arch_of()  # raises before anything is done
    device = GPU.current()
    gpu = GPU.name(device)
    path = arguments.output or own_path(gpu)
    table = TunedTable.read(path) if path.exists() else TunedTable(gpu, native.dsl_version())
    reason = table.mismatch(gpu)
    if reason is not None:
        print(f"{path} {reason}: begun anew")
        table = TunedTable(gpu, native.dsl_version())
    num_sms = GPU.num_sms(device)
    chosen = subjects_of(arguments, num_sms, "cpu" if GPU.takes_cpu else f"cuda:{device}")
    missing = [subject for subject in chosen if arguments.again or subject.key not in table.entries]
    try:
        load_many(dict.fromkeys(spec for subject in missing for spec in subject.specs()), arch, progress=show_kernel)
        tune(chosen, table, path, (make_timer or ColdTimer)(), again=arguments.again, progress=ShowSteps())
    except KeyboardInterrupt:
        print(f"\ninterrupted; {path} keeps {len(table.entries)} problems, and the same command goes on from there")
        return INTERRUPTED
    print(f"{path}: {len(table.entries)} problems, measured on {gpu}")
    return 0


def subjects_of(arguments: argparse.Namespace, num_sms: int, device: str) -> list[Measurable]:
    """What is asked for; of both kinds if nothing is."""
    everything = not (arguments.shape or arguments.experts)
    formats = arguments.format or [linear.Format()]
    layers = linear.LAYERS if everything else arguments.shape or ()
    of_experts = experts.LAYERS if everything else arguments.experts or ()
    return [
        *linear.subjects(layers, arguments.rows, formats, num_sms, linear.Weights(device)),
        *experts.subjects(of_experts, arguments.rows, formats, num_sms, experts.Experts(device)),
    ]


class ShowSteps:
    """Prints steps: all of them in a terminal, elsewhere one a second, the last one and those with warnings."""

    def __init__(self, seconds: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._next = seconds, 0.0

    def __call__(self, step: Step) -> None:
        now = self._seconds()
        if now < self._next and not (step.refused or step.done == step.total or sys.stdout.isatty()):
            return
        self._next = now + QUIET_SECONDS
        print(describe(step), flush=True)


def describe(step: Step) -> str:
    """A step in a line."""
    width = len(str(step.total))
    line = f"[{step.done:>{width}}/{step.total}] {step.key}  "
    if step.choice is None:
        return line + "known"
    choice = step.choice
    line += f"{choice.us:.1f} us"
    if choice.us != choice.model_us:
        line += f" ({choice.model_us:.1f} without)"
    line += f"  {choice.config} / {choice.cut}"
    if step.refused:
        line += f"  WARNING: {step.refused} candidates computed something else and were left out"
    return line
