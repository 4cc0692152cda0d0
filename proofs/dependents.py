"""Software that is built on Opacus, with Opacus and with dpcore in its place: ``make dependents``.

Each use is a program of its own, which says at its end what was spent. It runs unchanged, once as it is and once under
``python -m dpcore.as_opacus``, in a fresh process each, and a row of docs/dependents.md says what became of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "dependents.md"
BEGIN, END = "<!-- table of proofs/dependents.py -->", "<!-- end -->"
TIMEOUT = 300

COMMON = '''
import json, time, warnings
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
warnings.simplefilter("ignore")
torch.manual_seed(0)
x, y = torch.randn(256, 8), torch.randint(2, (256,))
data = TensorDataset(x, y)
net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
sgd = torch.optim.SGD(net.parameters(), lr=0.1)

def train(model, optimizer, loader, rounds=4):
    for _ in range(rounds):
        for a, b in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()

def engines():
    """Return a list to which every engine is added that a program makes."""
    import opacus
    made, init = [], opacus.PrivacyEngine.__init__
    def noted(self, *args, **options):
        init(self, *args, **options)
        made.append(self)
    opacus.PrivacyEngine.__init__ = noted
    return made

def tell(began, accountant):
    steps = sum(step[2] for step in accountant.history)
    seconds = time.process_time() - began
    print(json.dumps({"seconds": seconds, "epsilon": accountant.get_epsilon(delta=1e-3), "steps": steps}))
'''

USES = {
    "dptrainer 0.1.2: transformers' Trainer, pieces of a batch": """
        import tempfile
        from dptrainer import DPTrainer, PrivacyArguments
        from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
        shape = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
        model = BertForSequenceClassification(BertConfig(vocab_size=50, max_position_embeddings=16, **shape))
        model.bert.embeddings.position_embeddings.weight.requires_grad_(False)
        class Texts(torch.utils.data.Dataset):
            def __len__(self):
                return 128
            def __getitem__(self, i):
                words = torch.randint(50, (8,), generator=torch.Generator().manual_seed(i))
                return {"input_ids": words, "attention_mask": torch.ones(8).long(), "labels": torch.tensor(i % 2)}
        options = TrainingArguments(
            output_dir=tempfile.mkdtemp(), per_device_train_batch_size=4, gradient_accumulation_steps=2,
            num_train_epochs=6, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
            remove_unused_columns=False)
        privacy = PrivacyArguments(noise_multiplier=1.0, per_sample_max_grad_norm=1.0, target_delta=1e-3)
        trainer = DPTrainer(model=model, args=options, train_dataset=Texts(), privacy_args=privacy)
        began = time.process_time()
        trainer.train()
        tell(began, trainer.dp_callback.accountant)
        """,
    "correlated-noise-mechanism 0.4.0: an engine and an optimizer of its own": """
        from correlated_noise_mechanism.privacy_engine import CNMEngine
        engine = CNMEngine(accountant="rdp")
        model, optimizer, loader = engine.make_private(
            module=net, optimizer=sgd, data_loader=DataLoader(data, batch_size=32),
            noise_multiplier=1.0, max_grad_norm=1.0, mode="DP-SGD-AMPLIFIED")
        began = time.process_time()
        train(model, optimizer, loader)
        tell(began, engine.accountant)
        """,
    "secureml 0.3.1: differentially private training of a given model": """
        import sys, types
        package = sys.modules["secureml"] = types.ModuleType("secureml")  # whose other parts need large libraries
        package.__path__ = [folder + "/secureml" for folder in sys.path]
        from secureml import privacy
        import pandas
        frame = pandas.DataFrame(x.numpy()).assign(target=y.numpy())
        made = engines()
        one = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        began = time.process_time()
        privacy.differentially_private_train(
            one, frame, noise_multiplier=1.0, framework="pytorch", epochs=4, batch_size=32, verbose=False,
            target_column="target", criterion=nn.BCEWithLogitsLoss())
        tell(began, made[0].accountant)
        """,
    "dp-lora 0.1.0: LoRA with recording of its own, Opacus' Poisson loader": """
        from dp_lora.privacy_engine import DPLoRAEngine
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2LMHeadModel
        words = torch.randint(50, (64, 8))
        class Texts(torch.utils.data.Dataset):
            def __len__(self):
                return 64
            def __getitem__(self, i):
                return {"input_ids": words[i], "labels": words[i]}
        base = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=16))
        model = get_peft_model(base, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
        sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        engine = DPLoRAEngine()
        model, optimizer, loader = engine.make_private(
            model=model, optimizer=sgd, data_loader=DataLoader(Texts(), batch_size=8), noise_multiplier=1.0,
            max_grad_norm=1.0)
        began, steps = time.process_time(), 0
        for batch in loader:
            if not len(batch["input_ids"]):
                continue
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step(engine.grad_sample_module.get_per_sample_grads())
            engine.grad_sample_module.clear_per_sample_grads()
            steps += 1
        print(json.dumps({"seconds": time.process_time() - began, "epsilon": engine.get_epsilon(), "steps": steps}))
        """,
    "opacus-dpcr 1.0.0: a step of its own around the optimizer, with noise of its own": """
        from opacus_dpcr import DPCREngine
        engine = DPCREngine()
        model, optimizer, loader = engine.make_private(
            module=net, optimizer=sgd, data_loader=DataLoader(data, batch_size=32),
            noise_multiplier=1.0, max_grad_norm=1.0)
        began = time.process_time()
        train(model, optimizer, loader)
        tell(began, engine.accountant)
        """,
    "Flower 1.42.0: two clients and three rounds, Opacus in their fit()": """
        import numpy, flwr
        from flwr.client import NumPyClient
        from flwr.common import parameters_to_ndarrays, ndarrays_to_parameters
        from opacus import PrivacyEngine

        class Client(NumPyClient):
            def __init__(self, part):
                self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
                sgd = torch.optim.SGD(self.net.parameters(), lr=0.1)
                self.engine = PrivacyEngine(accountant="rdp")
                self.model, self.optimizer, self.loader = self.engine.make_private(
                    module=self.net, optimizer=sgd, data_loader=DataLoader(part, batch_size=16), noise_multiplier=1.0,
                    max_grad_norm=1.0)
            def fit(self, parameters, config):
                state = zip(self.model.state_dict(), map(torch.tensor, parameters))
                self.model.load_state_dict(dict(state), strict=True)
                train(self.model, self.optimizer, self.loader, rounds=1)
                values = [value.cpu().numpy() for value in self.model.state_dict().values()]
                return values, len(self.loader.dataset), {"epsilon": self.engine.get_epsilon(1e-3)}

        clients = [Client(torch.utils.data.Subset(data, range(k, 256, 2))) for k in range(2)]
        weights = [value.numpy() for value in clients[0].net.state_dict().values()]
        began = time.process_time()
        for _ in range(3):
            sent = ndarrays_to_parameters(weights)
            back = [client.fit(parameters_to_ndarrays(sent), {})[0] for client in clients]
            weights = [numpy.mean(values, axis=0) for values in zip(*back)]
        tell(began, clients[0].engine.accountant)
        """,
    "appfl 1.12.0: federated learning, its trainer of a client": """
        from appfl.algorithm.trainer import VanillaTrainer
        from omegaconf import OmegaConf
        class Silent:
            def __getattr__(self, name):
                return lambda *args, **options: None
        settings = {
            "mode": "epoch", "num_local_epochs": 4, "optim": "SGD", "optim_args": {"lr": 0.1}, "train_batch_size": 32,
            "device": "cpu", "use_dp": True, "dp_mechanism": "opacus",
            "dp_config": {"noise_multiplier": 1.0, "max_grad_norm": 1.0}}
        trainer = VanillaTrainer(
            model=net, loss_fn=nn.CrossEntropyLoss(), metric=lambda wanted, found: 0.0, train_dataset=data,
            logger=Silent(), train_configs=OmegaConf.create(settings))
        began = time.process_time()
        trainer.train()
        tell(began, trainer.privacy_engine.accountant)
        """,
    "declearn 2.9.1: federated learning, clipping of its own, three rounds to a budget of ε 5": """
        from declearn.aggregator import AveragingAggregator
        from declearn.dataset import InMemoryDataset
        from declearn.messaging import PrivacyRequest, TrainRequest
        from declearn.model.torch import TorchModel
        from declearn.optimizer import Optimizer
        from declearn.training.dp import DPTrainingManager
        model = TorchModel(net, nn.CrossEntropyLoss(reduction="none"))
        model.initialize({"features_shape": (8,), "data_type": "float32"})
        manager = DPTrainingManager(
            model=model, optim=Optimizer(lrate=0.1), aggrg=AveragingAggregator(), verbose=False,
            train_data=InMemoryDataset(x.numpy(), y.numpy()))
        plan = {"batches": {"batch_size": 32, "drop_remainder": False, "poisson": True}, "n_epoch": 1, "n_steps": None}
        began = time.process_time()
        manager.make_private(PrivacyRequest(
            budget=(5.0, 1e-3), sclip_norm=1.0, accountant="rdp", use_csprng=False, seed=None, rounds=3, **plan))
        for k in range(3):
            manager.training_round(TrainRequest(round_i=k, weights=model.get_weights(), aux_var={}, **plan))
        tell(began, manager.accountant)
        """,
    "fedbiomed 6.4.1: federated learning, its controller of privacy": """
        from fedbiomed.common.models import TorchModel
        from fedbiomed.common.optimizers.generic_optimizers import NativeTorchOptimizer
        from fedbiomed.common.privacy import DPController
        controller = DPController({"type": "local", "sigma": 1.0, "clip": 1.0})
        held = NativeTorchOptimizer(TorchModel(controller.validate_and_fix_model(net)), sgd)
        held, loader = controller.before_training(held, DataLoader(data, batch_size=32))
        began = time.process_time()
        train(held._model.model, held.optimizer, loader)
        controller.after_training(dict(held._model.model.state_dict()))
        tell(began, controller._privacy_engine.accountant)
        """,
    "fluke-fl 0.8.1: federated learning, DPFedAVG with two clients and three rounds": """
        import os, tempfile, types
        os.chdir(tempfile.mkdtemp())
        from fluke import FlukeENV
        from fluke.algorithms.dpfedavg import DPFedAVG
        from fluke.config import DDict
        from fluke.data import FastDataLoader
        made = engines()
        parts = [FastDataLoader(x[k::2], y[k::2], num_labels=2, batch_size=16) for k in range(2)]
        test = FastDataLoader(x, y, num_labels=2, batch_size=64)
        splitter = types.SimpleNamespace(assign=lambda clients, batch_size: ((parts, [None, None]), test))
        steps = {"name": torch.optim.lr_scheduler.StepLR, "gamma": 1, "step_size": 1}
        client = {
            "batch_size": 16, "local_epochs": 1, "loss": nn.CrossEntropyLoss, "noise_mul": 1.0, "max_grad_norm": 1.0,
            "optimizer": {"name": torch.optim.SGD, "lr": 0.1}, "scheduler": steps}
        algorithm = DPFedAVG(2, splitter, DDict({"client": client, "server": {"weighted": True}, "model": net}))
        FlukeENV().set_device("cpu")
        FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
        began = time.process_time()
        algorithm.run(3, 1.0, finalize=False)
        tell(began, made[0].accountant)
        """,
    "mostlyai-engine 2.7.3: synthetic tables, pieces of a batch": """
        import pandas, tempfile
        from pathlib import Path
        from mostlyai.engine import analyze, encode, split, train as fit
        from mostlyai.engine.domain import DifferentialPrivacyConfig
        made, place = engines(), Path(tempfile.mkdtemp())
        privacy = DifferentialPrivacyConfig(max_epsilon=50.0, noise_multiplier=1.0, max_grad_norm=1.0)
        frame = pandas.DataFrame(x[:, :3].numpy(), columns=list("abc")).assign(target=y.numpy())
        split(tgt_data=frame, workspace_dir=place)
        analyze(workspace_dir=place, differential_privacy=privacy)
        encode(workspace_dir=place)
        began = time.process_time()
        fit(workspace_dir=place, model="MOSTLY_AI/Small", max_epochs=8, differential_privacy=privacy, device="cpu",
            batch_size=32)
        tell(began, made[0].accountant)
        """,
    "nhssynth 0.11.0: synthetic tables, a variational autoencoder to ε 5": """
        import pandas, types
        from nhssynth.modules.model.models.dpvae import DPVAE
        columns = list(range(6))
        shape = types.SimpleNamespace(
            multi_column_indices=[[6, 7]], single_column_indices=columns, continuous_value_indices=columns)
        frame = pandas.DataFrame(x.numpy(), columns=[f"c{i}" for i in range(8)])
        frame[["c6", "c7"]] = nn.functional.one_hot(y, 2).numpy()
        sizes = {f"{part}_{kind}_dim": 32 for part in ("encoder", "decoder") for kind in ("latent", "hidden")}
        model = DPVAE(frame, shape, target_epsilon=5.0, target_delta=1e-3, **sizes)
        began = time.process_time()
        model.train(4, displayed_metrics=[])
        tell(began, model.privacy_engine.accountant)
        """,
}
"""Name, version and what is done -> the program, behind ``COMMON``."""


@dataclass(frozen=True)
class Outcome:
    """Return what became of a use: the numbers that it has said, or the last line of its error."""

    said: dict[str, float] | None
    error: str = ""

    @property
    def words(self) -> str:
        """The outcome for a table's cell."""
        if self.said is not None:
            return f"{self.said['steps']:.0f} steps, {self.said['seconds']:.2f} s, ε {self.said['epsilon']:.4f}"
        return self.error.replace("|", "/")


def outcome(python: str, program: str, as_opacus: bool) -> Outcome:
    """Run a use in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "use.py"
        script.write_text(COMMON + textwrap.dedent(program))
        command = [python, *(["-m", "dpcore.as_opacus"] if as_opacus else []), str(script)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment, timeout=TIMEOUT, cwd=folder
            )
        except subprocess.TimeoutExpired:
            return Outcome(None, f"no end after {TIMEOUT} s")
    told = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode == 0 and told:
        return Outcome(json.loads(told[-1]))
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Outcome(None, f"{last[:240]} ...".replace("dpcore.errors.", "") if len(last) > 240 else last)


def table(python: str) -> tuple[str, bool]:
    """Return the table, and whether whatever runs with Opacus runs with dpcore or is refused by a sentence."""
    rows, fine = ["| dependent | with Opacus | with dpcore |", "|---|---|---|"], True
    for name, program in USES.items():
        theirs, ours = (outcome(python, program, as_opacus) for as_opacus in (False, True))
        print(f"{name}\n  Opacus: {theirs.words}\n  dpcore: {ours.words}", flush=True)
        rows.append(f"| {name} | {theirs.words} | {ours.words} |")
        fine = fine and (theirs.said is None or ours.said is not None or "Error: " in ours.error)
    return "\n".join(rows), fine


def main() -> int:
    """Write the table into the page; 1 where a use that runs with Opacus ended without a sentence."""
    python = sys.argv[1] if len(sys.argv) > 1 else sys.executable
    text = PAGE.read_text(encoding="utf-8")
    found, fine = table(python)
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{found}\n{END}{after}", encoding="utf-8")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
