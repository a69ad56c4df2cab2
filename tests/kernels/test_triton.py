"""What only the Triton kernels have: chunks, their random numbers far out, and the backend around them.

Their passes are tested with those of the other backends, as runner ``triton`` of the shared cases.
"""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from cases import DTYPES, Case, Spec, assert_same_bits, build, clones, members_of, pair_id
from sassha_fast.triton_kernels import probe
from training import assert_same_bits as assert_same_tensors
from training import assert_same_state, closure_of, make_loss, make_net, snapshot, state_of, three_calls
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from sassha_fast import SASSHA, backends, reference
from sassha_fast._core.scalars import Request, step_scalars
from sassha_fast._passes import triton_launch
from sassha_fast._passes.layout import DTYPES as KINDS
from sassha_fast._passes.layout import INDEX, NUMEL, PARAM, PROBE_GRADIENT, ROW_WORDS, SIGNED_PRODUCT, DeviceScalars
from sassha_fast._passes.reference import Members, Passes, Products
from sassha_fast._passes.triton import KERNEL_DTYPES, TritonPasses
from sassha_fast._passes.triton_launch import CHUNK, Chunks, Launcher
from sassha_fast._passes.upload import Uploader
from sassha_fast.formats import Format, groups_of

CPU = torch.device("cpu")
SEED, DRAW = 2**36 + 7, 31

# ---- chunks and random numbers ------------------------------------------------------------------------------------


def far_signs(first_chunk, n, index, seed, draw, dtype):
    """What the kernel writes from chunk ``first_chunk`` of a huge tensor on, of which only n elements exist."""
    out = torch.full((n,), torch.nan, dtype=dtype)
    begin = first_chunk * CHUNK
    table = torch.zeros(1, ROW_WORDS, dtype=torch.int64)
    table[0, PARAM] = out.data_ptr() - begin * out.element_size()
    table[0, NUMEL] = begin + n
    table[0, INDEX] = index
    numbers = torch.arange(first_chunk, first_chunk + -(-n // CHUNK))
    chunks = torch.stack((torch.zeros_like(numbers), numbers, torch.zeros_like(numbers)), dim=1).to(torch.int32)
    kind = KERNEL_DTYPES[KINDS[dtype]]
    Launcher.on(CPU)(probe.rademacher, len(chunks), table, chunks, seed, draw, T=kind)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
@pytest.mark.parametrize(("index", "seed", "draw"), [(0, 0, 0), (2**32 - 1, 2**40 + 9, 2**31 + 1), (7, -1, 2**32 - 1)])
@pytest.mark.parametrize("first", [0, 2**32, 2**39, 2**41 + 3 * CHUNK])
def test_signs_equal_the_reference_for_every_element_also_past_32_bits(first, index, seed, draw, dtype):
    n = 2 * CHUNK + 77
    found = far_signs(first // CHUNK, n, index, seed, draw, dtype)
    assert_same_bits(found, reference.rademacher(found, index, seed, draw, first=first))


def test_chunks_cover_every_element_once_and_partial_results_of_a_group_or_row_are_spans():
    numels, kinds, groups = [5000, 0, 3, CHUNK, 2 * CHUNK + 1, 7], [0, 1, 0, 2, 0, 1], [2, 0, 0, 2, 0, 3]
    chunks = Chunks(numels, kinds, groups, 5, Uploader(CPU))
    entries = torch.cat([part for _, part in chunks.launches]).tolist()
    assert sorted(place for _, _, place in entries) == list(range(chunks.total))
    for kind, part in chunks.launches:
        assert {kinds[row] for row, _, _ in part.tolist()} == {kind}
    for row, n in enumerate(numels):
        assert sorted(number for r, number, _ in entries if r == row) == list(range(-(-n // CHUNK)))
    for names, (spans,) in ((groups, chunks.group_spans), (range(len(numels)), chunks.row_spans)):
        for name, (begin, end) in enumerate(spans.tolist()):
            places = sorted(place for row, _, place in entries if names[row] == name)
            assert places == list(range(begin, end))


def test_long_spans_are_added_in_levels(monkeypatch):
    monkeypatch.setattr(triton_launch, "SPAN", 3)
    numels, groups = [30 * CHUNK - 5, 0, 2 * CHUNK, 7 * CHUNK], [0, 1, 0, 2]
    weights = [torch.randint(-3, 4, (n,)).float() for n in numels]
    passes = TritonPasses(Members(weights, [0] * 4, groups, 4, ["w"] * 4))
    assert [len(level) for level in passes.chunks.group_spans] == [14, 5, 3, 4]
    passes.bind_grads(clones(weights))
    squares = [float(w.square().sum()) for w in weights]
    assert passes.square_sums(adaptive=False).tolist() == [squares[0] + squares[2], squares[1], squares[3], 0.0]


# ---- what is read from memory -------------------------------------------------------------------------------------

GROUP = {"lr": 0.13, "betas": (0.9, 0.99), "weight_decay": 0.02, "maximize": False, "eps": 1e-4, "hessian_power": 0.5}
TAILS = Case("tails", (Spec((CHUNK + 5,)), Spec((300,), "misaligned"), Spec(())))


def stepped(kind, dtype, scalars, *, products=None, noise=None, restore=False):
    """Weights and state after an update from a perturbed point by one class of passes, and its tally."""
    lists = build(TAILS, dtype, nonfinite=True)
    passes = kind(members_of(lists.weights))
    if restore:
        passes.bind_grads(clones(lists.grads))
        passes.perturb(torch.ones(3), adaptive=False, take_grads=False, seed=SEED, draw=torch.tensor([3]))
    passes.bind_state(lists.exp_avgs, lists.hessians)
    passes.bind_grads(lists.grads)
    if products is not None:
        products = Products(list(lists.products), [products] * 3)
    found = passes.step(scalars, [0] * 3, products, SEED, DRAW, restore=restore, noise_draw=noise)
    return [*lists.weights, *lists.exp_avgs, *lists.hessians], found.tallies


def scalars_with(**request):
    refresh = request.pop("refresh", False)
    return [step_scalars(GROUP, 21, 0.17, refresh=refresh, request=Request(**request))]


@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
@pytest.mark.parametrize("products", [None, SIGNED_PRODUCT], ids=["ordinary", "refresh"])
def test_a_skipped_update_returns_to_x_and_changes_nothing_else(dtype, products):
    scalars = scalars_with(refresh=products is not None, skip=torch.tensor(1.0, dtype=torch.float64))
    found, tally = stepped(TritonPasses, dtype, scalars, products=products, restore=True)
    before = build(TAILS, dtype, nonfinite=True)
    assert_same_bits(found, [*before.weights, *before.exp_avgs, *before.hessians])
    assert tally is None or tally.tolist() == [[0.0] * 3] * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
def test_scalars_in_device_memory_equal_numbers_of_the_host(dtype):
    numbers = scalars_with(grad_scale=0.3, skip=0.0)
    expected, _ = stepped(Passes, dtype, numbers, restore=True)
    tensor = scalars_with(grad_scale=torch.tensor(0.3, dtype=torch.float64), skip=torch.zeros(1))
    table = DeviceScalars(torch.tensor(numbers, dtype=torch.float64), [0.5])
    for scalars in (numbers, tensor, table):
        found, _ = stepped(TritonPasses, dtype, scalars, restore=True)
        assert_same_bits(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=pair_id)
def test_an_update_from_a_probe_gradient_rounded_at_random_equals_the_reference(dtype):
    scalars, noise = scalars_with(refresh=True, product_scale=1.7), torch.tensor([2**31 + 5])
    options = {"products": PROBE_GRADIENT, "noise": noise, "restore": True}
    expected, wanted = stepped(Passes, dtype, scalars, **options)
    found, tally = stepped(TritonPasses, dtype, scalars, **options)
    assert_same_bits(found, expected)
    assert tally[:, 1:].tolist() == wanted[:, 1:].tolist()


# ---- the optimizer ------------------------------------------------------------------------------------------------

STEPS = 12
VARIANTS = {
    "plain": {},
    "finite_difference": {"hvp": "finite_difference"},
    "two_powers": {"adaptive": True, "rho": 0.5, "weight_decay": 0.05},
}
# test_family.py has plain runs in float32 and float64.
RUNS = [("plain", torch.bfloat16), ("finite_difference", torch.float64), ("two_powers", torch.float32)]


def trained(backend, variant, dtype):
    net = make_net(dtype)
    params = net.parameters()
    if variant == "two_powers":
        params = [{"params": net[0].parameters(), "hessian_power": 1.0, "eps": 1e-2}, {"params": net[2:].parameters()}]
    options = {"lr": 0.03, "rho": 0.05, "lazy_hessian": 5, **VARIANTS[variant]}
    opt = SASSHA(params, backend=backend, **options)
    loss = make_loss(net, dtype)
    losses = []
    for _ in range(STEPS):
        if variant == "finite_difference":
            losses.append(opt.step(closure_of(opt, loss)).item())
        else:
            losses.append(three_calls(opt, loss))
    return net, opt, losses


@pytest.mark.parametrize(("variant", "dtype"), RUNS, ids=pair_id)
def test_twelve_steps_equal_the_reference_bit_for_bit(variant, dtype):
    expected, expected_opt, losses = trained("reference", variant, dtype)
    found, found_opt, _ = trained("triton", variant, dtype)
    assert losses[-1] < losses[0]
    assert found_opt.stats.refreshes == 3
    assert_same_tensors(snapshot(found), snapshot(expected))
    assert_same_state(state_of(found_opt), state_of(expected_opt))


def test_a_run_compiles_few_variants(monkeypatch):
    """Counted by Triton's own keys, as they would be on a GPU."""
    backend, binders, keys = CUDABackend(GPUTarget("cuda", 80, 32)), {}, set()
    launch = Launcher.__call__

    def recorded(self, kernel, programs, *args, **constants):
        if kernel not in binders:
            options = {k: v for k, v in kernel.kwargs.items() if k.startswith("do_not_specialize")}
            function = JITFunction(kernel.fn, **options)
            binders[kernel] = create_function_from_signature(function.signature, function.params, backend)
        _, specialization, _ = binders[kernel](*args, **constants)
        keys.add((kernel.__name__, str(specialization)))
        launch(self, kernel, programs, *args, **constants)

    monkeypatch.setattr(Launcher, "__call__", recorded)
    for seed in (0, 1, 16, 2**40):  # numbers that would be compiled in if Triton were let
        net = make_net()
        opt = SASSHA(net.parameters(), lr=0.03, rho=0.05, lazy_hessian=2, backend="triton", seed=seed)
        loss = make_loss(net)
        for _ in range(2):
            three_calls(opt, loss)
    kinds = sorted(name for name, _ in keys)
    # Two forms of the update, ordinary and refresh, and of the sums, one number and three.
    assert kinds == [
        *("fill_unseen", "finish", "finish", "perturb", "rademacher", "restore", "square_sums", "step", "step"),
        "unseen_sums",
    ]


# ---- the registry -------------------------------------------------------------------------------------------------


def test_auto_never_interprets():
    assert "triton" in backends.available("cpu")
    assert backends.choose("auto", CPU).name == "cpu"
    assert backends.choose("triton", CPU) is TritonPasses


def test_a_missing_triton_is_said_so(monkeypatch):
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="backend 'triton' can't run parameters on cpu: triton is not installed"):
        backends.choose("triton", CPU)
    assert backends.choose("auto", torch.device("cuda")).name == "foreach"


def test_an_unsupported_device_is_said_so():
    with pytest.raises(RuntimeError, match="on meta: its kernels run on GPUs of NVIDIA and AMD, not on meta"):
        backends.choose("triton", torch.device("meta"))
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 is set, so its kernels are interpreted on the CPU"):
        backends.choose("triton", torch.device("cuda"))


def test_a_switch_of_the_interpreter_after_import_is_said_so(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET has changed since triton was imported"):
        backends.choose("triton", CPU)


def test_without_the_interpreter_gpus_get_triton_and_the_cpu_is_told_why_not():
    code = (
        "import sys, torch; from sassha_fast import backends as b; print(b.report()); print(b._triton_why_not('cpu'));"
        "torch.cuda.is_available = lambda: True; print(b._suits('triton', 'cuda')); print('triton' in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    *report, on_cpu, suits, imported = done.stdout.splitlines()
    assert (suits, imported) == ("True", "False")
    assert "its kernels run on GPUs; set TRITON_INTERPRET=1" in on_cpu
    assert any("triton" in line and "unavailable: torch finds no GPU" in line for line in report)


def test_parameters_on_mixed_devices_are_named():
    weights = [torch.zeros(3), torch.zeros(3, device="meta")]
    with pytest.raises(RuntimeError, match="weight 1 is on meta, but weight 0 is on cpu"):
        TritonPasses(members_of(weights))


@pytest.mark.parametrize("column", ["exp_avgs", "hessians", "corrections", "exp_avg_scales", "hessian_scales"])
def test_state_of_another_format_or_size_is_refused(column):
    stored, weight = Format(8, 8), torch.zeros(5, 40, dtype=torch.bfloat16)
    codes, groups = torch.zeros(5, 40, dtype=torch.int8), groups_of(weight.numel())
    fitting = {"exp_avgs": codes, "hessians": codes.to(torch.uint8), "corrections": codes}
    fitting |= {"exp_avg_scales": torch.zeros(groups), "hessian_scales": torch.zeros(groups, dtype=torch.bfloat16)}
    right = fitting[column]
    others = [right.to(torch.float64), right.repeat(2, *[1] * (right.dim() - 1))]
    for state, refused in [(right, False), *((other, True) for other in others)]:
        given = {name: [tensor] for name, tensor in {**fitting, column: state}.items()}
        passes = TritonPasses(members_of([weight], stored))
        error = pytest.raises(RuntimeError, match="1 tensors of optimizer state do not have the layout")
        with error if refused else nullcontext():
            passes.bind_state(given["exp_avgs"], given["hessians"])
            passes.bind_compact(*(given[name] for name in ("corrections", "exp_avg_scales", "hessian_scales")))


def test_state_on_another_device_is_named():
    passes = TritonPasses(members_of([torch.zeros(3), torch.zeros(3)]))
    with pytest.raises(RuntimeError, match="weight 1 is on cpu, but its gradient or state is on meta"):
        passes.bind_state([torch.zeros(3), torch.zeros(3, device="meta")], [torch.zeros(3), torch.zeros(3)])


def test_state_in_another_layout_is_rejected():
    passes = TritonPasses(members_of([torch.zeros(3, 4)]))
    with pytest.raises(RuntimeError, match="1 tensors of optimizer state do not have the layout"):
        passes.bind_state([torch.zeros(4, 3).t()], [torch.zeros(3, 4)])
