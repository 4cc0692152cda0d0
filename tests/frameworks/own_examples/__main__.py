"""Each adapter beside its library's own example: ``python -m tests.frameworks.own_examples``, from a checkout's root.

    python -m tests.frameworks.own_examples                              # every contestant on every task
    python -m tests.frameworks.own_examples --contestants opacus-hooks --tasks vit

Updates are compared on the gate's small networks, times on the tasks. A comparison is one process in the
contestant's own environment, and prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from harness.environments import executor
from harness.environments import venv as env
from harness.environments.backend import last_json
from harness.plan import registry
from tests.frameworks.own_examples.worker import LOOPS

GPT2, VIT, LLAMA, WRN = (
    ("small-gpt2", "gpt2-lm"),
    ("small-vit", "vit"),
    ("small-llama", "llama-lora"),
    ("small-wrn", "wrn-16-2"),
)
SMALL, FULL = zip(GPT2, VIT, LLAMA, WRN, strict=True)
"""Updates are compared on the former, times on the latter."""
BOTH = ("mnist-cnn",)
TASKS = (*SMALL, *FULL, *BOTH)
EXAMPLES = {
    "backpack-batch-grad": BOTH,
    "dp_lora-hooks": LLAMA,
    "dpcore-native": (*GPT2, *VIT, *LLAMA),
    "fastdp-flat": (*VIT, *WRN, *BOTH),
    "jax-vmap": (*GPT2, *VIT, *LLAMA),
    "jax_privacy-clipped-grad": (*GPT2, *VIT),
    "jax_privacy_git-trainer": (*GPT2, *VIT),
    "keras-make-private": (*VIT, *BOTH),
    "microbatch-loop": (*GPT2, *VIT),
    "objax-private-gradients": (*WRN, *BOTH),
    "opacus-ghost": (*VIT, *LLAMA, *WRN),
    "opacus-hooks": (*GPT2, *VIT, *LLAMA),
    "opake-vmap": (*GPT2, *VIT, *LLAMA),
    "optax-aggregate": (*GPT2, *VIT),
    "private_transformers-default": (*GPT2, *VIT, *LLAMA, *BOTH),
    "pyvacy_git-microbatch": BOTH,
    "tfp-dpmodel": BOTH,
    "torch_func-eager": (*GPT2, *VIT, *LLAMA),
}
"""The tasks that a contestant's example trains. The transformers are trained by AdamW, which some adapters have not."""
LIMIT, LIMIT_ADAMW = 1e-5, 1e-3
"""Limits of updates by SGD, and of three steps of AdamW, as the gate has it: Adam divides small gradients by
themselves."""


def kinds(task: str) -> list[str]:
    """Return what is compared on a task: ``update``, ``turns``."""
    return [kind for kind, apart in (("update", FULL), ("turns", SMALL)) if task not in apart]


def compare(contestant: str, task: str, kind: str, turns: int) -> dict[str, Any]:
    """Run the worker in the contestant's environment.

    Raises:
        ToolFault: it failed; the message has its last lines.
        EnvironmentFault: the environment cannot be installed here.
    """
    chosen = registry.select([contestant])[0]
    place = env.ensure(chosen.framework, print)
    arguments = [contestant, kind, task, str(turns)]
    environment = {**chosen.variant.environment, "OMP_NUM_THREADS": "1"}
    worker = "tests.frameworks.own_examples.worker"
    return last_json(executor.run_tool(place.python, worker, arguments, 3600.0, environment))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestants", nargs="+", choices=sorted(LOOPS), default=sorted(LOOPS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--turns", type=int, default=6, help="pairs of steps that are timed")
    options = parser.parse_args()
    failed = False
    for task in options.tasks:
        for contestant in (name for name in options.contestants if task in EXAMPLES[name]):
            for kind in kinds(task):
                try:
                    print(json.dumps(compare(contestant, task, kind, options.turns)), flush=True)
                except (executor.ToolFault, env.EnvironmentFault) as fault:
                    failed = True
                    print(f"{contestant} on {task}: {fault}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
