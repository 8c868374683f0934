"""What of a launch stays the same from call to call: the compiled function, its schedule, its numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.attention.call import NO_OPTIONS, AttentionCall, CallOptions
from cute_kernels.attention.checks import Q_DTYPES
from cute_kernels.attention.compile import DecodeSpec
from cute_kernels.attention.config import PAGE_TOKENS, DecodeConfig
from cute_kernels.attention.schedule import NUM_SMS, Problem, Schedule, head_blocks, make_schedule
from cute_kernels.attention.tiles import has_headers
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.workspace import POOL

ALIGNMENT = 16  # bytes, of bulk copies and tensor maps


@dataclass(frozen=True)
class Plan:
    """Everything about a launch that does not change between calls of the same shapes and options.

    Attributes:
        num_words: of workspace, 0 if there is nothing to combine.
        scale_strides: of K's and V's given scales, elements from head to head.
        numbers: max_pages, window, soft cap; bias_strides: elements from one request, query, head and key to the next.
            Of use where the configuration has features.
    """

    function: Callable[..., Any]
    schedule: Schedule
    device_index: int
    softmax_scale: float
    v_head_dim: int
    num_words: int
    scale_strides: tuple[int, int] = (0, 0)
    numbers: tuple[int, int, float] = (0, 0, 1.0)
    bias_strides: tuple[int, ...] = (0, 0, 0, 0)

    def run(self, tensors, lse: int, softmax_scale: float, options: CallOptions | None, mode: int) -> None:
        """Launches on the current stream. tensors: q, k_cache, v_cache, seq_lens, out; lse: an address."""
        index = self.device_index
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                self.run(tensors, lse, softmax_scale, options, mode)
            return
        workspace = 0
        if self.num_words:
            workspace = POOL.get(index, torch._C._cuda_getCurrentRawStream(index), self.num_words)
        self.launch(tensors, lse, workspace, softmax_scale, options, mode)

    def launch(self, tensors, lse: int, workspace: int, softmax_scale: float, options, mode: int) -> None:
        """:meth:`run` with a workspace of the caller's."""
        q, k_cache, v_cache, seq_lens, out = tensors
        schedule = self.schedule
        if options is None:
            k_scale = v_scale = 0
        else:
            k_scale, v_scale = _address(options["k_scale"]), _address(options["v_scale"])
        arguments = (
            q,
            _as_bytes(k_cache),
            _as_bytes(v_cache),
            seq_lens,
            out,
            lse,
            workspace,
            k_scale,
            v_scale,
            *self.scale_strides,
            softmax_scale,
            schedule.num_splits,
            schedule.more_rows,
            mode,
        )
        if schedule.config.has_features:
            arguments += self._feature_arguments(NO_OPTIONS if options is None else options)
        self.function(*arguments)

    def _feature_arguments(self, options: Any) -> tuple[Any, ...]:
        max_pages, window, soft_cap = self.numbers
        table, sinks, slopes, bias = (
            _address(options[name]) for name in ("block_table", "sinks", "alibi_slopes", "bias")
        )
        return table, max_pages, window, soft_cap, sinks, slopes, bias, *self.bias_strides


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """A cache as the compiled functions take it: 8-bit codes of any dtype are bytes to them."""
    return cache.view(torch.uint8) if cache.element_size() == 1 and cache.dtype != torch.uint8 else cache


def make_plan(call: AttentionCall, config: DecodeConfig | None = None, num_splits: int | None = None) -> Plan:
    """The plan of a checked call; ``config`` and ``num_splits`` instead of what the schedule would choose."""
    problem = problem_of(call)
    schedule = make_schedule(problem, call.num_splits if num_splits is None else num_splits)
    if config is not None:
        splits = make_schedule(problem).num_splits if num_splits is None else num_splits
        more = schedule.more_rows if config.units else 0
        schedule = Schedule(config, splits, head_blocks(problem, config), more)
    return Plan(
        function=load(DecodeSpec(schedule.config), arch_of(call.q.device.index)),
        schedule=schedule,
        device_index=call.q.device.index,
        softmax_scale=call.softmax_scale,
        v_head_dim=call.v.head_dim,
        num_words=workspace_words(schedule, problem),
        scale_strides=(_head_stride(call.k.scale), _head_stride(call.v.scale)),
        numbers=(
            call.block_table.shape[1] if call.block_table is not None else 0,
            call.window or 0,
            call.soft_cap or 1.0,
        ),
        bias_strides=call.bias.strides if call.bias is not None else (0, 0, 0, 0),
    )


def _head_stride(scale) -> int:
    return 0 if scale is None else scale.head_stride


def workspace_words(schedule: Schedule, problem: Problem) -> int:
    """Words of the partial results of all units; 0 if no row has more than one."""
    if schedule.num_splits == 1 and not schedule.more_rows:
        return 0
    units = (problem.batch + schedule.more_rows) * schedule.num_splits
    return units * problem.q_len * problem.num_q_heads * schedule.config.partial_words


def problem_of(call: AttentionCall) -> Problem:
    """What the schedule needs to know of a call."""
    k_cache, v_cache = call.k.cache, call.v.cache
    starts = k_cache.data_ptr() | v_cache.data_ptr()
    blocks = call.k.block_stride | call.v.block_stride
    if call.head_major:
        blocks |= call.k.head_stride | call.v.head_stride
    return Problem(
        batch=call.batch,
        max_seq_len=call.max_seq_len,
        num_q_heads=call.num_q_heads,
        num_kv_heads=call.num_kv_heads,
        head_dim=call.head_dim,
        v_head_dim=call.v.head_dim,
        k_format=call.k.form.name,
        v_format=call.v.form.name,
        q_dtype=Q_DTYPES[call.q.dtype],
        q_len=call.q_len,
        page_tokens=max(size for size in PAGE_TOKENS if call.page_size % size == 0) if call.features.paged else 0,
        features=call.features,
        aligned=not (starts | blocks) % ALIGNMENT,
        num_sms=_num_sms(call.q.device),
    )


def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else NUM_SMS


def check_alignment(call: AttentionCall) -> None:
    """Raises ValueError for a tensor that the kernels cannot address."""
    tensors = {"q": (call.q, ALIGNMENT)}
    if call.out is not None:
        tensors["out"] = call.out, ALIGNMENT
    for name, operand in (("k", call.k), ("v", call.v)):
        tensors[f"{name}_cache"] = operand.cache, 4 if has_headers(operand.form) else ALIGNMENT
        if operand.scale is not None and operand.scale.channel_stride:
            tensors[f"{name}_scale"] = operand.scale.tensor, ALIGNMENT
    for name, (tensor, wanted) in tensors.items():
        if tensor.data_ptr() % wanted:
            raise ValueError(
                f"{name}: got a tensor that starts {tensor.data_ptr() % wanted} bytes past a multiple of {wanted}, "
                f"want it aligned to {wanted} bytes"
            )
