"""setup.sh's DeepEP, FlashAttention-4 and tokenizers, from stand-ins for what they come from."""

import http.server
import json
import re
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import commit_all
from tests.programs import write_program
from tests.set_up import WHEEL_FILES, Checkout, copy_for_setup, write_wheel
from tests.stand_in_gpus import B200

pytestmark = pytest.mark.titan

A100 = {"name": "NVIDIA A100", "capability": [8, 0]}
# A DeepEP that records its build.
SETUP = """
import json, os, pathlib, setuptools
from setuptools.command.build_ext import build_ext

class Record(build_ext):
    def build_extension(self, extension):
        library = pathlib.Path(self.get_ext_fullpath(extension.name))
        library.parent.mkdir(parents=True, exist_ok=True)
        library.write_bytes(os.environ["STAND_IN_LIBRARY"].encode())
        record = pathlib.Path(os.environ["STAND_IN_RECORD"])
        record.write_text(json.dumps(dict(os.environ)))

setuptools.setup(
    name="deep_ep",
    version="1.2.1",
    packages=["deep_ep"],
    ext_modules=[setuptools.Extension("deep_ep_cpp", ["csrc.cpp"])],
    cmdclass={"build_ext": Record},
)
"""
WITH_NVSHMEM = "ELF libnvshmem_host.so.3"
WITHOUT_NVSHMEM = "ELF NVSHMEM is disabled during compilation"


@dataclass
class Site:
    """A checkout with a CUDA toolkit and a DeepEP beside it; each test takes a part away."""

    checkout: Checkout
    toolkit: Path
    record: Path

    def setup(self, *options: str) -> subprocess.CompletedProcess[str]:
        return self.checkout.setup("--no-tokenizers", "--no-flash-attention", *options)

    def recorded(self) -> dict[str, str]:
        found: dict[str, str] = json.loads(self.record.read_text())
        return found


@pytest.fixture
def site(tmp_path: Path) -> Site:
    checkout = copy_for_setup(tmp_path)
    toolkit = tmp_path / "cuda"
    (toolkit / "include/cccl").mkdir(parents=True)
    (toolkit / "include/cuda_runtime.h").touch()
    source = tmp_path / "DeepEP"
    (source / "deep_ep").mkdir(parents=True)
    (source / "deep_ep/__init__.py").touch()
    (source / "csrc.cpp").touch()
    (source / "setup.py").write_text(SETUP)
    commit = commit_all(source)
    requirements = checkout.folder / "requirements.txt"
    # The build tools are there already; only the place and the commit of DeepEP change.
    lines = [
        line
        for line in requirements.read_text().splitlines()
        if not line.startswith(("deep_ep", "ninja", "setuptools"))
    ]
    lines.append(f'deep_ep @ git+file://localhost{source}@{commit} ; extra == "deepep"\n')
    requirements.write_text("\n".join(lines))
    site = Site(checkout, toolkit, tmp_path / "record.json")
    says = "#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8'\n"
    write_program(toolkit / "bin/nvcc", says)
    checkout.environment |= {
        "CUDA_HOME": str(toolkit),
        "CPATH": "/own/headers",
        "NVSHMEM_DIR": "/somewhere/else",
        "STAND_IN_LIBRARY": WITH_NVSHMEM,
        "STAND_IN_RECORD": str(site.record),
    }
    return site


class TestDeepEp:
    @pytest.mark.nightly
    def test_built_once_at_its_pin_with_inter_node_kernels(self, site: Site) -> None:
        result = site.setup("--arch", "9.0 10.0")
        assert result.returncode == 0, result.stdout
        assert "for GPUs 9.0;10.0, with NVSHMEM " in result.stdout
        assert re.search(r"^deepep +ok +1.2.1, inter-node kernels$", result.stdout, re.MULTILINE)
        built_with = site.recorded()
        assert built_with["TORCH_CUDA_ARCH_LIST"] == "9.0;10.0"
        assert built_with["CUDA_HOME"] == str(site.toolkit)
        assert built_with["CPATH"] == f"{site.toolkit}/include/cccl:/own/headers"
        assert built_with["LIBRARY_PATH"].endswith(f"{site.toolkit}/lib64/stubs")
        assert built_with["TMPDIR"].startswith(str(site.checkout.folder))
        assert int(built_with["MAX_JOBS"]) >= 1
        # DeepEP's setup.py finds the NVSHMEM that torch loads only without it.
        assert "NVSHMEM_DIR" not in built_with

        site.record.unlink()
        assert site.setup("--arch", "10.0", "--quiet").stdout == ""
        # Built for other GPUs, it is built again.
        assert site.setup("--arch", "10.3").returncode == 0
        assert site.recorded()["TORCH_CUDA_ARCH_LIST"] == "10.3"

    @pytest.mark.nightly
    def test_a_library_without_the_kernels_is_a_failure(self, site: Site) -> None:
        site.checkout.environment["STAND_IN_LIBRARY"] = WITHOUT_NVSHMEM
        result = site.setup("--arch", "10.0")
        assert result.returncode == 1
        assert "without inter-node kernels" in result.stdout
        assert "not done: DeepEP" in result.stdout
        assert "intra-node kernels only: one node at most" in result.stdout
        # It is tried again, not taken for built; a build that fails shows why.
        del site.checkout.environment["STAND_IN_RECORD"]
        result = site.setup("--arch", "10.0")
        assert result.returncode == 1
        assert "STAND_IN_RECORD" in (site.checkout.folder / "build/setup.log").read_text()
        assert "not done: DeepEP" in result.stdout and "local corpus" in result.stdout


OTHERS = ("--no-tokenizers", "--no-deepep")
INSTALLING = "setup: installing FlashAttention-4 99.1 (10 packages); about a minute"
SITE = ".venv/lib/python*/site-packages"


@pytest.fixture
def flash(tmp_path: Path) -> Checkout:
    """A checkout with versions of FlashAttention-4 that no machine has."""
    checkout = copy_for_setup(tmp_path)
    requirements = checkout.folder / "requirements.txt"
    pins = re.compile('^(.+)==.+( ; extra == "flash_attention")$', re.MULTILINE)
    requirements.write_text(pins.sub(r"\1==99.1\2", requirements.read_text()))
    wheels = Path(checkout.environment["PIP_FIND_LINKS"])
    for name in pins.findall(requirements.read_text()):
        write_wheel(wheels, name[0], "99.1", WHEEL_FILES.get(name[0], ()))
    return checkout


def is_installed(checkout: Checkout) -> bool:
    return bool([*checkout.folder.glob(f"{SITE}/flash_attn/cute")])


class TestFlashAttention:
    @pytest.mark.nightly
    def test_a_login_node_without_gpus_gets_it_once(self, flash: Checkout) -> None:
        first = flash.setup(*OTHERS)
        assert first.returncode == 0, first.stdout
        assert INSTALLING in first.stdout and is_installed(flash)
        assert flash.setup(*OTHERS, "--quiet").stdout == ""
        # A new pin is installed into the environment that is there.
        requirements = flash.folder / "requirements.txt"
        text = requirements.read_text().replace("flash-attn-4==99.1", "flash-attn-4==99.2")
        requirements.write_text(text)
        write_wheel(Path(flash.environment["PIP_FIND_LINKS"]), "flash-attn-4", "99.2")
        assert "installing FlashAttention-4 99.2" in flash.setup(*OTHERS).stdout

    @pytest.mark.nightly
    @pytest.mark.parametrize(
        ("gpus", "is_wanted"), [((), False), ((A100,), False), ((B200,), True)]
    )
    def test_a_machine_for_itself_gets_it_where_its_gpu_takes_it(
        self, flash: Checkout, gpus: tuple[dict[str, Any], ...], is_wanted: bool
    ) -> None:
        flash.has_gpus(*gpus)
        done = flash.setup("--local")
        assert (done.returncode, is_installed(flash)) == (0, is_wanted), done.stdout
        assert (INSTALLING in done.stdout) is is_wanted
        assert "FlashAttention-4 is not installed" not in done.stdout


class Hub(http.server.ThreadingHTTPServer):
    """A stand-in for the Hugging Face hub: every model has the two tokenizer files."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str | None]] = []
        self.broken = ""
        super().__init__(("127.0.0.1", 0), HubRequest)


class HubRequest(http.server.BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("authorization")))
        if self.server.broken and self.server.broken in self.path:
            self.send_error(404)
            return
        body = json.dumps({"path": self.path}).encode()
        commit = 5 * "01234567"
        self.send_response(200)
        self.send_header("ETag", f'"{commit}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        yield hub
        hub.shutdown()
        thread.join()


@pytest.mark.nightly
def test_tokenizers_come_from_the_hub_whole_or_not_at_all(tmp_path: Path, hub: Hub) -> None:
    checkout = copy_for_setup(tmp_path)
    checkout.environment |= {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_TOKEN": "hf_of_the_test",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_XET": "1",
    }
    hub.broken = "V3.1-Base/resolve/main/tokenizer_config.json"
    result = checkout.setup("--no-deepep")
    assert result.returncode == 1
    assert "not done: the tokenizer of deepseek-ai/DeepSeek-V3.1-Base" in result.stdout
    assert "HF_ENDPOINT" in result.stdout and "ready: " in result.stdout
    assert not checkout.exists("assets/hf/DeepSeek-V3.1-Base")
    assert checkout.exists("assets/hf/deepseek-moe-16b-base/tokenizer.json")

    hub.broken = ""
    assert checkout.setup("--no-deepep").returncode == 0
    names = ("deepseek-ai/DeepSeek-V3.1-Base", "deepseek-ai/deepseek-moe-16b-base")
    for name in (*names, "Qwen/Qwen3-30B-A3B"):
        folder = checkout.folder / "assets/hf" / name.partition("/")[2]
        files = sorted(path.name for path in folder.iterdir())
        assert files == ["tokenizer.json", "tokenizer_config.json"]
        for path in folder.iterdir():
            asked = f"/{name}/resolve/main/{path.name}"
            assert json.loads(path.read_text()) == {"path": asked}
    assert "Bearer hf_of_the_test" in {token for _, token in hub.asked}
    assert "hf_of_the_test" not in (checkout.folder / "build/setup.log").read_text()
    hub.asked.clear()
    assert checkout.setup("--no-deepep", "--quiet").stdout == ""
    assert hub.asked == []
    # Half a tokenizer is none.
    config = checkout.folder / "assets/hf/DeepSeek-V3.1-Base/tokenizer_config.json"
    config.write_text("")
    assert checkout.setup("--no-deepep").returncode == 0
    assert config.read_text() and hub.asked
