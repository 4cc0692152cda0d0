"""Write the tutorials, scripts with cells, as pages: `python docs/site/tutorials.py FOLDER...`, each beside its script.

A cell's comment becomes text, its code a block that can be copied; a program for notebooks would bring fifty packages.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

CELL = re.compile(r"^# %% \[\d+\] ", re.MULTILINE)


def page(script: str) -> str:
    """Return a script as Markdown: its docstring, then the text and the code of each cell."""
    said, _, rest = (ast.get_docstring(ast.parse(script)) or "").partition("\n")
    return "\n\n".join([f"# {said}", rest.strip("\n"), *_cells(script)]) + "\n"


def _cells(script: str) -> Iterator[str]:
    for number, cell in enumerate(CELL.split(script)[1:], 1):
        lines = cell.splitlines()
        code = next((k for k, line in enumerate(lines[1:], 1) if not line.startswith("#")), len(lines))
        words = [lines[0], *(line.removeprefix("#").strip() for line in lines[1:code])]
        source = "\n".join(line.replace("  # noqa: E402", "") for line in lines[code:]).strip()
        yield f"**{number}.** {' '.join(words)}\n\n```python\n{source}\n```"


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        for script in sorted(folder.glob("*.py")):
            script.with_suffix(".md").write_text(page(script.read_text()))
