"""A model served by SGLang, with and without the plug-in: `python -m bench e2e --engine sglang`.

Cases are `bench.e2e_vllm`'s, each in a process of its own. KV is "fp8" or "auto". A plug-in that is "on" serves linear
layers and experts, and attention too where the cache is FP8: SGLang is asked for it by name; "linear" leaves attention
to SGLang. gpt-oss's attention is always SGLang's, which refuses other backends for that model.
"""

# SGLang is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.e2e_cases import Case, cache_tokens, model_folder, prompts_of, warm_up_prompt
from bench.e2e_vllm import Decoding, row_of, take_turns, write_rows
from bench.turns import Turn
from cute_kernels.integrations.sglang.attention import NAME

DEFAULT_CASES = (
    "llama3-8b:w4:fp8:off",
    "llama3-8b:w4:fp8:on",
)
KV_DTYPES = {"fp8": "fp8_e4m3", "auto": "auto"}
PLUGINS = ("off", "on", "linear")


def engine_arguments(case: Case, folder: Path) -> dict[str, Any]:
    """What `sglang.Engine` is given for a case.

    Raises:
        ValueError: the case asks for what there is in vLLM alone.
    """
    alone = case.kv_format or case.kernels or case.mixed or case.gpus > 1
    if case.kv not in KV_DTYPES or case.plugin not in PLUGINS or alone:
        raise ValueError(
            f"case: got {case.name!r}, want KV of {', '.join(KV_DTYPES)} and a plug-in of {', '.join(PLUGINS)}, "
            "without a cache format, a mixed load or a second GPU, with SGLang"
        )
    own_attention = (case.plugin, case.kv) == ("on", "fp8") and case.weights != "mxfp4"
    return {
        "model_path": str(model_folder(case, folder)),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "context_length": case.context + 256,
        "kv_cache_dtype": KV_DTYPES[case.kv],
        "attention_backend": NAME if own_attention else None,
        "page_size": case.block_size or None,
        "mem_fraction_static": 0.85,
        "max_total_tokens": cache_tokens(case) if case.beside else None,
        "max_running_requests": max(case.batches),
        "chunked_prefill_size": case.context,
        "cuda_graph_bs_decode": list(case.batches),
        "cuda_graph_bs_prefill": prefills_of(case),
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "log_level": "info",
    }


def prefills_of(case: Case) -> list[int]:
    """Tokens of the prompts that a case captures: whole ones, and what prefix hits leave of them, in pages of 64 and of
    one token. SGLang would capture 58 sizes of up to a chunk, which takes a minute."""
    left = {max(rows * batch, 4) for batch in case.batches for rows in (1, 64)}  # SGLang captures none below 4
    return sorted({*left, case.context})


class SglangDecoding(Decoding):
    """The same of SGLang's engine, whose prompts are lists of tokens."""

    def _seconds(self, tokens: int) -> float:
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        begin = time.perf_counter()
        self.llm.generate(input_ids=self.prompts, sampling_params=sampling)
        return time.perf_counter() - begin


def measure(case: Case, folder: Path, turn: Turn) -> list[dict[str, Any]]:
    """Starts the engine and measures each batch."""
    import sglang

    start = time.perf_counter()
    engine = sglang.Engine(**engine_arguments(case, folder))
    start_s = time.perf_counter() - start
    print(f"{case.name}: started in {start_s:.1f} s", flush=True)
    decoding = {batch: SglangDecoding(engine, prompts) for batch, prompts in prompts_of(case).items()}
    try:
        SglangDecoding(engine, [warm_up_prompt(case)])._seconds(2)
        take_turns(case, decoding.values(), turn)
        fit = engine.get_server_info().get("max_total_num_tokens")
    finally:
        engine.shutdown()
    more = {"tokens_that_fit": None if case.beside else fit, "start_s": start_s, "sglang": sglang.__version__}
    return [{**row_of(case, batch, each), **more} for batch, each in decoding.items()]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures a case with SGLang and writes its rows to FOLDER/rows.json: what `bench.e2e_vllm` starts."""
    parser = argparse.ArgumentParser(description=str(main.__doc__))
    parser.add_argument("case", type=json.loads, metavar="CASE", help="a JSON object, the fields of Case")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    options = parser.parse_args(arguments)
    return write_rows(options.case, options.folder, measure)


if __name__ == "__main__":
    sys.exit(main())
