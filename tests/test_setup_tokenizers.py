"""setup.sh's tokenizers, from a stand-in for the Hugging Face hub."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.set_up import Checkout, copy_for_setup

pytestmark = pytest.mark.titan


@pytest.fixture
def ready(tmp_path: Path) -> Checkout:
    checkout = copy_for_setup(tmp_path)
    result = checkout.setup("--local")
    assert result.returncode == 0, result.stdout
    return checkout


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
    # Half a tokenizer is none.
    config = ready.folder / "assets/hf/DeepSeek-V3.1-Base/tokenizer_config.json"
    config.write_text("")
    assert ready.setup("--no-deepep").returncode == 0
    assert config.read_text() and hub.asked


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
