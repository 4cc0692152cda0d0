"""GitHub, or what speaks its interface: one comment that is renewed, and the commit of the history's new runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.errors import BadInput

LONGEST_COMMENT = 60_000
"""Characters; GitHub takes 65536."""
MARKER = "<!-- dpbench-{name} -->"
"""First line of the comment ``name``; :mod:`harness.compare.report` writes the same above its Markdown."""
BOT = "github-actions[bot]"
PUSHES = 4
TIMEOUT = 60.0
"""Seconds without an answer."""
HISTORY = Path("results/history")


class Forbidden(Exception):
    """The token may not do that: so it is, by design, for pull requests from forks."""


@dataclass(frozen=True)
class GitHubClient:
    """``url`` of the REST interface, ``repository`` as ``owner/name``."""

    url: str
    repository: str
    token: str

    @classmethod
    def of_the_job(cls, repository: str) -> GitHubClient:
        """Return the pull request that the runner describes to every job. Raises :class:`BadInput` outside of one."""
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
            raise BadInput(f"The repository {repository!r} is not of the form owner/name.")
        url, token = os.environ.get("GITHUB_API_URL", ""), os.environ.get("GITHUB_TOKEN", "")
        missing = [name for name, value in (("GITHUB_API_URL", url), ("GITHUB_TOKEN", token)) if not value]
        if missing:
            raise BadInput(f"{' and '.join(missing)} is not set; a CI job sets it, elsewhere set it by hand.")
        return cls(url, repository, token)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            f"{self.url}/repos/{self.repository}/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Accept": "application/vnd.github+json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code in (401, 403, 404):
                raise Forbidden(f"{method} {path}: {error.code} {error.reason}") from None
            raise BadInput(f"GitHub answered {error.code} {error.reason} to {method} {path}; try again.") from None
        except urllib.error.URLError as error:
            raise BadInput(f"GitHub at {self.url} cannot be reached ({error.reason}); try again.") from None
        except TimeoutError:  # connected, then silent: urllib leaves that one as it is
            raise BadInput(f"GitHub at {self.url} gave no answer to {method} {path} in time; try again.") from None


def comment(client: GitHubClient, pull_request: int, text: str, name: str) -> str:
    """Write ``text`` as the comment ``name`` of the pull request, over its former one if there is one; returns
    ``created`` or ``renewed``. Raises :class:`Forbidden` where the token may not.
    """
    marker = MARKER.format(name=name)
    body = marker + "\n" + _harmless(text.removeprefix(marker).lstrip("\n"))
    page, found = 1, None
    while found is None:
        some = client.ask("GET", f"issues/{pull_request}/comments?per_page=100&page={page}")
        # Only the bot's own: a person may quote the marker.
        mine = [c for c in some if c["body"].startswith(marker) and c["user"]["login"] == BOT]
        found = mine[0]["id"] if mine else None
        if len(some) < 100:
            break
        page += 1
    if found is None:
        client.ask("POST", f"issues/{pull_request}/comments", {"body": body})
        return "created"
    client.ask("PATCH", f"issues/comments/{found}", {"body": body})
    return "renewed"


def _harmless(text: str) -> str:
    """Text that code of a pull request wrote, to be said by a bot: it calls nobody by name, and it fits."""
    text = text.replace("@", "@\u200b").replace("<!--", "<\u200b!--")
    if len(text) > LONGEST_COMMENT:
        text = text[:LONGEST_COMMENT].rsplit("\n", 1)[0] + "\n\n… cut here; the job's page has the rest."
    return text


def publish_history(root: Path, by: str, branch: str, client: GitHubClient | None) -> str:
    """Commit the new files of the history and push them to ``branch`` (``by`` = ``commit``) or opens a pull request
    against it (``pull-request``); returns what was done.

    Raises :class:`BadInput` where a file that exists was changed (a history only grows), or the push is refused.
    """
    if by not in {"commit", "pull-request"}:
        raise BadInput(f"The history is to be published by {by!r}: choose commit or pull-request.")
    status = _git(root, "status", "--porcelain", "--untracked-files=all", "--", str(HISTORY)).splitlines()
    changed = [line[3:] for line in status if line[:2] != "??"]
    if changed:
        raise BadInput(f"{changed[0]} was changed or removed, but a history only grows; restore it by git checkout.")
    if not status:
        return "No new run: nothing to publish."
    _git(root, "add", "--", str(HISTORY))
    title = f"History: {len(status)} {'run' if len(status) == 1 else 'runs'} of {datetime.now(UTC):%Y-%m-%d}"
    _git(root, "-c", "user.name=dpbench", "-c", f"user.email={BOT}@users.noreply.github.com", "commit", "-qm", title)
    if by == "pull-request":
        return _open(root, branch, title, client)
    for attempt in range(PUSHES):
        try:
            _git(root, "push", "--quiet", "origin", f"HEAD:refs/heads/{branch}")
            return f"{title}: pushed to {branch}."
        except BadInput:  # somebody pushed meanwhile; one file per run cannot conflict
            if attempt == PUSHES - 1:
                raise
            _git(root, "fetch", "--quiet", "origin", branch)
            _git(root, "-c", "user.name=dpbench", "-c", "user.email=dpbench", "rebase", "--quiet", "FETCH_HEAD")
    raise AssertionError("unreachable")


def _open(root: Path, branch: str, title: str, client: GitHubClient | None) -> str:
    if client is None:
        raise BadInput("A pull request needs GitHub: name the repository.")
    topic = f"history/{datetime.now(UTC):%Y%m%d-%H%M%S}"
    _git(root, "push", "--quiet", "origin", f"HEAD:refs/heads/{topic}")
    try:
        answer = client.ask("POST", "pulls", {"title": title, "head": topic, "base": branch, "body": "New runs only."})
    except Forbidden as error:
        raise BadInput(
            f"The pull request of {topic} could not be opened ({error}); allow the job pull-requests: write, and the "
            "repository to let its jobs open pull requests."
        ) from None
    return f"{title}: pull request {answer['number']} from {topic}."


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except FileNotFoundError:
        raise BadInput("The history is published by git, which is not installed here; install it.") from None
    if done.returncode != 0:
        reason = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise BadInput(f"git {arguments[0]} failed: {reason[-1] if reason else 'without a reason'}.")
    return done.stdout
