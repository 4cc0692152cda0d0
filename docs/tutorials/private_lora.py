"""Tutorial 6: private LoRA in fifteen lines, with transformers and PEFT (pip install "./dpcore[transformers]" peft).

    python docs/tutorials/private_lora.py             # seconds, synthetic; or cell by cell, as a notebook

You will learn: that a model of transformers with adapters of PEFT is trained as it is; that a text's loss is the mean
over its own tokens, because that is what its gradient is clipped for; and the same with transformers' Trainer.
"""

# %% [1] A causal language model, trained on public texts, and private ones. (For yours:
# AutoModelForCausalLM.from_pretrained and your token ids.)
import copy
import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from dpcore import PrivacyEngine
from dpcore.examples import data
from dpcore.transformers import DPTrainer

options = data.tutorial_options(epochs=4)
WORDS, DELTA = 24, 1e-4
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
torch.manual_seed(0)
base = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=32, **sizes))


def counting(by: int, texts: int) -> torch.Tensor:
    """[texts, 12] tokens that count upwards."""
    return (torch.randint(0, WORDS, (texts, 1)) + by * torch.arange(12)) % WORDS


def right(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """The part of the tokens that the model finds by those before them."""
    model.eval()
    with torch.no_grad():
        guesses = model(input_ids=ids).logits[:, 1:-1].argmax(-1)
    model.train()
    return float((guesses == ids[:, 2:]).float().mean())


ordinary = torch.optim.AdamW(base.parameters(), lr=1e-2)
for _ in range(150):
    public = torch.cat([counting(by, 16) for by in (1, 2, 5)])
    base(input_ids=public, labels=public).loss.backward()
    ordinary.step()
    ordinary.zero_grad()
secret, unseen = counting(3, 2048), counting(3, 256)
print(f"{len(secret)} texts that count by 3 (synthetic data); {right(base, unseen):.2f} of the tokens right before")

# %% [2] The fifteen lines.
lora = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(copy.deepcopy(base), lora).train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
loader = DataLoader(TensorDataset(secret), batch_size=256)
engine = PrivacyEngine(seed=options.seed)
private, optimizer, loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=0.1
)
for epoch in range(1, options.epochs + 1):
    for (ids,) in data.progress(loader):
        optimizer.zero_grad()
        logits = private(input_ids=ids).logits[:, :-1]
        F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1).mean().backward()
        optimizer.step()
    print(f"epoch {epoch}: epsilon {engine.get_epsilon(DELTA):.2f}, {right(private, unseen):.2f} of the tokens right")

# %% [3] The same by transformers' Trainer: two more arguments. It accumulates, schedules, evaluates and saves as ever.
engine = PrivacyEngine(seed=options.seed)
with tempfile.TemporaryDirectory() as folder:
    trainer = DPTrainer(
        model=get_peft_model(copy.deepcopy(base), lora),
        args=TrainingArguments(
            folder,
            per_device_train_batch_size=64,
            gradient_accumulation_steps=4,
            num_train_epochs=options.epochs,
            learning_rate=1e-2,
            lr_scheduler_type="constant",  # as the loop above; by default the rate falls to zero
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in secret],
        engine=engine,
        privacy={"noise_multiplier": 1.0, "max_grad_norm": 0.1},
    )
    trainer.train()
print(f"Trainer: epsilon {engine.get_epsilon(DELTA):.2f}, {right(trainer.model, unseen):.2f} of the tokens right")
