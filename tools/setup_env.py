"""Makes `.venv` hold what the project needs; `make` runs this before everything else, with any Python >= 3.10.

It uses the standard library alone. A second run with nothing to do costs one file comparison.

Two situations are told apart:

* The interpreter already imports a torch that was built for CUDA (a GPU image). The environment then sees the
  system's packages, only what is missing is installed, and torch is never replaced or downloaded again.
* Otherwise a plain environment is made and filled from pyproject.toml under constraints.txt. Without an NVIDIA driver
  the CPU build of torch is preferred where PyTorch's own index can be reached (2.5 GB less to download).

With OFFLINE=1 nothing is installed and an environment that is there is kept: a new one sees the interpreter's packages
whatever its torch, what is missing is named, and whatever does not need it works.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENV = ROOT / ".venv"
STAMP = ENV / "setup-stamp.json"
EXTRAS = ("dev", "bench", "docs")
MIN_PYTHON = (3, 10)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
GET_PIP = "https://bootstrap.pypa.io/get-pip.py"

# Runs inside the environment: prints the project's requirements one per line, "all" or the "missing" ones.
REQUIREMENTS_SCRIPT = """
import sys
from importlib.metadata import PackageNotFoundError, version
from pip._vendor.packaging.requirements import Requirement
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
which, path, *extras = sys.argv[1:]
project = tomllib.load(open(path, "rb"))["project"]
wanted = list(project["dependencies"])
for extra in extras:
    wanted += project["optional-dependencies"][extra]
for text in wanted:
    need = Requirement(text)
    try:
        met = need.specifier.contains(version(need.name), prereleases=True)
    except PackageNotFoundError:
        met = False
    if (which == "all" or not met) and (need.marker is None or need.marker.evaluate()):
        print(text)
"""


def environment_python() -> Path:
    return ENV / "bin" / "python"


def stamp_content(system_torch: str | None) -> dict[str, str | None]:
    """What the environment depends on: when any of it changes, the environment is brought up to date."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt", "tools/setup_env.py"):
        digest.update((ROOT / name).read_bytes())
    return {"inputs": digest.hexdigest(), "python": sys.executable, "root": str(ROOT), "system_torch": system_torch}


def is_current() -> bool:
    if not (STAMP.is_file() and environment_python().exists()):
        return False
    have = json.loads(STAMP.read_text())
    return have == stamp_content(have.get("system_torch"))


def was_made_like_this(system_torch: str | None) -> bool:
    """Whether an earlier set-up finished with this interpreter and torch: then it is added to, not remade."""
    if not (STAMP.is_file() and environment_python().exists()):
        return False
    have = json.loads(STAMP.read_text())
    return (have["python"], have["root"], have["system_torch"]) == (sys.executable, str(ROOT), system_torch)


def cuda_torch_version() -> str | None:
    """Version of a CUDA build of torch that this interpreter already imports, else None."""
    probe = "import torch; print(torch.__version__ if torch.version.cuda else '')"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def create_environment(system_site_packages: bool) -> None:
    shutil.rmtree(ENV, ignore_errors=True)
    try:
        venv.create(ENV, system_site_packages=system_site_packages, symlinks=True, with_pip=True)
    except (subprocess.CalledProcessError, SystemExit):
        # Debian's python3 comes without ensurepip: an environment without pip still works, and pip can be fetched.
        shutil.rmtree(ENV, ignore_errors=True)
        venv.create(ENV, system_site_packages=system_site_packages, symlinks=True, with_pip=False)
        fetch_pip()
    if system_site_packages:
        drop_setuptools()


def drop_setuptools() -> None:
    """Removes the setuptools that Python 3.10 and 3.11 put into an environment, where it hides a newer borrowed one."""
    (site_packages,) = (ENV / "lib").glob("python3*/site-packages")
    if any(site_packages.glob("setuptools-*.dist-info")):
        run([environment_python(), "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"])


def fetch_pip() -> None:
    command = [environment_python(), "-I", "-m", "pip", "--version"]
    probe = subprocess.run(command, capture_output=True, check=False)
    if probe.returncode == 0:
        return  # seen through the system's packages
    target = ENV / "get-pip.py"
    try:
        with urllib.request.urlopen(GET_PIP, timeout=60) as response:
            target.write_bytes(response.read())
    except OSError as error:
        raise SystemExit(
            f"setup: {sys.executable} has no ensurepip and {GET_PIP} cannot be reached ({error}). "
            "Install the python3-venv package, or choose another interpreter: make PYTHON=/path/to/python3"
        ) from error
    run([environment_python(), target, "--quiet"])


def parent_site_packages() -> list[str]:
    """Directories of the interpreter that made the environment; matters when that is itself an environment.

    `--system-site-packages` reaches through to the base installation alone, so a torch that lives in an environment
    of its own would not be seen.
    """
    if sys.prefix == sys.base_prefix:
        return []
    return [path for path in sys.path if path.endswith("site-packages")]


def write_path_file(parents: list[str]) -> None:
    """Puts the checkout on the path, and the parents' packages with whatever path files they hold themselves."""
    site_packages = next((ENV / "lib").glob("python3*/site-packages"))
    lines = [str(ROOT), *(f"import site; site.addsitedir({parent!r})" for parent in parents)]
    (site_packages / "cute_kernels_checkout.pth").write_text("\n".join(lines) + "\n")


def constraints(system_torch: str | None) -> Path:
    """The constraints file, without the lines that would replace a torch that is already there."""
    if system_torch is None:
        return ROOT / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("torch==", "numpy=="))]
    path = ENV / "constraints.txt"
    path.write_text("\n".join([*kept, f"torch=={system_torch}"]) + "\n")
    return path


def torch_index() -> list[str]:
    """Options that make pip prefer the CPU build of torch on a machine without an NVIDIA driver."""
    if shutil.which("nvidia-smi") or Path("/proc/driver/nvidia").exists():
        return []
    try:
        urllib.request.urlopen(f"{TORCH_CPU_INDEX}/torch/", timeout=5).close()
    except OSError:
        return []
    return ["--extra-index-url", TORCH_CPU_INDEX]


def requirements(which: str) -> list[str]:
    command = [environment_python(), "-c", REQUIREMENTS_SCRIPT, which, ROOT / "pyproject.toml", *EXTRAS]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")[:-1]
    return list(dict.fromkeys(lines))


def run(command: list[str | Path]) -> None:
    done = subprocess.run(command, check=False, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"setup: failed ({done.returncode}): {' '.join(str(part) for part in command)}")


def install(wanted: list[str], system_torch: str | None) -> None:
    extra = [] if system_torch else torch_index()
    options = ["--quiet", "--disable-pip-version-check", "--no-compile", "-c", constraints(system_torch), *extra]
    run([environment_python(), "-m", "pip", "install", *options, *wanted])
    compile_packages()


def compile_packages() -> None:
    """Compiles the installed modules on all cores, where pip would take a minute on one: 14,000 of them."""
    (site_packages,) = (ENV / "lib").glob("python3*/site-packages")
    # Some packages bring files that are no Python of this version: pip passes over them, too.
    command = [environment_python(), "-m", "compileall", "-qq", "-j", "0", site_packages]
    subprocess.run(command, check=False, cwd=ROOT)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    if sys.version_info < MIN_PYTHON:
        raise SystemExit(f"setup: Python >= 3.10 is needed, {sys.executable} is {sys.version.split()[0]}; set PYTHON=")
    os.environ.setdefault("PIP_NO_INPUT", "1")
    if is_current():
        return 0
    system_torch, offline = cuda_torch_version(), bool(os.environ.get("OFFLINE"))
    borrows = offline or system_torch is not None
    how = f"with torch {system_torch}" if system_torch else "offline" if offline else "from scratch"
    print(f"setup: preparing {ENV} ({how})", flush=True)
    if not (was_made_like_this(system_torch) or (offline and environment_python().exists())):
        create_environment(system_site_packages=borrows)
    # The checkout is put on the path rather than installed: nothing to build, and edits are seen at once.
    write_path_file(parent_site_packages() if borrows else [])
    missing = requirements("missing")
    if offline:  # without a stamp, so that a run with a network makes the environment what it is to be
        without = f"without: {', '.join(missing)}" if missing else "with all that is wanted"
        print(f"setup: offline, going on {without}", flush=True)
        return 0
    if missing or system_torch is None:
        print(f"setup: installing {len(missing)} packages and what they need", flush=True)
        # All of them where nothing is borrowed from the system: a changed pin is then followed.
        install(missing if system_torch else requirements("all"), system_torch)
    STAMP.write_text(json.dumps(stamp_content(system_torch)))
    print("setup: ready", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
