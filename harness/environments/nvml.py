"""Memory of a process on the GPU as the driver counts it. Optional: without nvidia-ml-py, a driver, or sight of the
process (in a container the driver names the processes of the host), there is simply no such figure."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import psutil

METRIC = "nvml_process_peak"
"""The highest of what was seen, a look every tenth of a second: all pools and the CUDA context included."""


class Watch:
    """Looks at one process and its children, on all GPUs together."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak = 0
        self._gpus: list[Any] = []
        try:
            import pynvml
        except ImportError:
            return
        self._nvml = pynvml
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self._gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]

    def look(self) -> None:
        if not self._gpus:
            return
        family = {self._pid}
        with suppress(psutil.Error):
            family |= {child.pid for child in psutil.Process(self._pid).children(recursive=True)}
        total = 0
        for gpu in self._gpus:
            with suppress(self._nvml.NVMLError):
                found = self._nvml.nvmlDeviceGetComputeRunningProcesses(gpu)
                total += sum(process.usedGpuMemory or 0 for process in found if process.pid in family)
        self._peak = max(self._peak, total)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by metric, or nothing where the process was never seen."""
        return {METRIC: self._peak} if self._peak else {}
