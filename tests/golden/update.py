"""Measures every shipped kernel and rewrites the files of reviewed resources: `python -m tests.golden.update`."""

from __future__ import annotations

from cute_kernels import families
from cute_kernels.__main__ import show_progress
from cute_kernels.runtime import default_cache
from tests import golden


def main() -> None:
    specs = families.shipped_specs()
    measured = golden.measure(specs, default_cache(), show_progress)
    before = golden.read()["kernels"] if golden.PATH.exists() else {}
    for symbol in sorted(before.keys() | measured.keys()):
        if symbol not in measured:
            print(f"- {symbol}")
        elif symbol not in before:
            print(f"+ {symbol}")
        else:
            for line in golden.differences(before[symbol], measured[symbol]):
                print(f"~ {symbol}: {line}")
    golden.write(measured, golden.known_sources(specs))
    update_portable()
    print(f"{golden.PATH}: {len(measured)} configurations; review the diff before committing it")


def update_portable() -> None:
    measured = {
        arch: golden.measure(golden.portable_specs(), default_cache(), show_progress, arch)
        for arch in golden.PORTABLE_ARCHS
    }
    golden.write_portable(measured)


if __name__ == "__main__":
    main()
