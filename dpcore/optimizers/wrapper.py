"""An optimiser that stands around another one, without being one of torch's own: copies, and hooks of the user's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from dpcore.errors import PrivacyError, UnsupportedError
from dpcore.parts import Forwarded


class OptimizerWrapper(Optimizer):
    """Never calls Optimizer.__init__: what torch keeps in an optimiser is that of the ``inner`` one."""

    param_groups = Forwarded("inner")  # type: ignore[assignment]
    state = Forwarded("inner")  # type: ignore[assignment]
    defaults = Forwarded("inner")  # type: ignore[assignment]

    @property
    def inner(self) -> Optimizer:
        """The optimiser inside."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        # Of optimizers without a schedule, whose weights are others in evaluation: libraries ask whether there are any.
        if name in ("train", "eval"):
            return getattr(self.inner, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # torch would make a copy without its parts, and replace step() of the class on the way.
        raise PrivacyError(
            "A private optimizer cannot be copied or pickled: the copy would draw the noise of the same steps again, "
            "on other gradients, and the difference would be bare. Use PrivacyEngine.save_checkpoint and "
            "load_checkpoint, or copy optimizer.state_dict()."
        )

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """``hook(self, args, kwargs)`` runs before every update, when ``p.grad`` is the released gradient."""
        return self._register("register_step_pre_hook", hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """``hook(self, args, kwargs)`` runs after every update; not after a piece of a logical batch that goes on."""
        return self._register("register_step_post_hook", hook)

    def register_state_dict_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        return self._register("register_state_dict_pre_hook", hook, prepend=prepend)

    def register_state_dict_post_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        return self._register("register_state_dict_post_hook", hook, prepend=prepend)

    def register_load_state_dict_pre_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        return self._register("register_load_state_dict_pre_hook", hook, prepend=prepend)

    def register_load_state_dict_post_hook(self, hook: Callable[..., Any], prepend: bool = False) -> RemovableHandle:
        return self._register("register_load_state_dict_post_hook", hook, prepend=prepend)

    def _register(self, kind: str, hook: Callable[..., Any], **options: Any) -> RemovableHandle:
        """Registers the hook on the optimiser inside; it is called with this one in its place."""
        register = getattr(self.inner, kind, None)
        if register is None:
            raise UnsupportedError(
                f"The wrapped {type(self.inner).__name__} has no {kind}; call what the hook would do after "
                "optimizer.step()."
            )
        handle: RemovableHandle = register(lambda inner, *given: hook(self, *given), **options)
        return handle
