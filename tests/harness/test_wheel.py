"""The wheel of dpbench: it holds what a run needs, and runs from an empty environment outside the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.paths import ROOT
from harness.plan import registry

# What a run reads; a wheel has these folders below dpbench/.
PARTS = ("harness", "frameworks", "dpcore", "dockerfiles", "results/paper", "results/published")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@dataclass(frozen=True)
class Installed:
    """An environment that holds the wheel, and an empty folder to work in."""

    environment: Path
    work: Path

    @property
    def site(self) -> Path:
        (found,) = self.environment.glob("lib/python*/site-packages")
        return found

    @property
    def files(self) -> set[Path]:
        return {path for path in self.site.rglob("*") if "__pycache__" not in path.parts}

    def run(self, program: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "DPBENCH"))}
        return subprocess.run(
            [str(self.environment / "bin" / program), *arguments],
            cwd=self.work,
            env=kept | more,
            capture_output=True,
            text=True,
        )


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel alone; the libraries it needs are those of the tests, so that nothing is fetched."""
    folder = tmp_path_factory.mktemp("outside")
    subprocess.run(["git", "init", "--quiet", str(folder)], check=True)  # an environment often lies in a repository
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
    command = [*PIP, "--python", str(folder / "venv"), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(command, check=True)
    (folder / "work").mkdir()
    found = Installed(folder / "venv", folder / "work")
    (found.site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return found


def test_the_wheel_holds_every_file_that_a_run_reads(wheel: Path) -> None:
    listed = subprocess.run(["git", "ls-files", *PARTS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wanted = {f"dpbench/{name}" for name in listed.splitlines()} - {
        "dpbench/dpcore/pyproject.toml",
        "dpbench/dpcore/setup.py",
    }
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == wanted | {"dpbench.pth"}


def test_what_is_installed_finds_its_contestants(installed: Installed) -> None:
    done = installed.run("dpbench", "list", "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    expected = {f"{f.name}-{v.name}" for f in registry.frameworks().values() for v in f.variants}
    assert {f"{row['framework']}-{row['variant']}" for row in said["frameworks"]} == expected


def test_workers_see_the_tree_of_the_wheel_and_no_library_of_the_harness(installed: Installed) -> None:
    code = "from harness.environments.variables import of_worker as e; print(e(1, {})['PYTHONPATH'])"
    root = Path(installed.run("python", "-c", code).stdout.strip())
    assert root == installed.site / "dpbench"
    assert {path.name for path in root.iterdir()} == {name.split("/")[0] for name in PARTS}


def test_a_record_names_no_commit_of_a_repository_around_the_environment(installed: Installed) -> None:
    done = installed.run("python", "-c", "from harness.worker.machine import commit; print(commit())")
    assert done.stdout.strip() == "(None, None)"


def test_a_new_framework_goes_into_the_working_directory(installed: Installed) -> None:
    before = installed.files
    done = installed.run("dpbench", "new-framework", "my_own")
    assert done.returncode == 0, done.stderr
    assert (installed.work / "frameworks" / "my_own" / "adapter.py").exists()
    assert installed.files == before
    listed = installed.run("dpbench", "list", "--json", DPBENCH_FRAMEWORKS=str(installed.work / "frameworks"))
    assert "my_own" in {row["framework"] for row in json.loads(listed.stdout)["frameworks"]}


@pytest.mark.parametrize(
    "arguments",
    [("report", "cited"), ("findings",), ("compare", "--base", "HEAD", "--head", "."), ("gate", "--mutants")],
    ids=" ".join,
)
def test_what_needs_a_checkout_says_so(installed: Installed, arguments: tuple[str, ...]) -> None:
    done = installed.run("dpbench", *arguments)
    assert done.returncode == 2
    assert "checkout" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.network
def test_the_smoke_preset_runs_from_an_environment_that_pip_made(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    (tmp_path / "work").mkdir()
    here = Installed(tmp_path / "venv", tmp_path / "work")
    done = here.run("python", "-m", "pip", "install", "--quiet", str(wheel))
    assert done.returncode == 0, done.stderr
    before = here.files
    done = here.run("dpbench", "run", "e2e", "--preset", "smoke", "--threads", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (here.work / "results" / "local" / "smoke" / "report" / "report.md").exists()
    assert here.files == before
