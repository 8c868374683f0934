"""What of a launch stays the same from call to call: the compiled function, its schedule, its numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels.arguments import shape_of
from cute_kernels.attention.arguments import BIAS_STRIDES, decode_arguments
from cute_kernels.attention.call import NO_OPTIONS, AttentionCall, CacheOperand, GivenScale
from cute_kernels.attention.checks import Q_DTYPES
from cute_kernels.attention.compile import AttentionSpec
from cute_kernels.attention.decode_config import KEEP_PARTIALS, PLACES_SHIFT, WRITE_LSE, DecodeConfig
from cute_kernels.attention.decode_schedule import DecodeSchedule, head_blocks, make_schedule
from cute_kernels.attention.policies import PAGE_TOKENS
from cute_kernels.attention.problem import DecodeProblem
from cute_kernels.formats.scores import tensors_in
from cute_kernels.runtime.cache import load
from cute_kernels.runtime.device import arch_of
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.launch_arguments import Place
from cute_kernels.runtime.memory import Blank, blank, byte_view
from cute_kernels.runtime.plans import ALIGNMENT


@dataclass(frozen=True)
class DecodePlan:
    """Everything about a launch that does not change between calls of the same shapes, dtypes, device and options.

    Attributes:
        send: the compiled kernel, with what stays the same; it takes the other arguments
            (:mod:`cute_kernels.attention.arguments`) by name. In native code it compares the shape, strides, dtype,
            alignment and device of every tensor that it is given with what it was compiled for, and launches on torch's
            current stream of the tensors' device.
        new_out, new_lse: what results that the caller gives no tensor for are made of.
        takes_options: whether ``send`` looks for features in the options of a call.
        k_view, v_view: dtypes that the function takes the caches as, None for their own.
        num_words: of workspace, 0 if there is nothing to combine.
        mode: what a call's mode has beside what the call asks for.
    """

    send: Callable[..., Any]
    schedule: DecodeSchedule
    device_index: int
    softmax_scale: float
    new_out: Blank
    new_lse: Blank
    takes_options: bool = False
    k_view: torch.dtype | None = None
    v_view: torch.dtype | None = None
    num_words: int = 0
    mode: int = 0

    def launch(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        seq_lens: torch.Tensor,
        kv_format: object,
        softmax_scale: float | None,
        num_splits: int | None,
        return_lse: bool,
        out: torch.Tensor | None,
        options: Mapping[str, Any] | None = None,
        partials: torch.Tensor | None = None,
        new: tuple[Any, ...] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launches on the current stream of the plan's device, which is the current one: (out or a new one, lse if
        asked for).

        ``options``: complete ones (see `NO_OPTIONS`) or None. ``partials``: a workspace of the caller's, in which the
        partial results of all splits stay. ``new``: of a step in one launch, k and v of the newest tokens, [batch,
        num_kv_heads, head_dim] each, and where a transform's constants lie. This is one flat function, without objects
        on the way, because each decoding step of a model waits for it once a layer.
        """
        if out is None:
            out = GPU.empty(*self.new_out)
        lse, lse_address, mode = None, 0, self.mode
        if return_lse:
            lse = GPU.empty(*self.new_lse)
            lse_address, mode = lse.data_ptr(), mode | WRITE_LSE
        workspace = 0
        if partials is not None:
            workspace, mode = partials.data_ptr(), mode | KEEP_PARTIALS
        elif self.num_words:
            index = self.device_index
            workspace = GPU.workspace(index, GPU.stream(index), self.num_words)
        k_scale = v_scale = 0
        if options is not None:
            k_scale, v_scale = address_of(options["k_scale"]), address_of(options["v_scale"])
        if self.k_view is not None:
            k_cache = k_cache.view(self.k_view)
        if self.v_view is not None:
            v_cache = v_cache.view(self.v_view)
        if softmax_scale is None:
            softmax_scale = self.softmax_scale
        if new is not None:
            self.send(
                q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens, out=out, lse=lse_address,
                workspace=workspace, k_scale=k_scale, v_scale=v_scale, softmax_scale=softmax_scale, mode=mode,
                options=options or NO_OPTIONS, new=new,
            )  # fmt: skip
        elif self.takes_options:
            self.send(
                q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens, out=out, lse=lse_address,
                workspace=workspace, k_scale=k_scale, v_scale=v_scale, softmax_scale=softmax_scale, mode=mode,
                options=options or NO_OPTIONS,
            )  # fmt: skip
        else:
            self.send(
                q=q, k_cache=k_cache, v_cache=v_cache, seq_lens=seq_lens, out=out, lse=lse_address,
                workspace=workspace, k_scale=k_scale, v_scale=v_scale, softmax_scale=softmax_scale, mode=mode,
            )  # fmt: skip
        return out, lse


def address_of(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def make_plan(
    call: AttentionCall,
    config: DecodeConfig | None = None,
    num_splits: int | None = None,
    *,
    after_append: bool = False,
) -> DecodePlan:
    """The plan of a checked call; ``config`` and ``num_splits`` instead of what the schedule would choose.

    after_append: for launches that directly follow one that appends the newest tokens and lets this one start early.
    """
    problem = problem_of(call, after_append=after_append)
    schedule = make_schedule(problem, call.num_splits if num_splits is None else num_splits)
    if config is not None:
        splits = make_schedule(problem).num_splits if num_splits is None else num_splits
        uneven = (schedule.more_rows, schedule.shares) if config.units else (0, 0)
        schedule = DecodeSchedule(config, splits, head_blocks(problem, config), *uneven)
    return plan_of(call, problem, schedule, _sender(call, schedule))


def plan_of(
    call: AttentionCall, problem: DecodeProblem, schedule: DecodeSchedule, send: Callable[..., Any]
) -> DecodePlan:
    """The plan of a checked call with a schedule; ``send``: the compiled kernel, with what stays the same."""
    return DecodePlan(
        send=send,
        schedule=schedule,
        device_index=call.q.device.index,
        softmax_scale=call.softmax_scale,
        new_out=blank(call.out_shape, call.q.dtype),
        new_lse=blank(call.out_shape[:3], torch.float32),
        k_view=byte_view(call.k.cache),
        v_view=byte_view(call.v.cache),
        num_words=workspace_words(schedule, problem),
        mode=places_log2(schedule.config, problem.num_sms) << PLACES_SHIFT,
        takes_options=schedule.config.has_features,
    )


def _sender(call: AttentionCall, schedule: DecodeSchedule) -> Callable[..., Any]:
    """The compiled kernel, with the arguments that only what decides a plan decides."""
    config = schedule.config
    function = load(AttentionSpec(config), arch_of(call.q.device.index))
    return decode_arguments(config.features, config.page_tokens > 0).bound(function, *known_arguments(call, schedule))


def known_arguments(call: AttentionCall, schedule: DecodeSchedule) -> tuple[dict[str, int | float], dict[str, Place]]:
    """(arguments that only what decides a plan decides, places of those that are found in the options of a call)."""
    config = schedule.config
    features = config.features
    fixed: dict[str, int | float] = {
        "k_scale_stride": _head_stride(call.k.scale),
        "v_scale_stride": _head_stride(call.v.scale),
        "num_splits": schedule.num_splits,
    }
    options: dict[str, Place] = {}
    if config.has_features:
        max_pages, table_stride = _columns(call.block_table)
        strides = (0, 0, 0, 0) if call.bias is None else call.bias.strides
        fixed |= {"more_rows": schedule.more_rows, "shares": schedule.shares}
        fixed |= {"max_pages": max_pages, "table_stride": table_stride}
        fixed |= {"window": call.window or 0, "soft_cap": call.soft_cap or 1.0}
        fixed |= dict(zip(BIAS_STRIDES, strides, strict=True))
        options |= {name: ("options", name) for name in ("block_table", "sinks", "alibi_slopes")}
        options["bias"] = ("options", "attn_bias")
    if features.transformed:
        own = {"q_shift": features.shift, "out_factor": features.v_factor}
        options |= {name: ("options", name) for name, is_given in own.items() if is_given}
        fixed |= {name: 0 for name, is_given in own.items() if not is_given}
    if features.tail:
        options |= {name: ("options", name) for name in ("k_tail", "tail_slots")}
    options |= {tensor.name: ("options", "score_options", tensor.name) for tensor in tensors_in(features)}
    return fixed, options


def _columns(table: torch.Tensor | None) -> tuple[int, int]:
    """Columns of a block table, and entries from one row to the next."""
    if table is None:
        return 0, 0
    return table.shape[1], table.stride(0) if table.shape[0] > 1 else table.shape[1]


def _head_stride(scale) -> int:
    return 0 if scale is None else scale.head_stride


def places_log2(config: DecodeConfig, num_sms: int) -> int:
    """log2 of the CTAs that a GPU holds at a time, rounded down: so many combiners of a row may wait for each other."""
    return (num_sms * config.ctas_per_sm).bit_length() - 1


def workspace_words(schedule: DecodeSchedule, problem: DecodeProblem) -> int:
    """Words of the partial results of all units; 0 if no row has more than one."""
    if schedule.num_splits == 1 and not schedule.more_rows:
        return 0
    units = (problem.batch + schedule.more_rows) * schedule.num_splits
    return units * problem.q_len * problem.num_q_heads * schedule.config.partial_words


def problem_of(call: AttentionCall, *, after_append: bool = False) -> DecodeProblem:
    """What the schedule needs to know of a call."""
    rows = [operand for operand in (call.k, call.v) if operand.form.has_header]
    return DecodeProblem(
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
        aligned=not any(_places(call, operand) % ALIGNMENT for operand in rows),
        tokens_touch=all(operand.tokens_touch for operand in rows),
        heads_touch=call.head_major or all(operand.heads_touch for operand in rows),
        num_sms=_num_sms(call.q.device),
        after_append=after_append,
    )


def _places(call: AttentionCall, operand: CacheOperand) -> int:
    """All that where copies of raw rows begin and end is a sum of multiples of, its bits joined."""
    places = operand.cache.data_ptr() | operand.block_stride
    # Copies of several tokens are cut where the block ends.
    places |= call.page_size * operand.token_stride if operand.tokens_touch else operand.token_stride
    return places if operand.heads_touch and not call.head_major else places | operand.head_stride


def _num_sms(device: torch.device) -> int:
    return GPU.num_sms(device) if device.type == "cuda" or GPU.takes_cpu else DecodeProblem.num_sms


def check_columns(name: str, scale: GivenScale) -> None:
    """Raises ValueError unless the scales of a head's columns lie side by side, a multiple of 16 bytes from the next
    head's."""
    apart = scale.head_stride * scale.tensor.element_size() % ALIGNMENT and scale.tensor.shape[0] > 1
    if scale.channel_stride != 1 or apart:
        raise ValueError(
            f"{name}: got strides {scale.tensor.stride()} for shape {shape_of(scale.tensor)}, want a KV head's columns "
            f"side by side, on multiples of {ALIGNMENT} bytes"
        )


def check_alignment(call: AttentionCall) -> None:
    """Raises ValueError for a tensor that the kernels cannot address."""
    tensors = {"q": (call.q, ALIGNMENT)}
    if call.out is not None:
        tensors["out"] = call.out, ALIGNMENT
    if call.tail is not None:
        tensors["k_tail"] = call.tail.rows, ALIGNMENT
    for name, operand in (("k", call.k), ("v", call.v)):
        tensors[f"{name}_cache"] = operand.cache, 4 if operand.form.has_header else ALIGNMENT
        if operand.scale is not None and operand.form.given_scale == "channel":
            check_columns(f"{name}_scale", operand.scale)
            tensors[f"{name}_scale"] = operand.scale.tensor, ALIGNMENT
    for name, (tensor, wanted) in tensors.items():
        if tensor.data_ptr() % wanted:
            raise ValueError(
                f"{name}: got a tensor that starts {tensor.data_ptr() % wanted} bytes past a multiple of {wanted}, "
                f"want it aligned to {wanted} bytes"
            )
