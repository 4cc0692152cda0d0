"""Protocols: the rules of a measurement as data, read from ``harness/plan/protocols/*.toml``. Standard library only.

``python -m harness.plan.protocol`` prints docs/rules.md.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "protocols"


@dataclass(frozen=True)
class Rule:
    """One sentence with the number that messages cite."""

    id: str
    text: str


@dataclass(frozen=True)
class Protocol:
    """``sampling`` is ``poisson``, ``consecutive``, ``own`` (the library's own loop is timed instead of steps), or
    ``physical`` (every batch has the same size; only for the memory frontier), or ``none`` (only for layers). Without
    ``warm_up`` the first epoch, compile included, counts."""

    name: str
    version: int
    title: str
    sampling: str
    noise_multiplier: float
    max_grad_norm: float
    delta: float
    warm_up: bool
    default_epochs: int
    rules: tuple[Rule, ...]

    @property
    def needs_whole_epochs(self) -> bool:
        """Whether a part of an epoch cannot stand for one: the first is not like the others, or cannot be cut short."""
        return not self.warm_up or self.sampling == "own"

    @property
    def times_epochs(self) -> bool:
        """Whether it is a protocol of ``run e2e``."""
        return self.sampling not in {"physical", "none"}

    @property
    def label(self) -> str:
        return f"{self.name}-v{self.version}"


def names() -> list[str]:
    """Return the names of all protocols."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Protocol:
    """Raise ValueError with a remedy where there is no such protocol."""
    path = FOLDER / f"{name}.toml"
    if name not in names():
        raise ValueError(f"There is no protocol {name!r}; choose one of {', '.join(names())}.")
    data = tomllib.loads(path.read_text())
    rules = tuple(Rule(**rule) for rule in data.pop("rules"))
    return Protocol(**data, rules=rules)


def page() -> str:
    """Return the page of all rules, those of the default protocol first."""
    lines = ["# Rules of each protocol\n\nPrinted by `python -m harness.plan.protocol`; [what they mean](protocol.md)."]
    for name in sorted(names(), key=lambda name: (name != "verified", name)):
        found = load(name)
        lines.append(f"\n## `{name}` (version {found.version}): {found.title}\n")
        lines += [f"- **{rule.id}** {rule.text}" for rule in found.rules]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
