"""Plans decode calls that run faster with *key rows*, that is with keys as rows of MMAs and queries as columns. These
calls have several queries a request, over caches of codes.

Decode attention's own kernel decodes each row of a cache once for every 8 to 32 rows of queries. The kernel with key
rows (:mod:`.mainloops.key_rows`) decodes it once for up to 72 rows of queries.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from cute_kernels.attention.call import AttentionCall, Given
from cute_kernels.attention.extend_policies import KEY_ROWS_HEAD_DIM
from cute_kernels.attention.extend_schedule import choose, decodes_with_key_rows
from cute_kernels.attention.launches import Keys, even_bounds
from cute_kernels.attention.options import NO_EXTEND_OPTIONS
from cute_kernels.attention.plan import check_alignment, extend_launches, key_rows_for, lies_in_pieces, problem_of
from cute_kernels.runtime.gpu import GPU
from cute_kernels.runtime.memory import blank
from cute_kernels.runtime.operator import Plan


def plan_of(call: AttentionCall) -> Plan | None:
    """Returns the plan of a decode call that runs with key rows; None for other calls.

    Calls with fixed splits never run with key rows, which add in another order than decode attention's own kernel.
    """
    dims = {call.head_dim, call.v.head_dim}
    if call.num_splits is not None or not call.k.form.is_coded or dims != {KEY_ROWS_HEAD_DIM}:
        return None
    checked = replace(call, q=call.q.flatten(0, 1), cu_seqlens_q=call.seq_lens, out=None)
    shape = call.batch, call.q_len, call.num_q_heads, call.num_kv_heads, GPU.num_sms(call.q.device)
    config = decodes_with_key_rows(key_rows_for(checked, choose(problem_of(checked))), *shape)
    if config is None or not lies_in_pieces(checked):
        return None
    try:
        check_alignment(checked)
    except ValueError:
        return None
    launches, sizes = extend_launches(checked, config), (call.batch, call.q_len, call.q.device)

    def launch(given: Given) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launches attention. Takes the same arguments, and returns the same results, as every plan of decode
        attention.
        """
        q, k_cache, v_cache, seq_lens, _, softmax_scale, _, return_lse, out, options, _ = given
        if out is None:
            out = GPU.empty(*blank(tuple(q.shape), q.dtype))
        lse = GPU.empty(*blank(tuple(q.shape[:3]), torch.float32)) if return_lse else None
        # All of them: the kernel looks for its own.
        complete = NO_EXTEND_OPTIONS if options is None else {**NO_EXTEND_OPTIONS, **options}
        rows = q.flatten(0, 1)  # a copy where requests are not as far apart as all their queries
        ends = even_bounds(*sizes)
        launches.call(Keys(rows, k_cache, v_cache, ends, seq_lens, out.flatten(0, 1), lse, softmax_scale, complete))
        return out, lse

    return Plan(call.q.device.index, launch, (config,))
