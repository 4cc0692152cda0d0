"""dpcore's paths on a device beside float64 on the CPU: the first thing to run where there is a GPU.

    python -m tests.dpcore.on_device --device cuda          # or cpu; or simulated, a CUDA device that the CPU computes

Every path of docs/exactness.md that needs no compiled kernel, with random data and with positions that cancel, by the
engine, by the engine with Triton's kernels, by hooks and by the two-line loop. Of each: the error of the clipped sum,
and by how much the largest example alone exceeds C; with Triton, which kernels ran. Before them, a million numbers of
the kernel of noise beside float64's. It prints one JSON line for each and ends with 1 if any is wrong. It needs torch,
numpy and scipy alone, and Triton for its kernels.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.dpcore.simulated_cuda.device import leave

ALLOWED = {"random": 1e-4, "cancelling": 0.05}
"""Errors of a clipped sum: under cancellation by 1e4 float32 sums lose that much, on every device."""
TOLERATED = 5e-4
"""By how much the kernels' Gram norms may clip an example below C (``dpcore.gpu.contraction.TOLERATED_EXCESS``)."""
SHARE = 1e-6
DEGREE = 1e4
KERNELS = ("contraction_norm_sq", "convolution_norm_sq", "lookup_norm_sq")
NORMALS = 1_000_003


def main() -> int:
    """Run every path by every way; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu", "simulated"])
    parser.add_argument("--library", type=Path, help="where the simulated device is built; default a cache folder")
    parser.add_argument("--paths", help="only paths whose name contains this")
    parser.add_argument("--seconds", type=float, default=540.0, help="begin nothing after this time")
    options = parser.parse_args()
    os.environ["DPCORE_NATIVE"] = "0"
    device = options.device
    if device == "simulated":
        from tests.dpcore.simulated_cuda.device import SimulatedDevice, build

        folder = options.library or Path.home() / ".cache" / "dpbench"
        folder.mkdir(parents=True, exist_ok=True)
        SimulatedDevice(build(folder))  # before torch
        device = "cuda"
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA device; give --device cpu or --device simulated.", file=sys.stderr)
        return 2
    warnings.simplefilter("ignore")
    begun, wrong, left = time.monotonic(), 0, 0
    if (options.paths or "") in "noise":
        found = {"path": "noise", "way": "Triton", **_noise(device)}
        wrong += found["outcome"] in ("wrong", "crash")
        print(json.dumps(found), flush=True)
    for name, degree, way in _plan(options.paths or ""):
        if time.monotonic() - begun > options.seconds:
            left += 1
            continue
        found = {"path": name, "data": degree, "way": way, **_outcome(name, degree, way, device)}
        wrong += found["outcome"] != "right"
        print(json.dumps(found), flush=True)
    print(f"{wrong} wrong, {left} not begun", file=sys.stderr)
    return int(wrong > 0)


def _plan(part: str) -> Iterator[tuple[str, str, str]]:
    """Yield (path, data, way): all paths by the first way before the next way begins."""
    from tests.dpcore.exactness import PATHS

    names = [path.name for path in PATHS if not path.compiled and part in path.name]
    cancelling = {path.name for path in PATHS if path.cancels and not path.recorded}
    for way in ("engine", "engine, Triton", "loop", "hooks"):
        for data in ALLOWED:
            for name in names:
                if data == "random" or name in cancelling:
                    yield name, data, way


def _outcome(name: str, data: str, way: str, device: str) -> dict[str, Any]:
    """Return "right", "wrong" or "crash" and what was measured."""
    from tests.dpcore import exactness

    path = next(path for path in exactness.PATHS if path.name == name)
    batch = exactness.build(path, None if data == "random" else DEGREE)
    ran = dict.fromkeys(KERNELS, 0)
    try:
        with _counted(ran):
            error, share = _measured(batch.model, batch.x, batch.y, way, device)
    except Exception as failure:  # the next path is to run
        return {"outcome": "crash", "reason": f"{type(failure).__name__}: {failure}"[:500]}
    right = error <= ALLOWED[data] + (TOLERATED if "Triton" in way else 0.0) and share <= 1.0 + SHARE
    kernels = {"kernels": [kernel for kernel, calls in ran.items() if calls]} if "Triton" in way else {}
    return {"outcome": "right" if right else "wrong", "error": error, "share": share, **kernels}


def _noise(device: str) -> dict[str, Any]:
    """Return the largest error of the kernel's normals over the standard deviation; "no kernel" where there is none."""
    import torch

    from dpcore import gpu
    from dpcore.normals import LARGEST_ERROR, normals

    with _triton(True):
        added = torch.zeros(NORMALS, device=device)
        if not gpu.serves_noise(added):
            return {"outcome": "no kernel"}
        try:
            name = bytes(range(100, 116))
            gpu.draw_normals(added, 2.0, name, 0, add=True)
            gpu.draw_normals(added, 1.0, name, 0, add=True)
            written = torch.empty_like(added)
            gpu.draw_normals(written, 3.0, name, 0, add=False)
        except Exception as failure:
            return {"outcome": "crash", "reason": f"{type(failure).__name__}: {failure}"[:500]}
        true = 3.0 * normals(name, NORMALS)
        error = max(float((found.cpu().double() - true).abs().max()) for found in (added, written)) / 3.0
    return {"outcome": "right" if error <= LARGEST_ERROR else "wrong", "error": error}


@contextmanager
def _counted(calls: dict[str, int]) -> Iterator[None]:
    """Within, calls of the kernels for norms are counted."""
    from dpcore import gpu

    before = {name: getattr(gpu, name) for name in calls}

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    for name, function in before.items():
        setattr(gpu, name, counting(name, function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(gpu, name, function)


def _measured(model: Any, x: Any, y: Any, way: str, device: str) -> tuple[float, float]:
    """Return the relative error of the clipped sum, and the largest contribution of an example alone over C."""
    import torch

    from dpcore import reference
    from tests.dpcore.exactness import aligned

    norms = torch.stack([reference.norm(one) for one in reference.example_gradients(model, aligned, x, y)])
    bound = max(float(norms.median()), 1e-6)
    truth = reference.clipped_sum(model, aligned, x, y, bound).clipped
    sums = _sums(model, x, y, bound, way, device)
    wrong = sum(float((sums[name].double().cpu() - g).square().sum()) for name, g in truth.items())
    error = (wrong / max(sum(float(g.square().sum()) for g in truth.values()), 1e-300)) ** 0.5
    shares = []
    for i in range(len(x)):
        alone = _sums(model, x[i : i + 1], y[i : i + 1], bound, way, device)
        shares.append(sum(float(g.double().square().sum()) for g in alone.values()) ** 0.5 / bound)
    return error, max(shares)


def _sums(model: Any, x: Any, y: Any, bound: float, way: str, device: str) -> dict[str, Any]:
    """Return the clipped sum by name."""
    import torch

    from dpcore import Engine, PrivacyEngine
    from tests.dpcore.exactness import aligned

    model, x, y = copy.deepcopy(model).to(device), x.to(device), y.to(device)
    if way.startswith("engine"):
        with _triton("Triton" in way):
            return dict(Engine(model, aligned, max_grad_norm=bound, check_isolation=False).clipped_sum(x, y).sums)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x.cpu(), y.cpu()), batch_size=len(x))
    private, optimizer, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=data,
        noise_multiplier=0.0,
        max_grad_norm=bound,
        expected_batch_size=1,
        poisson_sampling=False,
        check_batches=False,
        **({"grad_sample_mode": "hooks"} if way == "hooks" else {}),
    )
    aligned(private(x), y).mean().backward()
    optimizer.step()
    return {name: p.grad for name, p in model.named_parameters()}


@contextmanager
def _triton(wanted: bool) -> Iterator[None]:
    """Within, the kernels are on or off. Where Triton does not run, the pure way is taken."""
    from dpcore import gpu

    before = os.environ.get("DPCORE_TRITON")
    os.environ["DPCORE_TRITON"] = "1" if wanted else "0"
    gpu.available.cache_clear()
    try:
        yield
    finally:
        os.environ.pop("DPCORE_TRITON") if before is None else os.environ.update(DPCORE_TRITON=before)
        gpu.available.cache_clear()


if __name__ == "__main__":
    leave(main())
