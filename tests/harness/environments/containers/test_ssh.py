"""The way to an engine behind ssh, with another program in the place of ssh."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from harness.environments.containers import engine, ssh
from harness.errors import BadInput


def pretend(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    ssh = folder / "ssh"
    ssh.write_text(f"#!/bin/sh\n{script}\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_bytes_go_both_ways_and_each_end_can_be_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, monkeypatch, 'for last; do :; done; echo "$last"; exec cat')
    through = ssh.SshConnection("ssh://me@there:22")
    assert through.socket.parent.stat().st_mode & 0o077 == 0
    for text in (b"first", b"second"):
        with socket.socket(socket.AF_UNIX) as one:
            one.settimeout(20)
            one.connect(str(through.socket))
            one.sendall(text)
            one.shutdown(socket.SHUT_WR)
            with one.makefile("rb") as answer:
                assert answer.read() == b"docker system dial-stdio\n" + text
    through.close()
    assert not through.socket.exists()


def test_user_port_and_host_go_to_ssh_as_they_are() -> None:
    words = ssh.command("ssh://me@There.example:2222")
    assert words[words.index("-l") + 1] == "me" and words[words.index("-p") + 1] == "2222"
    assert words[words.index("--") + 1 :] == ["there.example", "docker system dial-stdio"]
    assert "-l" not in ssh.command("ssh://there") and "-p" not in ssh.command("ssh://there/")


@pytest.mark.parametrize(
    "host", ["ssh://", "ssh://-oProxyCommand=x", "ssh://me:word@there", "ssh://there:no", "ssh://a/b"]
)
def test_another_form_is_refused_without_repeating_a_password(host: str) -> None:
    with pytest.raises(BadInput, match=r"ssh://\[user@\]host\[:port\]; write it so") as refusal:
        ssh.command(host)
    assert "word" not in str(refusal.value)


def test_what_ssh_says_is_in_the_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(tmp_path, monkeypatch, "echo 'me@there: Permission denied (publickey).' >&2; exit 255")
    monkeypatch.setenv(engine.HOST, "ssh://me@there")
    sentence = r"at ssh://me@there: ssh says: .*denied \(publickey\).*`ssh -l me there docker version`"
    with pytest.raises(BadInput, match=sentence):
        engine.connect()
