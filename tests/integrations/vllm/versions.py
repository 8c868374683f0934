"""How far the plugin fits other versions of vLLM: `python -m tests.integrations.vllm.versions [VERSION ...]`.

Fetches their Python (tools/fetch_engine.py), runs every seam's checks as if the version were supported, and prints a
table: checks that pass, of all. What does not fit follows it. `cute_kernels.integrations.vllm.versions` names those
that are supported, and what each was seen to do: in any other version everything is left to vLLM, with a line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from cute_kernels.integrations.vllm.versions import interface_of
from tests.integrations.vllm.interface import CHECKS
from tools.fetch_engine import TESTED, fetch

ROOT = Path(__file__).resolve().parents[3]
OTHERS = ("0.32.0", "0.31.0", "0.30.0")


def seam_of(check: str) -> str:
    """The seam that a check is of."""
    return CHECKS[check].__module__.rpartition("seam_")[2].partition("_")[0]


def outcomes(folder: Path) -> dict[str, str]:
    """Of each check "ok" or a traceback."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("VLLM", "CUTE_KERNELS_VLLM"))
    }
    which = [] if interface_of(folder.name) else ["any"]
    command = [sys.executable, "-m", "tests.integrations.vllm.interface", str(folder), *which]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(found: dict[str, dict[str, str]]) -> str:
    """In Markdown: of each version and seam how many checks pass."""
    seams = list(dict.fromkeys(map(seam_of, CHECKS)))
    lines = [f"| vLLM | supported: seen | {' | '.join(seams)} |", "|---|---|" + "---|" * len(seams)]
    total = Counter(map(seam_of, CHECKS))
    for version, results in found.items():
        passed = Counter(seam_of(check) for check, outcome in results.items() if outcome == "ok")
        cells = [f"{passed[seam]} of {total[seam]}" for seam in seams]
        interface = interface_of(version)
        lines.append(f"| {version} | {interface.tested if interface else 'no'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", metavar="VERSION", default=[*TESTED["vllm"], *OTHERS])
    versions = parser.parse_args(arguments).versions
    found = {version: outcomes(fetch("vllm", version)) for version in versions}
    print(table(found))
    for version, results in found.items():
        for check, outcome in results.items():
            if outcome != "ok":
                print(f"\n{version} {seam_of(check)} {check}: {outcome.strip().splitlines()[-1]}")
    failing = [v for v, results in found.items() if interface_of(v) and set(results.values()) != {"ok"}]
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
