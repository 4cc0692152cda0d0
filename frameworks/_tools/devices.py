"""What a framework says of the CUDA device: ``python -m frameworks._tools.devices torch`` (or ``jax``) prints one
JSON object, without ``device`` where it sees none."""

from __future__ import annotations

import json
import sys
from typing import Any


def of_torch() -> dict[str, Any]:
    import torch

    facts: dict[str, Any] = {"version": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
        facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        facts["cudnn"] = torch.backends.cudnn.version()
    return facts


def of_jax() -> dict[str, Any]:
    import jax

    try:
        return {"version": jax.__version__, "device": jax.devices("cuda")[0].device_kind}
    except RuntimeError as error:
        return {"version": jax.__version__, "why_not": str(error)[:300]}


if __name__ == "__main__":
    print(json.dumps({"torch": of_torch, "jax": of_jax}[sys.argv[1]]()))
