"""Tutorial 6: private LoRA in ten lines, with transformers and PEFT (tests/requirements-models.txt).

    python docs/tutorials/private_lora.py --smoke     # seconds, synthetic data, a small model with random weights

You will learn: that a model of transformers with adapters of PEFT is trained as it is; that a text's loss is the mean
over its own tokens, because that is what its gradient is clipped for.
"""

# %% [1] A causal language model and texts. (For yours: AutoModelForCausalLM.from_pretrained and your token ids.)
import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from dpcore import PrivacyEngine

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--smoke", action="store_true", help="accepted for the sake of the other tutorials: always so here")
parser.add_argument("--seed", type=int, help="makes noise and batches reproducible, and worthless as protection")
options = parser.parse_args()

sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
torch.manual_seed(0)
base = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes))
texts = (torch.randint(3, 64, (256, 1)) + torch.arange(16)) % 64  # every text counts upwards
print("synthetic data: texts that count upwards")

# %% [2] The ten lines.
model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")).train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
loader = DataLoader(TensorDataset(texts), batch_size=32)
engine = PrivacyEngine(seed=options.seed)
private, optimizer, loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=0.1
)
for (ids,) in loader:
    optimizer.zero_grad()
    logits = private(input_ids=ids).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
    losses.mean().backward()
    optimizer.step()
print(f"epsilon {engine.get_epsilon(1e-3):.2f} at delta 1e-3, loss of the last batch {losses.mean().item():.3f}")
