"""The command line: `cute-kernels doctor | aot | cache | calibrate`, or `python -m cute_kernels ...`."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cute_kernels import __version__, families
from cute_kernels.integrations import calibrate_command
from cute_kernels.integrations.sglang import doctor as sglang_doctor
from cute_kernels.integrations.vllm import doctor as vllm_doctor
from cute_kernels.integrations.vllm import engine_kernels
from cute_kernels.runtime import aot, aot_build, doctor, wanted
from cute_kernels.runtime.cache import Progress, default_cache
from cute_kernels.runtime.device import SUPPORTED_ARCHS, UnsupportedGPUError
from cute_kernels.runtime.native import CompilerMissingError, LinkerMissingError
from cute_kernels.runtime.spec import KernelSpec
from cute_kernels.runtime.store import DiskStore, default_directory
from cute_kernels.runtime.workers import CompileError
from layouts.broken_pipes import ends_with_its_reader

MARKS = {doctor.OK: "ok     ", doctor.LIMITED: "limited", doctor.MISSING: "missing"}


def show_progress(progress: Progress) -> None:
    width = len(str(progress.total))
    line = f"[{progress.done:>{width}}/{progress.total}] {progress.spec}  {progress.source}"
    if progress.source == "compiled":
        line += f" in {progress.seconds:.1f} s"
    print(line, flush=True)


def run_doctor(_: argparse.Namespace) -> int:
    findings = [*doctor.examine(), vllm_doctor.examine(), sglang_doctor.examine()]
    for finding in findings:
        print(f"{MARKS[finding.status]}  {finding.subject}: {finding.detail}")
        if finding.remedy and finding.status != doctor.OK:
            print(f"{'':9}-> {finding.remedy}")
    print()
    blocked = doctor.abilities(findings)
    for ability, obstacles in blocked.items():
        print(
            f"{'no,  ' if obstacles else 'yes, '}{ability}"
            + (f" (because of: {', '.join(obstacles)})" if obstacles else "")
        )
    return 1 if blocked["run the fp32 reference"] else 0


def chosen_specs(patterns: list[str]) -> list[KernelSpec]:
    """Returns the shipped kernels whose family:symbol matches one of the patterns; prints an error if there is none."""
    specs = [spec for spec in families.shipped_specs() if any(fnmatch.fnmatch(str(spec), each) for each in patterns)]
    if not specs:
        print(f"no shipped kernel matches {' '.join(patterns)}; `cute-kernels aot list` lists them", file=sys.stderr)
    return specs


def run_aot_list(arguments: argparse.Namespace) -> int:
    specs = chosen_specs(arguments.only)
    for spec in specs:
        print(spec)
    return 0 if specs else 2


def run_aot_build(arguments: argparse.Namespace) -> int:
    specs = [spec for path in arguments.list or () for spec in wanted.read(path, arguments.arch)]
    specs = list(dict.fromkeys(specs)) or chosen_specs(arguments.only)
    if arguments.engines:
        specs = list(dict.fromkeys([*specs, *engine_kernels.specs()]))
    if not specs:
        return 2
    start = time.perf_counter()
    manifest = aot_build.build(
        specs, arguments.arch, arguments.output, cache=default_cache(), jobs=arguments.jobs, progress=show_progress
    )
    size = manifest["library"]["bytes"] / 2**20
    seconds = time.perf_counter() - start
    print(f"{len(specs)} kernels, {size:.1f} MiB, for {arguments.arch} in {arguments.output} ({seconds:.0f} s)")
    return 0


def run_aot_info(arguments: argparse.Namespace) -> int:
    manifest = aot.read_manifest(arguments.directory)
    for name in ("arch", "host", "toolkit", "created"):
        print(f"{name:<10}{manifest[name]}")
    for name, version in manifest["versions"].items():
        print(f"{name:<20} {version}")
    print(f"{manifest['library']['bytes'] / 2**20:.1f} MiB, {len(manifest['kernels'])} kernels:")
    for symbol, kernel in manifest["kernels"].items():
        print(f"  {kernel['family']}:{symbol}  {json.dumps(kernel['config'], sort_keys=True)}")
    problems = aot.mismatches(manifest)
    print("fits this installation" if not problems else f"does not fit here: {'; '.join(problems)}")
    return 1 if problems else 0


def run_cache_info(_: argparse.Namespace) -> int:
    store = DiskStore(default_directory())
    entries = store.entries()
    print(f"{store.root}: {len(entries)} kernels, {sum(entry['bytes'] for entry in entries) / 2**20:.1f} MiB")
    for entry in entries:
        key = entry["key"]
        print(f"  {key['family']}:{key['symbol']}  {key['arch']}  {entry['bytes'] / 2**10:.0f} KiB  {entry['created']}")
    return 0


def run_cache_clear(_: argparse.Namespace) -> int:
    store = DiskStore(default_directory())
    print(f"removed {store.clear()} kernels from {store.root}")
    return 0


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="cute-kernels",
        description="Checks this machine, bundles kernels, lists cached ones, calibrates KV caches.",
    )
    root.add_argument("--version", action="version", version=f"cute-kernels {__version__}")
    commands = root.add_subparsers(required=True)

    commands.add_parser("doctor", help="say what works on this machine, and why the rest does not").set_defaults(
        run=run_doctor
    )

    bundling = commands.add_parser("aot", help="make and look at bundles of compiled kernels")
    bundles = bundling.add_subparsers(required=True)
    build = bundles.add_parser("build", help="compile shipped kernels into a bundle (no GPU needed)")
    build.add_argument("--arch", choices=sorted(set(SUPPORTED_ARCHS.values())), required=True, help="of the GPUs")
    build.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="where the bundle goes")
    build.add_argument(
        "--only",
        action="append",
        metavar="PATTERN",
        help="kernels whose family:symbol matches, such as 'attention:*d128*' (may be repeated; default: all)",
    )
    build.add_argument(
        "--list",
        action="append",
        type=Path,
        metavar="FILE",
        help="instead: the kernels of a list, as a program without the compiler writes it (may be repeated)",
    )
    build.add_argument("--engines", action="store_true", help="also the kernels that served models need")
    build.add_argument(
        "--jobs", type=calibrate_command.positive, help="worker processes (default: by cores and free memory)"
    )
    build.set_defaults(run=run_aot_build)
    listing = bundles.add_parser("list", help="list the kernels that `build` compiles; compiles nothing")
    listing.add_argument("--only", action="append", metavar="PATTERN", help="as for `build`")
    listing.set_defaults(run=run_aot_list)
    info = bundles.add_parser("info", help="say what a bundle holds, and whether it fits this machine")
    info.add_argument("directory", type=Path, metavar="DIR")
    info.set_defaults(run=run_aot_info)

    caching = commands.add_parser("cache", help="list or remove compiled kernels on disk")
    cache = caching.add_subparsers(required=True)
    cache.add_parser("info", help="list them").set_defaults(run=run_cache_info)
    cache.add_parser("clear", help="remove them").set_defaults(run=run_cache_clear)

    calibrate_command.add_parser(commands)
    return root


@ends_with_its_reader
def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if getattr(options, "only", "") is None:
        options.only = ["*"]
    try:
        return options.run(options)
    except BrokenPipeError:
        raise
    except (
        aot.BundleError,
        CompileError,
        CompilerMissingError,
        LinkerMissingError,
        OSError,
        UnsupportedGPUError,
        ValueError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
