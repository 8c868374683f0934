"""Serves a small random model by vLLM and writes what came out: `python -m tests.gpu.serve_vllm SCENARIOS FOLDER`.

SCENARIOS is a JSON object, of each scenario its `Scenario`'s fields; they run in one process, one engine after the
other, since importing vLLM takes longer than an engine of this size. FOLDER/NAME.json is what one gave, written as soon
as it is there.

An engine has little room: prompts are prefilled in chunks and beside decoding requests, prefixes are shared, and there
are too few pages for all requests, so that some are preempted and begin again.
"""

# vLLM is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from cute_kernels.formats.weights import NVFP4
from tests.gpu.vllm_scenarios import (
    BLOCK,
    CONFIG,
    FP4,
    GRAPHS,
    GROUP,
    MAX_MODEL_LEN,
    MAX_REQUESTS,
    MODELS_OF_TRANSFORMERS,
    VOCABULARY,
    WIDE,
    Scenario,
    kernels_of,
    named_format,
)

NEW_TOKENS = 24
FP4_PACKING = FP4["quantization_config"]["format"]


def attention_shapes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Of the matrices of a layer's attention."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if "kv_lora_rank" not in config:
        columns, kv = heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
        return {
            "q_proj": (columns, hidden),
            "k_proj": (kv, hidden),
            "v_proj": (kv, hidden),
            "o_proj": (hidden, columns),
        }
    latent, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    return {
        "q_proj": (heads * (nope + rope), hidden),
        "kv_a_proj_with_mqa": (latent + rope, hidden),
        "kv_b_proj": (heads * (nope + value), latent),
        "o_proj": (hidden, heads * value),
    }


def quantised_fp4(name: str, weight: Any) -> dict[str, Any]:
    """The tensors of a layer in NVFP4 as compressed-tensors packs it: a weight is a code's number, times the scale of
    its group, over the scale of all."""
    import torch

    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups = weight.float().unflatten(1, (-1, NVFP4.group_size))
    largest = groups.abs().amax(-1)
    second = 6 * 448 / largest.max()
    scales = (largest / 6 * second).to(torch.float8_e4m3fn)
    exact = groups * second / scales.float().unsqueeze(-1)
    codes = (exact.abs().unsqueeze(-1) - numbers).abs().argmin(-1) + 8 * (exact < 0)
    low, high = codes.flatten(1).unflatten(1, (-1, 2)).to(torch.uint8).unbind(-1)
    return {
        f"{name}.weight_packed": low | high << 4,
        f"{name}.weight_scale": scales,
        f"{name}.weight_global_scale": second.reshape(1),
    }


def quantised(name: str, weight: Any, packing: str) -> dict[str, Any]:
    """The tensors of a layer that compressed-tensors packs: 4 bits a weight, a scale for each group. packing: the
    format that a checkpoint names."""
    import torch

    if packing == FP4_PACKING:
        return quantised_fp4(name, weight)
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / 7
    codes = (groups / scales).round().clamp(-8, 7).long().flatten(1) + 8
    words = (codes.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    shape = torch.tensor(weight.shape)
    return {
        f"{name}.weight_packed": words,
        f"{name}.weight_scale": scales.squeeze(-1).half(),
        f"{name}.weight_shape": shape,
    }


def write_model(folder: Path, config: dict[str, Any]) -> None:
    """Random fp16 weights. Layers do not amplify what rounding does, so that runs can be compared."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    hidden, middle = config["hidden_size"], config["intermediate_size"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        # An engine that failed may have left its default dtype.
        drawn = torch.randn(rows, columns, generator=generator, dtype=torch.float32, device="cpu")
        return (drawn * gain * columns**-0.5).half()

    tensors = {
        "model.embed_tokens.weight": matrix(VOCABULARY, hidden, hidden**0.5),
        "model.norm.weight": torch.ones(hidden).half(),
        "lm_head.weight": matrix(VOCABULARY, hidden),
    }
    experts = [f"experts.{index}." for index in range(config.get("num_experts", 0))]
    middle = config["moe_intermediate_size"] if experts else middle
    mlp = {"gate_proj": (middle, hidden), "up_proj": (middle, hidden), "down_proj": (hidden, middle)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for name, shape in attention_shapes(config).items():
            tensors[f"{layer}.self_attn.{name}.weight"] = matrix(*shape)
        for part, (name, shape) in itertools.product(experts or [""], mlp.items()):
            tensors[f"{layer}.mlp.{part}{name}.weight"] = matrix(*shape)
        if experts:
            tensors[f"{layer}.mlp.gate.weight"] = matrix(len(experts), hidden)
            for name in ("q", "k"):  # of a head, or in OLMoE of all
                width = tensors[f"{layer}.self_attn.{name}_proj.weight"].shape[0]
                width = width if config["model_type"] == "olmoe" else config["head_dim"]
                tensors[f"{layer}.self_attn.{name}_norm.weight"] = torch.ones(width).half()
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}.{name}.weight"] = torch.ones(hidden).half()
        if "kv_lora_rank" in config:
            tensors[f"{layer}.self_attn.kv_a_layernorm.weight"] = torch.ones(config["kv_lora_rank"]).half()
    if "quantization_config" in config:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors |= quantised(
                name.removesuffix(".weight"), tensors.pop(name), config["quantization_config"]["format"]
            )
    save_file(tensors, folder / "model.safetensors")


def write_model_of_transformers(folder: Path) -> None:
    """Random fp16 weights of a model that a folder's configuration describes, by the names that transformers gives
    them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # transformers draws what is left of it below: the same in every engine of a process
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).half()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
                weight.copy_(drawn * weight.shape[1] ** -0.5)
    model.save_pretrained(folder)


def prompts() -> list[list[int]]:
    """Prompts of 1 to 700 tokens; every third one begins like another."""
    import torch

    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(5, VOCABULARY, (300,), generator=generator).tolist()
    found = []
    for index, length in enumerate([1, 2, 15, 16, 17, 63, 64, 65, 130, 200, 257, 400, 511, 700] * 3):
        own = torch.randint(5, VOCABULARY, (length,), generator=generator).tolist()
        found.append(shared + own if index % 3 == 0 else own)
    return found


def start(scenario: Scenario, folder: Path) -> Any:
    """The engine of a scenario."""
    import vllm

    folder.mkdir()
    os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = named_format(scenario.kv_format, folder)
    config = {**CONFIG, **scenario.model}
    (folder / "config.json").write_text(json.dumps(config))
    if config["model_type"] in MODELS_OF_TRANSFORMERS:
        write_model_of_transformers(folder)
    else:
        write_model(folder, config)
    usual = {
        "compilation_config": GRAPHS,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_REQUESTS,
        "block_size": BLOCK,
    }
    arguments = {**usual, **scenario.engine}
    if arguments.get("speculative_config", {}).get("method") == "draft_model":
        arguments["speculative_config"] = {**arguments["speculative_config"], "model": str(folder)}
    return vllm.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        max_num_batched_tokens=scenario.chunk,
        num_gpu_blocks_override=scenario.tokens // arguments["block_size"],
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=1 << 30,  # nothing is profiled: others may come and go on the GPU meanwhile
        enable_prefix_caching=True,
        kv_cache_dtype=scenario.kv,
        disable_log_stats=False,
        **arguments,
    )


def generate(llm: Any, asked: list[list[int]] | None = None) -> list[dict[str, Any]]:
    """Of each request: its tokens, their log-probabilities, and by how much each was the best."""
    import vllm

    sampling = vllm.SamplingParams(
        max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, temperature=0.0, logprobs=2
    )
    results = []
    given = [{"prompt_token_ids": ids} for ids in asked or prompts()]
    for output in llm.generate(given, sampling, use_tqdm=False):
        result = output.outputs[0]
        best = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in result.logprobs]
        results.append(
            {
                "tokens": list(result.token_ids),
                "logprobs": [first for first, *_ in best],
                "margins": [first - second for first, second, *_ in best],
            }
        )
    return results


def generate_twice(llm: Any, scenario: Scenario, folder: Path) -> dict[str, Any]:
    """The second time prefixes are in the cache."""
    return {"results": [*generate(llm), *generate(llm)]}


def sleep_and_wake(llm: Any, scenario: Scenario, folder: Path) -> dict[str, Any]:
    """Before it sleeps, after its weights were put aside, and after they were thrown away and loaded again."""
    results = generate(llm)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.collective_rpc("reload_weights")
        results += generate(llm)
    return {"results": results}


def random_prompts(lengths: list[int]) -> list[list[int]]:
    rng = random.Random(len(lengths))
    return [[rng.randrange(5, VOCABULARY) for _ in range(length)] for length in lengths]


def generate_wide(llm: Any, scenario: Scenario, folder: Path) -> dict[str, Any]:
    """A prompt that is nearly as long as a prompt may be, beside short ones; again as a prefix hit."""
    asked = random_prompts([WIDE - NEW_TOKENS, 1, 300])
    return {"results": [*generate(llm, asked), *generate(llm, asked)]}


def generate_many(llm: Any, scenario: Scenario, folder: Path) -> dict[str, Any]:
    """As many requests at a time as batches have been made for, and fewer and fewer."""
    results = []
    for count in (256, 100, 33, 3, 1):
        results += generate(llm, random_prompts([1 + 7 * index % 90 for index in range(count)]))
    return {"results": results}


def beside_another(llm: Any, scenario: Scenario, folder: Path) -> dict[str, Any]:
    """What an engine gives that takes turns with another one in the same process."""
    other = start(scenario, folder / "other")
    results = generate(llm)
    others = generate(other)
    results += generate(llm)
    return {"results": results, "others": [*others, *generate(other)]}


def serve_long(llm: Any, scenario: Scenario, folder: Path) -> dict[str, Any]:
    """Many steps of requests that come and go, some of them aborted; memory in use, of host and GPU, on the way."""
    import torch
    import vllm

    engine, rng = llm.llm_engine, random.Random(0)
    live: list[str] = []
    memory, finished, aborted, count = [], 0, 0, 0
    for step in range(LONG_STEPS):
        while len(live) < 40:  # more than the engine runs at a time
            ids = [rng.randrange(5, VOCABULARY) for _ in range(rng.choice([1, 16, 17, 100, 500, 900]))]
            new = rng.choice([1, 5, 60])
            sampling = vllm.SamplingParams(max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
            engine.add_request(str(count), {"prompt_token_ids": ids}, sampling)
            live.append(str(count))
            count += 1
        if rng.random() < 0.05:
            gone = live.pop(rng.randrange(len(live)))
            engine.abort_request([gone])
            aborted += 1
        for output in engine.step():
            if output.finished and output.request_id in live:
                live.remove(output.request_id)
                finished += 1
        if (step + 1) % (LONG_STEPS // 4) == 0:
            torch.cuda.synchronize()
            memory.append({"gpu": gpu_bytes(), "torch": torch.cuda.memory_reserved(), "host": resident_bytes()})
    return {"memory": memory, "finished": finished, "aborted": aborted, "live": len(live)}


LONG_STEPS = 6000


def gpu_bytes() -> int:
    """In use on the first GPU by this process; by all, where the driver does not tell processes apart."""
    import torch
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return process.usedGpuMemory
    except pynvml.NVMLError:
        pass
    finally:
        pynvml.nvmlShutdown()
    free, total = torch.cuda.mem_get_info()
    return total - free


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run(scenario: Scenario, folder: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    """What a scenario gave, the attention that served it, and what the plugin replaced go to ``keep``, before the
    engine is shut down: one that does not end well has served all the same."""
    from cute_kernels.gemm import deferred
    from cute_kernels.gemm.layer import call as layer_call
    from cute_kernels.integrations.vllm import plugin, seams

    seams.said.clear()
    deferred.deferred_product_of.cache_clear()
    seam = f"cute_kernels.integrations.vllm.{scenario.leaves}"
    with mock.patch(f"{seam}.reason_against", lambda *_: "left in this engine") if scenario.leaves else nullcontext():
        llm = start(scenario, folder / "model")
    try:
        found = globals()[scenario.what](llm, scenario, folder)
        ranks = llm.collective_rpc(kinds_of_layers)
        kinds = {name: sorted({kind for rank in ranks for kind in rank[name]}) for name in ranks[0]}
        replaced = [[one.seam, one.reason] for one in plugin.outcomes()]
        fused = sorted(line for line in seams.said if "gates and" in line)
        ahead = bool(llm.llm_engine.vllm_config.scheduler_config.async_scheduling)
        about = {"ranks": len(ranks), "replaced": replaced, "fused": fused, "ahead": ahead}
        about["floats"] = any("NVFP4 layers run here" in line for line in seams.said)
        about["plans_around_norms"] = deferred.deferred_product_of.cache_info().currsize
        about["plans_of_layers"] = sum(bool(one.products) for one in layer_call._layer.plans.values())
        keep({**found, **kinds, **about})
    finally:
        if scenario.engine.get("tensor_parallel_size", 1) > 1:
            llm.llm_engine.engine_core.shutdown()  # its processes would live as long as this one
            _kept.append(llm)
        del llm
        clean_up(frees=not _kept)


_kept: list[Any] = []
"""Engines of several processes, until this one ends: when vLLM 0.26's message queues are freed they wait for ever for
readers that are gone."""


def kinds_of_layers(worker: Any) -> dict[str, list[str]]:
    """What serves the attention, the quantised linear layers and the routers of a worker."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    routers = [layer.router for layer in layers if hasattr(layer, "router")]
    kernels = [getattr(getattr(module, "scheme", None), "kernel", None) for module in worker.get_model().modules()]
    return {
        "attention": [type(layer.impl).__name__ for layer in layers if hasattr(layer, "impl")],
        "linear": [type(kernel).__name__ for kernel in kernels if kernel is not None],
        "routers": [type(router._compute_routing.__self__).__name__ for router in routers],
    }


def clean_up(frees: bool) -> None:
    """Frees what an engine held."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    if not frees:
        return
    cleanup_dist_env_and_memory()
    # vLLM's graphs share a memory pool for as long as the process lives, but it is gone with the last of them.
    type(current_platform)._global_graph_pool = None


def make_ready(scenarios: list[Scenario]) -> None:
    """Compiles what all engines will ask for, side by side."""
    import torch

    from cute_kernels.integrations.vllm import prepare

    invariant = os.environ.get("VLLM_BATCH_INVARIANT") == "1"
    prepare.load(torch.device("cuda", 0), kernels_of(scenarios, invariant=invariant))


def start_sooner() -> None:
    """Leaves out of vLLM's starts what models of this size do not need, half a minute on a busy machine.

    These are a process that imports vLLM anew, to look at a model's class, kernels for routers of known models, the
    import of the compiler, of whose calls vLLM would warn, and the choice among dozens of ways to compile each of
    Mamba's kernels: the last way, that of the smallest tiles, fits every GPU.
    """
    from triton.runtime.autotuner import Autotuner
    from vllm.model_executor.models import registry
    from vllm.model_executor.warmup import kernel_warmup
    from vllm.utils import jit_monitor

    made = Autotuner.__init__
    Autotuner.__init__ = lambda self, fn, names, configs, *others, **named: made(
        self, fn, names, configs[-1:], *others, **named
    )
    registry._run_in_subprocess = lambda look: look()
    kernel_warmup._warmup_ll_bf16_router_gemm = lambda *_: None
    jit_monitor._setup_cutedsl_jit_hook = lambda: None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", type=json.loads, metavar="SCENARIOS")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    options = parser.parse_args(arguments)
    from cute_kernels.integrations.vllm import register

    os.environ["CUTE_KERNELS_VLLM_KV_FORMAT"] = "fp16"  # of some scenarios: the seam has to be there for all
    register()
    start_sooner()
    scenarios = {name: Scenario(**fields) for name, fields in options.scenarios.items()}
    make_ready(list(scenarios.values()))
    for name, scenario in scenarios.items():
        begin, kept = time.perf_counter(), []
        path = options.folder / f"{name}.json"

        def keep(found: dict[str, Any], path: Path = path, kept: list[Path] = kept) -> None:
            scratch = path.with_suffix(".partial")
            scratch.write_text(json.dumps(found))
            kept.append(scratch.replace(path))

        with tempfile.TemporaryDirectory() as folder:
            try:
                run(scenario, Path(folder), keep)
            except Exception:
                traceback.print_exc()
                if not kept:
                    keep({"failed": traceback.format_exc()})
        print(f"scenario {name}: {time.perf_counter() - begin:.1f} s", flush=True)
    if _kept:
        sys.stdout.flush()
        os._exit(0)  # nothing is freed on the way
    return 0


if __name__ == "__main__":
    sys.exit(main())
