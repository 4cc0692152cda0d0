"""The tutorials as pages of the site: every line of their code, and what is said beside it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.paths import ROOT

SCRIPTS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_tutorial_s_page_has_all_of_its_code_and_its_words(script: Path, tmp_path: Path) -> None:
    text = script.read_text()
    (tmp_path / script.name).write_text(text)
    subprocess.run([sys.executable, ROOT / "docs" / "site" / "tutorials.py", tmp_path], check=True)
    page = (tmp_path / script.name).with_suffix(".md").read_text()
    blocks = re.findall(r"^```python\n(.*?)\n```$", page, re.DOTALL | re.MULTILINE)
    assert page.startswith("# Tutorial ") and len(blocks) == text.count("\n# %% [")
    shown = {line for block in blocks for line in block.splitlines()}
    body = text.split("\n# %% [", 1)[1]
    code = [line.replace("  # noqa: E402", "") for line in body.splitlines()[1:]]
    missing = [line for line in code if line and not line.startswith("#") and line not in shown]
    assert not missing
    prose = " ".join(page.split())
    first = re.search(r"# %% \[1\] (.*)", text)
    assert first is not None and first[1] in prose
