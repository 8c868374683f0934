"""The worker process of `workers`.

It reads one pickled tuple per line (base64): a directory, an architecture, the modules to import and a spec. It
compiles the spec into the store at that directory, and answers with one JSON line.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import os
import pickle
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from typing import TextIO

from cute_kernels.runtime.cache import KernelCache


def _compile(encoded: str) -> str | None:
    try:
        directory, arch, modules, spec = pickle.loads(base64.b64decode(encoded))
        for module in modules:
            importlib.import_module(module)
        # Of this request alone: what is on disk counts, not what this process once compiled.
        KernelCache(directory).artifact(spec, arch)
    except BaseException:
        return traceback.format_exc()
    return None


def serve(requests: TextIO, replies: TextIO) -> None:
    for line in requests:
        start = time.perf_counter()
        error = _compile(line)
        replies.write(json.dumps({"error": error, "seconds": time.perf_counter() - start}) + "\n")
        replies.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    # The compiler may print: replies get a descriptor of their own, and everything else goes to stderr.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # A scratch directory that goes away, or one that cannot be written, must be an error here, not a fallback.
    warnings.filterwarnings("error", message="kernel cache|sources of", category=RuntimeWarning)
    serve(sys.stdin, replies)
    return 0


if __name__ == "__main__":
    sys.exit(main())
