"""Layers on PyTorch: what every contestant does alike, and how allocations are counted on a CPU and on CUDA."""

from __future__ import annotations

import gc
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.layer_contract import Bytes, CachingAllocator, LayerAdapter, LayerSetting, Unsupported, of_events
from harness.layers import Layer

RECURRENT = ("RNN", "GRU", "LSTM")


class Model(nn.Module):
    """The layer behind a signature with the batch first: ``forward(x, *others)`` -> [B, *layer.output].

    Time-first layers get the transposed view. The tensors of :meth:`TorchLayer.place_inputs` are then transposed views
    of time-first memory, so that the layer sees the paper's layout without a copy.
    """

    def __init__(self, layer: Layer, module: nn.Module) -> None:
        super().__init__()
        self.kind = layer.kind
        self.time_first = layer.time_first
        self.module = module

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        if self.kind in RECURRENT:
            states = tuple(state.unsqueeze(0) for state in others)
            out = self.module(self._turn(x), states if len(states) > 1 else states[0])[0]
        elif self.kind == "MultiheadAttention":
            key, value = others or (x, x)
            out = self.module(self._turn(x), self._turn(key), self._turn(value), need_weights=False)[0]
        else:
            out = self.module(self._turn(x))
        return self._turn(out)

    def _turn(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1) if self.time_first else x


def own_losses(layer: Layer) -> Callable[[Tensor, Tensor], Tensor]:
    """(outputs, targets) [B, *output] -> the examples' own losses [B]: cross-entropy along the class axis, mean over
    the other axes."""

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        if layer.class_axis == 0 or outputs.dim() == 2:
            values = F.cross_entropy(outputs, targets, reduction="none")
        else:
            values = F.cross_entropy(outputs.movedim(-1, 1), targets.movedim(-1, 1), reduction="none")
        return values.flatten(1).mean(1) if values.dim() > 1 else values

    return losses


def plain_module(layer: Layer) -> nn.Module:
    """The layer of ``torch.nn``."""
    options = dict(layer.options)
    if layer.kind in RECURRENT or layer.kind == "MultiheadAttention":
        options["batch_first"] = not layer.time_first
    return getattr(nn, layer.kind)(**options)


def canonical(module: nn.Module, layer: Layer) -> dict[str, nn.Parameter]:
    """The trained parameters under the layer's canonical names, in its order."""
    found = {}
    for name in layer.parameters:
        owner, _, attribute = name.rpartition(".")
        found[name] = getattr(module.get_submodule(owner), attribute)
    return found


def load(module: nn.Module, layer: Layer, initial: Mapping[str, np.ndarray]) -> None:
    """Canonical weights into the module, in place."""
    with torch.no_grad():
        for name, parameter in canonical(module, layer).items():
            parameter.copy_(torch.from_numpy(np.asarray(initial[name])))


class TorchLayer(LayerAdapter):
    """Leaves :meth:`wrap` (the DP library around ``self.model``) and :meth:`one_pass` to the contestant."""

    def configure(self, layer: Layer, setting: LayerSetting) -> None:
        self.layer, self.setting = layer, setting
        self.device = torch.device(setting.device)
        torch.set_num_threads(setting.threads)
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise Unsupported("PyTorch finds no CUDA device here.")
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
            self.allocator = CachingAllocator(torch.cuda, torch.cuda.synchronize)
        self.instrument = "CUDA's caching allocator" if self.device.type == "cuda" else "PyTorch's profiler"
        self.losses = own_losses(layer)
        square = torch.ones(64, 64, device=self.device, requires_grad=True)
        (square @ square).sum().backward()

    def place_inputs(self, batches: Sequence[Mapping[str, np.ndarray]]) -> None:
        self.inputs = [tuple(self._placed(i.is_state, batch[i.name]) for i in self.layer.inputs) for batch in batches]

    def place_labels(self, batches: Sequence[np.ndarray]) -> None:
        self.labels = [self._placed(False, batch) for batch in batches]

    def _placed(self, is_state: bool, array: np.ndarray) -> Tensor:
        if not self.layer.time_first or is_state:
            return torch.tensor(array, device=self.device)
        time_first = np.ascontiguousarray(array.swapaxes(0, 1))
        return torch.tensor(time_first, device=self.device).transpose(0, 1)

    def build(self, initial: Mapping[str, np.ndarray]) -> None:
        with torch.device(self.device):
            module = self.module()
        self.model = Model(self.layer, module).train()
        self.load(initial)
        self.parameters = list(module.parameters())
        self.wrap()

    def module(self) -> nn.Module:
        """The layer itself: plain ``torch.nn`` unless the contestant has its own."""
        return plain_module(self.layer)

    def load(self, initial: Mapping[str, np.ndarray]) -> None:
        load(self.model.module, self.layer, initial)

    def wrap(self) -> None:
        """What the DP library makes of ``self.model``."""

    @abstractmethod
    def one_pass(self, inputs: tuple[Tensor, ...], labels: Tensor) -> None:
        """One timed pass."""

    def run(self, batch: int) -> None:
        self.one_pass(self.inputs[batch], self.labels[batch])

    def forget(self) -> None:
        """As ``optimizer.zero_grad()``."""
        for p in self.parameters:
            p.grad = None

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def left_behind(self) -> Mapping[str, Tensor]:
        """What the last pass left, by canonical name."""
        return {name: p.grad for name, p in canonical(self.model.module, self.layer).items()}

    def gradient_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self.left_behind().items()}

    def gradients(self) -> Mapping[str, np.ndarray]:
        return {name: value.detach().cpu().numpy().copy() for name, value in self.left_behind().items()}

    def count(self, work: Callable[[], None]) -> Bytes:
        return self.allocator.count(work) if self.device.type == "cuda" else profiled(work)

    def allocated(self) -> int:
        return self.allocator.allocated() if self.device.type == "cuda" else alive()


def profiled(work: Callable[[], None]) -> Bytes:
    """Every allocation and release of PyTorch's CPU allocator during ``work``, exact bytes, internal buffers included.

    A block that was allocated before any counting and is released here is missed: count from the first allocation on.
    Buffers that oneDNN and MKL take from the system directly are not PyTorch's and not seen.
    """
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
        gc.collect()  # what is garbage by now was held during the work, and must be seen to go
    events = profile.kineto_results.events()
    return of_events(event.nbytes() for event in events if event.name() == "[memory]")


def alive() -> int:
    """Bytes of the storages of all tensors that Python can reach."""
    gc.collect()
    storages = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thing in gc.get_objects():
            if isinstance(thing, Tensor) and thing.device.type != "meta":
                for tensor in (thing, thing.grad if thing.is_leaf else None):
                    if tensor is not None and tensor.layout == torch.strided:
                        storage = tensor.untyped_storage()
                        if storage.device.type != "meta":  # what torch.compile traces with has no memory
                            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
