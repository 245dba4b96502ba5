"""setup.sh from outside, in a copy of the checkout; checkout.py says what stands in for the index.

A full install from the index is what CI starts with.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import Checkout, copy_checkout

pytestmark = pytest.mark.titan


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return copy_checkout(tmp_path)


@pytest.fixture
def ready(checkout: Checkout) -> Checkout:
    result = checkout.setup("--local")
    assert result.returncode == 0, result.stdout
    return checkout


def test_help_says_what_and_touches_nothing(checkout: Checkout) -> None:
    result = checkout.setup("--help")
    assert result.returncode == 0
    for word in ("minutes", "DeepEP", "tokenizers", "--local", "--arch", "--dev", "doctor"):
        assert word in result.stdout
    assert not checkout.exists("build") and not checkout.exists(".venv")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--lokal"], "unknown option: --lokal"),
        (["--arch"], "--arch: a value is missing"),
        (["--arch", "8.0"], "allowed are 9.0 (Hopper), 10.0 (Blackwell)"),
        (["--arch", "9.0; rm -rf"], "allowed are"),
    ],
)
def test_wrong_options(checkout: Checkout, options: list[str], said: str) -> None:
    result = checkout.setup(*options)
    assert result.returncode == 2
    assert said in result.stdout
    assert not checkout.exists("build")


def test_first_run_then_nothing_to_do(checkout: Checkout) -> None:
    first = checkout.setup("--local")
    assert first.returncode == 0, first.stdout
    assert "installing the pins" in first.stdout
    assert "ready: " in first.stdout
    for path in ("assets/local/stamp.json", ".venv/.cookbook/installed", "build/setup.log"):
        assert checkout.exists(path)
    for path in (".venv/.cookbook/unfinished", "build/tmp", "assets/hf"):
        assert not checkout.exists(path)

    stamp = checkout.folder / ".venv/.cookbook/installed"
    written = stamp.stat().st_mtime_ns
    began = time.monotonic()
    second = checkout.setup("--local")
    took = time.monotonic() - began
    assert second.returncode == 0
    assert "setup: " not in second.stdout
    assert stamp.stat().st_mtime_ns == written
    assert took < 2, f"{took:.1f} s"
    assert checkout.setup("--local", "--quiet").stdout == ""


def test_dev_is_added_and_stays(ready: Checkout) -> None:
    assert "installing the pins" in ready.setup("--local", "--dev").stdout
    assert ready.setup("--local", "--dev", "--quiet").stdout == ""
    assert ready.setup("--local", "--quiet").stdout == ""


def test_changed_pins_are_installed_into_the_same_environment(ready: Checkout) -> None:
    kept = ready.folder / ".venv/kept"
    kept.touch()
    with (ready.folder / "requirements.txt").open("a") as file:
        file.write("# another line\n")
    assert "installing the pins" in ready.setup("--local").stdout
    assert kept.exists()


def test_a_pin_that_cannot_be_had_shows_pip_s_words(checkout: Checkout) -> None:
    with (checkout.folder / "requirements.txt").open("a") as file:
        file.write("no-such-package-of-the-cookbook==1.0\n")
    result = checkout.setup("--local")
    assert result.returncode == 1
    assert "| ERROR: No matching distribution found for no-such-package" in result.stdout
    assert "build/setup.log" in result.stdout
    assert not checkout.exists(".venv/.cookbook/installed")


def test_an_unfinished_environment_is_made_anew(ready: Checkout) -> None:
    half = ready.folder / ".venv/half-a-package"
    half.touch()
    (ready.folder / ".venv/.cookbook/installed").unlink()
    (ready.folder / ".venv/.cookbook/unfinished").touch()
    result = ready.setup("--local")
    assert result.returncode == 0, result.stdout
    assert "making .venv anew" in result.stdout
    assert not half.exists()


def test_a_broken_environment_is_made_anew(ready: Checkout) -> None:
    for link in (ready.folder / ".venv/bin").glob("python*"):
        link.unlink()
    result = ready.setup("--local")
    assert result.returncode == 0, result.stdout
    assert "making .venv anew" in result.stdout


def test_what_is_not_ours_is_left_alone(checkout: Checkout) -> None:
    mine = checkout.folder / ".venv/mine"
    mine.parent.mkdir()
    mine.touch()
    result = checkout.setup("--local")
    assert result.returncode == 1
    assert "not made by setup.sh; move it away" in result.stdout
    assert mine.exists()


def test_another_s_working_environment_is_added_to(checkout: Checkout) -> None:
    folder = checkout.folder / ".venv"
    subprocess.run([checkout.python, "-m", "venv", folder], check=True, timeout=120)
    (folder / "mine").touch()
    assert checkout.setup("--local").returncode == 0
    assert (folder / "mine").exists()


def test_an_old_python_is_refused(checkout: Checkout, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = checkout.setup("--local", "--python", str(old))
    assert result.returncode == 1
    assert "not a Python 3.11 or later" in result.stdout
    assert not checkout.exists(".venv")


def wait_for(path: Path) -> int:
    """The process id that the hanging stand-in wrote."""
    for _ in range(600):
        if path.exists() and (text := path.read_text()).endswith("\n"):
            return int(text)
        time.sleep(0.1)
    raise AssertionError(f"{path} did not appear")


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_of_it_and_the_next_run_repairs(
    checkout: Checkout, tmp_path: Path, number: signal.Signals
) -> None:
    checkout.environment["HANG"] = str(tmp_path / "pid")
    running = checkout.start("--local")
    child = wait_for(tmp_path / "pid")
    running.send_signal(number)
    output, _ = running.communicate(timeout=10)
    assert running.returncode == 130, output
    assert "run ./setup.sh again" in output
    assert not is_alive(child)
    assert not checkout.exists("build/tmp")

    del checkout.environment["HANG"]
    again = checkout.setup("--local")
    assert again.returncode == 0, again.stdout
    assert "making .venv anew" in again.stdout


def test_after_a_kill_the_next_run_waits_for_what_still_writes(
    checkout: Checkout, tmp_path: Path
) -> None:
    checkout.environment["HANG"] = str(tmp_path / "pid")
    running = checkout.start("--local")
    child = wait_for(tmp_path / "pid")
    running.kill()
    assert running.wait(timeout=10) == -signal.SIGKILL
    assert is_alive(child)

    del checkout.environment["HANG"]
    again = checkout.start("--local")
    assert again.stdout is not None
    assert "waiting for it" in again.stdout.readline()
    os.kill(child, signal.SIGKILL)
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0, output
    assert "making .venv anew" in output


def test_two_at_once(checkout: Checkout) -> None:
    both = [checkout.start("--local") for _ in range(2)]
    outputs = [running.communicate(timeout=120)[0] for running in both]
    assert [running.returncode for running in both] == [0, 0], outputs
    assert sum("installing the pins" in output for output in outputs) == 1
    assert sum("waiting for it" in output for output in outputs) == 1


class Hub(http.server.ThreadingHTTPServer):
    """A stand-in for the Hugging Face hub: every model has the two tokenizer files."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.broken = ""
        super().__init__(("127.0.0.1", 0), HubRequest)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubRequest(http.server.BaseHTTPRequestHandler):
    server: Hub

    def answer(self, with_body: bool) -> None:
        self.server.asked.append((self.path, self.headers.get("authorization")))
        if self.server.broken and self.server.broken in self.path:
            self.send_error(404)
            return
        body = json.dumps({"path": self.path}).encode()
        self.send_response(200)
        self.send_header("ETag", '"0123456789abcdef0123456789abcdef01234567"')
        self.send_header("X-Repo-Commit", "0123456789abcdef0123456789abcdef01234567")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def running_hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


@pytest.fixture
def hub(ready: Checkout, tmp_path: Path) -> Iterator[Hub]:
    with running_hub() as hub:
        ready.environment |= {
            "HF_ENDPOINT": hub.address,
            "HF_TOKEN": "hf_of_the_test",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_XET": "1",
        }
        yield hub


def test_tokenizers_come_from_the_hub(ready: Checkout, hub: Hub) -> None:
    result = ready.setup("--no-deepep")
    assert result.returncode == 0, result.stdout
    for name in ("DeepSeek-V3.1-Base", "deepseek-moe-16b-base"):
        folder = ready.folder / "assets/hf" / name
        assert sorted(path.name for path in folder.iterdir()) == [
            "tokenizer.json",
            "tokenizer_config.json",
        ]
        for path in folder.iterdir():
            asked = f"/deepseek-ai/{name}/resolve/main/{path.name}"
            assert json.loads(path.read_text()) == {"path": asked}
    assert "Bearer hf_of_the_test" in {token for _, token in hub.asked}
    assert "hf_of_the_test" not in (ready.folder / "build/setup.log").read_text()

    hub.asked.clear()
    assert ready.setup("--no-deepep", "--quiet").stdout == ""
    assert hub.asked == []


def test_a_hub_that_fails_leaves_no_half_and_the_rest_goes_on(ready: Checkout, hub: Hub) -> None:
    hub.broken = "V3.1-Base/resolve/main/tokenizer_config.json"
    result = ready.setup("--no-deepep")
    assert result.returncode == 1
    assert "not done: the tokenizer of deepseek-ai/DeepSeek-V3.1-Base" in result.stdout
    assert "HF_ENDPOINT" in result.stdout
    assert "ready: " in result.stdout
    assert not ready.exists("assets/hf/DeepSeek-V3.1-Base")
    assert ready.exists("assets/hf/deepseek-moe-16b-base/tokenizer.json")

    hub.broken = ""
    assert ready.setup("--no-deepep").returncode == 0
    assert ready.exists("assets/hf/DeepSeek-V3.1-Base/tokenizer.json")
