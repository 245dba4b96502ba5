"""`submit.py new`: copies that can be read, listed, checked and used under their own names."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.checkout import copy_checkout
from tests.submit import ROOT, environment, listing

RENDER = ("render", "debug-2", "--cluster", "soperator-b200")


@dataclass(frozen=True)
class Checkout:
    """A checkout of one's own, whose recipes a test may add to."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(self.folder / "submit.py"), *words]
        env = environment(self.folder / "runs") | self.variables
        return subprocess.run(command, cwd=self.folder, env=env, capture_output=True, text=True)


@pytest.fixture
def own(tmp_path: Path) -> Checkout:
    return Checkout(copy_checkout(tmp_path / "own", assets=True))


def test_a_recipe_is_copied_with_its_comments(own: Checkout) -> None:
    done = own.run("new", "mine", "--from", "deepseek_v3_671b")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "wrote recipes/mine.yaml; edit it, then:\n  python submit.py run mine --dry-run\n"
    )
    text = (own.folder / "recipes/mine.yaml").read_text()
    # What was published holds for the original alone.
    assert text.count("#") > 10 and "published:" not in text and "651" not in text
    shown = own.run("show", "mine", "--cluster", "soperator-b200")
    assert yaml.safe_load(shown.stdout)["name"] == "mine-bf16-standard"


def test_a_checkout_for_a_group_is_only_read(own: Checkout, tmp_path: Path) -> None:
    before = listing(own.folder)
    own.variables["COOKBOOK_RECIPES"] = str(tmp_path / "mine")
    # Who may only read cannot leave compiled modules either.
    own.variables["PYTHONDONTWRITEBYTECODE"] = "1"
    assert own.run("new", "debug-2", "--from", "debug").returncode == 0
    assert own.run("new", "box", "--from", "local").returncode == 0
    shown = own.run("run", "debug-2", "--cluster", "box", "--dry-run")
    assert "debug-2 on cluster box" in shown.stdout, shown.stderr
    found = f"{tmp_path}/mine/debug-2.yaml: exists already"
    assert found in own.run("new", "debug-2", "--from", "debug").stderr
    assert "debug-2 " in own.run("list").stdout
    # What is rendered names the file wherever it lies.
    assert str(tmp_path / "mine/debug-2.yaml") in own.run(*RENDER).stdout
    assert listing(own.folder) == before


@pytest.mark.nightly
@pytest.mark.titan
def test_a_copy_of_the_second_familys_recipe_is_checked_and_trains(tmp_path: Path) -> None:
    own = Checkout(copy_checkout(tmp_path / "own"))
    (own.folder / "assets").symlink_to(ROOT / "assets")
    assert own.run("new", "mine", "--from", "qwen3_debug").returncode == 0
    words = ["--cluster", "local", "--set", "training.seq_len=64", "--set", "training.steps=2"]
    checked = own.run("check", "mine", *words)
    assert checked.returncode == 0 and "attention sdpa" in checked.stdout, checked
    done = own.run("run", "mine", *words)
    assert done.returncode == 0 and "| mine-bf16-standard |" in done.stdout, done


def test_files_of_other_kinds_are_copied(own: Checkout) -> None:
    # The ending may be typed too.
    sources = {"mine.yaml": "mxfp8", "my-cluster": "soperator-b200", "my-sweep": "matrix"}
    for name, source in sources.items():
        done = own.run("new", name, "--from", source)
        assert done.returncode == 0, done.stderr
    text = (own.folder / "recipes/precision/mine.yaml").read_text()
    assert yaml.safe_load(text)["expect"]
    words = ["--precision", "mine", "--cluster", "my-cluster", "--dry-run"]
    plan = own.run("sweep", "my-sweep", *words)
    assert plan.stdout.startswith("my-sweep on cluster my-cluster: 32 node(s) x 8 B200")
    assert "671b-mine-standard" in plan.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["debug", "--from", "debug"], "recipes/debug.yaml: exists already; choose another name"),
        (
            ["a/b", "--from", "debug"],
            "NAME: found 'a/b', a path; write b: the copy goes to recipes",
        ),
        (["x" * 61, "--from", "debug"], "at most 60, a letter or digit first"),
        (["other", "--from", "debgu"], "--from: unknown name 'debgu'; allowed: bf16, "),
        (["other"], "the following arguments are required: --from"),
    ],
)
def test_what_cannot_be_copied_is_one_line(own: Checkout, words: list[str], message: str) -> None:
    before = listing(own.folder / "recipes")
    done = own.run("new", *words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert message in done.stderr and listing(own.folder / "recipes") == before


def test_a_name_of_two_kinds_asks_which(own: Checkout) -> None:
    assert own.run("new", "smoke", "--from", "debug").returncode == 0
    done = own.run("new", "other", "--from", "smoke")
    found = "'smoke' is the name of several files; name a file in recipes, recipes/precision, "
    assert done.returncode == 2 and found in done.stderr
    assert own.run("new", "other", "--from", "recipes/sweep/smoke.yaml").returncode == 0
    assert (own.folder / "recipes/sweep/other.yaml").is_file()


def test_one_broken_file_does_not_hide_the_others(own: Checkout) -> None:
    (own.folder / "recipes/broken.yaml").write_text("name: [\n")
    (own.folder / "recipes/precision/odd.yaml").write_text("description: a\nneeed: 1\n")
    done = own.run("list")
    assert done.returncode == 2
    assert "\n  debug " in done.stdout and "\n  mxfp8 " in done.stdout
    problems = done.stderr.splitlines()
    assert len(problems) == 2
    assert problems[0].startswith("submit.py: left out: recipes/broken.yaml:2:1: YAML syntax: ")
    assert problems[1].startswith("submit.py: left out: recipes/precision/odd.yaml:2: neeed: unkn")
