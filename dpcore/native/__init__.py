"""The optional compiled part: C++ kernels for what torch's operators do badly on a CPU.

Nothing is compiled unless asked: ``python -m dpcore.native`` (or :func:`build`) compiles the sources of this folder for
this very processor into the user's cache, from where later processes load them. Without it, or with the environment
variable ``DPCORE_NATIVE=0``, every rule runs its pure torch twin, which computes the same.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread")
COMPILERS = ("c++", "g++", "clang++")
REMEDY = "not in use (python -m dpcore.native compiles them, where there is a C++ compiler)"


class NativeBuildError(RuntimeError):
    """The compiled part could not be built; the pure torch path remains."""


def _processor() -> str:
    """What ``-march=native`` depends on: a library for another processor may hold instructions that this one lacks."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def path() -> Path:
    """Where the library of these sources, flags and this processor lies, or would lie."""
    digest = hashlib.sha256("\0".join([*FLAGS, platform.machine(), _processor()]).encode())
    for source in (*HEADERS, *SOURCES):
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dpcore" / f"native-{digest.hexdigest()[:16]}.so"


def build() -> Path:
    """Compiles the library unless it is there, and returns its path. Raises NativeBuildError without a C++ compiler."""
    target = path()
    if not target.exists():
        compiler = os.environ.get("CXX") or next((c for c in COMPILERS if shutil.which(c)), None)
        if compiler is None:
            raise NativeBuildError(f"No C++ compiler ({', '.join(COMPILERS)}) was found; install one, or set CXX.")
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            command = [*compiler.split(), *FLAGS, "-o", str(made), *map(str, SOURCES)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode:
                raise NativeBuildError(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
            os.replace(made, target)
    reload()
    return target


@functools.cache
def _library() -> ctypes.CDLL | None:
    if os.environ.get("DPCORE_NATIVE") == "0":
        return None
    built = path()
    return ctypes.CDLL(str(built)) if built.exists() else None


def reload() -> None:
    """Looks for the library again, after a build or a change of the environment."""
    _library.cache_clear()


_switched_off = False


def available() -> bool:
    """Whether the compiled part is in use."""
    return _library() is not None and not _switched_off


@contextmanager
def disabled() -> Iterator[None]:
    """Within, every rule runs its pure torch twin: to compare the two."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


def serves(*tensors: Tensor) -> bool:
    """Whether kernels can take these tensors: float32 on a CPU, outside of tracing, with memory of their own that holds
    their values (not their negatives, as that of ``z.conj().imag`` does)."""
    return (
        available()
        and all(
            t.dtype == torch.float32
            and t.device.type == "cpu"
            and type(t) is Tensor
            and not t.is_neg()
            and not t._is_zerotensor()
            for t in tensors
        )
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.maybe_current_level()
    )


def serves_graph(*tensors: Tensor) -> bool:
    """As :func:`serves`, for tensors without values while a graph is traced that will call the kernels."""
    return available() and all(
        isinstance(t, FakeTensor) and t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors
    )


def _call(name: str, tensors: Sequence[Tensor], sizes: Sequence[int], *numbers: float, strided: int = 0) -> None:
    """``strided``: so many tensors at the beginning may have any strides, which are among the sizes."""
    library = _library()
    assert library is not None
    for tensor in tensors[strided:]:
        if not tensor.is_contiguous():
            raise ValueError(f"{name} got a tensor of strides {tensor.stride()} for shape {tuple(tensor.shape)}.")
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in tensors]
    getattr(library, name)(*pointers, *(ctypes.c_int64(s) for s in sizes), *map(ctypes.c_double, numbers))


def lstm_forward(z: Tensor, weight: Tensor, gates: Tensor, h: Tensor, c: Tensor, tanh_c: Tensor, reverse: bool) -> None:
    """The loop of :class:`dpcore.rules.recurrent_loops.LstmRecurrence`: from z [T, B, 4H] and the first rows of h and
    c [T + 1, B, H] (the last ones in reverse) fills in gates [T, B, 4H], which may be z itself, tanh_c [T, B, H], h and
    c."""
    steps, batch, hidden = tanh_c.shape
    sizes = (steps, batch, hidden, int(reverse), torch.get_num_threads())
    _call("dpcore_lstm_forward", (z, weight.contiguous(), gates, h, c, tanh_c), sizes)
    torch.autograd.graph.increment_version(gates)


def lstm_backward(
    gates: Tensor,
    c: Tensor,
    tanh_c: Tensor,
    weight: Tensor,
    grad_h: Tensor,
    grad_c: Tensor,
    delta: Tensor,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """From the gradients at all h [T, B, H] and the last c, fills in δ [T, B, 4H], which may be ``gates`` itself, and
    returns the gradients at the first h and c [B, H]."""
    steps, batch, hidden = tanh_c.shape
    dc = grad_c.clone(memory_format=torch.contiguous_format)
    dh = torch.empty_like(dc)
    sizes = (steps, batch, hidden, int(reverse), torch.get_num_threads())
    tensors = (gates, c, tanh_c, weight.contiguous(), grad_h.contiguous(), delta, dh, dc)
    _call("dpcore_lstm_backward", tensors, sizes)
    torch.autograd.graph.increment_version(delta)
    return dh, dc


def contraction_grad_sample(g: Tensor, x: Tensor) -> Tensor:
    """[B, d, p]: Σ_t g_t x_tᵀ of each example, for g [B, T, d] and x [B, T, p] of any strides."""
    g, x = (t if t.stride(2) == 1 else t.contiguous() for t in (g, x))
    out = x.new_empty((len(x), g.shape[2], x.shape[2]))
    sizes = (*g.shape, x.shape[2], *g.stride()[:2], *x.stride()[:2], torch.get_num_threads())
    _call("dpcore_contraction_grad_sample", (g, x, out), sizes, strided=2)
    return out


def conv2d_grad_sample(
    x: Tensor, grad: Tensor, kernel: tuple[int, int], stride: tuple[int, ...], padding: tuple[int, ...]
) -> Tensor:
    """[B, d, c, kh, kw], channels-last in memory: the weight gradient of each example of a convolution with inputs x
    [B, c, h, w] and output gradients [B, d, oh, ow], without groups or dilation."""
    x, grad = (t.permute(0, 2, 3, 1).contiguous() for t in (x, grad))
    out = x.new_empty((len(x), grad.shape[3], *kernel, x.shape[3]))
    sizes = (*x.shape, grad.shape[3], *kernel, *stride, *padding, *grad.shape[1:3], torch.get_num_threads())
    _call("dpcore_conv2d_grad_sample", (x, grad, out), sizes)
    return out.movedim(-1, 2)


def count_tokens(ids: Tensor, rows: int, skipped: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of ids [B, T], each in [0, rows): the different ones of each example (int32) and how often it holds each
    (float32), those of example b at starts[b] : starts[b + 1] (int32 [B + 1]), and the sums of the squared counts [B].
    ``skipped`` does not count."""
    batch, length = ids.shape
    # torch.empty alone would follow torch.set_default_dtype and set_default_device; the kernel does not.
    tokens, counts = ids.new_empty(ids.numel(), dtype=torch.int32), ids.new_empty(ids.numel(), dtype=torch.float32)
    starts, squares = ids.new_empty(batch + 1, dtype=torch.int32), ids.new_empty(batch, dtype=torch.float32)
    sizes = (batch, length, rows, -1 if skipped is None else skipped)
    _call("dpcore_count_tokens", (ids, tokens, counts, starts, squares), sizes)
    return tokens, counts, starts, squares


def add_by_token(out: Tensor, tokens: Tensor, counts: Tensor, starts: Tensor, vectors: Tensor) -> None:
    """out[tokens[n]] += counts[n] * vectors[b] for all n in starts[b] : starts[b + 1]; out [V, d], vectors [B, d]."""
    sizes = (len(vectors), *out.shape, torch.get_num_threads())
    _call("dpcore_add_by_token", (tokens, counts, starts, vectors.contiguous(), out), sizes)


def add_normals(target: Tensor, std: float, words: bytes) -> None:
    """target += std * the normals, to rounding, that torch draws into a tensor of this length (16 or more) from a
    Mersenne twister whose state is ``words`` (624, little-endian)."""
    state = torch.frombuffer(bytearray(words), dtype=torch.int32)
    _call("dpcore_add_normals", (state, target), (target.numel(),), std)
    torch.autograd.graph.increment_version(target)
