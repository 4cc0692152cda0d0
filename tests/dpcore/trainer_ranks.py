"""Run by torchrun: training libraries with several processes, for test_trainer_ranks.py.

``torchrun ... trainer_ranks.py FOLDER CHECK...``: every rank writes FOLDER/<rank>.pt, a dictionary of what each check
found.
"""

from __future__ import annotations

import copy
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from dpcore import PrivacyEngine, UnsupportedError
from dpcore.utils import batch_memory_manager
from tests.dpcore import ranks
from tests.dpcore.trainer_parts import (
    PIECES,
    ROWS,
    WITHOUT,
    InOrder,
    Texts,
    arguments,
    difference,
    language_model,
    loop,
    network,
    numbers,
    state,
    words_and_tokenizer,
)

ROUNDS = 2
"""Of ten steps: two processes take 16 of the 160 examples at a time."""
SETTING = {"sample_rate": ranks.RATE, "expected_batch_size": ranks.DIVISOR, "max_grad_norm": ranks.CLIP}


def flat(module: nn.Module) -> torch.Tensor:
    whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in module.parameters())
    return torch.cat([p.detach().flatten() for p in whole])


def found(engine: PrivacyEngine, module: nn.Module, **more: Any) -> dict[str, Any]:
    spent = engine.accountant.history
    return {"weights": flat(module), "accounted": spent, "epsilon": engine.get_epsilon(1e-5) if spent else 0.0} | more


# ---- accelerate


def accelerator(**options: Any) -> Any:
    import accelerate

    return accelerate.Accelerator(cpu=True, **options)


def shard_by(using: Any, layer: str, version: int = 2, **options: Any) -> None:
    """Set the FSDP plugin as accelerate's constructor does, which takes it on GPUs only."""
    import accelerate
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    using.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[layer],
        **options,
    )
    using.state.distributed_type = accelerate.PartialState._shared_state["distributed_type"] = DistributedType.FSDP


def sharding_accelerator(layer: str = "Linear", version: int = 2, **options: Any) -> Any:
    using = accelerator(**options)
    shard_by(using, layer, version)
    return using


def prepared(using: Any, engine: PrivacyEngine, model: nn.Module, loader: DataLoader, optimizer: Any, **privacy: Any):
    from dpcore.accelerate import prepare

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="poisson_sampling=False")
        return prepare(using, engine, module=model, optimizer=optimizer, data_loader=loader, **privacy)


def check_accelerate_same() -> Any:
    """How far the private run ends from accelerate's own, over how far both went; the learning rates; the steps."""
    start, rates, ends, engine = state(network()), [], [], PrivacyEngine()
    for private in (False, True):
        model, using = network(), accelerator(gradient_accumulation_steps=PIECES)
        optimizer, loader = torch.optim.Adam(model.parameters(), lr=0.01), DataLoader(numbers(), batch_size=ROWS)
        if private:
            run = prepared(using, engine, model, loader, optimizer, **WITHOUT)
        else:
            run = using.prepare(model, optimizer, loader)
        rates.append([loop(using, *run) for _ in range(ROUNDS)])
        ends.append(model)
    return {"difference": difference(start, *ends), "rates": rates, "accounted": engine.accountant.history}


def accelerated_steps(size: int | str | None, steps: int, folder: Path | None = None, **options: Any) -> dict[str, Any]:
    """Noise and clipping, by a loop that gathers its losses after every piece; a checkpoint after three steps."""
    seed, dropout = options.get("seed", 7), options.get("dropout", 0.0)
    engine, model = PrivacyEngine(seed=seed), ranks.model(dropout=dropout)
    using = sharding_accelerator() if options.get("shards") else accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    privacy = {"noise_multiplier": 1.0, "max_physical_batch_size": size, **SETTING}
    loader = DataLoader(ranks.data(), batch_size=5)
    module, optimizer, pieces = prepared(using, engine, model, loader, optimizer, **privacy)
    torch.manual_seed(100 + dist.get_rank())
    if options.get("resumed"):
        using.load_state(str(folder))
    drawn, history, passes = [], [], 0
    while True:
        batch: list[int] = []
        for x, y, number in pieces:
            batch += number.tolist()
            passes += 1
            with using.accumulate(module):
                loss = F.cross_entropy(module(x), y, reduction="sum") if not len(x) else F.cross_entropy(module(x), y)
                using.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            assert using.gather(loss.detach().reshape(1)).shape == (dist.get_world_size(),)
            if optimizer.batch_goes_on:
                continue
            drawn, history, batch = [*drawn, batch], [*history, ranks.weights(model)], []
            if optimizer.optimizer.steps == 3 and folder and not options.get("resumed"):
                using.save_state(str(folder))
                using.wait_for_everyone()
            if optimizer.steps == steps:
                return found(engine, model, batches=drawn, history=torch.stack(history), passes=passes)


def check_accelerate_noise() -> Any:
    batch_memory_manager.FIRST_PIECE = 2  # so that "auto" cuts these small batches
    return {str(size): accelerated_steps(size, 20) for size in (2, "auto")}


def check_accelerate_resume(folder: Path) -> Any:
    whole = accelerated_steps(4, 6, folder / "accelerate", dropout=0.5)
    resumed = accelerated_steps(4, 6, folder / "accelerate", dropout=0.5, seed=99, resumed=True)
    return {"whole": whole, "resumed": resumed}


def check_accelerate_shards(folder: Path) -> Any:
    """FSDP2 by accelerate's plugin: noisy steps, a checkpoint, a schedule of the user's optimizer, and what is refused.

    The last check of its process, whose accelerators shard from then on.
    """
    kept = folder / "shards"
    found = {str(size): accelerated_steps(size, 20, shards=True) for size in (2, "auto")}
    found["whole"] = accelerated_steps(4, 6, kept, dropout=0.5, shards=True)
    found["resumed"] = accelerated_steps(4, 6, kept, dropout=0.5, seed=99, resumed=True, shards=True)
    found["files"] = sorted(path.name for path in kept.iterdir())

    def made(using: Any, **privacy: Any) -> Any:
        model = ranks.model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(ranks.data(), batch_size=5)
        run = prepared(using, PrivacyEngine(seed=7), model, loader, optimizer, **{"noise_multiplier": 1.0} | privacy)
        return model, optimizer, run

    model, optimizer, (module, private, pieces) = made(sharding_accelerator(), **SETTING)
    found["local"] = [(p.numel(), p.to_local().numel()) for p in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.0  # as a schedule does
    before = ranks.weights(model)
    for x, y, _ in pieces:
        F.cross_entropy(module(x), y).backward()
        private.step()
        private.zero_grad()
    found["moved at a rate of 0"] = float((ranks.weights(model) - before).abs().max())
    found["steps"] = private.optimizer.steps

    def refusal(*given: Any, **privacy: Any) -> str:
        try:
            made(*given, **SETTING | privacy)
        except UnsupportedError as error:
            return str(error)
        return "nothing was refused"

    found["in order"] = refusal(sharding_accelerator(), poisson_sampling=False)
    found["version 1"] = refusal(sharding_accelerator(version=1))
    return found


def check_accelerate_empty() -> Any:
    """[steps, weights] of what was released where no example was drawn, in standard deviations of one process."""
    engine, model, using = PrivacyEngine(), ranks.model(), accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    privacy = SETTING | {"noise_multiplier": 2.0, "sample_rate": 1e-9}
    module, optimizer, pieces = prepared(using, engine, model, DataLoader(ranks.data(), 5), optimizer, **privacy)
    draws, before = [], ranks.weights(module)
    for (x, y, _), _ in zip(pieces, range(60), strict=False):
        using.backward(F.cross_entropy(module(x), y))
        optimizer.step()
        optimizer.zero_grad()
        draws.append((ranks.weights(module) - before) * ranks.DIVISOR / (2.0 * ranks.CLIP))
        before = ranks.weights(module)
    return torch.stack(draws)


# ---- transformers and TRL


def check_transformers_same(folder: Path) -> Any:
    """How far the private run ends from the Trainer's own."""
    import transformers

    from dpcore.transformers import DPTrainer

    kinds = [type(k.__name__, (InOrder, k), {}) for k in (transformers.Trainer, DPTrainer)]
    return run_both(kinds, folder, "gpt2", lambda options: {"args": arguments(folder, **options)}, optim="adamw_torch")


def run_both(kinds: Any, folder: Path, name: str, given: Any, **options: Any) -> dict[str, Any]:
    model = language_model(name)
    start, other, engine = state(model), copy.deepcopy(model), PrivacyEngine()
    options |= {"num_train_epochs": ROUNDS}
    data = {"train_dataset": Texts()} | given(options)
    kinds[0](model=model, **data).train()
    data = {"train_dataset": Texts()} | given(options)
    kinds[1](model=other, **data, engine=engine, privacy=WITHOUT).train()
    return {"difference": difference(start, model, other), "accounted": engine.accountant.history}


def check_trl_same(folder: Path) -> Any:
    import datasets
    import trl

    from dpcore.transformers import DPTrainerMixin

    words, tokenizer = words_and_tokenizer()
    texts = [" ".join(words[int(i) % len(words)] for i in row) for row in Texts().ids]
    fixed = {"bf16": False, "gradient_checkpointing": False, "max_length": 8, "optim": "sgd"}

    def given(options: dict[str, Any]) -> dict[str, Any]:
        return {
            "args": arguments(folder, trl.SFTConfig, **fixed, **options),
            "train_dataset": datasets.Dataset.from_dict({"text": texts}),
            "processing_class": tokenizer,
        }

    private = type("Private", (InOrder, DPTrainerMixin, trl.SFTTrainer), {})
    return run_both([type("Ordinary", (InOrder, trl.SFTTrainer), {}), private], folder, "llama", given)


def trained_text(
    folder: Path, resume: str | None = None, kind: str = "gpt2", layer: str | None = None, **privacy: Any
) -> dict[str, Any]:
    """A private Trainer's end, and the examples of each of its steps; in shards, where the layer of a unit is named."""
    from dpcore.transformers import DPTrainer

    batches: list[list[int]] = []
    ids = Texts().ids

    class Noted(DPTrainer):
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            if layer is not None:
                shard_by(self.accelerator, layer, state_dict_type="FULL_STATE_DICT")  # the Trainer's default
                self.is_fsdp_enabled = True

        def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            batches.append([int((ids == row).all(1).nonzero()) for row in inputs["input_ids"]])
            return super().training_step(model, inputs, num_items_in_batch)

    engine, model = PrivacyEngine(seed=7), language_model(kind)
    options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 6, "optim": "sgd", "learning_rate": 0.1}
    settings = {"noise_multiplier": 1.0, "max_grad_norm": ranks.CLIP} | privacy
    given = {"args": arguments(folder, lr_scheduler_type="constant", **options), "train_dataset": Texts()}
    Noted(model=model, **given, engine=engine, privacy=settings).train(resume_from_checkpoint=resume)
    return found(engine, model, batches=batches)


def check_transformers_noise(folder: Path) -> Any:
    whole = trained_text(folder / "whole")
    resumed = trained_text(folder / "again", str(folder / "whole" / "checkpoint-4"))
    empty = trained_text(folder / "empty", sample_rate=1e-9, expected_batch_size=8)
    return {"whole": whole, "resumed": resumed, "empty": empty}


def check_transformers_shards(folder: Path) -> Any:
    """FSDP2 in the Trainer; the last check of its process, whose accelerators shard from then on."""
    found = {"whole": trained_text(folder / "shards", kind="llama", layer="LlamaDecoderLayer")}
    found["gpt2"] = trained_text(folder / "gpt2 in shards", kind="gpt2", layer="GPT2Block")
    kept, again = str(folder / "shards" / "checkpoint-4"), folder / "again in shards"
    found["resumed"] = trained_text(again, kept, kind="llama", layer="LlamaDecoderLayer")
    rare = {"sample_rate": 0.02, "expected_batch_size": 2 * PIECES * ROWS}
    found["rare"] = trained_text(folder / "rare in shards", kind="llama", layer="LlamaDecoderLayer", **rare)
    return found


# ---- Lightning


def lightning_parts() -> Any:
    """(Module, Batches, fit) of Lightning, whose package may be missing."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self, model: nn.Module, engine: PrivacyEngine | None = None, **privacy: Any) -> None:
            super().__init__()
            self.model, self.engine, self.privacy = model, engine, privacy
            self.drawn: list[list[int]] = []
            self.history: list[torch.Tensor] = []

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
            if self.engine is None:
                return optimizer
            loader = self.trainer.datamodule.train_dataloader()
            given = {"module": self.model.train(), "optimizer": optimizer, "data_loader": loader}
            return self.engine.make_private(**given, wrap_model=False, **self.privacy)[1]

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            self.drawn.append(batch[2].tolist())
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def on_train_batch_end(self, *given: Any) -> None:
            self.history.append(ranks.weights(self.model))

    class Batches(lightning.LightningDataModule):
        def __init__(self, size: int, shared: bool = False) -> None:
            super().__init__()
            self.size, self.shared = size, shared

        def train_dataloader(self) -> DataLoader:
            data = ranks.data()
            sampler = DistributedSampler(data, shuffle=False, drop_last=True) if self.shared else None
            return DataLoader(data, batch_size=self.size, sampler=sampler)

    def fit(module: Any, batches: Any, strategy: Any, checkpoint: str | None = None, **options: Any) -> Any:
        quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        size = dist.get_world_size()
        trainer = lightning.Trainer(accelerator="cpu", devices=size, strategy=strategy, logger=False, **quiet | options)
        trainer.fit(module, datamodule=batches, ckpt_path=checkpoint)
        return trainer

    return Module, Batches, fit


def check_lightning_same() -> Any:
    """20 steps of 8 examples: five a round of 40; by Lightning's own "ddp" in pieces of one example, then private."""
    from dpcore.lightning import DPDDPStrategy, DPLightningDataModule

    module, batches, fit = lightning_parts()
    start, ordinary, private, engine = ranks.model(), ranks.model(), ranks.model(), PrivacyEngine()
    fit(module(ordinary), batches(1, shared=True), "ddp", accumulate_grad_batches=4, max_epochs=4)
    run = module(private, engine, **WITHOUT)
    data = DPLightningDataModule(batches(4, shared=True), poisson_sampling=False)
    fit(run, data, DPDDPStrategy(), max_epochs=4)
    apart = difference(state(start), ordinary, private)
    return {"difference": apart, "accounted": engine.accountant.history, "steps": len(run.history)}


def check_lightning_noise(folder: Path) -> Any:
    from dpcore.lightning import DPDDPStrategy, DPLightningDataModule, PrivacyCheckpoint

    module, batches, fit = lightning_parts()

    def run(dropout: float = 0.0, rounds: int = 5, checkpoint: str | None = None, seed: int = 7, **more: Any) -> Any:
        engine = PrivacyEngine(seed=seed)
        given = module(ranks.model(dropout=dropout), engine, noise_multiplier=1.0, **SETTING | more)
        torch.manual_seed(100 + dist.get_rank())
        generator = torch.Generator().manual_seed(seed + dist.get_rank())
        data = DPLightningDataModule(batches(10), generator, sample_rate=more.get("sample_rate", ranks.RATE))
        callbacks = [PrivacyCheckpoint(engine)]
        trainer = fit(given, data, DPDDPStrategy(), checkpoint, max_epochs=rounds, callbacks=callbacks)
        return trainer, found(engine, given.model, batches=given.drawn, history=torch.stack(given.history))

    noisy = run()[1]
    whole = run(dropout=0.5, rounds=2)[1]
    saved = str(folder / "lightning.ckpt")
    run(dropout=0.5, rounds=1)[0].save_checkpoint(saved)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resumed = run(dropout=0.5, rounds=2, checkpoint=saved, seed=99)[1]
    told = [str(w.message) for w in caught if "random state" in str(w.message)]
    empty = run(sample_rate=0.05, rounds=1)[1]
    return {"noise": noisy, "whole": whole, "resumed": resumed, "empty": empty, "told": told}


def check_lightning_refusals() -> Any:
    from dpcore.lightning import DPDDPStrategy, DPLightningDataModule

    module, batches, fit = lightning_parts()

    def refusal(action: Any) -> str:
        try:
            action()
        except UnsupportedError as error:
            return str(error)
        return "nothing was refused"

    def private() -> Any:
        return module(ranks.model(), PrivacyEngine(seed=7), noise_multiplier=1.0, **SETTING)

    return {
        "ddp": refusal(lambda: fit(private(), DPLightningDataModule(batches(10)), "ddp", max_steps=1)),
        "ordinary": refusal(lambda: fit(module(ranks.model()), batches(10), DPDDPStrategy(), max_steps=1)),
    }


def main() -> None:
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="sample_rate")
    dist.init_process_group("gloo", timeout=timedelta(seconds=400))
    checks = {name.removeprefix("check_"): check for name, check in globals().items() if name.startswith("check_")}
    reports = {}
    for name in names:
        takes = checks[name].__code__.co_argcount
        reports[name] = checks[name](folder) if takes else checks[name]()
    torch.save(reports, folder / f"{dist.get_rank()}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
