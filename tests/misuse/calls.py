"""Calls of every public function that are right, with most of their options, so that one argument can be made wrong.

A call is made anew each time it is asked for: some of them write into their arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import cute_kernels as ck
from cute_kernels.attention import decode_attention_splits
from cute_kernels.compat import fbgemm, flash_mla
from cute_kernels.gemm import pack_weight
from cute_kernels.gemm.experts import ClampedSwiglu, Routing, route
from cute_kernels.kv_cache import CacheTransform, Calibrator, check_pairs, compute_kv_scale, fold, smooth_keys
from layouts.kv import Int4Row

Call = tuple[Callable[..., Any], dict[str, Any]]
CALLS: dict[str, Callable[[], Call]] = {}


def case(make: Callable[[], Call]) -> Callable[[], Call]:
    CALLS[make.__name__] = make
    return make


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def words(*shape: int) -> torch.Tensor:
    return torch.randint(0, 2**31, shape, dtype=torch.int32)


def rows(*shape: int) -> torch.Tensor:
    return Int4Row(64, 1).quantize(torch.randn(*shape, 64))


def latents() -> torch.Tensor:
    return ck.quantize_mla_kv(numbers(4, 16, 576), kv_format="mla_fp8")


def table() -> torch.Tensor:
    return torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)


def packed(n: int = 64, k: int = 128, **options: Any) -> ck.PackedWeight:
    return ck.quantize_weight(numbers(n, k), group_size=64, **options)


def experts(n: int = 64, k: int = 64) -> ck.PackedExperts:
    return ck.quantize_experts(numbers(4, n, k), group_size=64)


def caches() -> dict[str, Any]:
    return {"k_cache": rows(2, 32, 2), "v_cache": rows(2, 32, 2), "kv_format": "int4_g1"}


def pages() -> dict[str, Any]:
    return {"k_cache": rows(4, 16, 2), "v_cache": rows(4, 16, 2), "kv_format": "int4_g1"}


def score_options() -> dict[str, Any]:
    return {
        "softmax_scale": 0.1,
        "causal": True,
        "window_size": 8,
        "softcap": 3.0,
        "sinks": torch.zeros(4),
        "alibi_slopes": torch.zeros(4),
        "attn_bias": torch.zeros(2, 1, 4, 32),
        "num_splits": 2,
        "cache_layout": "NHD",
        "out": numbers(2, 1, 4, 64),
    }


def norms() -> dict[str, Any]:
    return {"rope": ck.Rope(64), "q_norm": numbers(64), "k_norm": numbers(64), "norm_eps": 1e-6}


def biases() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return numbers(256), numbers(128), numbers(128)


# -- attention ---------------------------------------------------------------------------------------------------------


@case
def decode() -> Call:
    return ck.decode_attention, {"q": numbers(2, 1, 4, 64), **caches(), "seq_lens": ints(5, 32), **score_options()}


@case
def decode_pages() -> Call:
    call = {"q": numbers(2, 1, 4, 64), **pages(), "seq_lens": ints(5, 32), "block_table": table()}
    return ck.decode_attention, call


@case
def decode_with_scales() -> Call:
    codes = [torch.zeros(2, 32, 2, 64, dtype=torch.uint8) for _ in range(2)]
    call = {"q": numbers(2, 1, 4, 64), "k_cache": codes[0], "v_cache": codes[1], "seq_lens": ints(5, 32)}
    return ck.decode_attention, {**call, "kv_format": "int8_head", "k_scale": torch.ones(2), "v_scale": torch.ones(2)}


@case
def decode_splits() -> Call:
    call = {"q": numbers(2, 1, 4, 64), **caches(), "seq_lens": ints(5, 32)}
    return decode_attention_splits, {**call, "softmax_scale": 0.1, "num_splits": 2}


@case
def extend() -> Call:
    call = {"q": numbers(5, 4, 64), **pages(), "seq_lens": ints(5, 32), "cu_seqlens_q": ints(0, 3, 5)}
    options = {name: value for name, value in score_options().items() if name not in ("attn_bias", "out")}
    options["sm_margin"] = 4
    return ck.extend_attention, {**call, **options, "block_table": table(), "out": numbers(5, 4, 64)}


@case
def append_then_extend() -> Call:
    call = {"q": numbers(5, 4, 64), "new_k": numbers(5, 2, 64), "new_v": numbers(5, 2, 64), **pages()}
    call |= {"seq_lens": ints(5, 32), "cu_seqlens_q": ints(0, 3, 5), "block_table": table()}
    return ck.append_and_extend, {**call, "sinks": torch.zeros(4), "softcap": 3.0, "out": numbers(5, 4, 64)}


@case
def extend_trees() -> Call:
    call = {"q": numbers(5, 4, 64), **pages(), "seq_lens": ints(5, 32), "cu_seqlens_q": ints(0, 3, 5)}
    return ck.extend_attention, {**call, "block_table": table(), "tree_mask": words(5, 1)}


@case
def decode_trees() -> Call:
    call = {"q": numbers(2, 3, 4, 64), **caches(), "seq_lens": ints(5, 32), "tree_mask": words(2, 3, 1)}
    return ck.decode_attention, {**call, "out": numbers(2, 3, 4, 64)}


@case
def mixed() -> Call:
    call = {"q": numbers(4, 4, 64), **pages(), "seq_lens": ints(5, 32), "cu_seqlens_q": ints(0, 1, 4)}
    options = {"block_table": table(), "sm_margin": 4, "softcap": 3.0, "sinks": torch.zeros(4)}
    return ck.mixed_attention, {**call, **options, "num_decodes": 1, "out": numbers(4, 4, 64)}


@case
def tree_mask() -> Call:
    return ck.pack_tree_mask, {"seen": torch.ones(5, 3, dtype=torch.bool)}


@case
def merge() -> Call:
    parts = {name: numbers(2, 1, 4, 64) for name in ("out_a", "out_b")}
    return ck.merge_states, {**parts, "lse_a": torch.zeros(2, 1, 4), "lse_b": torch.zeros(2, 1, 4)}


@case
def activations() -> Call:
    return ck.quantize_activations, {"x": numbers(3, 128), "group_size": 128}


@case
def activations_of_a_scale() -> Call:
    return ck.quantize_activations, {"x": numbers(3, 128), "scale": torch.tensor([0.5])}


@case
def fbgemm_decode() -> Call:
    call = {"XQ": numbers(2, 1, 4, 64), "cache_K": rows(2, 32, 1), "cache_V": rows(2, 32, 1)}
    call |= {"seq_positions": ints(4, 31), "qk_scale": 0.1, "num_split_ks": 2, "kv_cache_quant_num_groups": 1}
    return fbgemm.gqa_attn_splitk, {**call, "cache_logical_dtype_int": 0}


# -- caches ------------------------------------------------------------------------------------------------------------


@case
def append() -> Call:
    call = {"k": numbers(2, 2, 64), "v": numbers(2, 2, 64), **caches(), **norms(), "qkv_bias": biases()}
    call |= {"q": numbers(2, 4, 64), "q_out": numbers(2, 4, 64), "cache_layout": "NHD"}
    return ck.append_kv, {**call, "seq_lens": ints(5, 32), "cu_seqlens": ints(0, 1, 2), "position_ids": ints(4, 31)}


@case
def append_by_slots() -> Call:
    return ck.append_kv, {
        "k": numbers(2, 2, 64), "v": numbers(2, 2, 64), **pages(), "slot_mapping": torch.tensor([3, 40])
    }  # fmt: skip


@case
def append_pages() -> Call:
    call = {"k": numbers(2, 2, 64), "v": numbers(2, 2, 64), **pages()}
    return ck.append_kv, {**call, "seq_lens": ints(5, 32), "block_table": table()}


@case
def append_then_decode() -> Call:
    call = {"q": numbers(2, 1, 4, 64), "k": numbers(2, 1, 2, 64), "v": numbers(2, 1, 2, 64), **caches()}
    call |= {"seq_lens": ints(5, 32), "qkv_bias": biases(), "position_ids": ints(4, 31).view(2, 1)}
    return ck.append_and_decode, {**call, **norms(), **score_options()}


@case
def quantize_rows() -> Call:
    out = torch.zeros(3, 2, 64, dtype=torch.uint8)
    return ck.quantize_kv, {"x": numbers(3, 2, 64), "kv_format": "int8_head", "scale": torch.ones(2), "out": out}


@case
def dequantize_rows() -> Call:
    call = {"rows": rows(3, 2), "kv_format": "int4_g1", "head_dim": 64, "dtype": torch.bfloat16}
    return ck.dequantize_kv, {**call, "out": numbers(3, 2, 64)}


@case
def kv_cache() -> Call:
    sizes = {"num_layers": 2, "num_pages": 4, "page_size": 16, "num_kv_heads": 2, "head_dim": 64, "max_seq_len": 64}
    kinds = {"kv_format": "int4_g1", "cache_layout": "NHD", "dtype": torch.bfloat16, "device": "cpu"}
    return ck.KVCache, {**sizes, "v_head_dim": 64, **kinds}


@case
def rope() -> Call:
    scaling = ck.LinearScaling(2.0)
    return ck.Rope, {"rotary_dim": 64, "theta": 10000.0, "interleaved": False, "scaling": scaling}


@case
def linear_scaling() -> Call:
    return ck.LinearScaling, {"factor": 2.0}


@case
def ntk_scaling() -> Call:
    return ck.NtkScaling, {"factor": 2.0, "original_max_position": 4096, "seq_len": 8192}


@case
def llama3_scaling() -> Call:
    return ck.Llama3Scaling, {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192
    }  # fmt: skip


@case
def yarn_scaling() -> Call:
    turns = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0, "truncate": True}
    return ck.YarnScaling, {"factor": 40.0, "original_max_position": 4096, **turns}


@case
def calibrator() -> Call:
    return Calibrator, {"kv_format": "int8_head", "method": "absmax", "percentile": 99.0}


@case
def calibrator_update() -> Call:
    return Calibrator("int8_head").update, {"x": numbers(4, 2, 64)}


@case
def kv_scale() -> Call:
    return compute_kv_scale, {
        "x": numbers(4, 2, 64), "kv_format": "int8_head", "method": "absmax", "percentile": 99.0
    }  # fmt: skip


@case
def smoothing() -> Call:
    samples = {"k_samples": numbers(10, 2, 64), "q_samples": numbers(10, 4, 64)}
    return smooth_keys, {**samples, "alpha": 0.5, "rope": ck.Rope(64)}


@case
def folding() -> Call:
    weights = {"q_weight": numbers(256, 8), "k_weight": numbers(128, 8), "q_bias": numbers(256), "k_bias": numbers(128)}
    return fold, {"factors": torch.ones(2, 64), **weights, "rope": ck.Rope(64)}


@case
def pairs() -> Call:
    return check_pairs, {"factors": torch.ones(2, 64), "rope": ck.Rope(64)}


# -- linear layers and experts -----------------------------------------------------------------------------------------


def format_options() -> dict[str, Any]:
    return {"bits": 4, "group_size": 64, "zero_point": False, "dtype": torch.bfloat16, "device": "cpu"}


@case
def quantize_a_weight() -> Call:
    return ck.quantize_weight, {"w": numbers(64, 128), **format_options()}


@case
def linear_layer() -> Call:
    call = {"x": numbers(3, 128), "weight": packed(), "bias": numbers(64), "residual": numbers(3, 32)}
    kinds = {"activation": "swiglu", "out_dtype": torch.bfloat16, "batch_invariant": False}
    return ck.quantized_linear, {**call, **kinds, "out": numbers(3, 32)}


@case
def linear_layer_before_a_norm() -> Call:
    call = {"x": numbers(3, 128), "weight": packed(), "bias": numbers(64), "residual": numbers(3, 64)}
    return ck.quantized_linear_norm, {**call, **norm(64), "following": packed(32, 64)}


@case
def products_of_a_layer() -> Call:
    call = {"x": numbers(3, 128), "o": packed(), "gate_up": packed(256, 64), "down": packed(64, 128)}
    norms = {**norm(64), "following_norm": numbers(64)}
    return ck.quantized_layer, {**call, "qkv": packed(96, 64), "residual": numbers(3, 64), **norms}


@case
def normed_rows() -> Call:
    return ck.NormedRows, {"rows": numbers(3, 64), **norm(64)}


def norm(n: int) -> dict[str, Any]:
    return {"norm": numbers(n), "norm_eps": 1e-5, "norm_offset": 0.5}


@case
def linear_module() -> Call:
    return ck.QuantizedLinear, {"weight": packed(), "bias": numbers(64)}


@case
def linear_module_of_a_layer() -> Call:
    return ck.QuantizedLinear.from_linear, {"linear": torch.nn.Linear(128, 64), **format_options()}


@case
def interleaved_weights() -> Call:
    return ck.interleave_weights, {"gate": packed(), "up": packed()}


@case
def shard_of_n() -> Call:
    return packed(128).shard_n, {"rank": 0, "world_size": 2}


@case
def shard_of_k() -> Call:
    return packed().shard_k, {"rank": 0, "world_size": 2}


@case
def dequantized_weight() -> Call:
    return packed().dequantize, {"dtype": torch.float32}


@case
def moved_weight() -> Call:
    return packed().to, {"device": "cpu"}


@case
def moved_experts() -> Call:
    return experts().to, {"device": "cpu"}


@case
def packed_weight() -> Call:
    weight = packed(zero_point=True)
    tensors = {name: getattr(weight, name) for name in ("codes", "scales", "zeros")}
    order = torch.arange(128, dtype=torch.int32)
    form = {"format": weight.format, "shape": (64, 128)}
    return ck.PackedWeight, {**tensors, **form, "perm": order, "input_scale": numbers(128), "check_values": True}


@case
def packed_experts() -> Call:
    weights = ck.quantize_experts(numbers(4, 64, 64), group_size=64, zero_point=True)
    tensors = {name: getattr(weights, name) for name in ("codes", "scales", "zeros")}
    return ck.PackedExperts, {**tensors, "format": weights.format, "shape": (64, 64), "check_values": True}


@case
def packed_weight_of_tensors() -> Call:
    return ck.PackedWeight.from_state_dict, {"tensors": packed().state_dict()}


@case
def packed_experts_of_tensors() -> Call:
    return ck.PackedExperts.from_state_dict, {"tensors": experts().state_dict()}


@case
def quantized_model() -> Call:
    options = {**format_options(), "skip": ("lm_head",), "progress": lambda *_: None}
    return ck.quantize_model, {"model": torch.nn.Sequential(torch.nn.Linear(128, 64)), **options}


@case
def quantize_some_experts() -> Call:
    return ck.quantize_experts, {"w": numbers(4, 64, 64), **format_options()}


@case
def stacked_experts() -> Call:
    return ck.stack_experts, {"weights": [packed(), packed()]}


@case
def interleaved_experts() -> Call:
    return ck.interleave_experts, {"gate": experts(), "up": experts()}


@case
def grouped() -> Call:
    call = {"x": numbers(3, 64), "weight": experts(), "expert_offsets": ints(0, 1, 2, 3, 4), "rows": ints(0, 1, 2, 0)}
    options = {"bias": numbers(4, 64), "activation": "silu", "out_dtype": torch.bfloat16, "out": numbers(4, 64)}
    return ck.grouped_linear, {**call, **options}


@case
def layer_of_experts() -> Call:
    routing = {"topk_weights": torch.rand(3, 2), "topk_ids": torch.tensor([[0, 1], [2, 3], [1, 2]])}
    call = {"x": numbers(3, 64), "gate_up": experts(128), "down": experts(), **routing}
    return ck.fused_moe, {**call, "activation": "swiglu", "out_dtype": torch.bfloat16, "out": numbers(3, 64)}


# -- norms -------------------------------------------------------------------------------------------------------------


@case
def norm_of_rows() -> Call:
    call = {"x": numbers(3, 64), "weight": numbers(64), "residual": numbers(3, 64), "eps": 1e-6, "weight_offset": 1.0}
    return ck.rms_norm, {**call, **layer_inputs(), "out": numbers(3, 64), "residual_out": numbers(3, 64)}


def layer_inputs() -> dict[str, Any]:
    return {"order": torch.arange(63, -1, -1, dtype=torch.int32), "input_scale": numbers(64)}


@case
def layer_norm_of_rows() -> Call:
    call = {"x": numbers(3, 64), "weight": numbers(64), "bias": numbers(64), "residual": numbers(3, 64), "eps": 1e-5}
    return ck.layer_norm, {**call, **layer_inputs(), "out": numbers(3, 64), "residual_out": numbers(3, 64)}


# -- multi-head latent attention ---------------------------------------------------------------------------------------


@case
def mla() -> Call:
    call = {"q": numbers(2, 1, 4, 576), "cache": latents(), "block_table": table(), "seq_lens": ints(5, 32)}
    options = {"softmax_scale": 0.1, "causal": True, "out": numbers(2, 1, 4, 512)}
    return ck.mla_decode, {**call, "kv_format": "mla_fp8", **options}


@case
def sparse_mla() -> Call:
    call = {"q": numbers(2, 1, 4, 576), "cache": latents(), "indices": words(2, 1, 8) % 64, "kv_format": "mla_fp8"}
    call |= {"softmax_scale": 0.1, "topk_length": ints(3, 4), "sinks": torch.zeros(4), "out": numbers(2, 1, 4, 512)}
    extra = {"extra_cache": latents(), "extra_indices": words(2, 1, 8) % 64, "extra_topk_length": ints(1, 2)}
    return ck.sparse_mla_decode, {**call, **extra}


@case
def append_latents() -> Call:
    call = {"latent": numbers(3, 512), "k_rope": numbers(3, 64), "cache": latents(), "kv_format": "mla_fp8"}
    rope = ck.Rope(64, interleaved=True)
    return ck.append_mla, {**call, "slot_mapping": torch.tensor([1, 2, 3]), "rope": rope, "position_ids": ints(1, 2, 3)}


@case
def quantize_latents() -> Call:
    out = torch.zeros(3, 656, dtype=torch.uint8)
    return ck.quantize_mla_kv, {"x": numbers(3, 576), "kv_format": "mla_fp8", "out": out}


def flash_mla_call(k_cache: torch.Tensor, **others: Any) -> Call:
    metadata, _ = flash_mla.get_mla_metadata()
    call = {"q": numbers(2, 1, 4, 576), "k_cache": k_cache, "block_table": None, "cache_seqlens": None}
    call |= {"head_dim_v": 512, "tile_scheduler_metadata": metadata, "num_splits": None, "softmax_scale": 0.1}
    return flash_mla.flash_mla_with_kvcache, {**call, **others}


@case
def flash_mla_dense() -> Call:
    return flash_mla_call(numbers(4, 16, 1, 576), block_table=table(), cache_seqlens=ints(5, 32))


@case
def flash_mla_sparse() -> Call:
    extra = {"extra_k_cache": latents()[:, :, None], "extra_indices_in_kvcache": words(2, 1, 8) % 64}
    lengths = {"topk_length": ints(3, 4), "extra_topk_length": ints(1, 2)}
    chosen = {"indices": words(2, 1, 8) % 64, "attn_sink": torch.zeros(4), "is_fp8_kvcache": True}
    return flash_mla_call(latents()[:, :, None], **chosen, **extra, **lengths)


@case
def flash_mla_prefill() -> Call:
    call = {"q": numbers(3, 4, 576), "kv": numbers(20, 1, 576), "indices": words(3, 1, 8) % 20, "sm_scale": 0.1}
    options = {"d_v": 512, "attn_sink": torch.zeros(4), "topk_length": ints(3, 4, 5)}
    return flash_mla.flash_mla_sparse_fwd, {**call, **options}


# -- checkpoints of others ---------------------------------------------------------------------------------------------


def import_options() -> dict[str, Any]:
    return {"group_size": 64, "dtype": torch.bfloat16, "device": "cpu"}


def groups() -> torch.Tensor:
    return (torch.arange(256) // 64).int()


@case
def from_awq() -> Call:
    call = {"qweight": words(256, 8), "qzeros": words(4, 8), "scales": torch.rand(4, 64).half()}
    return ck.PackedWeight.from_awq, {**call, "input_scale": torch.ones(256), **import_options()}


@case
def from_gptq() -> Call:
    call = {"qweight": words(32, 64), "qzeros": words(4, 8), "scales": torch.rand(4, 64).half(), "g_idx": groups()}
    return ck.PackedWeight.from_gptq, {**call, "bits": 4, "checkpoint_format": "gptq_v2", **import_options()}


@case
def from_compressed_tensors() -> Call:
    call = {"weight_packed": words(64, 32), "weight_scale": torch.rand(64, 4), "weight_zero_point": words(8, 4)}
    call |= {"weight_shape": torch.tensor([64, 256]), "weight_g_idx": groups(), "bits": 4}
    return ck.PackedWeight.from_compressed_tensors, {**call, **import_options()}


@case
def from_hqq() -> Call:
    codes = torch.randint(0, 256, (64 * 128,), dtype=torch.uint8)
    call = {"W_q": codes, "scale": torch.rand(64, 4), "zero": torch.full((64, 4), 7.0), "shape": (64, 256)}
    return ck.PackedWeight.from_hqq, {**call, "bits": 4, "axis": 1, **import_options()}


@case
def from_torchao() -> Call:
    pairs = torch.stack((torch.ones(4, 64), torch.zeros(4, 64)), dim=-1)
    call = {"packed_weight": words(8, 2, 32, 4), "scale_and_zero": pairs.bfloat16(), "shape": (64, 256)}
    return ck.PackedWeight.from_torchao, {**call, **import_options()}


@case
def from_torchao_int8() -> Call:
    codes, zeros = torch.randint(-128, 128, (64, 256), dtype=torch.int8), torch.zeros(64, 4, dtype=torch.int32)
    call = {"int_data": codes, "scale": torch.rand(64, 4), "zero_point": zeros}
    return ck.PackedWeight.from_torchao, {**call, **import_options()}


@case
def from_fastertransformer() -> Call:
    codes = torch.randint(-128, 128, (256, 32), dtype=torch.int8)
    call = {"weight": codes, "scales": torch.rand(4, 64), "bits": 4, "arch": 80, "activation_bits": 16}
    return ck.PackedWeight.from_fastertransformer, {**call, **import_options()}


# -- what is newer, or has options that go together ------------------------------------------------------------------


@case
def decode_chosen_blocks() -> Call:
    call = {"q": numbers(2, 1, 4, 64), "k_cache": rows(2, 128, 2), "v_cache": rows(2, 128, 2), "kv_format": "int4_g1"}
    chosen = {"block_list": torch.zeros(2, 2, 1, dtype=torch.int32), "block_counts": torch.ones_like(table())}
    return ck.decode_attention, {**call, "seq_lens": ints(70, 128), **chosen, "block_tokens": 64, "return_lse": True}


@case
def extend_chosen_blocks() -> Call:
    call = {"q": numbers(2, 4, 64), **pages(), "seq_lens": ints(5, 32), "cu_seqlens_q": ints(0, 1, 2)}
    chosen = {"block_list": torch.zeros(2, 2, 1, dtype=torch.int32), "block_counts": torch.ones_like(table())}
    wide = {"block_table": torch.arange(4, dtype=torch.int32).expand(2, 4).contiguous(), "block_tokens": 64}
    return ck.extend_attention, {**call, **chosen, **wide, "return_lse": True}


@case
def extend_with_scales() -> Call:
    codes = [torch.zeros(2, 32, 2, 64, dtype=torch.uint8) for _ in range(2)]
    call = {"q": numbers(5, 4, 64), "k_cache": codes[0], "v_cache": codes[1], "seq_lens": ints(5, 32)}
    call |= {"kv_format": "int8_head", "k_scale": torch.ones(2), "v_scale": torch.ones(2), "unpack": False}
    new = {"new_k": numbers(5, 2, 64), "new_v": numbers(5, 2, 64), "max_seq_len": 32}
    return ck.extend_attention, {**call, **new, "cu_seqlens_q": ints(0, 3, 5)}


@case
def decode_keys_in_blocks() -> Call:
    rows_of_blocks = torch.zeros(2, 32, 2, 40, dtype=torch.uint8)
    call = {"q": numbers(2, 1, 4, 64), "k_cache": rows_of_blocks, "v_cache": rows(2, 32, 2), "seq_lens": ints(5, 32)}
    tail = {"k_tail": torch.zeros(3, 64, 2, 64, dtype=torch.float16), "tail_slots": ints(2, 0)}
    return ck.decode_attention, {**call, "kv_format": ("int4_channel32", "int4_g1"), **tail}


@case
def append_keys_in_blocks() -> Call:
    rows_of_blocks = torch.zeros(2, 32, 2, 40, dtype=torch.uint8)
    call = {"k": numbers(2, 2, 64), "v": numbers(2, 2, 64), "k_cache": rows_of_blocks, "v_cache": rows(2, 32, 2)}
    tail = {"k_tail": torch.zeros(3, 64, 2, 64, dtype=torch.float16), "tail_slots": ints(2, 0)}
    return ck.append_kv, {**call, "seq_lens": ints(5, 32), "kv_format": ("int4_channel32", "int4_g1"), **tail}


@case
def append_with_scales_and_a_transform() -> Call:
    codes = [torch.zeros(2, 32, 2, 64, dtype=torch.uint8) for _ in range(2)]
    call = {"k": numbers(2, 2, 64), "v": numbers(2, 2, 64), "k_cache": codes[0], "v_cache": codes[1]}
    call |= {"kv_format": "int8_head", "k_scale": torch.ones(2), "v_scale": torch.ones(2), "seq_lens": ints(5, 32)}
    centred = CacheTransform(k_center=torch.zeros(2, 64), k_rotation=32)
    return ck.append_kv, {**call, "q": numbers(2, 4, 64), "transform": centred, "q_shift": torch.zeros(2, 4)}


@case
def append_pages_then_decode() -> Call:
    call = {"q": numbers(2, 1, 4, 64), "k": numbers(2, 1, 2, 64), "v": numbers(2, 1, 2, 64), **pages()}
    centred = CacheTransform(k_center=torch.zeros(2, 64), v_rotation=32)
    return ck.append_and_decode, {
        **call, "seq_lens": ints(5, 32), "block_table": table(), "transform": centred, "return_lse": True
    }  # fmt: skip


@case
def dequantize_rows_with_scales() -> Call:
    codes = torch.zeros(3, 2, 64, dtype=torch.uint8)
    return ck.dequantize_kv, {"rows": codes, "kv_format": "int8_head", "head_dim": 64, "scale": torch.ones(2)}


@case
def linear_layer_behind_a_norm() -> Call:
    call = {"x": numbers(3, 128), "weight": packed(), "norm": numbers(128), "norm_eps": 1e-6, "norm_offset": 1.0}
    return ck.quantized_linear, call


@case
def linear_layer_in_fp8() -> Call:
    weight = ck.quantize_weight(numbers(64, 128), format="fp8")
    call = {"x": numbers(3, 128), "weight": weight, "bias": numbers(64), "activations": "fp8"}
    return ck.quantized_linear, {**call, "activation_scale": torch.ones(1)}


@case
def quantize_a_weight_by_name() -> Call:
    return ck.quantize_weight, {"w": numbers(64, 128), "format": "mxfp4", "device": "cpu"}


@case
def given_codes() -> Call:
    codes, scales = (torch.full((64, n), 56, dtype=torch.uint8) for n in (64, 8))
    levels = {"second": torch.tensor([0.5]), "second_divides": True}
    return pack_weight, {"format": "nvfp4", "codes": codes, "scales": scales, **levels, "device": "cpu"}


@case
def layer_of_experts_with_biases() -> Call:
    routing = {"topk_weights": torch.rand(3, 2), "topk_ids": torch.tensor([[0, 1], [2, 3], [1, 2]])}
    call = {"x": numbers(3, 64), "gate_up": experts(128), "down": experts(), **routing, "batch_invariant": True}
    biases = {"gate_up_bias": numbers(4, 128), "down_bias": numbers(4, 64)}
    return ck.fused_moe, {**call, **biases, "activation": ClampedSwiglu(1.702, 7.0)}


@case
def router() -> Call:
    routing = Routing(2, "sigmoid", renormalize=True, scale=2.5, groups=2, kept_groups=1)
    call = {"hidden": numbers(3, 64), "weight": numbers(8, 64), "routing": routing}
    return route, {**call, "bias": torch.zeros(8), "correction": torch.rand(8)}


@case
def routing() -> Call:
    return Routing, {"top_k": 2, "renormalize": True, "scale": 2.5, "groups": 2, "kept_groups": 1}
