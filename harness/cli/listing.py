"""Plain listings for people and machines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from textwrap import wrap
from typing import Any

from harness.errors import BadInput
from harness.layers import SETS
from harness.plan import layer_registry, protocol, registry
from harness.plan.e2e import PRESETS
from harness.tasks import FLOAT32, FULL_TASKS, TASKS, Task


def table(title: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    """A rich table with a column per key, or the rows as JSON."""
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        Console().print(f"{title}: none.", markup=False)
        return
    # Text, because rich would take [words] of a name for markup and swallow them.
    view = Table(title=Text(title), title_justify="left")
    for key in rows[0]:
        numeric = all(isinstance(row[key], int | float) for row in rows)
        view.add_column(key.replace("_", " "), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        view.add_row(*(Text(_text(row[key])) for key in rows[0]))
    Console().print(view)


def _text(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def tasks() -> list[dict[str, Any]]:
    """Return the physical floor beside the name: FLOPs and bytes of one example's training step."""
    return [
        {
            "task": task.name,
            "data": task.dataset,
            "precision": task.precision,
            "examples": task.train_size,
            "parameters": task.parameter_count,
            "forward_flops_per_example": task.forward_flops,
            "training_flops_per_example": task.training_flops,
            "activation_bytes_per_example": task.activation_bytes,
        }
        for task in TASKS.values()
    ]


def variants() -> list[dict[str, Any]]:
    """Return a row per variant of every framework."""
    return [
        {
            "framework": framework.name,
            "variant": variant.name,
            "title": variant.title,
            "private": variant.private,
            "default": variant.default,
            "core": framework.core and variant.default,
            "twin": variant.twin or "",
            "own_sampling": variant.own_sampling or "",
            "unsupported": ", ".join(variant.unsupported) or "",
        }
        for framework in registry.frameworks().values()
        for variant in framework.variants
    ]


def protocols() -> list[dict[str, Any]]:
    """Return a row per protocol."""
    loaded = [protocol.load(name) for name in protocol.names()]
    return [
        {"protocol": p.label, "sampling": p.sampling, "sigma": p.noise_multiplier, "title": p.title} for p in loaded
    ]


def presets() -> list[dict[str, Any]]:
    """Return a row per preset of ``run e2e``."""
    return [
        {
            "preset": name,
            "tasks": ", ".join(options.tasks),
            "batch_sizes": "; ".join(sorted({", ".join(map(str, sizes)) for sizes in options.batch_sizes.values()})),
            "rounds": options.rounds,
            "frameworks": ", ".join(options.frameworks or ("default variants",)),
        }
        for name, options in PRESETS.items()
    ]


def layers() -> list[dict[str, Any]]:
    """C and L of the memory law beside the name."""
    return [
        {
            "layer": layer.name,
            "set": name,
            "kind": layer.kind,
            "parameters": layer.parameter_count,
            "example_bytes": layer.example_bytes,
            "parameter_bytes": layer.parameter_bytes,
        }
        for name, members in SETS.items()
        for layer in members
    ]


def layer_contestants() -> list[dict[str, Any]]:
    """Return a row per contestant of layers."""
    return [
        {
            "contestant": c.name,
            "title": c.variant.title,
            "column": c.variant.column,
            "passes": ", ".join(c.variant.passes),
            "core": c.variant.core,
        }
        for c in layer_registry.contestants()
    ]


KINDS = ("tasks", "frameworks", "protocols", "presets", "layers")


def show_all(details: bool, as_json: bool, kind: str | None = None) -> None:
    """Print everything that has a name, or only what is of a ``kind``: in a terminal of 80 columns, or with ``details``
    all columns. Raises :class:`BadInput` for a kind that there is not."""
    if kind is not None and kind not in KINDS:
        raise BadInput(f"There is no list of {kind!r}; name one of {', '.join(KINDS)}.")
    parts = {
        "tasks": tasks(),
        "frameworks": variants(),
        "protocols": protocols(),
        "presets": presets(),
        "layers": layers(),
        "layer_contestants": layer_contestants(),
    }
    chosen = {name: rows for name, rows in parts.items() if kind in (None, name)}
    if as_json:
        print(json.dumps(chosen, indent=1))
        return
    if details:
        for title, rows in chosen.items():
            table(title.capitalize().replace("_", " "), rows, False)
        return
    found = "\n".join(short(parts)).split("\n\n")
    print("\n\n".join(part for part in found if part.lower().startswith(kind or "")))


def short(parts: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    """Yield one line for each thing that has a name, of at most 80 characters."""
    yield "Tasks"
    yield from (_line(task, 9) for name, task in TASKS.items() if name not in FULL_TASKS)
    yield "\nTasks of published shapes, for one GPU"
    yield from (_line(TASKS[name], 13) for name in FULL_TASKS)
    yield "\nFrameworks (*: default variant; c: also in core, the set of the short presets)"
    for row in parts["frameworks"]:
        mark = "c" if row["core"] else "*" if row["default"] else " "
        name = f"{row['framework']}-{row['variant']}"
        yield shorten(f"{mark} {name:<27}", row["title"])
    yield "\nProtocols"
    for row in parts["protocols"]:
        yield shorten(f"  {row['protocol']:<16}", row["title"])
    yield "\nPresets"
    for row in parts["presets"]:
        rounds = f"{row['rounds']} round{'' if row['rounds'] == 1 else 's'}"
        what = f"{rounds} of {row['frameworks']}, batch {row['batch_sizes']}"
        yield shorten(f"  {row['preset']:<8}", what)
    yield "\nLayers"
    for name, members in SETS.items():
        yield from wrap(", ".join(layer.name for layer in members), 80, initial_indent=f"  {name:<8}", **_HANGING)
    names = dict.fromkeys(row["contestant"] for row in parts["layer_contestants"])
    yield from wrap(", ".join(names), 80, initial_indent="  by      ", **_HANGING)
    yield "\nMore of each: dpbench list --details, dpbench list --json"


def _line(task: Task, digits: int) -> str:
    """Return a task's line, its number of parameters ``digits`` wide."""
    size = f"{task.train_size:>6,} examples, {task.parameter_count:>{digits},} parameters"
    size += f", {task.precision}" if task.precision != FLOAT32 else ""
    return f"  {task.name:<{15 if digits < 13 else 18}} {size}"


_HANGING: dict[str, Any] = {"subsequent_indent": 10 * " ", "break_on_hyphens": False}


def shorten(start: str, text: str) -> str:
    """``start`` and as much of ``text`` as fits 80 columns."""
    room = 79 - len(start)
    return f"{start} {text if len(text) <= room else text[: room - 1] + '…'}"
