"""The workflows and actions under .github: linted, least in what they may, every step a make target that works here."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tests.dpcore.versions import PAIRS
from tests.harness.ci.test_ci import make_wheel, read_outputs

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTIONS = sorted((ROOT / ".github" / "actions").glob("*/action.yml"))
FILES = [*WORKFLOWS, *ACTIONS]
PAGE = ROOT / "docs" / "ci.md"

# (workflow, job): what it may write. A new entry is a decision.
WRITES = {
    ("pull-request", "comment"): {"pull-requests"},
    ("nightly", "record"): {"contents", "pull-requests"},
    ("nightly", "site"): {"pages", "id-token"},
    ("pages", "deploy"): {"pages", "id-token"},
    ("release", "publish"): {"id-token"},
}


def load(text: str | Path) -> dict[str, Any]:
    return YAML(typ="safe", pure=True).load(text)  # YAML 1.2, in which `on` is a word and no truth value


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    return load(path)["jobs"]


@dataclass(frozen=True)
class Step:
    file: Path
    where: str
    content: dict[str, Any]


def steps_of(path: Path) -> list[Step]:
    data = load(path)
    if "jobs" not in data:
        return [Step(path, str(i), step) for i, step in enumerate(data["runs"]["steps"])]
    return [
        Step(path, f"{name}[{i}]", step)
        for name, job in data["jobs"].items()
        for i, step in enumerate(job.get("steps", []))
    ]


STEPS = [step for path in FILES for step in steps_of(path)]
RUNS = [pytest.param(step, id=f"{step.file.stem}-{step.where}") for step in STEPS if "run" in step.content]


def tool(name: str) -> str:
    """Installed with the pins of requirements.txt."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert found is not None, f"{name} is missing; make brings what requirements.txt pins"
    return found


def test_there_is_something_to_check() -> None:
    assert {path.stem for path in WORKFLOWS} == {
        "compare-wheel",
        "nightly",
        "packs",
        "pages",
        "pull-request",
        "release",
        "versions",
    }
    assert {path.parent.name for path in ACTIONS} == {"compare", "setup"}
    assert len(RUNS) >= 12


# ---- linters


def validate(schema: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True)


def test_files_fit_the_forge_s_schemas(tmp_path: Path) -> None:
    for schema, paths in (("github-workflows", WORKFLOWS), ("github-actions", ACTIONS)):
        done = validate(schema, *paths)
        assert done.returncode == 0, done.stdout
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOWS[0].read_text().replace("timeout-minutes:", "timeout-minuten:"))
    assert validate("github-workflows", wrong).returncode == 1


def audit(path: Path) -> subprocess.CompletedProcess[str]:
    command = [tool("zizmor"), "--offline", "--no-progress", "--persona=pedantic", "--format=plain", str(path)]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_security_audit_finds_nothing(tmp_path: Path) -> None:
    done = audit(ROOT / ".github")
    assert done.returncode == 0, done.stdout
    planted = tmp_path / ".github" / "workflows" / "planted.yml"
    planted.parent.mkdir(parents=True)
    text = (ROOT / ".github" / "workflows" / "pull-request.yml").read_text()
    planted.write_text(text.replace("run: make lint", 'run: echo "${{ github.event.pull_request.title }}"'))
    assert "template-injection" in audit(planted).stdout


SCRIPTS = [pytest.param(path.read_text(), id=path.name) for path in sorted((ROOT / ".ci").glob("*.sh"))]


@pytest.mark.parametrize("script", [*(pytest.param(p.values[0].content["run"], id=p.id) for p in RUNS), *SCRIPTS])
def test_shell_is_clean(script: str) -> None:
    done = subprocess.run([tool("shellcheck"), "-s", "bash", "-"], input=script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---- what jobs may, and for how long


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_permissions_are_the_least_and_times_end(path: Path) -> None:
    assert load(path)["permissions"] == {}
    for name, job in jobs(path).items():
        wanted = job["permissions"]
        writes = {what for what, level in wanted.items() if level == "write"}
        assert writes == WRITES.get((path.stem, name), set()), name
        assert set(wanted.values()) <= {"read", "write"}
        if "uses" not in job:
            assert 1 <= job["timeout-minutes"] <= 360, name
    if path.stem != "compare-wheel":  # called by others, whose concurrency it is
        assert load(path)["concurrency"]["group"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name + "-" + path.stem)
def test_strangers_reach_nothing(path: Path) -> None:
    text, data = path.read_text(), load(path)
    # These run with secrets and write tokens on behalf of a fork.
    assert not {"pull_request_target", "workflow_run", "issue_comment"} & set(data.get("on") or {})
    assert "secrets." not in text
    assert "secrets: inherit" not in text
    tokens = [step for step in steps_of(path) if "github.token" in str(step.content)]
    assert {step.where.split("[")[0] for step in tokens} <= {job for file, job in WRITES if file == path.stem}
    if "pull_request" in (data.get("on") or {}):
        for name, job in data["jobs"].items():
            assert "self-hosted" not in str(job["runs-on"]), "a machine that stays must not run code of a fork"
            if "write" in job["permissions"].values():
                assert "head.repo.full_name == github.repository" in job["if"], name
                (checkout,) = [s for s in job["steps"] if "actions/checkout" in s.get("uses", "")]
                assert checkout["with"]["ref"] == "${{ github.event.pull_request.base.sha }}"


def test_credentials_stay_only_where_something_is_pushed() -> None:
    keep = {
        (step.file.stem, step.where.split("[")[0]): step.content["with"]["persist-credentials"]
        for step in STEPS
        if "actions/checkout" in step.content.get("uses", "")
    }
    assert {job for job, kept in keep.items() if kept} == {("nightly", "record")}


def test_every_action_is_pinned_to_a_commit_with_its_version_beside() -> None:
    pins: dict[str, set[str]] = {}
    for path in FILES:
        for line in path.read_text().splitlines():
            if not (found := re.match(r"\s*(?:- )?uses: (\S+)(.*)", line)):
                continue
            name, rest = found[1], found[2]
            if name.startswith("$/"):  # this repository, at the very commit that runs
                target = ROOT / name[2:]
                assert target.is_file() or (target / "action.yml").is_file(), name
                continue
            assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", name), f"{path.name}: {name}"
            assert re.fullmatch(r" # v\d+\.\d+\.\d+", rest), f"{path.name}: {name} does not say its version"
            pins.setdefault(name.split("@")[0], set()).add(name)
    assert all(len(found) == 1 for found in pins.values()), pins


def test_where_a_token_is_nothing_is_installed() -> None:
    holders = [(path, name, job) for path in WORKFLOWS for name, job in jobs(path).items()]
    holders = [found for found in holders if "github.token" in str(found[2].get("steps"))]
    assert {(path.stem, name) for path, name, _ in holders} == {("pull-request", "comment"), ("nightly", "record")}
    for path, name, job in holders:
        assert "github.token" not in str([load(path).get("env"), job.get("env")])
        assert all("checkout" in step["uses"] or "download" in step["uses"] for step in job["steps"][:-1]), name
        assert "github.token" not in str(job["steps"][:-1]), name


# ---- when jobs run


def holds(condition: str, *, cancelled: bool = False, success: bool = True, **values: str) -> bool:
    """The condition as GitHub takes it; ``success``: of everything before, which it asks unless a status is named.

    ``values`` by their context's name with ``__`` for the dots; what is not given is empty.
    """
    text = condition.removeprefix("${{").removesuffix("}}").strip()
    if not re.search(r"\b(?:cancelled|always|failure|success)\(\)", text):
        text = f"success() && ({text})"
    contexts = {name.replace("__", "."): value for name, value in values.items()}
    text = re.sub(r"\b[a-z]+(?:\.\w+)+", lambda found: repr(contexts.get(found[0], "")), text)
    text = re.sub(r"!(?!=)", " not ", text).replace("&&", " and ").replace("||", " or ")
    return bool(eval(text, {"cancelled": lambda: cancelled, "success": lambda: success}))


BY_HAND = {"github__event_name": "workflow_dispatch", "github__event__repository__default_branch": "main"}
SCHEDULED = {"github__event_name": "schedule", "github__ref_name": "main"}  # whose event has no repository


@pytest.mark.parametrize("job", ["cpu", "gpu"])
def test_a_night_with_a_failed_cell_becomes_history_too(job: str) -> None:
    steps = jobs(ROOT / ".github" / "workflows" / "nightly.yml")[job]["steps"]
    measured = next(i for i, step in enumerate(steps) if step.get("run", "").startswith("make bench-layers"))
    history, upload = steps[measured + 1 :]
    assert history["run"].startswith("make history ")
    assert holds(history["if"], success=False)
    assert holds(upload["if"], success=False, steps__history__outcome="success")
    assert not holds(upload["if"], success=False, steps__history__outcome="failure")
    assert not holds(history["if"], cancelled=True)


@pytest.mark.parametrize("job", ["record", "check"])
def test_what_a_failed_job_uploaded_is_recorded_and_checked(job: str) -> None:
    found = jobs(ROOT / ".github" / "workflows" / "nightly.yml")
    assert set(found[job]["needs"]) == {"cpu", "gpu"}
    for one in ("cpu", "gpu"):
        assert found[one]["outputs"] == {"artifact": "${{ steps.upload.outputs.artifact-id }}"}
        assert found[one]["steps"][-1]["id"] == "upload"
        artifact = {f"needs__{one}__outputs__artifact": "1", f"needs__{one}__result": "failure"}
        assert holds(found[job]["if"], success=False, **artifact, **SCHEDULED)
        assert not holds(found[job]["if"], cancelled=True, **artifact, **SCHEDULED)
    assert not holds(found[job]["if"], needs__cpu__result="success", **SCHEDULED)


@pytest.mark.parametrize("job", ["cpu", "gpu", "record"])
def test_only_the_default_branch_becomes_history(job: str) -> None:
    condition = jobs(ROOT / ".github" / "workflows" / "nightly.yml")[job]["if"]
    ready = {"vars__DPBENCH_GPU_LABEL": "gpu", "needs__cpu__outputs__artifact": "1"}
    assert holds(condition, **ready, **SCHEDULED)
    assert holds(condition, github__ref_name="main", **ready, **BY_HAND)
    assert not holds(condition, github__ref_name="topic", **ready, **BY_HAND)


@pytest.mark.parametrize(("file", "job", "needed"), [("nightly", "site", "record"), ("pages", "deploy", "build")])
def test_the_site_is_published_where_the_job_before_succeeded(file: str, job: str, needed: str) -> None:
    condition = jobs(ROOT / ".github" / "workflows" / f"{file}.yml")[job]["if"]
    name = f"needs__{needed}__result"
    assert holds(condition, success=False, **{name: "success"})  # a GPU job further up was skipped
    assert not holds(condition, success=False, **{name: "failure"})
    assert not holds(condition, cancelled=True, **{name: "success"})


def test_a_pull_request_is_compared_with_the_commit_that_it_is_merged_with() -> None:
    steps = jobs(ROOT / ".github" / "workflows" / "pull-request.yml")["compare"]["steps"]
    (checkout,) = [step for step in steps if "actions/checkout" in step.get("uses", "")]
    (compare,) = [step for step in steps if step.get("run") == "make compare"]
    assert "ref" not in checkout["with"]  # the merge commit, of which every parent is there
    assert checkout["with"]["fetch-depth"] == 0
    assert (compare["env"]["BASE"], compare["env"]["HEAD"]) == ("HEAD^1", ".")


# ---- steps work here


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """In which make finds the harness set up as it is here: it must not install anything."""
    dpbench = tmp_path / "venv" / "bin" / "dpbench"
    dpbench.parent.mkdir(parents=True, exist_ok=True)
    dpbench.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m harness "$@"\n')
    dpbench.chmod(0o755)
    flags = f"VENV={tmp_path / 'venv'}"
    for name in ("READY", "TORCH_READY"):
        (tmp_path / name).touch()
        flags += f" {name}={tmp_path / name}"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"MAKEFLAGS": flags, "PYTHONPATH": path} | more


def written_out(values: dict[str, Any] | None, contexts: dict[str, str]) -> dict[str, str]:
    """The step's env with its expressions replaced as the runner would do; each must be known to the test."""
    return {
        name: re.sub(r"\$\{\{ *(.*?) *\}\}", lambda found: contexts[found[1]], str(value))
        for name, value in (values or {}).items()
    }


CONTEXTS = {
    "github.event.pull_request.number": "7",
    "github.repository": "owner/name",
    "matrix.torch": "2.6.0",
    "github.event.repository.default_branch || github.ref_name": "main",
    "github.token": "secret",
    "vars.DPBENCH_HISTORY_BY || 'commit'": "commit",
    "steps.python.outputs.python-path": sys.executable,
    "inputs.fail-on-regression == 'false'": "false",
} | {f"inputs.{name}": str(value.get("default", name)) for name, value in load(ACTIONS[0])["inputs"].items()}


@pytest.mark.parametrize("step", RUNS)
def test_a_step_is_a_make_target_that_exists_or_writes_one_file_of_the_runner(step: Step, tmp_path: Path) -> None:
    script = step.content["run"].strip()
    assert "\n" not in script
    assert "${{" not in script, "an expression in a script is code of whoever chose its value: pass it by env"
    if re.search(r'>> "\$GITHUB_(OUTPUT|STEP_SUMMARY)"$', script):
        return
    assert script.startswith("make "), script
    env = environment(tmp_path, GITHUB_ACTION_PATH=str(step.file.parent)) | written_out(
        step.content.get("env"), CONTEXTS
    )
    dry = subprocess.run(
        ["bash", "-c", script.replace("make ", "make -n ", 1)], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert dry.returncode == 0, dry.stderr
    assert re.search(r"bin/|python\S* -m |gh pr comment|\.ci/publish_history\.sh", dry.stdout)


def test_packs_of_a_pull_request_are_verified_one_by_one(tmp_path: Path) -> None:
    env = environment(tmp_path, BASE="HEAD^1")
    dpbench = tmp_path / "venv" / "bin" / "dpbench"
    dpbench.write_text('#!/bin/sh\necho "called:$*"\n! grep -q bad "$2"\n')
    records = tmp_path / "results" / "records"
    records.mkdir(parents=True)
    (tmp_path / "Makefile").symlink_to(ROOT / "Makefile")
    for name in ("requirements.txt", "pyproject.toml"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))  # so that what is set up is newer

    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    def commit(**packs: str) -> None:
        for name, content in packs.items():
            (records / f"{name}.jsonl.gz").write_text(content)
        git("add", "results")
        git("commit", "-m", "packs")

    def verified() -> tuple[int, list[str]]:
        done = subprocess.run(["make", "verify-packs"], cwd=tmp_path, env=env, capture_output=True, text=True)
        return done.returncode, re.findall(r"^called:(.*)$", done.stdout, re.MULTILINE)

    git("init")
    commit(old="good")
    commit(**{"a b $(touch x)": "good", "c": "good"})
    called = [f"verify results/records/{name}.jsonl.gz" for name in ("a b $(touch x)", "c")]
    assert verified() == (0, called)
    commit(d="bad", e="good")
    assert verified() == (2, [f"verify results/records/{name}.jsonl.gz" for name in "de"])
    (records / "note.txt").write_text("no pack")
    commit()
    assert verified() == (0, [])


def test_every_pair_of_torch_and_python_has_a_job() -> None:
    include = jobs(ROOT / ".github" / "workflows" / "versions.yml")["pair"]["strategy"]["matrix"]["include"]
    assert tuple((one["torch"], one["python"]) for one in include) == PAIRS


# ---- the action that others call


def run_action(tmp_path: Path, inputs: dict[str, str]) -> tuple[subprocess.CompletedProcess[str], dict[str, str], str]:
    """Its own steps as a runner takes them: defaults, inputs, expressions, env, then the scripts in bash."""
    path = ROOT / ".github" / "actions" / "compare" / "action.yml"
    declared = load(path)["inputs"]
    assert inputs.keys() <= declared.keys()
    values = {name: inputs.get(name, str(one.get("default", ""))) for name, one in declared.items()}
    assert all(values[name] for name, one in declared.items() if one.get("required"))
    contexts = {f"inputs.{name}": value for name, value in values.items()} | {
        "steps.python.outputs.python-path": sys.executable,
        "inputs.fail-on-regression == 'false'": str(values["fail-on-regression"] == "false").lower(),
    }
    workspace, output, summary = tmp_path / "workspace", tmp_path / "output", tmp_path / "summary"
    for file in (output, summary):
        file.touch()
    (step,) = [step for step in steps_of(path) if "run" in step.content]
    env = environment(
        tmp_path,
        GITHUB_ACTION_PATH=str(path.parent),
        GITHUB_WORKSPACE=str(workspace),
        GITHUB_OUTPUT=str(output),
        GITHUB_STEP_SUMMARY=str(summary),
    ) | written_out(step.content["env"], contexts)
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step.content["run"]]
    done = subprocess.run(command, cwd=workspace, env=env, capture_output=True, text=True)
    return done, read_outputs(output), summary.read_text()


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """The workspace of another repository, with a wheel that it has built."""
    make_wheel(tmp_path / "workspace" / "dist", "some_library", "1.1")
    return tmp_path


def test_the_action_finds_the_wheel_and_the_last_release(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("0.9", "1.0"):
        make_wheel(library / "index", "some_library", version)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(library / "index"))
    inputs = {"package": "some-library", "wheel": "dist/*.whl", "layers": "linear,lstm", "dry-run": "true"}
    done, outputs, _ = run_action(library, inputs)
    assert done.returncode == 0, done.stderr
    assert "some-library 1.1 (some_library-1.1-py3-none-any.whl) against the release 1.0" in done.stdout
    assert (outputs["verdict"], outputs["base"]) == ("dry-run", "1.0")
    assert outputs["file"] == str(library / "workspace" / "comparison.md")


def test_the_action_s_verdict_and_text_reach_the_caller(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a comparison that says at once what a real one finds: a regression."""
    fake = library / "fake"
    fake.mkdir()
    (fake / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if sys.orig_argv[1:4] == ['-m', 'harness', 'compare']:\n"
        "    words = sys.orig_argv[4:]\n"
        "    with open(words[words.index('--markdown') + 1], 'w') as file:\n"
        "        file.write(' '.join(words) + '\\n| lstm | slower |\\n')\n"
        "    os._exit(1)\n"
    )
    inputs = {"package": "some-library", "wheel": "dist/*.whl", "base": "1.0", "threshold": "0.1"}
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(fake), os.environ.get("PYTHONPATH")])))
    failing = run_action(library, inputs)
    (library / "output").unlink()
    tolerated = run_action(library, inputs | {"fail-on-regression": "false"})
    for (done, outputs, summary), code in ((failing, 2), (tolerated, 0)):  # make's own code for a failed target is 2
        assert done.returncode == code, done.stderr
        assert outputs["verdict"] == "regression"
        assert "| lstm | slower |" in outputs["markdown"]
        assert "--base some-library==1.0" in outputs["markdown"]
        assert "--threshold 0.1 --minutes 20" in outputs["markdown"]
        assert outputs["markdown"].strip() in summary


@pytest.mark.parametrize("name", ["package", "wheel", "base", "layers", "threshold"])
def test_what_a_stranger_types_is_never_run(name: str, library: Path) -> None:
    planted = library / "planted"
    inputs = {"package": "some-library", "wheel": "dist/*.whl", "base": "1.0", "dry-run": "true"}
    evil = f'a"; touch {planted}; $(touch {planted}) `touch {planted}` $(shell touch {planted}) "b'
    done, outputs, _ = run_action(library, inputs | {name: evil})
    assert not planted.exists()
    assert done.returncode == 2 or outputs["verdict"] == "dry-run"


# ---- the documented caller


def blocks() -> Iterator[str]:
    yield from re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_page_s_workflows_are_valid_and_call_what_exists(tmp_path: Path) -> None:
    examples = list(blocks())
    assert len(examples) == 2
    for number, text in enumerate(examples):
        path = tmp_path / f"example{number}.yml"
        path.write_text(text)
        done = validate("github-workflows", path)
        assert done.returncode == 0, done.stdout
        data = load(text)
        assert data["permissions"] == {}
        calls = [job for job in data["jobs"].values() if "uses" in job]
        calls += [step for job in data["jobs"].values() for step in job.get("steps", ())]
        ours = [call for call in calls if "OWNER/dpbench/" in call.get("uses", "")]
        (call,) = ours
        target = ROOT / call["uses"].removeprefix("OWNER/dpbench/").split("@")[0]
        offered = (
            load(target)["on"]["workflow_call"]["inputs"] if target.is_file() else load(target / "action.yml")["inputs"]
        )
        assert call["with"].keys() <= offered.keys()
        assert {name for name, one in offered.items() if one.get("required")} <= call["with"].keys()
        assert re.search(r"@[0-9a-f]{40}$|@COMMIT$", call["uses"])


def test_the_page_s_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"`make ([a-z-]+)", PAGE.read_text())):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_workflow_for_others_hands_every_input_on() -> None:
    workflow = load(ROOT / ".github" / "workflows" / "compare-wheel.yml")
    offered = set(workflow["on"]["workflow_call"]["inputs"]) - {"artifact"}
    (step,) = [step for step in workflow["jobs"]["compare"]["steps"] if step.get("id") == "compare"]
    used = {found for value in step["with"].values() for found in re.findall(r"inputs\.([\w-]+)", value)}
    assert used == offered
    assert shlex.split(step["with"]["wheel"]) == ["wheel/${{", "inputs.wheel", "}}"]
