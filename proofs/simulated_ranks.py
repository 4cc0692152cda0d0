"""Measure rank 0 of many, alone: ``python -m proofs.simulated_ranks --model 1b --ranks 8``.

torch's fake process group makes this process rank 0 of 8 or 64, whose collectives carry nothing: what the others would
send is made up of this rank's own shards, so that numbers stay finite. Tensors are real, and so is the peak of resident
memory; there are no other ranks, no wire and no result. Beside it stand a formula for the state, and how many numbers
of the noise rank 0 draws, which has the most rows of every parameter. ``--groups 2``: HSDP. ``--layers 4``: fewer
layers of a model's shapes, where it would take too long.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from dpcore.examples.llama_fsdp import Llama, mean_loss
from proofs.sharded_memory import GIVEN_BACK, _memory, counted

MODELS = {
    "small": {"words": 16_384, "width": 512, "layers": 4, "head": 64},
    "1b": {"words": 128_256, "width": 2048, "layers": 16, "head": 64},
    "8b": {"words": 128_256, "width": 4096, "layers": 32, "head": 128},
}
STEPS = 2


class Echo(TorchDispatchMode):
    """Lets the other ranks answer with what this one says: gathered are copies, scattered is this rank's own part."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call, and fill what the fake group leaves as it was."""
        result = function(*args, **(kwargs or {}))
        name = str(function).split(".")[1] if str(function).startswith("c10d") else ""
        if name == "_allgather_base_":
            mine = args[1].reshape(-1)  # which may lie in the output already
            for other in args[0].view(-1, mine.numel()):
                if other.data_ptr() != mine.data_ptr():
                    other.copy_(mine)
        elif name == "_reduce_scatter_base_":
            args[0].view(-1).copy_(args[1].reshape(-1)[: args[0].numel()])
        elif name == "allgather_":
            for outputs, mine in zip(args[0], args[1], strict=True):
                for output in outputs:
                    output.copy_(mine)
        return result


def _sharded(shape: dict[str, int], ranks: int, groups: int) -> nn.Module:
    with torch.device("meta"):
        model = Llama(**shape)
    mesh = init_device_mesh("cpu", (ranks,) if groups == 1 else (groups, ranks // groups))
    for part in (model.embedding, *model.layers, model.last, model):
        fully_shard(part, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, param in model.named_parameters():
            local: Tensor = param.to_local()
            local.fill_(1.0) if "norm" in name else local.normal_(0.0, 0.02)
    return model


def work(side: str, shape: dict[str, int], ranks: int, tokens: int, groups: int) -> None:
    """Be rank 0, and print what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    if side == "dpcore":
        from dpcore import PrivacyEngine
    before = _memory("VmRSS")
    peaks = []
    with Echo():
        model: Any = _sharded(shape, ranks, groups)
        held = sum(p.to_local().numel() for p in model.parameters())
        count = sum(p.numel() for p in model.parameters())
        stepper: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        words = torch.randint(shape["words"], (ranks, tokens), generator=torch.Generator().manual_seed(1))
        if side == "dpcore":
            model, stepper, _ = PrivacyEngine(seed=3).make_private(
                module=model,
                optimizer=stepper,
                data_loader=DataLoader(TensorDataset(words), batch_size=ranks),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
                check_batches=False,
                check_isolation=False,
            )
        drawn = counted(stepper.noise) if side == "dpcore" else []
        for _ in range(STEPS):
            drawn.clear()
            Path("/proc/self/clear_refs").write_text("5")
            stepper.zero_grad()
            mean_loss(model, words[:1]).backward()
            stepper.step()
            peaks.append(_memory("VmHWM") - before)
    print(json.dumps({"peak": peaks[-1], "parameters": count, "held": held, "drawn": sum(drawn)}))


def _say_formula() -> None:
    print("by formula, nothing was run: MB of a rank's shards, sums and AdamW's state (16 bytes a number), by ranks")
    for name, shape in MODELS.items():
        with torch.device("meta"):
            count = sum(p.numel() for p in Llama(**shape).parameters())
        states = ", ".join(f"{ranks}: {16 * count / ranks / 1e6:,.0f}" for ranks in (8, 64))
        print(f"{name:6} {count / 1e6:,.0f} million parameters; {states}")


def main() -> None:
    """Print a line, or be one side of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=tuple(MODELS), default="small")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--groups", type=int, default=1, help="groups of ranks that hold the model once each (HSDP)")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--layers", type=int, help="how many layers, where not all")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--formula", action="store_true", help="say the state of all models, and run nothing")
    given = parser.parse_args()
    if given.groups < 1 or given.ranks % given.groups:
        parser.error(f"--groups is {given.groups}; it must divide --ranks, {given.ranks}, into equal groups.")
    if given.formula:
        _say_formula()
        return
    whole = MODELS[given.model]["layers"]
    layers = given.layers or whole
    if given.side:
        work(given.side, MODELS[given.model] | {"layers": layers}, given.ranks, given.tokens, given.groups)
        return
    found = {}
    for side in ("ordinary", "dpcore"):
        numbers = {"--ranks": given.ranks, "--groups": given.groups, "--tokens": given.tokens, "--layers": layers}
        again = [*("--model", given.model, "--side", side), *(str(word) for one in numbers.items() for word in one)]
        done = subprocess.run(
            [sys.executable, "-m", "proofs.simulated_ranks", *again],
            env=os.environ | GIVEN_BACK | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        found[side] = json.loads(done.stdout.strip().splitlines()[-1])
    ordinary, private = (found[side]["peak"] / 1e6 for side in ("ordinary", "dpcore"))
    state, count = 16 * found["dpcore"]["held"] / 1e6, found["dpcore"]["parameters"]
    print(
        f"simulated: {given.model} ({layers} of {whole} layers), {count / 1e6:,.0f} million parameters, rank 0 of "
        f"{given.ranks} in {given.groups} group(s), AdamW, {given.tokens} tokens: by formula {state:,.0f} MB of state "
        f"(16 bytes a number held); peaks {ordinary:,.0f} MB ordinary, {private:,.0f} MB dpcore, ratio "
        f"{private / ordinary:.2f}; numbers drawn over P / W: {found['dpcore']['drawn'] * given.ranks / count:.4f}"
    )


if __name__ == "__main__":
    main()
