"""Kill a rank of a private training at many moments: ``python -m proofs.elastic_kills [--moments N]``.

Two ranks train a model in shards under ``torchrun --max-restarts`` and save after every step. One of them dies in the
midst of a step (SIGKILL) or of saving, both begin anew from the file, and in the end weights, epsilon and every update
that was ever released are, bit for bit, those of a run that nothing has happened to.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import PrivacyEngine, shards_file

RANKS, STEPS, AT = 2, 5, 3
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Ranks that begin anew may find addresses of dead ones in a store that torchrun shares (pytorch's issue 135712)."""
MOMENTS = {
    "in the forward pass": 1,
    "in the backward pass": 0,
    "between two pieces": 1,
    "while sums are exchanged": 1,
    "within the noise": 0,
    "between release and update": 1,
    "between update and count": 0,
    "between the step and saving": 1,
    "while shards are written": 1,
    "between shards and file": 0,
    "with half a file written": 0,
    "before old shards are removed": 0,
    "while the next start loads": 1,
}
"""The rank that is killed, by the moment."""


class Killer:
    """Kills this process at one of ``MOMENTS`` within one step, if it is of the first start and of the right rank."""

    def __init__(self, moment: str) -> None:
        """Be ready to kill at ``moment``; at no other name."""
        self.moment = moment
        self.step = 0
        self.start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    def at(self, moment: str) -> None:
        """Kill, if this is the moment."""
        first = moment == self.moment and self.start == 0 and self.step == AT
        # Loading comes behind another kill.
        of_start = self.moment == "while the next start loads" and (
            (moment == "in the forward pass" and self.start == 0 and self.step == AT)
            or (moment == self.moment and self.start == 1)
        )
        if (first or of_start) and dist.get_rank() == MOMENTS[self.moment]:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str, before: str = "", after: str = "") -> None:
        """Kill at a call of ``owner.name``, as it begins or when it is done."""
        call = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            self.at(before)
            result = call(*args, **kwargs)
            self.at(after)
            return result

        setattr(owner, name, run)


class Words(nn.Module):
    """A small model with dropout, which draws from random numbers of a rank's own."""

    def __init__(self, killer: Killer) -> None:
        """Make the layers."""
        super().__init__()
        self.table, self.layer, self.last = nn.Embedding(30, 16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.killer = killer

    def forward(self, words: Tensor) -> Tensor:
        """[B, 3] of words [B, T]."""
        x = self.layer(self.table(words)).tanh()
        if torch.is_grad_enabled() and x.requires_grad:
            self.killer.at("in the forward pass")
            x.register_hook(lambda _: self.killer.at("in the backward pass"))
        return self.last(F.dropout(x, 0.3).mean(1))


def _digest(optimizer: torch.optim.Optimizer) -> str:
    found = hashlib.sha256()
    for group in optimizer.param_groups:
        for p in group["params"]:
            found.update(p.grad.to_local().numpy().tobytes())
    return found.hexdigest()[:32]


def work(folder: Path, moment: str, steps: int) -> None:
    """Be one rank: go on from the file where there is one, save before the first step and after each."""
    dist.init_process_group("gloo")
    killer, rank = Killer(moment), dist.get_rank()
    torch.manual_seed(0)
    model = Words(killer)
    mesh = init_device_mesh("cpu", (RANKS,))
    for part in (model.layer, model):
        fully_shard(part, mesh=mesh)
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(30, (40, 6), generator=draw)
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = PrivacyEngine()  # secret noise and batches, which only the file knows
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=stepper,
        data_loader=DataLoader(TensorDataset(words, words[:, 0] % 3), batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=3,
    )
    torch.manual_seed(100 + rank)
    file = folder / "run.pt"
    kept = {"path": file, "module": private, "optimizer": optimizer}
    killer.around(dcp, "load", after="while the next start loads")
    if file.exists():
        engine.load_checkpoint(**kept)
    else:
        engine.save_checkpoint(**kept)
    log = (folder / f"released.{rank}").open("a")
    _set_traps(killer, optimizer, stepper)
    release: Callable[..., Any] = stepper.step

    def noted(*args: Any, **kwargs: Any) -> Any:
        print(optimizer.steps, _digest(stepper), file=log, flush=True)
        return release(*args, **kwargs)

    stepper.step = noted  # type: ignore[method-assign]
    while optimizer.steps < steps:
        for x, y in loader:
            killer.step = min(optimizer.steps + 1, STEPS)
            optimizer.zero_grad()
            F.cross_entropy(private(x), y).backward()
            optimizer.step()
            if optimizer.batch_goes_on:
                killer.at("between two pieces")
                continue
            killer.at("between the step and saving")
            engine.save_checkpoint(**kept)
            if optimizer.steps == steps:
                break
    weights = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters() if isinstance(p, DTensor)])
    if rank == 0:
        found = {
            "weights": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
            "epsilon": engine.get_epsilon(1e-5),
            "history": engine.accountant.history,
            "starts": killer.start + 1,
            "files": sorted(path.name.split("-")[-1] for path in folder.glob("run.pt*")),
        }
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _set_traps(killer: Killer, optimizer: Any, stepper: Any) -> None:
    killer.around(optimizer.accumulator.reduction, "begin_scatter", after="while sums are exchanged")
    killer.around(optimizer.noise, "add_", after="within the noise")
    killer.around(stepper, "step", "between release and update", "between update and count")
    killer.around(dcp, "save", before="while shards are written")
    killer.around(shards_file, "write_whole", before="between shards and file")
    killer.around(shards_file, "forget_others", before="before old shards are removed")
    save = torch.save

    def half(entries: Any, path: Any, **options: Any) -> None:
        save(entries, path, **options)
        if killer.moment == "with half a file written" and isinstance(path, str | os.PathLike):
            whole = Path(path).read_bytes()
            Path(path).write_bytes(whole[: len(whole) // 2])
            killer.at("with half a file written")
            Path(path).write_bytes(whole)

    torch.save = half


def trained(folder: Path, moment: str, steps: int = STEPS) -> dict[str, Any]:
    """Return what rank 0 found in the end, and what was released: by rank, (step, digest) in the order of time."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    said = folder / "said"
    with said.open("w") as out:  # not a pipe: what a killed rank has started may hold it open
        done = subprocess.run(
            [*command, "--max-restarts=2", "-m", "proofs.elastic_kills", "--work", str(folder), moment, str(steps)],
            cwd=Path(__file__).parents[1],
            env=os.environ | ENVIRONMENT,
            stdout=out,
            stderr=out,
            check=False,
            timeout=300,
        )
    if done.returncode:
        raise RuntimeError(f"{moment}: {said.read_text()[-3000:]}")
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    logs = [(folder / f"released.{rank}").read_text().split("\n")[:-1] for rank in range(RANKS)]
    return found | {"released": [[tuple(line.split()) for line in log] for log in logs]}


def begun(folder: Path) -> Path:
    """Return the folder of a run that has saved its secret seeds and made no step."""
    start = folder / "start"
    start.mkdir()
    trained(start, "never", 0)
    return start


def killed(start: Path, moment: str) -> dict[str, Any]:
    """Return what a run from ``start`` on finds in which a rank is killed at ``moment``."""
    folder = start.parent / moment.replace(" ", "-")
    shutil.copytree(start, folder)
    return trained(folder, moment)


def differences(whole: dict[str, Any], run: dict[str, Any]) -> list[str]:
    """Return what differs between a run and the one that nothing has happened to."""
    said = [name for name in ("weights", "epsilon", "history", "files") if run[name] != whole[name]]
    for rank, of_whole in enumerate(whole["released"]):
        released, expected = set(run["released"][rank]), set(of_whole)
        # A step that is made twice releases the same numbers twice, which tells nothing more.
        said += [f"released by rank {rank}"] * (released != expected)
    return said


def main() -> None:
    """Print the table, or be one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=len(MOMENTS), help="how many of them")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work(Path(given.work[0]), given.work[1], int(given.work[2]))
        return
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        start = begun(Path(folder))
        whole = killed(start, "never")
        print(f"undisturbed: epsilon {whole['epsilon']:.6f}, {STEPS} steps, starts {whole['starts']}", flush=True)
        for moment, rank in [*MOMENTS.items()][: given.moments]:
            run = killed(start, moment)
            said = differences(whole, run)
            wrong += bool(said) or run["starts"] < 2
            again = len(run["released"][0]) - STEPS
            print(
                f"rank {rank} {moment:32} starts {run['starts']}, releases made again {again}: "
                f"{'differs in ' + ', '.join(said) if said else 'equal'}",
                flush=True,
            )
    if wrong:
        raise SystemExit(f"{wrong} runs differ.")


if __name__ == "__main__":
    main()
