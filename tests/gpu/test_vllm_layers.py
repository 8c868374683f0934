"""Layers, also of experts, that vLLM makes run on these kernels, and give what their checkpoints say; needs vLLM."""

import dataclasses

import pytest
import torch

from tests.integrations.vllm import layers, seam_float_linear

pytestmark = pytest.mark.gpu
pytest.importorskip("vllm")


ROWS = (1, 5, 40)


@pytest.fixture(scope="module", autouse=True)
def kernels(request: pytest.FixtureRequest):
    """Kernels of the layers of chosen tests, compiled side by side where they are not there yet."""
    from cute_kernels.formats.weights import integers
    from cute_kernels.gemm.packed_experts import ExpertsForm
    from cute_kernels.gemm.weight import padded_shape
    from cute_kernels.integrations import expert_kernels
    from cute_kernels.integrations.engine_linear import Form
    from cute_kernels.integrations.vllm import prepare

    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    chosen = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    parameters = [call.params for call in chosen if call is not None]
    specs = []
    for form in {given["form"] for given in parameters if "form" in given} | {layers.Checkpoint("ct")}:
        weight_format = integers(form.bits, form.group_size, form.zero_point)
        problem = Form(weight_format, form.n, form.k, form.dtype).problem(num_sms)
        specs += [spec for rows in ROWS for spec in prepare.specs_for(problem, rows)]
    for given in (given for given in parameters if "checkpoint" in given):
        bits, group_size, zero_point, dtype = (given[name] for name in ("bits", "group_size", "zero_point", "dtype"))
        gate_up, down = (
            ExpertsForm(
                num_experts=layers.NUM_EXPERTS,
                n=n,
                k=k,
                k_pad=padded_shape((n, k), group_size or None)[1],
                format=integers(bits, group_size, zero_point),
                dtype=dtype,
                device_index=0,
            )
            for n, k in ((2 * EXPERT_N, EXPERT_K), (EXPERT_K, EXPERT_N))
        )
        specs += expert_kernels.specs(gate_up, down, 2, ROWS, False)
    prepare.load(torch.device("cuda", 0), specs)


EXPERT_N, EXPERT_K = 96, 128  # features of an expert, and of the model


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch):
    """The plugin, with kernels made ready for the rows of these tests alone."""
    monkeypatch.setenv("CUTE_KERNELS_VLLM", "linear,moe")
    from cute_kernels.integrations.vllm import prepare, register

    register()
    monkeypatch.setattr(prepare, "DEFAULT_ROWS", prepare.RowCounts(ROWS, ROWS[-1]))


@pytest.mark.parametrize("form", layers.CHECKPOINTS, ids=str)
def test_a_layer_of_vllm_gives_what_its_checkpoint_says(form):
    if form.act_order and not layers.has_act_order():
        pytest.skip("this vLLM loads no act-order")
    layer = layers.make(form, "cuda")
    assert type(layer.kernel).__name__ == "CuteKernelsLinearKernel"
    for rows in ROWS:
        x = torch.randn(rows, form.k, dtype=form.dtype, device="cuda")
        expected = x.double() @ layer.weight.cuda().T
        error = (layer.apply(x).double() - expected).abs().max() / expected.abs().max()
        assert error < (2**-7 if form.dtype == torch.bfloat16 else 2**-9)


@pytest.mark.parametrize("kind", seam_float_linear.KINDS)
def test_a_layer_of_floats_gives_what_its_checkpoint_says(kind):
    if not seam_float_linear.fits():
        pytest.skip("this vLLM has other methods of such layers")
    method, layer, weight = seam_float_linear.made(kind, device="cuda")
    with seam_float_linear.wanted(), seam_float_linear.named():
        method.process_weights_after_loading(layer)
    assert type(seam_float_linear.kernel_of(method)).__name__ == "FloatProducts"
    for rows in ROWS:
        x = torch.randn(rows, seam_float_linear.K, dtype=torch.bfloat16, device="cuda")
        expected = x.double() @ weight.cuda().T
        error = (seam_float_linear.apply(method, layer, x).double() - expected).abs().max() / expected.abs().max()
        assert error < 2**-7


@pytest.mark.parametrize("form", layers.CHECKPOINTS[:3], ids=str)
def test_rows_in_between_run_kernels_that_are_ready(form):
    from cute_kernels.gemm.served import schedule_for
    from cute_kernels.gemm.spec import GemmSpec
    from cute_kernels.runtime import arch_of, default_cache

    layer = layers.make(form, "cuda")
    problem = layer.kernel.form.problem(torch.cuda.get_device_properties(0).multi_processor_count)
    for rows in (3, 17, 33, 41):
        asked = [GemmSpec(schedule_for(dataclasses.replace(problem, m=rows)).config)]
        assert all(default_cache().has(spec, arch_of()) for spec in asked)
        x = torch.randn(rows, form.k, dtype=form.dtype, device="cuda")
        expected = x.double() @ layer.weight.cuda().T
        error = (layer.apply(x).double() - expected).abs().max() / expected.abs().max()
        assert error < (2**-7 if form.dtype == torch.bfloat16 else 2**-9)


def test_a_layer_is_one_operator_to_torch_compile():
    form = layers.Checkpoint("ct")
    layer = layers.make(form, "cuda")
    compiled = torch.compile(layer.apply, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (1, 5):
        x = torch.randn(rows, form.k, dtype=form.dtype, device="cuda")
        assert torch.equal(compiled(x), layer.apply(x))


@pytest.mark.parametrize(("checkpoint", "bits", "group_size", "zero_point", "dtype"), layers.EXPERTS)
def test_experts_of_vllm_give_what_their_checkpoint_says(checkpoint, bits, group_size, zero_point, dtype):
    form = layers.Checkpoint(checkpoint, bits, group_size, zero_point, dtype=dtype, n=EXPERT_N, k=EXPERT_K)
    layer, made = layers.serve_experts(form, "cuda")
    for tokens in ROWS:
        for expert_map in (None, torch.tensor([-1, 0, 1, -1, 2], dtype=torch.int32)):
            error = layers.error_of_experts(layer, made, tokens, dtype, expert_map)
            assert error < (2**-6 if dtype == torch.bfloat16 else 2**-9)
