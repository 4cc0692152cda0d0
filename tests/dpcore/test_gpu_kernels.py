"""The kernels for GPUs, by Triton's interpreter on the CPU, beside float64; and compiled ahead of time for two GPUs.

    make test-gpu-kernels

Triton lies in a folder of its own: beside torch it would change what torch.compile does.
"""

from __future__ import annotations

import copy
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


@pytest.mark.parametrize("norm_sq", [contraction.tiled_norm_sq, contraction.gram_norm_sq])
@settings(max_examples=12, deadline=None)
@given(steps=sizes, d=sizes, p=sizes, dtype=dtypes, strided=st.booleans())
def test_a_norm_is_within_its_own_error(norm_sq, steps, d, p, dtype, strided):
    g, x = operands(steps, d, p, dtype, strided)
    true = gradients(g, x).square().sum((1, 2))

    found = norm_sq(g, x)

    assert found.scale is not None and bool((found.scale >= true * (1 - 1e-6)).all())
    assert bool(((found.value - true).abs() <= found.error * found.scale + 1e-30).all())
    assert found.error < 2e-4


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
@pytest.mark.parametrize("steps", [3, 70])
def test_an_engine_with_the_kernels_is_exact_and_no_example_exceeds_the_bound(monkeypatch, dtype, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 70), nn.Tanh(), nn.Linear(70, 9)).to(dtype)
    x, y = torch.randn(6, steps, 20).to(dtype), torch.randint(0, 9, (6,))

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs.float().mean(1), labels, reduction="none").to(outputs.dtype)

    calls = []
    monkeypatch.setattr(gpu, "contraction_norm_sq", lambda *a, f=gpu.contraction_norm_sq: calls.append(a) or f(*a))
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


AHEAD_OF_TIME = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from dpcore.gpu import contraction

FIXED = {"TILE": contraction.TILE, "DEPTH": contraction.DEPTH, "WIDEN": False}
for operand in ("fp32", "bf16", "fp16"):
    for name, result in (("_tile_squares", "fp64"), ("_tile_sums", "fp32"), ("_gram_blocks", "fp64")):
        kernel = getattr(contraction, name)
        pointers = {"g": f"*{operand}", "x": f"*{operand}", "factors": "*fp32", "out": f"*{result}"}
        signature = {a: "constexpr" if a in FIXED else pointers.get(a, "i32") for a in kernel.arg_names}
        source = triton.compiler.ASTSource(kernel, signature, constexprs=FIXED)
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
    assert len(shared) == 9 and max(shared) <= 160 * 1024  # an A100 has 163 KiB of shared memory for a block
