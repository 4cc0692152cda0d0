"""The kernels for GPUs, by Triton's interpreter on the CPU, beside float64; and compiled ahead of time for two GPUs.

    make test-gpu-kernels

Triton lies in a folder of its own: beside torch it would change what torch.compile does.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

triton = pytest.importorskip("triton", reason="no Triton: make test-gpu-kernels brings it")
if os.environ.get("TRITON_INTERPRET") != "1" or os.environ.get("DPCORE_TRITON") != "1":
    pytest.skip("run by make test-gpu-kernels, which sets the interpreter", allow_module_level=True)

from dpcore import Engine, gpu, reference  # noqa: E402
from dpcore.gpu import contraction  # noqa: E402
from dpcore.gpu import sizes as sizes_of  # noqa: E402
from dpcore.gpu.sizes import Sizes  # noqa: E402
from dpcore.microbatch.accumulator import Accumulator  # noqa: E402
from dpcore.numerics.rounding import gamma  # noqa: E402

EXAMPLES = 3
sizes = st.integers(1, 80)
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def operands(steps: int, d: int, p: int, dtype: torch.dtype, strided: bool = False) -> tuple[Tensor, Tensor]:
    """Return random output gradients [B, T, d] and inputs [B, T, p]."""
    generator = torch.Generator().manual_seed(steps + 100 * d + 10_000 * p)
    g, x = (torch.randn(EXAMPLES, n, steps, generator=generator).to(dtype).transpose(1, 2) for n in (d, p))
    return (g, x) if strided else (g.contiguous(), x.contiguous())


def gradients(g: Tensor, x: Tensor) -> Tensor:
    """[B, d, p] in float64."""
    return torch.einsum("btd,btp->bdp", g.double(), x.double())


def added(g: Tensor, x: Tensor, limits: Tensor | None) -> Tensor:
    """[B, d, p] in float64: what the kernel adds for each example alone, at a factor of 1."""
    each = []
    for i in range(len(g)):
        out = torch.zeros(g.shape[2], x.shape[2])
        of = None if limits is None else limits[i : i + 1]
        gpu.contraction_clipped_sum(g[i : i + 1], x[i : i + 1], torch.ones(1), out, of)
        each.append(out.double())
    return torch.stack(each)


@pytest.mark.parametrize("tiled", [True, False])
@settings(max_examples=10, deadline=None)
@given(steps=sizes, d=sizes, p=sizes, dtype=dtypes, strided=st.booleans(), cancels=st.floats(0, 1))
def test_a_norm_is_within_its_own_error_and_so_is_what_is_added(tiled, steps, d, p, dtype, strided, cancels):
    g, x = operands(steps, d, p, dtype, strided)
    x = x - cancels * x.mean(1, keepdim=True)
    g = (g - cancels * g.mean(1, keepdim=True)).to(dtype)
    true = gradients(g, x).square().sum((1, 2))
    terms = (g.double().norm(dim=2) * x.double().norm(dim=2)).sum(1).square()

    found, limits = contraction.tiled_norm_sq(g, x) if tiled else (contraction.gram_norm_sq(g, x), None)

    assert (found.scale is None) == tiled
    upper = found.value + found.error * (found.value if found.scale is None else found.scale)
    assert bool((added(g, x, limits).square().sum((1, 2)) <= upper * (1 + 1e-7) + 1e-30).all())
    assert bool(((found.value - true).abs() <= 4 * gamma(steps + 140, torch.float32) * terms + 1e-30).all())
    assert found.error < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [16, 64, 256])
def test_bounds_are_tight_for_sequences_of_unrelated_positions(steps, dtype):
    """There S = (Σ_t |x_t||g_t|)² is about T times the squared norm. No example of them is left to float64."""
    g, x = operands(steps, 24, 40, dtype)

    found, _ = gpu.contraction_norm_sq(g, x)

    true = gradients(g, x).square().sum((1, 2))
    upper = found.value + found.error * (found.value if found.scale is None else found.scale)
    assert bool((upper <= true * (1 + (1e-3 if dtype == torch.float32 else 8e-3))).all())
    assert found.scale is None or bool((found.scale <= found.tolerated * found.value).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_of_positions_that_cancel_keep_to_what_was_measured(dtype):
    """Terms of 1e4 leave a sum of rounding errors: what is added must not be larger than what was measured of it."""
    half = torch.randn(EXAMPLES, 128, 20), torch.randn(EXAMPLES, 128, 30)
    order = torch.randperm(256)
    g = 100 * torch.cat([half[0], -half[0] * (1 + 2.0**-9)], 1)[:, order].to(dtype)
    x = 100 * torch.cat([half[1], half[1]], 1)[:, order].to(dtype)

    found, limits = contraction.tiled_norm_sq(g, x)

    sizes_added = added(g, x, limits).square().sum((1, 2))
    assert bool((sizes_added <= found.value * (1 + found.error)).all())
    assert bool((sizes_added >= found.value * (1 - 1e-5)).all())


@pytest.mark.parametrize("share", [1.0, 0.81, 1e-12, 0.0])
def test_a_tile_never_exceeds_its_limit_whatever_the_sum_computes(share):
    """As if the sum's kernel had rounded otherwise than the norm's: the limits are lower than what it finds."""
    g, x = operands(9, 70, 70, torch.float32)
    _, limits = contraction.tiled_norm_sq(g, x)
    whole = gradients(g, x)

    small = added(g, x, limits * share)

    for rows in (slice(0, 64), slice(64, 70)):
        for columns in (slice(0, 64), slice(64, 70)):
            one, other = small[:, rows, columns], whole[:, rows, columns]
            limit = share * other.square().sum((1, 2))
            assert bool((one.square().sum((1, 2)) <= limit * (1 + 1e-5)).all())
            torch.testing.assert_close(one, share**0.5 * other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 3e38])
def test_a_tile_that_is_no_number_where_a_limit_was_finite_is_left_out(value):
    g, x = operands(4, 5, 6, torch.float32)
    _, limits = contraction.tiled_norm_sq(g, x)
    g[1, 0, 0] = value

    small = added(g, x, limits)

    assert bool((small[1] == 0).all())
    torch.testing.assert_close(small[[0, 2]], gradients(g, x)[[0, 2]], rtol=1e-5, atol=1e-5)


@settings(max_examples=12, deadline=None)
@given(steps=sizes, d=sizes, p=sizes, dtype=dtypes, examples=st.integers(0, 5))
def test_clipped_sums_are_those_of_float64(steps, d, p, dtype, examples):
    generator = torch.Generator().manual_seed(examples)
    g, x = (torch.randn(examples, steps, n, generator=generator).to(dtype) for n in (d, p))
    factors, out = torch.rand(examples, generator=generator), torch.ones(p, d).t()
    true = 1.0 + torch.einsum("b,bdp->dp", factors.double(), gradients(g, x))

    gpu.contraction_clipped_sum(g, x, factors, out)

    torch.testing.assert_close(out.double(), true, rtol=1e-5, atol=1e-5)


def test_examples_at_factor_zero_leave_nothing_even_if_they_are_infinite():
    g, x = operands(4, 5, 6, torch.float32)
    g[1, 0, 0] = torch.inf
    factors, out = torch.tensor([0.5, 0.0, 0.25]), torch.zeros(5, 6)

    gpu.contraction_clipped_sum(g, x, factors, out)

    others = gradients(g[[0, 2]], x[[0, 2]])
    torch.testing.assert_close(out.double(), 0.5 * others[0] + 0.25 * others[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [3, 70, 256])
def test_an_engine_with_the_kernels_is_exact_and_no_example_exceeds_the_bound(monkeypatch, dtype, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 70), nn.Tanh(), nn.Linear(70, 9)).to(dtype)
    x, y = torch.randn(4, steps, 20).to(dtype), torch.randint(0, 9, (4, steps))

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        signs = 1.0 - 2.0 * (torch.arange(steps) % 2)  # the positions' gradients partly cancel
        of = nn.functional.cross_entropy(outputs.float().transpose(1, 2), labels, reduction="none")
        return (signs * of).mean(1).to(outputs.dtype)

    calls = []
    monkeypatch.setattr(gpu, "contraction_norm_sq", lambda *a, f=gpu.contraction_norm_sq: calls.append(a) or f(*a))
    alone_in_float64 = []
    monkeypatch.setattr(
        Accumulator, "_add_singly", lambda *a, f=Accumulator._add_singly: alone_in_float64.append(a) or f(*a)
    )
    bound = 0.01
    result = Engine(copy.deepcopy(model), loss, max_grad_norm=bound, check_isolation=False).clipped_sum(x, y)
    assert len(calls) >= 2
    assert all(operand.dtype == dtype for operand in calls[0])

    for i in range(len(x)):
        alone = Engine(copy.deepcopy(model), loss, max_grad_norm=bound, check_isolation=False)
        parts = alone.clipped_sum(x[i : i + 1], y[i : i + 1]).sums
        size = sum(part.double().square().sum() for part in parts.values()).sqrt()
        assert bound * (1 - 2e-3) < size <= bound * (1 + 1e-6)
    if dtype == torch.float32:
        truth = reference.clipped_sum(model, loss, x, y, bound).clipped
        for name, expected in truth.items():
            assert (result.sums[name] - expected).norm() <= 1e-4 * expected.norm()
    assert not alone_in_float64


def test_positions_that_cancel_are_left_to_float64():
    """Σ_t g_t x_tᵀ is 2^-10 of its terms, whose products are rounded: in float32 it would be off by 6e-5."""
    model = nn.Linear(40, 30, bias=False)
    x = torch.randn(2, 1, 40).repeat(1, 2, 1)
    weights = torch.randint(-100, 100, (2, 30)).float()

    def loss(outputs: Tensor, of: Tensor) -> Tensor:
        return ((outputs[:, 0] - (1.0 - 2.0**-10) * outputs[:, 1]) * of).sum(1)

    result = Engine(model, loss, max_grad_norm=1e-3, check_isolation=False).clipped_sum(x, weights)
    true = reference.clipped_sum(model, loss, x, weights, 1e-3).clipped["weight"]

    assert float((result.sums["weight"] - true).norm()) <= 1e-5 * float(true.norm())


@settings(max_examples=12, deadline=None)
@given(steps=st.integers(2, 80), d=sizes, dtype=dtypes, words=st.integers(1, 40), padding=st.sampled_from([None, 0]))
def test_lookups_are_those_of_float64_and_keep_to_their_limits(steps, d, dtype, words, padding):
    generator = torch.Generator().manual_seed(steps)
    ids = torch.randint(0, words, (EXAMPLES, steps), generator=generator)
    g = torch.randn(EXAMPLES, steps, d, generator=generator).to(dtype)
    g[:, steps // 2 :] -= g[:, : steps - steps // 2]  # equal ids partly cancel
    counted = g.double() if padding is None else g.double() * (ids != padding).unsqueeze(2)
    rows = torch.zeros(EXAMPLES, words, d, dtype=torch.float64).scatter_add_(
        1, ids.unsqueeze(2).expand(-1, -1, d), counted
    )
    factors = torch.tensor([0.5, 0.0, 2.0])
    out = torch.ones(d, words).t()

    norms, limits = gpu.lookup_norm_sq(ids, g, padding)
    gpu.lookup_clipped_sum(ids, g, padding, factors, out, limits)

    torch.testing.assert_close(norms.value, rows.square().sum((1, 2)), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        out.double(), 1 + torch.einsum("b,bvd->vd", factors.double(), rows), rtol=1e-4, atol=1e-4
    )
    small = torch.zeros(words, d)
    gpu.lookup_clipped_sum(ids[:1], g[:1], padding, torch.ones(1), small, 0.25 * limits[:1])
    torch.testing.assert_close(small.double(), 0.5 * rows[0], rtol=1e-4, atol=1e-4)
    assert float(small.double().square().sum()) <= 0.25 * float(norms.value[0]) * (1 + norms.error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_with_a_table_is_exact_by_the_kernels(monkeypatch, dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(12, 20, padding_idx=0), nn.Linear(20, 9)).to(dtype)
    ids, y = torch.randint(0, 12, (5, 17)), torch.randint(0, 9, (5, 17))

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        of = nn.functional.cross_entropy(outputs.float().transpose(1, 2), labels, reduction="none")
        return of.mean(1).to(outputs.dtype)

    calls = []
    monkeypatch.setattr(gpu, "lookup_clipped_sum", lambda *a, f=gpu.lookup_clipped_sum: calls.append(a) or f(*a))
    bound = 0.01
    result = Engine(copy.deepcopy(model), loss, max_grad_norm=bound, check_isolation=False).clipped_sum(ids, y)
    assert calls and calls[0][1].dtype == dtype
    assert not result.sums["0.weight"][0].any()  # the padding's row
    for i in range(len(ids)):
        alone = Engine(copy.deepcopy(model), loss, max_grad_norm=bound, check_isolation=False)
        parts = alone.clipped_sum(ids[i : i + 1], y[i : i + 1]).sums
        size = sum(part.double().square().sum() for part in parts.values()).sqrt()
        assert bound * (1 - 5e-3) < size <= bound * (1 + 1e-6)
    if dtype == torch.float32:
        for name, expected in reference.clipped_sum(model, loss, ids, y, bound).clipped.items():
            assert (result.sums[name] - expected).norm() <= 1e-3 * expected.norm()


def test_other_sizes_give_the_same_values_and_limits_of_other_tiles_are_refused():
    g, x = operands(20, 50, 40, torch.float32)
    small = Sizes(tile=16, depth=16)
    norm, limits = contraction.tiled_norm_sq(g, x, small)
    factors, out = torch.tensor([0.5, 0.0, 2.0]), torch.zeros(50, 40)

    contraction.add_clipped_sum(g, x, factors, out, limits, small)

    true = gradients(g, x)
    torch.testing.assert_close(norm.value, true.square().sum((1, 2)), rtol=1e-5, atol=0.0)
    torch.testing.assert_close(contraction.gram_norm_sq(g, x, small).value, norm.value, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(out.double(), torch.einsum("b,bdp->dp", factors.double(), true), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="other tiles"):
        contraction.add_clipped_sum(g, x, factors, out, limits)


def test_tuning_writes_data_that_says_it_is_simulated_and_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "sizes.json"
    done = subprocess.run(
        [sys.executable, "-m", "dpcore.gpu.tune", "--out", str(path)], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 0, done.stderr[-2000:]
    made = json.loads(path.read_text())
    assert made["simulated"] and not any("failed" in row for row in made["tried"])
    monkeypatch.setenv(sizes_of.VARIABLE, str(path))
    with pytest.raises(ValueError, match="make one on a GPU"):
        sizes_of.chosen("tiles", torch.float32)

    real = tmp_path / "real.json"
    real.write_text(json.dumps(made | {"simulated": False, "tiles": {"float32": {"tile": 128, "depth": 64}}}))
    monkeypatch.setenv(sizes_of.VARIABLE, str(real))
    assert sizes_of.chosen("tiles", torch.float32) == Sizes(128, 64)
    assert sizes_of.chosen("tiles", torch.float16) == Sizes()
    real.with_name("odd.json").write_text(json.dumps(made | {"simulated": False, "gram": {"float32": {"tile": 65}}}))
    monkeypatch.setenv(sizes_of.VARIABLE, str(real.with_name("odd.json")))
    with pytest.raises(ValueError, match="tile is 65; it must be a power of two"):
        sizes_of.chosen("tiles", torch.float32)


AHEAD_OF_TIME = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from dpcore.gpu import contraction, lookup

from dpcore.gpu.sizes import Sizes
SIZES = {"TILE": Sizes().tile, "DEPTH": Sizes().depth, "WIDEN": False}
FLAGS = {"LIMITED": True, "ADD": True}
DOUBLES = dict.fromkeys(("limits", "products", "lengths", "values", "scales"), "*fp64")
REALS = dict.fromkeys(("largest", "of_gram", "of_sum"), "fp32")
KERNELS = [("_tile_squares", "fp64", SIZES), ("_tile_sums", "fp32", SIZES | FLAGS), ("_gram_blocks", "", SIZES)]
for operand in ("fp32", "bf16", "fp16"):
    for name, result, fixed in [*KERNELS, ("_gram_totals", "", {"WIDTH": 256})]:
        kernel = getattr(contraction, name)
        pointers = {"g": f"*{operand}", "x": f"*{operand}", "factors": "*fp32", "out": f"*{result}"} | DOUBLES | REALS
        signature = {a: "constexpr" if a in fixed else pointers.get(a, "i32") for a in kernel.arg_names}
        source = triton.compiler.ASTSource(kernel, signature, constexprs=fixed)
        made = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))
        assert len(made.asm["cubin"]) > 1000
        print(made.metadata.shared)
    for name, result, fixed in (("_row_squares", "fp64", SIZES), ("_row_sums", "fp32", SIZES | {"LIMITED": True})):
        kernel = getattr(lookup, name)
        pointers = {"ids": "*i64", "g": f"*{operand}", "factors": "*fp32", "out": f"*{result}"} | DOUBLES
        signature = {a: "constexpr" if a in fixed else pointers.get(a, "i32") for a in kernel.arg_names}
        source = triton.compiler.ASTSource(kernel, signature, constexprs=fixed)
        made = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))
        assert len(made.asm["cubin"]) > 1000
        print(made.metadata.shared)
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_ahead_of_time_without_a_gpu(capability, tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", AHEAD_OF_TIME, str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    shared = [int(line) for line in done.stdout.split()]
    assert len(shared) == 18 and max(shared) <= 160 * 1024  # an A100 has 163 KiB of shared memory for a block
