"""Adapters that try to get out of their container, each in one way."""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from harness.contract import Adapter, Array, Setting
from harness.tasks import Task

HERE = Path(__file__).resolve()
RESULTS = Path("/dpbench/results")


class Prisoner(Adapter):
    def __init__(self, variant: str) -> None:
        self.variant = variant
        self.hoard: list[Array] = []

    def build(self, task: Task, setting: Setting, initial: Mapping[str, Array]) -> None:
        self.weights = {name: value.copy() for name, value in initial.items()}

    def place(self, x: Array, y: Array) -> None:
        self.rows = len(x)

    def step(self, indices: Array, mask: Array | None) -> None:
        for value in self.weights.values():
            value += 1e-3
        misbehave = getattr(self, "_" + self.variant.replace("-", "_"), None)
        if misbehave is not None:
            misbehave()

    def synchronize(self) -> None:
        pass

    def parameters(self) -> Mapping[str, Array]:
        return {name: value.copy() for name, value in self.weights.items()}

    def _escape(self) -> None:
        worked = [name for name, attempt in ATTEMPTS.items() if _works(attempt)]
        if worked:
            raise RuntimeError(f"escaped by: {', '.join(worked)}")

    def _work(self) -> None:
        product = np.full((160, 160), 0.5, dtype=np.float32)
        for _ in range(20):
            product = product @ product * np.float32(0.01)

    def _fill_results(self) -> None:
        _fill(RESULTS / "fill")

    def _fill_scratch(self) -> None:
        _fill(Path("/tmp/fill"))

    def _fork(self) -> None:
        while True:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)

    def _glutton(self) -> None:
        while True:
            self.hoard.append(np.ones(2**24, dtype=np.uint8))

    def _hang(self) -> None:
        time.sleep(3600)

    def _slow(self) -> None:
        time.sleep(2.0)

    def _vanish(self) -> None:
        os._exit(7)

    def _flood(self) -> None:
        self.variant = "honest"
        for number in range(3, 32):
            with suppress(OSError):
                os.write(number, b"\n" * 2**18)
        for _ in range(1024):
            os.write(2, b"x" * 2**16)

    def _invent(self) -> None:
        """Says nonsense where events are expected, and a result that is none, and goes."""
        for line in NONSENSE:
            for number in range(3, 32):
                with suppress(OSError):
                    os.write(number, line.encode() + b"\n")
        os._exit(0)

    def _spoil(self) -> None:
        """Leaves no weights where they are expected."""
        with suppress(OSError):
            (RESULTS / "snapshot.npz").write_bytes(b"nothing")

    def _endless(self) -> None:
        """A line of events that never ends."""
        while True:
            for number in range(3, 32):
                with suppress(OSError):
                    os.write(number, b"x" * 2**16)

    def _orphan(self) -> None:
        """Ends as if the harness had gone."""
        os._exit(88)

    def _mute(self) -> None:
        os.closerange(1, 100)
        time.sleep(3600)


NONSENSE = (
    "[" * 100_000,
    '{"event": ["result"]}',
    '{"event": "phase"}',
    '{"event": "phase", "phase": "[/nothing]"}',
    '{"event": "started", "machine": 3}',
    '{"event": "file", "name": 3, "data": "x"}',
    '{"event": "result", "state": ["ok"]}',
    '{"event": "result", "state": "ok", "epoch_seconds": "soon", "foreign_share": "much"}',
    '{"event": "done"}',
)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        while True:
            file.write(b"\0" * 2**20)


def _works(attempt: Callable[[], object]) -> bool:
    """An attempt fails by raising or by a false answer."""
    try:
        return bool(attempt())
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return False


def _is_answered(number: int) -> bool:
    """Whether the kernel looks at the arguments of a system call, which are nonsense, instead of refusing it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(number, 8, 0)
    return ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM)


def _write(path: Path) -> bool:
    path.write_text("here")
    with suppress(OSError):
        path.unlink()
    return True


def _connect() -> bool:
    with socket.create_connection(("192.0.2.1", 80), timeout=2):
        return True


def _has_interfaces() -> bool:
    return any(name != "lo" for _, name in socket.if_nameindex())


def _writable() -> bool:
    """Anything but the results, ``/tmp`` and the shared memory: all three are memory of limited size."""
    skipped = {"/proc", "/sys", "/dev", "/tmp", str(RESULTS)}
    for root in ("/", "/proc/sys", "/sys/fs/cgroup"):
        for folder, inner, files in os.walk(root):
            regular = filter(os.path.isfile, (os.path.join(folder, name) for name in files))
            for path in (folder, *regular):
                if os.access(path, os.W_OK):
                    print(f"{path} can be written", file=sys.stderr)
                    return True
            inner[:] = [name for name in inner if os.path.join(folder, name) not in skipped]
    return False


def _more_processors() -> bool:
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return len(os.sched_getaffinity(0)) > 1


def _status(key: str) -> str:
    return next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))


ATTEMPTS: dict[str, Callable[[], object]] = {
    "a connection": _connect,
    "a network interface": _has_interfaces,
    "being root": lambda: os.geteuid() == 0 or os.getuid() == 0,
    "becoming root": lambda: os.setuid(0) is None,
    "a capability": lambda: int(_status("CapEff:"), 16) or int(_status("CapBnd:"), 16),
    "new privileges": lambda: _status("NoNewPrivs:") != "1",
    "writing to the root": lambda: _write(Path("/escaped")),
    "writing to the environment": lambda: _write(Path("/opt/env/escaped")),
    "writing to the harness": lambda: _write(HERE.parents[0] / "escaped"),
    "writing to the code": lambda: _write(Path("/dpbench/code/harness/escaped")),
    "writing to the data": lambda: _write(next(Path("/dpbench/cache/data").iterdir()) / "escaped"),
    "writing elsewhere": _writable,
    "another processor": _more_processors,
    "a user namespace": lambda: ctypes.CDLL(None).unshare(0x10000000) == 0,
    "a secret of the harness": lambda: any("not-for-contestants" in value for value in os.environ.values()),
    "the engine's socket": lambda: [p for p in ("/var/run/docker.sock", "/run/docker.sock") if Path(p).exists()],
    "a block device": lambda: [p for p in Path("/dev").iterdir() if p.is_block_device()],
    "the host's processes": lambda: sum(p.name.isdigit() for p in Path("/proc").iterdir()) > 8,
    "a socket to the hypervisor": lambda: socket.socket(40, socket.SOCK_STREAM),
    "io_uring": lambda: _is_answered(425),
    "the key of the seals": lambda: list(Path(os.environ["DPBENCH_CACHE"]).rglob("key")),
    "mounting": lambda: os.system("mount -t tmpfs none /mnt 2>/dev/null") == 0,
}


def create(variant: str) -> Prisoner:
    return Prisoner(variant)
