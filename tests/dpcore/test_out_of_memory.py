"""Where memory runs out the Engine starts the batch anew in smaller pieces: nothing is lost or counted twice."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo import register_backend
from torch.nn import functional as F

from dpcore import Engine, PrivacyError
from dpcore.clipping import clip_factors
from dpcore.example_isolation import check as isolation
from dpcore.microbatch.memory import ran_out
from dpcore.noise import GaussianNoise
from tests.dpcore.test_own_clipping_rules import Sequences

CUDA_MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."
CPU_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
)
KINDS: dict[str, Callable[[], Exception]] = {
    "a GPU's allocator": lambda: torch.OutOfMemoryError(CUDA_MESSAGE),
    "the CPU's allocator": lambda: RuntimeError(CPU_MESSAGE),
    "Python": MemoryError,
}

pytestmark = pytest.mark.filterwarnings("ignore:Memory ran out:UserWarning")


def losses(outputs: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(outputs, y, reduction="none")


class Limited(nn.Module):
    """A model in which no more than ``fitting`` examples fit the memory.

    Copies of one example always do (dpcore looks at a model by at least seven of them), unless nothing does (0).
    """

    def __init__(self, fitting: int, error: Callable[[], Exception] = MemoryError) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 40), nn.Linear(40, 3)
        self.fitting, self.error = fitting, error

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.fitting and (not self.fitting or bool((x - x[:1]).abs().max() > 1e-4)):
            raise self.error()
        return self.second(torch.relu(self.first(x)))


def batch(count: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(count)
    return 3.0 * torch.randn(count, 6, generator=numbers), torch.randint(3, (count,), generator=numbers)


def engine_of(model: nn.Module, **options: Any) -> Engine:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Engine(model, losses, max_grad_norm=0.7, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_way_to_run_out_of_memory_is_known(kind: str) -> None:
    check_exact(Limited(5, KINDS[kind]), 24)


@settings(max_examples=8, deadline=None)
@given(count=st.integers(1, 40), fitting=st.integers(2, 17))
def test_a_batch_that_does_not_fit_gives_the_exact_sum(count: int, fitting: int) -> None:
    check_exact(Limited(fitting), count)


def check_exact(model: Limited, count: int) -> None:
    """Two batches give the sums of the loop over examples."""
    engine, (x, y) = engine_of(model), batch(count)
    for _ in range(2):
        found = engine.clipped_sum(x, y)
        for name, of in by_loop(model, x, y).items():
            torch.testing.assert_close(found.sums[name].double(), of, rtol=1e-5, atol=1e-6)
        assert found.norms.shape == found.factors.shape == found.losses.shape == (count,)


def by_loop(model: Limited, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The clipped sum in float64, example by example."""
    exact = copy.deepcopy(model).double()
    sums = {name: torch.zeros_like(p) for name, p in exact.named_parameters()}
    for one, target in zip(x.double().unbind(0), y.unbind(0), strict=True):
        grads = torch.autograd.grad(losses(exact(one[None]), target[None]).sum(), list(exact.parameters()))
        factor = min(1.0, 0.7 / float(torch.stack([g.norm() for g in grads]).norm()))
        for total, grad in zip(sums.values(), grads, strict=True):
            total += factor * grad
    return sums


def test_later_batches_begin_with_what_has_fitted() -> None:
    model = Limited(5)
    engine = engine_of(model)
    with pytest.warns(UserWarning, match="with 16 examples in work at once; the batch starts anew with 8"):
        engine.clipped_sum(*batch(64))
    assert "physical batch size: 4" in engine.explain()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.clipped_sum(*batch(64))


def _graphs_of_eight_at_most(module: Any, inputs: list[Tensor]) -> Callable[..., Any]:
    def run(*values: Tensor) -> Any:
        if len(values[0]) > 8:
            raise torch.OutOfMemoryError(CUDA_MESSAGE)
        return module(*values)

    return run


def test_compiled_graphs_become_shorter() -> None:
    register_backend(_graphs_of_eight_at_most, "graphs of eight at most")
    model, (x, y) = Limited(100), batch(50)
    engine = engine_of(model, compile="graphs of eight at most")
    for _ in range(2):
        found = engine.clipped_sum(x, y).sums
        for name, of in by_loop(model, x, y).items():
            torch.testing.assert_close(found[name].double(), of, rtol=1e-5, atol=1e-6)


class RunsOutOnce:
    """A clipping rule that runs out of memory once, when it is called for the ``number``-th time."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, norms: Tensor, c: Any) -> Tensor:
        self.left -= 1
        if not self.left:
            raise torch.OutOfMemoryError(CUDA_MESSAGE)
        return clip_factors(norms, c)


@pytest.mark.parametrize("number", [1, 2, 5, 18, 23])
def test_what_was_added_before_memory_ran_out_is_not_added_again(number: int) -> None:
    numbers = torch.Generator().manual_seed(1)
    x, y = torch.randn(24, 200, 256, generator=numbers), torch.randint(3, (24,), generator=numbers)
    plain = engine_of(Sequences())
    expected = {name: total.clone() for name, total in plain.clipped_sum(x, y).sums.items()}
    assert "large.weight: turn" in plain.explain()
    engine = engine_of(Sequences(), factors=RunsOutOnce(number))
    found = engine.clipped_sum(x, y)
    assert engine.accumulator.factors.left <= 0  # type: ignore[attr-defined]
    for name, total in expected.items():
        torch.testing.assert_close(found.sums[name], total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sigma", [0.0, 1.3])
def test_a_step_that_starts_anew_is_one_step_with_its_own_noise(sigma: float) -> None:
    x, y = batch(30)
    made = []
    for fitting in (100, 3):
        model = Limited(fitting)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        noise = GaussianNoise(seed=5)
        engine = engine_of(model, noise=noise, noise_multiplier=sigma, expected_batch_size=20, optimizer=optimizer)
        for _ in range(3):
            engine.step(x, y)
        assert engine.steps == 3
        made.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*made, rtol=1e-5, atol=1e-6)


def test_where_one_example_does_not_fit_the_error_stays_and_nothing_of_the_step_does() -> None:
    model = Limited(100)
    options = {"noise_multiplier": 1.0, "expected_batch_size": 8}
    engine = engine_of(model, noise=GaussianNoise(seed=5), **options)
    engine.privatize(*batch(8))
    model.fitting = 0
    with pytest.raises(MemoryError) as caught:
        engine.privatize(*batch(1))
    assert caught.value.__notes__ == ["dpcore had 1 example in work at once."]
    assert engine.steps == 1 and all(p.grad is None for p in model.parameters())
    assert not engine.accumulator.flat.any()
    model.fitting = 100
    engine.privatize(*batch(9))
    untroubled = engine_of(Limited(100), noise=GaussianNoise(seed=5), **options)
    for count in (8, 9):
        untroubled.privatize(*batch(count))
    assert torch.equal(engine.accumulator.flat, untroubled.accumulator.flat)


def test_a_size_that_the_user_chose_is_not_changed() -> None:
    engine = engine_of(Limited(5), physical_batch_size=8, check_isolation=False)
    with pytest.raises(MemoryError) as caught:
        engine.clipped_sum(*batch(16))
    (note,) = caught.value.__notes__
    assert note == "dpcore had 8 examples in work at once; with physical_batch_size=None it would go on with fewer."


def test_other_errors_are_not_taken_for_it() -> None:
    engine = engine_of(Limited(5, lambda: RuntimeError("CUDA error: an illegal memory access was encountered")))
    with pytest.raises(RuntimeError, match="illegal"):
        engine.clipped_sum(*batch(16))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert ran_out(caught.value)


class Mixing(Limited):
    """Subtracts the batch's mean."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


@pytest.mark.parametrize("fitting", [2, 3, 5, 9])
def test_that_examples_mix_is_seen_with_as_few_as_fit(fitting: int) -> None:
    with pytest.raises(PrivacyError, match=r"depend|reach"):
        engine_of(Mixing(fitting)).clipped_sum(*batch(isolation.EXAMPLES))


def test_where_not_even_two_examples_fit_it_is_not_taken_for_seen() -> None:
    with pytest.raises(MemoryError) as caught:
        engine_of(Limited(1)).clipped_sum(*batch(9))
    assert caught.value.__notes__ == [
        "dpcore had 2 examples in work, to see whether the model keeps examples apart, which takes two."
    ]


LIMITED_PROCESS = """
    import resource, warnings
    from pathlib import Path
    import torch
    from torch import nn
    from torch.nn import functional as F
    from dpcore import Engine
    from dpcore.rerun.heap import give_back

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = 128
    layers = [layer for _ in range(6) for layer in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * width, 3))

    def losses(outputs, y):
        return F.cross_entropy(outputs, y, reduction="none")

    x, y = torch.randn(64, 128, width), torch.arange(64) % 3
    engine = Engine(model, losses, max_grad_norm=0.5, physical_batch_size=8)
    expected = {name: total.clone() for name, total in engine.clipped_sum(x, y).sums.items()}
    del engine
    engine = Engine(model, losses, max_grad_norm=0.5)
    engine.isolation.enabled = False
    give_back()  # what the heap keeps would be there beyond the limit
    sizes = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    now = int(sizes["VmSize"].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (now + MEGABYTES * 2**20, resource.RLIM_INFINITY))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = engine.clipped_sum(x, y).sums
    worst = max(float((found[name] - total).abs().max() / total.abs().max()) for name, total in expected.items())
    print(len([w for w in caught if "Memory ran out" in str(w.message)]), worst)
"""


def test_a_process_whose_memory_is_limited_goes_on() -> None:
    """The real thing: the CPU's allocator refuses, once and again."""
    code = textwrap.dedent(LIMITED_PROCESS.replace("MEGABYTES", "8"))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    times, worst = done.stdout.split()
    assert int(times) >= 1 and float(worst) < 1e-5
