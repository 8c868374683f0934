"""Variants of the MLA decode kernels on a GPU that no public call chooses: fences, scales, parts, prefetching.

Judged as the public calls are, see :mod:`.test_mla_decode`; outputs are poisoned.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels.architecture import HOPPER
from cute_kernels.mla.compile import MlaSpec, combine_specs
from cute_kernels.mla.config import MlaConfig, served_config
from cute_kernels.mla.few_heads.config import FewHeadsConfig
from cute_kernels.mla.plan import NO_CACHE, Tokens, make_plan
from cute_kernels.mla.policies import Copies, Crossover, Decode, SplitCrossover, SplitTiles, TmaTiles, WholeTiles
from cute_kernels.mla.reference import mla_decode_reference, sparse_mla_decode_reference
from cute_kernels.mla.schedule import STREAM_K, Workload
from layouts.kv.mla import MlaModel1
from tests.mla.cases import DenseCall, SparseCall, assert_as_close_as_flash_mla, make_dense, make_sparse, moved

pytestmark = pytest.mark.gpu

DEVIATION, SCALE = 0.1, 0.5
SMS = HOPPER.num_sms
FEW_HEADS = [
    FewHeadsConfig(heads=8, stages=5, ahead=1),
    FewHeadsConfig(heads=16),
    FewHeadsConfig(heads=32, stages=2),
]
CLUSTERS = [
    FewHeadsConfig("sparse", 32, 3, cluster=8),
    FewHeadsConfig("sparse", 32, 3, cluster=4),
    FewHeadsConfig("sparse", 16, 4, cluster=2),
    FewHeadsConfig("sparse", 8, 4, cluster=8),
]
PAGED_CLUSTER = FewHeadsConfig("paged", 8, 4, cluster=8)


def own(*arguments: Any, **fields: Any) -> MlaConfig:
    """Chosen 656-byte tokens that every CTA decodes by itself, in the plain order."""
    return MlaConfig(tiles=WholeTiles(Decode(*arguments, **fields)))


SPARSE: list[MlaConfig | FewHeadsConfig] = [
    own(),
    own(fence="reader"),
    own(prefetch=2, chunk=3),
    own(prefetch=7, fence="reader"),
    own(warps=8),
    own(prefetch=2, chunk=5, warps=8),
    own("power_of_2"),
    own("power_of_2", prefetch=4, fence="reader"),
    MlaConfig(tiles=WholeTiles(Crossover())),
    MlaConfig(tiles=WholeTiles(Crossover(prefetch=4))),
    MlaConfig(tiles=WholeTiles(Crossover(chunk=3), "stepped")),
    MlaConfig(tiles=WholeTiles(Decode(), "stepped")),
    MlaConfig(tiles=WholeTiles(Crossover(prefetch=4, chunk=3))),
    MlaConfig("sparse", "mla_model1", 512, WholeTiles(Crossover("ue8m0", chunk=3), "stepped")),
    MlaConfig(tiles=SplitTiles(SplitCrossover())),
    MlaConfig("sparse", "mla_model1", 512, SplitTiles(SplitCrossover("ue8m0"))),
    own(prefetch=2, chunk=2, warps=8, fence="reader"),
    MlaConfig("sparse", "mla_model1", 512, WholeTiles(Decode("power_of_2", prefetch=4))),
    MlaConfig("sparse", "mla_model1", 512, WholeTiles(Decode("ue8m0", prefetch=2, chunk=5, warps=8))),
    MlaConfig(form="mla_bf16", tiles=WholeTiles(Copies())),
    MlaConfig(form="mla_bf16", tiles=WholeTiles(Copies(), "stepped")),
    *FEW_HEADS,
]
WIDE = [config for config in SPARSE if isinstance(config, MlaConfig)]
PAGED: list[MlaConfig | FewHeadsConfig] = [
    MlaConfig("paged"),
    MlaConfig("paged", tiles=WholeTiles(Decode(chunk=5, warps=8))),
    MlaConfig("paged", "mla_bf16", tiles=WholeTiles(Copies())),
    MlaConfig("paged", "mla_bf16", tiles=WholeTiles(Copies(), "stepped")),
    *(FewHeadsConfig("paged", heads, 3) for heads in (8, 16, 32)),
]
BOXED = [
    MlaConfig("paged", "mla_bf16", tiles=SplitTiles(TmaTiles())),
    MlaConfig("paged", "mla_bf16", tiles=SplitTiles(TmaTiles(eager=True))),
    MlaConfig("paged", "mla_bf16", tiles=SplitTiles(TmaTiles(pair=True, prefetch=1))),
]
WHOLE_CROSSOVER = MlaConfig("paged", tiles=SplitTiles(SplitCrossover()))
COOPERATIVE = served_config("sparse", "mla_fp8", crossover=True, cooperative=True)
WHOLE_CONTEXTS = [config for config in PAGED if isinstance(config, MlaConfig)]


def specs() -> list[Any]:
    wanted = [*SPARSE, COOPERATIVE, *PAGED, *BOXED, WHOLE_CROSSOVER, *CLUSTERS, PAGED_CLUSTER]
    return [*map(MlaSpec, wanted), *combine_specs("bf16")]


def address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def pages_of(cache: torch.Tensor) -> dict[str, int]:
    page_stride, token_stride, _ = (stride * cache.element_size() for stride in cache.stride())
    if cache.shape[2] == MlaModel1().row_bytes:
        token_stride = MlaModel1.DATA_BYTES
    return {
        "cache": cache.data_ptr(),
        "page_stride": page_stride,
        "token_stride": token_stride,
        "page_size": cache.shape[1],
    }


def run(
    config: MlaConfig | FewHeadsConfig,
    call: DenseCall | SparseCall,
    tokens: Tokens,
    num_parts: int,
    sinks=None,
    num_sms: int = SMS,
):
    """(out, lse) of a kernel over ``tokens``, its arguments by name; twice, with equal bits. num_sms:
    so many CTAs at most share stream-K, if num_parts is STREAM_K."""
    batch, q_len, num_heads = call.q.shape[:3]
    rows = (batch * q_len, num_heads) if isinstance(call, SparseCall) else (batch, q_len * num_heads)
    plan = make_plan(config, "sm_90a", Workload(*rows, 0, num_sms), num_parts)
    results = []
    for _ in range(2):
        out = torch.full((*call.q.shape[:3], 512), torch.nan, dtype=torch.bfloat16, device="cuda")
        results.append(plan.run(call.q, SCALE, tokens, out, sinks))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return results[0]


def check_sparse(config: MlaConfig | FewHeadsConfig, num_parts: int = 1, *, num_sms: int = SMS, **shape: Any) -> None:
    shape = {"num_pages": 40, "page_size": 64, "length": True, "sinks": True} | shape
    shape = {"head_dim": config.head_dim, "deviation": DEVIATION} | shape
    call = moved(make_sparse(config.form, **shape), "cuda")
    topk, lengths = call.indices.shape[2], call.options.get("topk_length")
    num_tokens = call.cache.shape[0] * call.cache.shape[1]
    chosen = {"num_tokens": num_tokens, "indices": call.indices.data_ptr(), "topk": topk}
    tokens = {**pages_of(call.cache), **chosen, "topk_length": address(lengths), **NO_CACHE}
    out, lse = run(config, call, tokens, num_parts, call.options["sinks"], num_sms)
    wanted_out, wanted_lse, _ = sparse_mla_decode_reference(
        *call.tensors, kv_format=call.kv_format, **(call.options | {"softmax_scale": SCALE})
    )
    assert_as_close_as_flash_mla(out, lse, wanted_out, wanted_lse)


def check_paged(
    config: MlaConfig | FewHeadsConfig,
    lengths: list[int],
    num_parts: int = 1,
    causal: bool = True,
    *,
    num_sms: int = SMS,
    **shape: Any,
) -> None:
    call = moved(make_dense(config.form, lengths, deviation=DEVIATION, **shape), "cuda")
    table = {"table": call.block_table.data_ptr(), "table_stride": call.block_table.stride(0)}
    table |= {"max_pages": call.block_table.shape[1], "seq_lens": call.seq_lens.data_ptr(), "causal": int(causal)}
    tokens = {**pages_of(call.cache), "num_pages": call.cache.shape[0], **table}
    out, lse = run(config, call, tokens, num_parts, num_sms=num_sms)
    options: Any = {"kv_format": call.kv_format, "softmax_scale": SCALE, "causal": causal}
    wanted_out, wanted_lse = mla_decode_reference(*call.tensors, **options)
    assert_as_close_as_flash_mla(out, lse, wanted_out, wanted_lse)


def name(config: MlaConfig | FewHeadsConfig) -> str:
    return config.name


@pytest.mark.parametrize("topk", [1, 64, 65, 128, 192, 1500])
@pytest.mark.parametrize("config", SPARSE, ids=name)
def test_even_and_odd_numbers_of_blocks(config, topk):
    check_sparse(config, batch=3, q_len=2, num_heads=128, topk=topk)


@pytest.mark.parametrize(("num_parts", "batch"), [(2, 4), (3, 4), (7, 4), (2, 20), (40, 1)])
@pytest.mark.parametrize("config", SPARSE, ids=name)
def test_parts(config, num_parts, batch):
    check_sparse(config, num_parts, batch=batch, num_heads=128, topk=700 if num_parts < 40 else 2600)


@pytest.mark.parametrize(
    ("num_parts", "batch", "q_len", "num_heads", "topk"),
    [
        (16, 2, 2, 128, 2048), (11, 4, 1, 128, 2048), (8, 8, 1, 128, 700), (4, 4, 4, 128, 1500), (32, 1, 1, 128, 2100),
        (16, 2, 2, 80, 900), (5, 12, 1, 128, 640), (7, 3, 3, 128, 65), (22, 3, 1, 70, 5000), (12, 5, 1, 128, 1),
    ],
)  # fmt: skip
def test_parts_that_are_added_up_together(num_parts, batch, q_len, num_heads, topk):
    """In one launch, some parts without tokens among them."""
    check_sparse(COOPERATIVE, num_parts, batch=batch, q_len=q_len, num_heads=num_heads, topk=topk)


def test_launches_on_several_streams_that_add_up_together():
    """Each wants nearly all SMs at once: they wait for each other, not for ever, and flags are each stream's own."""
    calls = []
    for stream, num_parts in ((torch.cuda.Stream(), 16), (torch.cuda.Stream(), 11), (torch.cuda.Stream(), 4)):
        call = moved(
            make_sparse("mla_fp8", batch=4, q_len=1, num_heads=128, topk=2048, num_pages=40, page_size=64), "cuda"
        )
        chosen = {"num_tokens": 40 * 64, "indices": call.indices.data_ptr(), "topk": 2048, "topk_length": 0}
        tokens = {**pages_of(call.cache), **chosen, **NO_CACHE}
        calls.append((stream, call, tokens, num_parts, run(COOPERATIVE, call, tokens, num_parts)[0]))
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream, call, tokens, num_parts, wanted in calls:
            with torch.cuda.stream(stream):
                plan = make_plan(COOPERATIVE, "sm_90a", Workload(4, 128, 0), num_parts)
                found.append((plan.run(call.q, SCALE, tokens)[0], wanted))
    torch.cuda.synchronize()
    assert all(torch.equal(out, wanted) for out, wanted in found)


def test_too_many_ctas_to_add_up_together():
    with pytest.raises(ValueError, match="num_parts"):
        make_plan(COOPERATIVE, "sm_90a", Workload(8, 128, 2048), 16)


@pytest.mark.parametrize("config", SPARSE, ids=name)
def test_more_ctas_than_there_is_room_for(config):
    check_sparse(config, batch=90, q_len=2, num_heads=128, topk=300)


@pytest.mark.parametrize("topk", [1, 64, 300, 1500])
@pytest.mark.parametrize("num_sms", [2, 6, 14, 36])
@pytest.mark.parametrize("config", WIDE, ids=name)
def test_line_of_queries(config, num_sms, topk):
    """Rows of any length, none included, cut anywhere; the longest ones go through several CTAs."""
    check_sparse(config, STREAM_K, batch=9, q_len=2, num_heads=128, topk=topk, num_sms=num_sms)


@pytest.mark.parametrize("num_sms", [3, 9, 31])
@pytest.mark.parametrize("config", WHOLE_CONTEXTS, ids=name)
def test_line_of_whole_contexts(config, num_sms):
    lengths = [0, 0, 1, 64, 65, 777, 0, 130, 3, 0]
    check_paged(config, lengths, STREAM_K, q_len=2, num_heads=80, page_size=16, num_sms=num_sms)


@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("config", PAGED, ids=name)
def test_pages(config, num_parts, page_size):
    check_paged(config, [0, 1, 64, 65, 777, 130], num_parts, q_len=2, num_heads=80, page_size=page_size)


@pytest.mark.parametrize("config", PAGED, ids=name)
def test_queries_that_all_see_everything(config):
    check_paged(config, [300, 5, 129], causal=False, q_len=3, num_heads=64, page_size=16)


@pytest.mark.parametrize("page_size", [1, 5, 64])
@pytest.mark.parametrize(("num_parts", "num_sms"), [(1, SMS), (3, SMS), (STREAM_K, 4), (STREAM_K, 12)])
def test_whole_contexts_by_crossover(num_parts, num_sms, page_size):
    """Pairs want an even number of blocks of heads."""
    lengths = [0, 1, 64, 65, 777, 130]
    check_paged(WHOLE_CROSSOVER, lengths, num_parts, q_len=2, num_heads=100, page_size=page_size, num_sms=num_sms)


@pytest.mark.parametrize("num_sms", [4, 12, 31])
@pytest.mark.parametrize("config", BOXED, ids=name)
def test_line_of_boxes(config, num_sms):
    lengths = [0, 0, 1, 64, 65, 777, 0, 130, 3, 0]
    check_paged(config, lengths, STREAM_K, q_len=2, num_heads=100, page_size=64, num_sms=num_sms)


@pytest.mark.parametrize("page_size", [64, 192])
@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("config", BOXED, ids=name)
def test_pages_of_boxes(config, num_parts, page_size):
    lengths = [0, 1, 64, 65, 777, 130, 1472]
    check_paged(config, lengths, num_parts, q_len=2, num_heads=128, page_size=page_size, padding=48)


@pytest.mark.parametrize("config", BOXED, ids=name)
def test_boxes_and_queries_that_all_see_everything(config):
    check_paged(config, [300, 5, 129], causal=False, q_len=4, num_heads=64, page_size=64)


@pytest.mark.parametrize("config", BOXED, ids=name)
def test_more_boxes_than_there_is_room_for(config):
    check_paged(config, [600 - 3 * i for i in range(100)], q_len=2, num_heads=128, page_size=64)


@pytest.mark.parametrize("num_heads", [1, 8, 9, 24, 32, 67])
@pytest.mark.parametrize("config", FEW_HEADS, ids=name)
def test_any_number_of_heads(config, num_heads):
    check_sparse(config, batch=5, num_heads=num_heads, topk=500)


@pytest.mark.parametrize("config", FEW_HEADS, ids=name)
def test_larger_scores(config):
    """The softmax's reference is raised now and then."""
    check_sparse(config, num_heads=config.heads, topk=900, deviation=0.5)


@pytest.mark.parametrize("topk", [1, 64, 500, 2048])
@pytest.mark.parametrize("num_heads", [1, 16, 40, 128])
@pytest.mark.parametrize("config", CLUSTERS, ids=name)
def test_parts_of_a_cluster(config, num_heads, topk):
    check_sparse(config, config.cluster, batch=3, q_len=2, num_heads=num_heads, topk=topk)


@pytest.mark.parametrize("causal", [False, True])
def test_parts_of_whole_contexts_of_a_cluster(causal):
    check_paged(PAGED_CLUSTER, [0, 1, 64, 449, 2000, 130], 8, causal, q_len=2, num_heads=16, page_size=64)


@pytest.mark.parametrize("config", CLUSTERS, ids=name)
def test_more_clusters_than_there_is_room_for(config):
    check_sparse(config, config.cluster, batch=90, num_heads=config.heads, topk=700)
