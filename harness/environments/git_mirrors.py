"""Git requirements out of bundles or mirrors in a folder of the user's, for machines that reach no git server.

Git itself does the redirection (``url.<base>.insteadOf``), so that pins and records keep the public address.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.environments import variables
from harness.environments.orphans import dying_with_parent
from harness.errors import BadInput

VARIABLE = "DPBENCH_GIT_MIRRORS"
FORMS = ("{}.bundle", "{}.git", "{}")
"""Names that a bundle, a bare mirror and a clone of a repository may have in the folder."""
GIT_PIN = re.compile(r"(?P<package>\S+) @ git\+(?P<address>\S+?)@(?P<commit>[0-9a-f]{40})")


class GitFault(Exception):
    """A git requirement that cannot be had; the message is one sentence."""


@dataclass(frozen=True)
class GitPin:
    """A requirement that is a git commit. ``address``: the public one, as the requirements file has it."""

    package: str
    address: str
    commit: str

    @property
    def repository(self) -> str:
        """Return the last part of the address: what the bundle is called."""
        return self.address.rstrip("/").rpartition("/")[2].removesuffix(".git")


def git_pins(lines: Iterable[str]) -> list[GitPin]:
    """Return the requirements among ``lines`` that are a commit of a git repository."""
    found = (GIT_PIN.fullmatch(line) for line in lines)
    return [GitPin(**match.groupdict()) for match in found if match]


def folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder that DPBENCH_GIT_MIRRORS names, or None. Raises :class:`BadInput` where it is none."""
    named = environment.get(VARIABLE)
    if not named:
        return None
    path = Path(named).expanduser()
    if not path.is_dir():
        raise BadInput(
            f"{VARIABLE} (or --git-mirrors) is {named!r}, which is no folder; name one that holds bundles "
            "(REPOSITORY.bundle) or mirrors (REPOSITORY.git)."
        )
    return path.resolve()


@contextmanager
def redirected(pins: Iterable[GitPin], mirrors: Path | None) -> Iterator[dict[str, str]]:
    """Yield environment variables under which git finds each pin in ``mirrors`` instead of at its public address.

    A repository of which the folder holds nothing keeps its address.

    Args:
        pins: the git requirements.
        mirrors: the user's folder; None redirects nothing.

    Raises:
        GitFault: a bundle or mirror cannot be read, or lacks the pinned commit.
    """
    with tempfile.TemporaryDirectory(prefix="dpbench-git-") as temporary:
        rules: list[tuple[str, str]] = []
        for number, pin in enumerate(pins):
            source = _source(pin, mirrors)
            if source is not None:
                copy = Path(temporary, f"{number}.git")
                _copy(pin, source, copy)
                rules.append((f"url.{copy.as_uri()}.insteadOf", pin.address))
        before = int(os.environ.get("GIT_CONFIG_COUNT") or 0)
        environment = {"GIT_CONFIG_COUNT": str(before + len(rules))} if rules else {}
        for number, (key, value) in enumerate(rules, before):
            environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
        yield environment


def check_reachable(pins: Iterable[GitPin], redirections: Mapping[str, str]) -> None:
    """Ask every repository for its branches: seconds, where pip would come to it after gigabytes of other packages.

    Args:
        pins: the git requirements.
        redirections: what :func:`redirected` yields.

    Raises:
        GitFault: git does not reach one of them.
    """
    silent = [pin for pin in pins if _git("ls-remote", "--quiet", pin.address, **redirections).returncode]
    if silent:
        names = ", ".join(pin.package for pin in silent)
        bundles = " and ".join(f"{pin.repository}.bundle" for pin in silent)
        raise GitFault(
            f"not installable offline: {names} comes from a git commit and from no package registry, and git could not "
            f"reach it from here; name a folder that holds {bundles} by {VARIABLE}."
        )


def _source(pin: GitPin, mirrors: Path | None) -> Path | None:
    if mirrors is None:
        return None
    paths = (mirrors / form.format(pin.repository) for form in FORMS)
    return next((path for path in paths if path.exists()), None)


def _copy(pin: GitPin, source: Path, copy: Path) -> None:
    """Make a bare repository with the pinned commit on a branch, as pip clones branches only."""
    made = _git("clone", "--quiet", "--mirror", str(source), str(copy))
    if made.returncode:
        words = " ".join(made.stderr.split())[-300:]
        raise GitFault(
            f"not installable here: git cannot read {source} ({words}); make it with "
            f"`git bundle create {pin.repository}.bundle --all` in a whole clone of {pin.address}."
        )
    if _git("-C", str(copy), "rev-parse", "--quiet", "--verify", f"{pin.commit}^{{commit}}").returncode:
        raise GitFault(
            f"not installable here: {source} does not hold commit {pin.commit}, which {pin.package} is pinned to; "
            f"make it anew with `git bundle create {pin.repository}.bundle --all` in a clone of {pin.address}."
        )
    _git("-C", str(copy), "branch", "--force", f"pinned-{pin.commit}", pin.commit)


def _git(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            dying_with_parent(["git", *arguments]),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=variables.of_installer(more),
        )
    except FileNotFoundError:
        raise GitFault("not installable here: git is not on the PATH; install it and run again.") from None
