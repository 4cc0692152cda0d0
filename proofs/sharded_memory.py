"""Measure dpcore beside ordinary training of a sharded model: ``python -m proofs.sharded_memory [--ranks 4]``.

Peak of a rank's resident memory in warm steps, above what it held before the model was built, bytes that collectives
carry, and how many numbers of the noise a rank draws, by the same loop over gloo on this machine: 67.7 million
parameters (some 4 GB in all at 4 ranks), two examples of 64 tokens a rank. Nothing here says how fast a network is.

``--pieces 2,4 --gather piece,batch``: steps of so many passes, which gather the parameters each, or once for all of
them. Ordinary training does the same by FSDP2's switches, and both scatter what every pass has summed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from frameworks._shared.torch.ranks import Payload

WIDTH, BLOCKS, WORDS, EXAMPLES, TOKENS, STEPS = 768, 6, 16384, 2, 64, 4
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**17), "MALLOC_ARENA_MAX": "1"}
"""For glibc: what is let go is given back at once; else it keeps three times of what either side needs."""
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, foreach=False),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-4, foreach=False),
}


class Block(nn.Module):
    """A layer of a language model that reads to the left."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, width] of the same."""
        y = self.first(x)
        heads = (layer(y).unflatten(2, (12, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        x = x + self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Words(nn.Module):
    """A language model; the loss by example."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        """Losses [B] of words [B, T]."""
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        found = self.head(self.norm(x[:, :-1]))
        return F.cross_entropy(found.float().transpose(1, 2), words[:, 1:], reduction="none").mean(1)


def _memory(entry: str) -> int:
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(entry))
    return int(found.split()[1]) * 1024


def counted(noise: Any) -> list[int]:
    """Return a list to which every addition of ``noise`` from now on appends how many numbers it draws."""
    drawn: list[int] = []
    add = noise.add_

    def call(target: Tensor, *rest: Any) -> Tensor:
        drawn.append(target.numel())
        return add(target, *rest)

    noise.add_ = call
    return drawn


def keep_gathered(model: Any, goes_on: bool) -> None:
    """Let what an ordinary pass gathers stay until the pass behind which the batch does not go on."""
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(not goes_on)


def work(side: str, optimizer: str, policy: str, groups: int, pieces: int, gather: str) -> None:
    """Be one rank, and let the first print what was found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    if side == "dpcore":
        from dpcore import PrivacyEngine
    before = _memory("VmRSS")
    torch.manual_seed(0)
    model: Any = Words()
    count = sum(p.numel() for p in model.parameters())
    hybrid = {"mesh_shape": (groups, ranks // groups), "mesh_dim_names": ("copies", "shards")}
    mesh = init_device_mesh("cpu", **(hybrid if groups > 1 else {"mesh_shape": (ranks,)}))
    narrow = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": narrow if policy == "bfloat16" else MixedPrecisionPolicy()}
    for part in (*model.blocks, model):
        fully_shard(part, **options)
    stepper: Any = OPTIMIZERS[optimizer](model.parameters())
    if side == "dpcore":
        data = TensorDataset(torch.zeros(64 * ranks, TOKENS, dtype=torch.long))
        model, stepper, _ = PrivacyEngine(seed=3).make_private(
            module=model,
            optimizer=stepper,
            data_loader=DataLoader(data, batch_size=EXAMPLES * ranks),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            check_batches=False,
            check_isolation=False,
            keep_gathered=gather == "batch",
        )
    drawn = counted(stepper.noise) if side == "dpcore" else []
    draw = torch.Generator().manual_seed(5 + dist.get_rank())
    found = []
    for _ in range(STEPS):
        words = torch.randint(0, WORDS, (max(EXAMPLES, pieces), TOKENS), generator=draw)
        dist.barrier()
        drawn.clear()
        Path("/proc/self/clear_refs").write_text("5")
        with Payload() as payload:
            stepper.zero_grad()
            for k, piece in enumerate(words.chunk(pieces)):
                goes_on = k + 1 < pieces
                if side == "ordinary" and gather == "batch" and pieces > 1:
                    keep_gathered(model, goes_on)
                if side == "dpcore" and goes_on:
                    stepper.signal_skip_step()
                model(piece).mean().backward()
                if side == "dpcore" and goes_on:
                    stepper.step()
            stepper.step()
        found.append((_memory("VmHWM") - before, dict(payload.bytes)))
    mine = statistics.median(peak for peak, _ in found[1:])
    of_ranks: list[Any] = [None] * ranks
    dist.all_gather_object(of_ranks, (mine, sum(drawn) * ranks / count))
    if dist.get_rank() == 0:
        peaks, shares = zip(*of_ranks, strict=True)
        drawn_by = [min(shares), max(shares)]
        print(json.dumps({"peak": max(peaks), "payload": found[-1][1], "parameters": count, "drawn": drawn_by}))
    dist.destroy_process_group()


def _launch(ranks: int, *given: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, "-m", "proofs.sharded_memory", "--side", *given],
        env=os.environ | GIVEN_BACK | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    """Print the table, or be one rank of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--optimizers", default="sgd,adamw")
    parser.add_argument("--policy", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--groups", type=int, default=1, help="groups of ranks that hold the model once each (HSDP)")
    parser.add_argument("--pieces", default="1", help="passes through the model in a step")
    parser.add_argument("--gather", default="piece", help="what gathers the parameters: every piece, or a batch")
    parser.add_argument("--side", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        side, optimizer, policy, groups, pieces, gather = given.side
        work(side, optimizer, policy, int(groups), int(pieces), gather)
        return
    print(f"{'optimizer':9} pieces gather {'side':9} {'peak MB':>8} {'ratio':>6}  payload, in 4 bytes a parameter")
    rows = itertools.product(given.optimizers.split(","), given.pieces.split(","), given.gather.split(","))
    for optimizer, pieces, gather in rows:
        peaks = {}
        for side in ("ordinary", "dpcore"):
            found = _launch(given.ranks, side, optimizer, given.policy, str(given.groups), pieces, gather)
            peaks[side] = found["peak"]
            carried = {name: n / 4 / found["parameters"] for name, n in sorted(found["payload"].items()) if n > 2**20}
            text = ", ".join(f"{name} {share:.3f}" for name, share in carried.items())
            if side == "dpcore":
                text += "; numbers a rank draws, over P / W: {:.4f} to {:.4f}".format(*found["drawn"])
            ratio = peaks[side] / peaks["ordinary"]
            row = f"{optimizer:9} {pieces:6} {gather:6} {side:9}"
            print(f"{row} {peaks[side] / 1e6:8.0f} {ratio:6.2f}  {text}", flush=True)


if __name__ == "__main__":
    main()
