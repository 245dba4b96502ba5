"""setup.sh from outside, in a copy of the checkout; set_up.py says what stands in for the index.

A full install from the index is what CI starts with.
"""

import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.programs import write_program
from tests.set_up import Checkout, copy_for_setup, write_wheel
from tests.waiting import until

pytestmark = pytest.mark.titan


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return copy_for_setup(tmp_path)


@pytest.fixture
def ready(checkout: Checkout) -> Checkout:
    result = checkout.setup("--local")
    assert result.returncode == 0, result.stdout
    return checkout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--lokal"], "unknown option: --lokal"),
        (["--arch"], "--arch: a value is missing"),
        (["--arch", "8.0"], "allowed are 9.0 (Hopper), 10.0 (Blackwell)"),
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
    second = checkout.setup("--local")
    assert second.returncode == 0
    assert "setup: " not in second.stdout
    assert stamp.stat().st_mtime_ns == written
    assert checkout.setup("--local", "--quiet").stdout == ""


@pytest.mark.parametrize("status", [0, 1])
def test_uv_installs_where_it_is_and_pip_where_uv_fails(checkout: Checkout, status: int) -> None:
    checkout.has_uv(status)
    result = checkout.setup("--local", "--dev")
    assert result.returncode == 0, result.stdout
    command = "pip install --python .venv/bin/python -r requirements.txt -r requirements-dev.txt\n"
    assert (checkout.programs / "uv.log").read_text() == command
    by_pip = "-m pip" in (checkout.folder / "build/setup.log").read_text()
    assert by_pip == ("uv could not install the pins; pip tries now" in result.stdout)
    assert by_pip == (status == 1)


def test_uv_comes_from_the_package_index_where_there_is_none(
    checkout: Checkout, tmp_path: Path
) -> None:
    program = f'#!/bin/sh\necho "$@" >>"{tmp_path}/uv.log"\n'
    write_wheel(tmp_path / "wheels", "uv", "0.13.9", ["uv-0.13.9.data/scripts/uv"], program)
    checkout.environment["PATH"] = "/usr/bin:/bin"
    result = checkout.setup("--local")
    assert result.returncode == 0, result.stdout
    command = "pip install --python .venv/bin/python -r requirements.txt\n"
    assert (tmp_path / "uv.log").read_text() == command and checkout.exists("build/uv/bin/uv")


@pytest.mark.nightly
def test_another_index_gives_torch_and_stays(checkout: Checkout) -> None:
    url = "https://packages.example/cu130"
    assert checkout.setup("--local", "--torch-index", url).returncode == 0
    log = checkout.folder / "build/setup.log"
    assert f"--index-url {url} -r build/tmp/torch.txt" in log.read_text()
    # Who does not name it again keeps it; another one installs anew.
    assert checkout.setup("--local", "--quiet").stdout == ""
    again = checkout.setup("--local", "--torch-index", f"{url}0")
    assert "installing the pins" in again.stdout
    assert f"--index-url {url}0 -r" in log.read_text()


@pytest.mark.nightly
def test_changed_pins_are_enough(ready: Checkout, tmp_path: Path) -> None:
    """A new pin and a new version reach the environment that is there, and the doctor sees them."""
    kept = ready.folder / ".venv/kept"
    kept.touch()
    ready.environment["PIP_FIND_LINKS"] = str(tmp_path)
    requirements = ready.folder / "requirements.txt"
    pins = requirements.read_text()
    for version in ("1.0", "1.1"):
        write_wheel(tmp_path, "new_package", version)
        requirements.write_text(f"{pins}new_package=={version}\n")
        result = ready.setup("--local")
        assert result.returncode == 0, result.stdout
        assert "installing the pins" in result.stdout
        program = "import new_package; print(new_package.VERSION)"
        python = ready.folder / ".venv/bin/python"
        answer = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
        assert answer.stdout == f"{version}\n"
    assert kept.exists()
    assert ready.setup("--local", "--quiet").stdout == ""


@pytest.mark.nightly
def test_a_pin_that_cannot_be_had_shows_pip_s_words(checkout: Checkout) -> None:
    with (checkout.folder / "requirements.txt").open("a") as file:
        file.write("no-such-package-of-the-cookbook==1.0\n")
    result = checkout.setup("--local")
    assert result.returncode == 1
    assert "| ERROR: No matching distribution found for no-such-package" in result.stdout
    assert "build/setup.log" in result.stdout
    assert not checkout.exists(".venv/.cookbook/installed")


@pytest.mark.nightly
@pytest.mark.parametrize("broken", ["unfinished", "no pyvenv.cfg"])
def test_a_broken_environment_is_made_anew(ready: Checkout, broken: str) -> None:
    """Without pyvenv.cfg its Python is the system's, which must not get the packages."""
    venv = ready.folder / ".venv"
    (venv / "kept").touch()
    match broken:
        case "unfinished":
            (venv / ".cookbook/installed").unlink()
            (venv / ".cookbook/unfinished").touch()
        case _:
            (venv / "pyvenv.cfg").unlink()
    result = ready.setup("--local")
    assert result.returncode == 0, result.stdout
    assert "making .venv anew" in result.stdout
    assert (venv / "pyvenv.cfg").exists() and not (venv / "kept").exists()


def test_what_is_not_ours_is_left_alone(checkout: Checkout) -> None:
    mine = checkout.folder / ".venv/mine"
    mine.parent.mkdir()
    mine.touch()
    result = checkout.setup("--local")
    assert result.returncode == 1
    assert "not made by setup.sh; move it away" in result.stdout
    assert mine.exists()


def test_an_old_python_is_refused(checkout: Checkout, tmp_path: Path) -> None:
    old = tmp_path / "old"
    write_program(old, "#!/bin/sh\nexit 1\n")
    result = checkout.setup("--local", "--python", str(old))
    assert result.returncode == 1
    assert "not a Python 3.11 or later" in result.stdout
    assert not checkout.exists(".venv")


def test_an_interrupt_ends_all_and_is_repaired(checkout: Checkout, tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    checkout.environment["HANG"] = str(pid)
    running = checkout.start("--local")
    until(lambda: pid.exists() and pid.read_text().endswith("\n"))
    child = psutil.Process(int(pid.read_text()))
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=10)
    assert running.returncode == 130, output
    assert "run ./setup.sh again" in output
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert not checkout.exists("build/tmp")

    del checkout.environment["HANG"]
    again = checkout.setup("--local")
    assert again.returncode == 0, again.stdout
    assert "making .venv anew" in again.stdout
