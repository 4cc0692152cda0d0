"""Makes torchvision importable beside a CPU build of torch, whose operators its compiled part does not find.

python -m tests.dpcore.torchvision_on_cpu MODULE ARGUMENTS    # runs python -m MODULE ARGUMENTS after that
"""

from __future__ import annotations

import runpy
import sys

import torch

_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def make_importable() -> None:
    """Define the two operators that torchvision asks for by name when timm or transformers import it.

    Nothing here calls them. Where torchvision is not installed, or its compiled part is loaded, nothing happens.
    """
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        pass
    except RuntimeError:
        for name in ("nms", "qnms"):
            _OPERATORS.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


if __name__ == "__main__":
    make_importable()
    module = sys.argv[1]
    del sys.argv[1]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
