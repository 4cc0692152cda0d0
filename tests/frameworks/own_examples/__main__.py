"""Each adapter beside its library's own example: ``python -m tests.frameworks.own_examples``, from a checkout's root.

    python -m tests.frameworks.own_examples                              # what is missing, and the page
    python -m tests.frameworks.own_examples --contestants opacus-hooks --tasks vit
    python -m tests.frameworks.own_examples --page                       # the page of the records that are there

Updates are compared on the gate's small networks, times on the tasks. A comparison is one process in the
contestant's own environment; one that is on record is not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from harness.environments import executor
from harness.environments import venv as env
from harness.environments.backend import last_json
from harness.plan import registry
from tests.frameworks.own_examples import lines as lines_of
from tests.frameworks.own_examples.worker import BOUNDS, LOOPS, OTHER_BOUNDS, SIGMA, WARM_UP

RECORDS = registry.ROOT / "results" / "own-examples"
PAGE = registry.ROOT / "results" / "findings" / "2026-11-24-own-examples.md"
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
WORDS = {"update": "update", "turns": "time"}
LIMIT, LIMIT_ADAMW = 1e-5, 1e-3
"""Limits of updates by SGD, and of three steps of AdamW, as the gate has it: Adam divides small gradients by
themselves."""
SLOWER = 1.05
"""An adapter is as fast as the example up to here: rounds of a shared machine differ by as much."""
NOT_COMPARED = {
    "dp_lora-mean-loss on small-llama, on llama-lora": "its README takes a mean loss, by which it clips wrongly and "
    "the gate rejects it (its NOTES.md), so its example above has the losses summed",
    "fastdp-flat on small-gpt2, on gpt2-lm": "it takes the norm of a tied head from one of its two uses, and the gate "
    "rejects it (its NOTES.md)",
    "opacus-ghost on small-gpt2, on gpt2-lm": "Opacus refuses a tied head in its ghost mode",
}
WITHOUT_EXAMPLE = {
    "jaxdpopt": "its example, a notebook, trains a large pretrained network; the adapter calls its functions in that "
    "order (its NOTES.md)",
    "pyvacy": "the release on the package index does not clip right, and the gate rejects it (its NOTES.md); its code "
    "at the paper's commit is pyvacy_git",
    "tfp_xla": "no library, but a step of the paper's authors, completed here",
}
SOURCES = {
    "backpack-batch-grad": "page on individual gradients: `extend`, `backpack(BatchGrad())`, then clip, noise, step",
    "dp_lora-hooks": "README: `make_private`, `step(get_per_sample_grads())`; the losses summed, where its README "
    "takes a mean, by which it clips wrongly",
    "dpcore-native": "README: `make_private`, the loop as it was",
    "fastdp-flat": "README: `PrivacyEngine`, `attach`, the loop as it was; flat clipping",
    "jax-vmap": "JAX's repository, the script on private SGD: clipping inside `vmap`",
    "jax_privacy-clipped-grad": "introduction: `clipped_grad`, `gaussian_privatizer`, Optax",
    "jax_privacy_git-trainer": "page on training: `BandMFConfig` of one band, `DPTrainer.train_step`",
    "keras-make-private": "page on Keras: `DPKerasConfig`, `make_private`, `compile`; a step by `train_on_batch`; "
    "AdamW with the paper's epsilon, for Keras' own is 0.1 off after three steps",
    "microbatch-loop": "none of its own: batches of one, `clip_grad_norm_`, a sum",
    "objax-private-gradients": "script on private MNIST: `PrivateGradValues`, `SGD`, one `Jit`",
    "opacus-ghost": "page on ghost clipping: `make_private` with the criterion",
    "opacus-hooks": "README: `make_private`, the loop as it was",
    "opake-vmap": "README: `clipped_grad`, `gaussian_noise`, `opake.optimizers`",
    "optax-aggregate": "API page: `differentially_private_aggregate` first in a chain",
    "private_transformers-default": "README: `PrivacyEngine`, `attach`, `step(loss=losses)`",
    "pyvacy_git-microbatch": "tutorial: `microbatch_step` for each example, then `step`",
    "tfp-dpmodel": "docstring of `DPModel`: `compile`; a step by `train_on_batch`",
    "torch_func-eager": "PyTorch's page on per-sample gradients: `vmap(grad(…))`, then clip, noise, step",
}


def missing(contestants: Iterable[str], tasks: Iterable[str]) -> list[tuple[str, str, str]]:
    """Return which (contestant, task, kind) can be compared and are not on record. Kinds: ``update``, ``turns``."""
    wanted = [(c, t, kind) for t in tasks for c in contestants if is_comparable(c, t) for kind in kinds(t)]
    return [(c, t, kind) for c, t, kind in wanted if kind not in recorded(c, t)]


def kinds(task: str) -> list[str]:
    """Return what is compared on a task."""
    return [kind for kind, apart in (("update", FULL), ("turns", SMALL)) if task not in apart]


def recorded(contestant: str, task: str) -> dict[str, Any]:
    """Return the record of a contestant on a task; empty where there is none."""
    path = _record(contestant, task)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def is_comparable(contestant: str, task: str) -> bool:
    """Whether there is an example of the contestant for the task."""
    return task in EXAMPLES[contestant]


def _record(contestant: str, task: str) -> Path:
    return RECORDS / f"{contestant}-{task}.json"


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


HEAD = """# Each adapter beside its library's own example

Written by `python -m tests.frameworks.own_examples --page` from [results/own-examples](../own-examples). On the left is
the benchmark's adapter, on the right what the library's public documentation tells its users to write, in our own words
([loops](../../tests/frameworks/own_examples)): the same network, weights, batch and bound C, in one process of the
library's own pinned environment. Both get the batch from memory, so a loader's time is in neither.

## The same update?

Noise is zero, the batch has 24 examples, and the networks are those of the gate. The distance of the example's update
from the adapter's, over the length of that: the largest of one step of SGD at C = {bounds}
({others}), where all, some and none of the examples are clipped (limit {limit:g}); and
after three steps of the task's AdamW (limit {adamw:g}), where it has that. Frozen weights (small-llama trains LoRA
alone) have to stay as they were, bit by bit, in both.
Control: a step of SGD where all are clipped and the example's C is 1 % higher. Zero: both run the same operations.

| contestant | its example | versions | network | SGD | AdamW | control |
|:--|:--|:--|:--|--:|--:|--:|
"""

TIMES = """
## The same time?

The benchmark's tasks at 32 examples, sigma = {sigma:g}, the task's optimizer, one thread. Processor seconds of a whole
step, the two in turns after {warm_up} steps each; median, and in brackets the range of the pairs' ratios. Below 1 the
adapter is faster. The machine ran other work, so seconds are rough.

| contestant | task | pairs | adapter | example | adapter / example |
|:--|:--|--:|--:|--:|:--|
"""


CHANGES = """
## What a user changes

Statements of the example that are added to the same library's loop without DP, changed in it or taken out of it,
however long they are; a helper function that only one of the two has counts whole. The number says how much there is to
write and to get wrong, not how good the library is. `jax-vmap` writes AdamW by hand, as its script does SGD: some ten
of its lines.

| contestant | lines |
|:--|--:|
"""


def page(records: Iterable[Mapping[str, Any]]) -> str:
    """Return the page of records of both kinds."""
    found = sorted(records, key=lambda r: (r["contestant"], r["task"]))
    bounds, *of_others = (", ".join(f"{b:g}" for b in of) for of in (BOUNDS, *OTHER_BOUNDS.values()))
    others = "; ".join(f"{task}: {of}" for task, of in zip(OTHER_BOUNDS, of_others, strict=True))
    lines = [HEAD.format(bounds=bounds, others=others, limit=LIMIT, adamw=LIMIT_ADAMW)]
    lines += [_update_row(r) for r in found if "update" in r]
    lines.append(TIMES.format(sigma=SIGMA, warm_up=WARM_UP))
    timed = [r for r in found if "turns" in r]
    lines += [_time_row(r) for r in timed]
    slow = [f"{r['contestant']} on {r['task']} ({r['turns']['ratio']:.2f})" for r in timed if is_slower(r)]
    lines.append(f"\nSlower than its example by more than 5 %: {', '.join(slow) or 'none of these'}.\n")
    counts = sorted((lines_of.changed(contestant), contestant) for contestant in LOOPS)
    lines += [CHANGES, *(f"| {contestant} | {count} |\n" for count, contestant in counts)]
    return "".join(lines) + _not_compared(found)


def is_slower(record: Mapping[str, Any]) -> bool:
    """Whether the adapter takes longer than the example by more than SLOWER."""
    return bool(record["turns"]["ratio"] > SLOWER)


def _update_row(record: Mapping[str, Any]) -> str:
    contestant, versions = record["contestant"], ", ".join(f"{k} {v}" for k, v in sorted(record["versions"].items()))
    distances = record["update"]
    adamw = f"{distances['adamw']:.1e}" if "adamw" in distances else "–"
    return (
        f"| {contestant} | {SOURCES[contestant]} | {versions} | {record['task']} "
        f"| {distances['sgd']:.1e} | {adamw} | {distances['control']:.1e} |\n"
    )


def _time_row(record: Mapping[str, Any]) -> str:
    ours, theirs = (record["turns"][f"{of}_seconds"] for of in ("adapter", "example"))
    ratios = [a / e for a, e in zip(ours, theirs, strict=True)]
    middles = " | ".join(f"{statistics.median(seconds):.3f}" for seconds in (ours, theirs))
    return (
        f"| {record['contestant']} | {record['task']} | {len(ours)} | {middles} "
        f"| {record['turns']['ratio']:.2f} [{min(ratios):.2f}, {max(ratios):.2f}] |\n"
    )


def _not_compared(found: Iterable[Mapping[str, Any]]) -> str:
    """Return a list of what has no row, and why."""
    there = {(r["contestant"], r["task"], kind) for r in found for kind in ("update", "turns") if kind in r}
    lines = ["\n## What was not compared\n\n"]
    lines += [f"- {what}: {reason}.\n" for what, reason in NOT_COMPARED.items()]
    comparable = [(c, t, kind) for t in TASKS for c in LOOPS if is_comparable(c, t) for kind in kinds(t)]
    left = [f"{c} on {t} ({WORDS[kind]})" for c, t, kind in comparable if (c, t, kind) not in there]
    if left:
        lines.append(f"- Not measured yet: {', '.join(left)}.\n")
    private = {f.name for f in registry.frameworks().values() if any(v.private for v in f.variants)}
    compared = {contestant.split("-", 1)[0] for contestant in LOOPS}
    for framework in sorted(private - compared):
        lines.append(f"- {framework}: {WITHOUT_EXAMPLE.get(framework, 'no example is written yet')}.\n")
    return "".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contestants", nargs="+", choices=sorted(LOOPS), default=sorted(LOOPS))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--turns", type=int, default=6, help="pairs of steps that are timed")
    parser.add_argument("--page", action="store_true", help="write the page of the records, and end")
    options = parser.parse_args()
    failed = False
    if not options.page:
        RECORDS.mkdir(exist_ok=True)
        for contestant, task, kind in missing(options.contestants, options.tasks):
            try:
                found = recorded(contestant, task) | compare(contestant, task, kind, options.turns)
            except (executor.ToolFault, env.EnvironmentFault) as fault:
                failed = True
                print(f"{contestant} on {task}: {fault}", file=sys.stderr)
                continue
            _record(contestant, task).write_text(json.dumps(found, indent=1) + "\n")
            print(json.dumps(found), flush=True)
    PAGE.write_text(page([json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
