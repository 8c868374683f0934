"""Small calls for compute-sanitizer; all inputs are initialised, so initcheck reports only what the kernels leave out.

    python -m tests.gpu.sanitize build            compiles what the cases need (no GPU); keep CUTE_KERNELS_CACHE_DIR
    compute-sanitizer --tool memcheck|racecheck|synccheck|initcheck python -m tests.gpu.sanitize [CASE ...]
    python -m tests.gpu.sanitize list

Results are compared with the CPU reference: a tool that slows the kernels down shows races as wrong numbers, too.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

import torch

from cute_kernels.attention.call import make_call as check_call
from cute_kernels.attention.compile import DecodeSpec
from cute_kernels.attention.plan import problem_of
from cute_kernels.attention.schedule import Schedule, make_schedule
from cute_kernels.runtime import arch_of, default_cache, load_many
from cute_kernels.runtime.store import key_of
from tests.attention.cases import Call, assert_close, make_call

ARCH = "sm_90a"


@dataclass(frozen=True)
class Case:
    """Arguments of `make_call` and the splits."""

    kv_format: str
    lengths: tuple[int, ...]
    num_splits: int | None = None
    num_kv_heads: int = 1
    group: int = 8
    head_dim: int = 128
    q_dtype: str = "bf16"
    q_len: int = 1
    page_size: int | None = None

    def call(self) -> Call:
        """On the CPU. Rows past the lengths hold numbers: what lies there may be loaded, and must be initialised."""
        return make_call(
            self.kv_format,
            self.lengths,
            num_kv_heads=self.num_kv_heads,
            group=self.group,
            head_dim=self.head_dim,
            q_dtype=self.q_dtype,
            q_len=self.q_len,
            page_size=self.page_size,
            poison=False,
        )

    def schedule(self) -> Schedule:
        """What the call uses on an H100 or H200."""
        call = self.call()
        checked = check_call(*call.tensors, kv_format=call.kv_format, **call.options)
        return make_schedule(problem_of(checked), self.num_splits)

    def spec(self) -> DecodeSpec:
        return DecodeSpec(self.schedule().config)


CASES = {
    "int4_g1": Case("int4_g1", (600, 33, 0)),
    "int4_g1-one-combiner": Case("int4_g1", (1024,)),
    "int4_g1-combiners": Case("int4_g1", (8192,)),
    "int4_g1-splits": Case("int4_g1", (600, 300, 1, 0), num_splits=3),
    "int4_g1-words": Case("int4_g1", (517, 5, 0), num_splits=2),
    "int4_g1-mha": Case("int4_g1", (96, 33, 0), num_kv_heads=32, group=1),
    "int4_g1-two-warps": Case("int4_g1", (300, 1), group=16),
    "int4_g1-short-rows": Case("int4_g1", (130, 33, 0, 100) * 140),
    "int4_g2-d64": Case("int4_g2", (300, 64), num_kv_heads=3, head_dim=64, q_dtype="fp16"),
    "int4_g4-heads": Case("int4_g4", (96, 33, 0), num_splits=2, num_kv_heads=8),
    "int4_g8-d256": Case("int4_g8", (200, 31), head_dim=256),
    "bf16": Case("bf16", (600, 33, 0)),
    "bf16-combiners": Case("bf16", (1600,)),
    "bf16-splits": Case("bf16", (299, 1, 0), num_splits=3, num_kv_heads=2),
    "bf16-d256": Case("bf16", (150, 31), head_dim=256, group=5),
    "int8_token_head": Case("int8_token_head", (600, 33, 0)),
    "int8_tensor": Case("int8_tensor", (600, 33, 0), num_splits=2),
    "e4m3_tensor": Case("e4m3_tensor", (600, 33, 0), num_splits=2),
    "int4_g1-pages": Case("int4_g1", (1500, 33, 0, 64), page_size=16),
    "e4m3_tensor-pages": Case("e4m3_tensor", (1500, 33, 0, 64), page_size=64),
    "bf16-pages": Case("bf16", (900, 33, 0, 64), page_size=16),
    "int4_g1-queries": Case("int4_g1", (600, 33, 4), q_len=4),
    "int8_token_head-queries": Case("int8_token_head", (600, 33, 4), q_len=4, page_size=64),
    "fp16-d64": Case("fp16", (300, 64), num_kv_heads=3, head_dim=64, group=24),
}


def missing() -> list[str]:
    """Cases whose kernels are not in the cache."""
    store = default_cache().store
    return [name for name, case in CASES.items() if store.read(key_of(case.spec(), ARCH)) is None]


def run(name: str) -> None:
    """One case on the GPU, twice: the workspace of split calls must be left as it was found."""
    case = CASES[name]
    call = case.call()
    tensors = [tensor.cuda() for tensor in call.tensors]
    options = {key: value.cuda() if torch.is_tensor(value) else value for key, value in call.options.items()}
    named = dict(zip(("q", "k_cache", "v_cache", "seq_lens"), tensors, strict=True))
    on_gpu = dataclasses.replace(call, **named, options=options)
    for _ in range(2):
        out, lse = on_gpu.run(return_lse=True, num_splits=case.num_splits)
        assert_close(call, out.cpu(), lse.cpu())
    schedule = case.schedule()
    print(f"{name}: right, {schedule.num_splits} splits, {schedule.config.name}", flush=True)


def main(arguments: list[str]) -> int:
    if arguments == ["build"]:
        load_many([case.spec() for case in CASES.values()], ARCH, progress=lambda done: print(done.spec, done.source))
        return 0
    if arguments == ["list"]:
        print("\n".join(CASES))
        return 0
    unknown = [name for name in arguments if name not in CASES]
    if unknown:
        print(f"unknown case {', '.join(unknown)}; there are {', '.join(CASES)}", file=sys.stderr)
        return 2
    arch_of()  # says what is supported if this GPU is not
    absent = missing()
    if absent:
        print(f"not compiled: {', '.join(absent)}; run `python -m tests.gpu.sanitize build` first", file=sys.stderr)
        return 2
    for name in arguments or CASES:
        run(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
