"""Give what reads a table between steps rows with all their noise, or none."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.lazy_tables.table import Table


class Owner(Protocol):
    """The engine, as far as hooks call it."""

    def flush(self) -> None: ...

    def read(self, table: Table, rows: Tensor) -> None: ...

    @property
    def is_owner(self) -> bool: ...


class Watch:
    """The hooks of one table's module. A copy of a module has none that do anything."""

    def __init__(self, table: Table | None, engine: Owner | None) -> None:
        self.table, self.engine = table, engine

    @property
    def waits(self) -> bool:
        """Return whether rows wait for their noise."""
        return self.table is not None and self.table.is_hidden

    def __reduce__(self) -> Any:
        if self.waits:
            raise PrivacyError(
                "The model is copied or pickled while rows of a table wait for their noise; call flush() of the "
                "LazyEngine first, or save model.state_dict(), which does it."
            )
        return Watch, (None, None)

    def __call__(self, *_: Any) -> None:
        """Bring all rows up to date, before a state is written or read."""
        if self.engine is not None:
            self.engine.flush()


class Reading(Watch):
    """Before a call of the module: the rows that it reads are brought up to date, and shown while it runs."""

    def __reduce__(self) -> Any:
        return Reading, super().__reduce__()[1]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Show the table."""
        if self.table is None or self.engine is None or not self.waits:
            return
        if _is_seen(module):
            self.engine.flush()
            return
        ids: Tensor = args[0] if args else named["input"]
        self.engine.read(self.table, ids)
        self.table.show(True)


def _is_seen(module: nn.Module) -> bool:
    """Return whether somebody else's hook, mode or ``forward`` sees all of the table while the module is called."""
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    return modes > 0 or "forward" in vars(module) or any(not isinstance(hook, Watch) for hook in _hooks(module))


def _hooks(module: nn.Module) -> list[Any]:
    """Return all that run while the module is called, those of all modules among them."""
    of_all = torch.nn.modules.module
    before = (module._forward_pre_hooks, of_all._global_forward_pre_hooks)
    behind = (module._forward_hooks, of_all._global_forward_hooks)
    return [hook for hooks in (*before, *behind) for hook in hooks.values()]


class Read(Watch):
    """Hides the table behind such a call, also one that failed."""

    def __reduce__(self) -> Any:
        return Read, super().__reduce__()[1]

    def __call__(self, *_: Any) -> None:
        """Hide the table again."""
        if self.table is not None and self.engine is not None and self.waits and self.engine.is_owner:
            self.table.show(False)


class Apart(Watch):
    """Refuses calls of a module of whose rows other ranks hold some, and of its copies."""

    def __reduce__(self) -> Any:
        return Apart, super().__reduce__()[1]

    def __call__(self, *_: Any) -> None:
        """Refuse the call."""
        raise UnsupportedError(
            "A table was called of whose rows each rank holds a part, and would take others for those that are asked "
            "for. Call the model within `with engine.reading(x):`, on all ranks."
        )


def watch(module: nn.Module, table: Table, engine: Owner) -> None:
    """Let what reads the table of ``module`` between steps get rows with all their noise."""
    if table.share.ranks is not None:
        module.register_forward_pre_hook(Apart(table, engine))
    else:
        module.register_forward_pre_hook(Reading(table, engine), with_kwargs=True)
        module.register_forward_hook(Read(table, engine), always_call=True)
    module.register_state_dict_pre_hook(Watch(table, engine))  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(Watch(table, engine))


def watch_optimizer(optimizer: torch.optim.Optimizer, engine: Owner) -> None:
    """Let momentum that is saved or replaced have all its noise."""
    optimizer.register_state_dict_pre_hook(Watch(None, engine))
    optimizer.register_load_state_dict_pre_hook(Watch(None, engine))
