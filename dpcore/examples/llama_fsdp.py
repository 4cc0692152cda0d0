"""A Llama of any size, with random weights, trained privately by several processes that hold a shard of it each.

    torchrun --nproc-per-node 2 -m dpcore.examples.llama_fsdp --smoke            # half a minute on two cores
    torchrun --nproc-per-node 8 -m dpcore.examples.llama_fsdp --width 4096 --layers 32 --bfloat16     # GPUs
    torchrun --nproc-per-node 2 --max-restarts 3 -m dpcore.examples.llama_fsdp --smoke --lora 8 --checkpoint llama

The layers are those of Llama 3, and the texts are random words: what this shows is how to write it, and that it runs.
``--checkpoint FILE`` goes on from a file that any number of processes has written, and writes it before the first step
and after each: a run that died is started anew by the same line, or by ``--max-restarts``, and repeats what it had not
saved with the same batches and the same noise.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dpcore import PrivacyEngine
from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.examples.transformer_lora import Adapted


def turned(x: Tensor) -> Tensor:
    """Return heads [B, heads, T, n] whose pairs of numbers are turned by angles that grow with the place."""
    half = x.shape[-1] // 2
    speeds = 500_000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, other = x[..., :half], x[..., half:]
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Block(nn.Module):
    """Attention of heads of ``head`` numbers, four of which share keys and values, and a gated feed-forward part."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        shared = max(head, width // 4)
        self.head = head
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, shared, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 7 * width // 2, bias=False) for _ in range(2))
        self.down = nn.Linear(7 * width // 2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        query, key, value = (
            layer(y).unflatten(2, (-1, self.head)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(turned(query), turned(key), value, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        result: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Llama(nn.Module):
    """Words [B, T] -> logits [B, T, words]."""

    def __init__(self, words: int, width: int, layers: int, head: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width, head) for _ in range(layers))
        self.norm, self.last = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.last(self.norm(x))
        return logits

    def adapt(self, rank: int) -> None:
        """Freeze all weights, and put adapters beside those of the attention."""
        self.requires_grad_(False)
        for layer in self.layers:
            for name in ("query", "key", "value", "out"):
                setattr(layer, name, Adapted(getattr(layer, name), rank))


def shard(model: Llama, device: str, bfloat16: bool, copies: int) -> None:
    """Shard every layer and the rest over all ranks, or within each of ``copies`` groups of them."""
    ranks = dist.get_world_size()
    if copies > 1:
        mesh = init_device_mesh(device, (copies, ranks // copies), mesh_dim_names=("copies", "shards"))
    else:
        mesh = init_device_mesh(device, (ranks,))
    # The weights, the noise and the update stay in float32.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = policy if bfloat16 else MixedPrecisionPolicy()
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)


def mean_loss(model: nn.Module, words: Tensor) -> Tensor:
    """Return the mean loss over the texts [B, T]."""
    logits = model(words)[:, :-1].float()
    return F.cross_entropy(logits.transpose(1, 2), words[:, 1:], reduction="none").mean(1).mean()


def check(options: argparse.Namespace) -> str | None:
    """Return what is wrong with the options, for one who started the script; None: nothing."""
    ranks = int(os.environ.get("WORLD_SIZE", 0))
    if not ranks:
        return "There is no process group; start it with torchrun --nproc-per-node N -m dpcore.examples.llama_fsdp."
    if options.copies < 1 or ranks % options.copies:
        return f"--copies is {options.copies}; it must divide the number of processes, {ranks}, into equal groups."
    if options.head % 2 or options.width % (4 * options.head):
        return f"--width is {options.width}; it must be a multiple of four even heads, of --head {options.head} each."
    if options.checkpoint and not options.checkpoint.resolve().parent.is_dir():
        return f"--checkpoint is {options.checkpoint}, and its folder is not there; make it first."
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" and not options.checkpoint:
        return "A rank died, and what it had spent is in no file; a new start would not count it: give --checkpoint."
    small = [name for name in ("layers", "words", "tokens", "texts", "steps") if getattr(options, name) < 1]
    return f"--{small[0]} is {getattr(options, small[0])}; it must be 1 or more." if small else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--head", type=int, default=64, help="numbers of an attention head")
    parser.add_argument("--words", type=int, default=32_000, help="of the vocabulary")
    parser.add_argument("--tokens", type=int, default=512, help="of a text")
    parser.add_argument("--texts", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=256, help="expected, of all ranks together")
    parser.add_argument("--piece", type=int, default=4, help="the most texts that a rank has in work at once")
    parser.add_argument("--steps", type=int, default=4, help="of the whole run, with those before a checkpoint")
    parser.add_argument("--lora", type=int, default=0, help="rank of adapters; 0: all weights are trained")
    parser.add_argument("--copies", type=int, default=1, help="groups of ranks with a copy of the model each (HSDP)")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16")
    parser.add_argument("--checkpoint", type=Path, help="go on from this file, and write it after each step")
    parser.add_argument("--seed", type=int, help="makes noise and batches reproducible; leave it out for a release")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, for a look")
    if parser.parse_args().smoke:
        parser.set_defaults(width=64, layers=2, head=16, words=128, tokens=16, texts=64, batch_size=16)
    options = parser.parse_args()
    if wrong := check(options):
        parser.exit(2, f"{wrong}\n" if os.environ.get("RANK", "0") == "0" else "")
    try:
        train(options)
    except (PrivacyError, UnsupportedError, ValueError) as error:
        parser.exit(2, f"{error}\n")


def train(options: argparse.Namespace) -> None:
    """Be one rank of the training."""
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    torch.manual_seed(0)  # the same weights on all ranks
    model = Llama(options.words, options.width, options.layers, options.head)
    if options.lora:
        model.adapt(options.lora)
    shard(model, device, options.bfloat16, options.copies)
    # Every rank has all texts, in the same order.
    words = torch.randint(options.words, (options.texts, options.tokens), generator=torch.Generator().manual_seed(1))
    engine = PrivacyEngine(seed=options.seed)
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3),
        data_loader=DataLoader(TensorDataset(words), batch_size=options.batch_size),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        max_physical_batch_size=options.piece,
    )
    kept = {"path": options.checkpoint, "module": private, "optimizer": optimizer}
    if options.checkpoint:
        # Before the first step too: the file has the secret seeds, and a run that died must not draw others.
        (engine.load_checkpoint if options.checkpoint.exists() else engine.save_checkpoint)(**kept)
        if dist.get_rank() == 0 and optimizer.steps:
            print(f"going on behind step {optimizer.steps} of {options.checkpoint}", flush=True)
    delta = 1 / options.texts
    losses: list[float] = []
    while optimizer.steps < options.steps:
        for (piece,) in loader:
            optimizer.zero_grad()
            loss = mean_loss(private, piece.to(device))
            loss.backward()
            optimizer.step()
            losses += [loss.item()] * len(piece)
            if optimizer.batch_goes_on:
                continue
            if options.checkpoint:
                engine.save_checkpoint(**kept)
            if dist.get_rank() == 0:
                mean = f"{sum(losses) / len(losses):.3f}" if losses else "none"
                epsilon = engine.get_epsilon(delta)
                # The loss is for the one who trains: no noise protects it.
                print(f"step {optimizer.steps}: loss {mean} (of rank 0's texts), epsilon {epsilon:.3f}", flush=True)
            losses = []
            if optimizer.steps >= options.steps:
                break
    if dist.get_rank() == 0:
        print(f"{optimizer.steps} steps: epsilon {engine.get_epsilon(delta):.3f} at delta {delta:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
