"""The tasks' networks in plain PyTorch, for every contestant that is built on PyTorch.

Only standard layers (``nn.Conv2d``, ``nn.Linear``, ``nn.Embedding``, ``nn.LSTM`` …) in one ``nn.Sequential`` whose
children carry the task's layer names, so that a DP library can wrap the model as its users' models come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from frameworks._shared.torch import transformer
from harness import network, tasks
from harness.contract import Unsupported
from harness.tasks import NOT_OWN, TOKEN_LOSS, Task

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Table = Callable[[int, int], nn.Module]
"""(rows, dim) -> what maps ids [B, ids] to the sum of their vectors [B, dim], or to the vectors."""


SUMMED: Table = partial(nn.EmbeddingBag, mode="sum")


@dataclass(frozen=True)
class Own:
    """Modules that a library brings, or needs, in place of PyTorch's: an LSTM with the constructor and the parameter
    names of ``nn.LSTM``; the tables of bags (None: it knows none). ``views``: whether the rows of an
    example can be clipped as one."""

    lstm: type[nn.Module] = nn.LSTM
    table: Table | None = SUMMED
    views: bool = True


class Mean(nn.Module):
    """Mean over the dimensions ``dims``."""

    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(self.dims)

    def extra_repr(self) -> str:
        return f"dims={self.dims}"


class LstmOutput(nn.Module):
    """The hidden states [B, T, H] out of what an LSTM returns, (hidden states, last state)."""

    def forward(self, outputs: tuple[torch.Tensor, object]) -> torch.Tensor:
        return outputs[0]


def build_model(
    task: Task,
    initial: Mapping[str, np.ndarray],
    dtype: torch.dtype = torch.float32,
    own: Own = Own(),
) -> nn.Sequential:
    """The task's network on the CPU with the canonical weights ``initial``; maps inputs [B, *input_shape] to logits.

    PyTorch's LSTM has two bias vectors where the task has one: ``bias_hh`` is zero and frozen, ``bias_ih`` is trained.
    """
    model = nn.Sequential(_children(task.layers, own)).to(dtype)
    paths = _paths(task.layers)
    for layer in task.layers:
        if isinstance(layer, tasks.TiedHead):
            model.get_submodule(paths[layer]).weight = model.get_submodule(paths[layer.table]).weight
    for layer in task.layers:
        if isinstance(layer, tasks.Lstm):
            frozen = model.get_submodule(layer.name).bias_hh_l0
            frozen.requires_grad_(False)
            with torch.no_grad():
                frozen.zero_()
    load_parameters(model, task, initial)
    trained = task.trained_parameters
    for name, parameter in canonical_parameters(model, task).items():
        if name not in trained:
            parameter.requires_grad_(False)
    return model


def _children(layers: Iterable[tasks.Layer], own: Own) -> OrderedDict[str, nn.Module]:
    """The modules of layers one after the other, by their places."""
    children: OrderedDict[str, nn.Module] = OrderedDict()
    for position, layer in enumerate(layers):
        place = _place(layer, position)
        if isinstance(layer, tasks.Residual):
            body, shortcut = (nn.Sequential(_children(part, own)) for part in (layer.layers, layer.shortcut))
            children[place] = transformer.Residual(body, shortcut)
        else:
            children[place] = _module(layer, own)
        if isinstance(layer, tasks.Lstm):
            children[f"{place}_output"] = LstmOutput()
    return children


def _place(layer: tasks.Layer, position: int) -> str:
    """The attribute of the module that holds it: its name, or its kind and position."""
    return getattr(layer, "name", f"{type(layer).__name__.lower()}{position}").replace(".", "_")


def _paths(layers: Iterable[tasks.Layer], above: str = "") -> dict[str | tasks.Layer, str]:
    """Where in the model each layer is, by its canonical name, or by itself where it has none."""
    found: dict[str | tasks.Layer, str] = {}
    for position, layer in enumerate(layers):
        path = above + _place(layer, position)
        found[getattr(layer, "name", layer)] = path
        if isinstance(layer, tasks.Residual):
            found |= _paths(layer.layers, f"{path}.body.") | _paths(layer.shortcut, f"{path}.shortcut.")
        for part in getattr(layer, "maps", ()):
            found[part.name] = f"{path}.{part.name.rpartition('.')[2]}"
    return found


def _module(layer: tasks.Layer, own: Own) -> nn.Module:
    match layer:
        case tasks.Conv2d(_, c_in, c_out, kernel, stride, padding):
            return nn.Conv2d(c_in, c_out, kernel, stride, padding)
        case tasks.Linear():
            return transformer.linear(layer)
        case tasks.Embedding(_, rows, dim):
            return nn.Embedding(rows, dim)
        case tasks.Lstm(_, n_in, hidden):
            return own.lstm(n_in, hidden, batch_first=True)
        case tasks.Bags() if own.table is None:
            raise Unsupported("it has no rule for bags of ids (nn.EmbeddingBag).")
        case tasks.Bags():
            return transformer.Bags(layer, own.table)
        case tasks.ReLU():
            return nn.ReLU()
        case tasks.MaxPool2d(kernel, stride):
            return nn.MaxPool2d(kernel, stride)
        case tasks.AvgPool2d(kernel, stride):
            return nn.AvgPool2d(kernel, stride)
        case tasks.Flatten():
            return nn.Flatten()
        case tasks.MeanOverSpace():
            return Mean(2, 3)
        case tasks.SpaceAsTime():
            return transformer.SpaceAsTime()
        case tasks.MeanOverTime():
            return Mean(1)
        case tasks.Views() if own.views:
            return transformer.Views(layer)
    return _module_of_transformer(layer)


def _module_of_transformer(layer: tasks.Layer) -> nn.Module:
    match layer:
        case tasks.Positions():
            return transformer.Positions(layer)
        case tasks.GroupNorm(_, groups, channels, eps):
            return nn.GroupNorm(groups, channels, eps)
        case tasks.LayerNorm(_, dim, eps):
            return nn.LayerNorm(dim, eps)
        case tasks.RMSNorm(_, dim, eps):
            return nn.RMSNorm(dim, eps)
        case tasks.TokenTypes():
            return transformer.TokenTypes(layer)
        case tasks.GELU(exact):
            return nn.GELU(approximate="none" if exact else "tanh")
        case tasks.SiLU():
            return nn.SiLU()
        case tasks.SwiGLU():
            return transformer.SwiGLU(layer)
        case tasks.Attention():
            return transformer.Attention(layer)
        case tasks.TiedHead(_, rows):
            return nn.Linear(1, rows, bias=False)  # its weight becomes the table
    if isinstance(layer, tasks.Views):
        raise Unsupported("it clips every row by itself, not the views of an example as one.")
    raise Unsupported(f"there is no PyTorch module for the layer {type(layer).__name__}.")


_LSTM_NAMES = {"weight_ih": "weight_ih_l0", "weight_hh": "weight_hh_l0", "bias": "bias_ih_l0"}


def canonical_parameters(model: nn.Module, task: Task) -> dict[str, nn.Parameter]:
    """The parameters themselves under the task's canonical names, in the task's order, frozen ones included."""
    paths = _paths(task.layers)
    found = {}
    for layer in network.walk(task.layers):
        for full_name in network.parameter_shapes(layer):
            path, name = paths[layer.name], full_name.rpartition(".")[2]
            if isinstance(layer, tasks.Lstm):
                name = _LSTM_NAMES[name]
            elif isinstance(layer, tasks.Positions | tasks.TokenTypes):
                path += ".table"
            elif isinstance(layer, tasks.Linear) and layer.lora:
                part, name = (name, "weight") if name.startswith("lora") else ("base", name)
                path += f".{part}"
            found[full_name] = getattr(model.get_submodule(path), name)
    return found


def load_parameters(model: nn.Module, task: Task, initial: Mapping[str, np.ndarray]) -> None:
    """Copies canonical weights into the model in place: the parameters keep their identity and storage."""
    with torch.no_grad():
        for name, parameter in canonical_parameters(model, task).items():
            parameter.copy_(torch.from_numpy(np.asarray(initial[name])))


def read_parameters(model: nn.Module, task: Task) -> dict[str, np.ndarray]:
    """Copies of the trained weights as numpy arrays in the model's own precision, under the canonical names."""
    return {name: p.detach().cpu().numpy().copy() for name, p in canonical_parameters(model, task).items()}


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that training changes."""
    return [p for p in model.parameters() if p.requires_grad]


def loss_fn(task: Task) -> Loss:
    """(logits [B, outputs], labels [B]) -> the examples' own losses [B]; of tokens (logits [B, T, outputs], labels
    [B, T]). The one place where logits become losses; those of bfloat16 become float32 first, for a logarithm of
    probabilities with eight bits is off by per cents."""
    if task.views > 1:
        return _mean_over_views
    if task.loss == "cross_entropy":
        return _cross_entropy
    if task.loss == "binary_cross_entropy":
        return _binary_cross_entropy
    if task.loss == TOKEN_LOSS:
        return _token_cross_entropy
    raise ValueError(f"{task.name}: there is no loss {task.loss!r}.")


def _full(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype == torch.bfloat16 else logits


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(_full(logits), labels, reduction="none")


def _mean_over_views(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Averages the losses of an example's rows, whose logits stand one after the other."""
    views = len(logits) // max(1, len(labels))
    return _cross_entropy(logits, labels.repeat_interleave(views)).unflatten(0, (len(labels), views)).mean(1)


def _binary_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    outputs = _full(logits).squeeze(-1)
    return F.binary_cross_entropy_with_logits(outputs, labels.to(outputs.dtype), reduction="none")


def _token_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over each example's own tokens, zero where it has none."""
    losses = F.cross_entropy(_full(logits).flatten(0, 1), labels.flatten(), ignore_index=NOT_OWN, reduction="none")
    return losses.view(labels.shape).sum(1) / (labels != NOT_OWN).sum(1).clamp(min=1)


def correct(task: Task, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Whether each example is classified right, bool [B]; of tokens the share of its own ones that are, float [B]."""
    if task.views > 1:
        logits = logits.unflatten(0, (-1, task.views)).mean(1)
    if task.loss == TOKEN_LOSS:
        is_own = labels != NOT_OWN
        return ((logits.argmax(-1) == labels) & is_own).sum(1) / is_own.sum(1).clamp(min=1)
    predicted = logits.squeeze(-1) > 0 if task.loss == "binary_cross_entropy" else logits.argmax(-1)
    return predicted == labels


def place(x: np.ndarray, y: np.ndarray, device: str | torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The data as tensors on ``device``, owned by them: float inputs as they are, token ids and labels as int64."""
    inputs = torch.tensor(x, device=device)
    if not inputs.is_floating_point():
        inputs = inputs.long()
    return inputs, torch.tensor(y, device=device).long()
