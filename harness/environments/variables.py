"""List the shell's variables that reach a worker, installers and git, of which a record names what a library
may read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from harness.data.store import CACHE_VARIABLE, cache_folder, home
from harness.paths import ROOT

HANDED_ON = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|TZ|LANG|LANGUAGE|LC_\w+|TMPDIR|TEMP|TMP|XDG_\w+|"
    r"CUDA_VISIBLE_DEVICES|CUDA_HOME|CUDA_PATH|NVIDIA_VISIBLE_DEVICES|NVIDIA_DRIVER_CAPABILITIES|DPBENCH_\w+"
)
"""Where things are, and whose they are: no time depends on it. (The GPU that is used is in the record.)"""
NAMED = re.compile(
    r"DPCORE_\w+|LD_PRELOAD|LD_LIBRARY_PATH|GLIBC_TUNABLES|MALLOC_\w+|CXX|CUDA_(LAUNCH|MODULE|CACHE|DEVICE_MAX)_\w+|"
    r"NVIDIA_TF32_OVERRIDE|CUBLAS_\w+|CUDNN_\w+|TRITON_\w+"
)
"""What people set on purpose, and times depend on: handed on, named in the record, and never pooled with runs without
it. What is on neither list (ONEDNN_MAX_CPU_ISA, ATEN_CPU_CAPABILITY, OMP_NUM_THREADS, PYTHONMALLOC) stays outside."""
INSTALLER = re.compile(
    r"PIP_(INDEX_URL|EXTRA_INDEX_URL|NO_INDEX|FIND_LINKS|TRUSTED_HOST|CERT|CLIENT_CERT|PROXY|TIMEOUT|DEFAULT_TIMEOUT|"
    r"RETRIES|CACHE_DIR|NO_CACHE_DIR|CONFIG_FILE|KEYRING_PROVIDER)|GIT_(?!DIR|WORK_TREE|INDEX_FILE)\w+|SSH_\w+|"
    r"SSL_CERT_\w+|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|(?i:https?_proxy|all_proxy|no_proxy)|CC|CXX|CFLAGS|CXXFLAGS|LDFLAGS|"
    r"UV_(CACHE_DIR|LINK_MODE|\w*INDEX\w*|FIND_LINKS|OFFLINE|HTTP_TIMEOUT|INSECURE_HOST)"
)
"""Needed by installers and git beside the first list: where packages come from, and how the network is reached."""
HEAP = re.compile(r"MALLOC_(TRIM_THRESHOLD|MMAP_MAX|MMAP_THRESHOLD|TOP_PAD)_|GLIBC_TUNABLES")
"""Settings of glibc's heap that decide whether freed blocks are kept, as dpcore reads them. A contestant may declare
some to be faster, which its peak does not have to pay for."""
POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
COMPUTES = re.compile(
    r"lib(gomp|iomp|omp|mkl|openblas|blas|lapack|cu(?!rl)|nv|nccl|tcmalloc|jemalloc|mimalloc|torch|stdc)\S*\.so\S*"
)
"""Libraries that a time depends on. A folder with none of them, of a Python for instance, changes no time."""


def named() -> dict[str, str]:
    """Return the variables that a record names."""
    found = {k: v for k, v in sorted(os.environ.items()) if NAMED.fullmatch(k)}
    folders = [Path(part) for part in found.get("LD_LIBRARY_PATH", "").split(os.pathsep) if part]
    if not any(COMPUTES.fullmatch(file.name) for folder in folders for file in folder.glob("lib*")):
        found.pop("LD_LIBRARY_PATH", None)
    return found


def of_worker(
    threads: int, extra: Mapping[str, str], root: Path = ROOT, leaves_bytecode: bool = False
) -> dict[str, str]:
    """Return the worker's environment variables: it sees the repository, its thread count, and what is on the lists.

    Args:
        threads: of every pool.
        extra: further variables, which the contestant declares.
        root: the tree that it imports from.
        leaves_bytecode: whether Python keeps the bytecode of what it imports, for the processes after it.
    """
    return {
        **{k: v for k, v in os.environ.items() if HANDED_ON.fullmatch(k) or NAMED.fullmatch(k)},
        **of_every_worker(threads, root),
        **({"PYTHONDONTWRITEBYTECODE": ""} if leaves_bytecode else {}),
        # An index into all of nvidia-smi's devices then means the same device to CUDA.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        # A library that asks for a home folder finds one, whoever runs this.
        "HOME": str(home() or cache_folder().absolute()),
        # Workers of an old commit know fewer rules of where the cache is.
        CACHE_VARIABLE: str(cache_folder().absolute()),
        **extra,
    }


def declared(environment: Mapping[str, str], mode: str, shell: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a contestant declares, without the heap's where its memory is weighed, and where the
    shell sets the heap of all contestants."""
    as_installed = mode in {"memory", "probe"} or any(HEAP.fullmatch(name) for name in shell)
    return {k: v for k, v in environment.items() if not (as_installed and HEAP.fullmatch(k))}


def of_every_worker(threads: int, root: Path) -> dict[str, str]:
    """Return the variables that a worker has wherever it runs."""
    return {
        **dict.fromkeys(POOLS, str(threads)),
        "PYTHONPATH": str(root),
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        # A cache of compiled code would make the second process of a cell compile for nothing.
        "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    }


def of_installer(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of installers and git: no other place than the environment itself is installed
    to or looked into, whatever the shell says.

    Args:
        extra: further variables.
    """
    kept = {k: v for k, v in os.environ.items() if HANDED_ON.fullmatch(k) or INSTALLER.fullmatch(k)}
    # A user's configuration file may ask for --user, which no environment can.
    return {**kept, "PIP_USER": "0", "GIT_TERMINAL_PROMPT": "0", **extra}
