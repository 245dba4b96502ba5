"""The documents' paths and links lead somewhere, and their commands are real."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cookbook.base.paths import ROOT
from cookbook.config.dialect.names import DEGREES
from tests.cells import walked
from tests.checkout import copy_checkout
from tests.submit import environment, submit
from tests.waiting import HANG_S

DOCUMENTS = walked(
    [*(ROOT / "README.md", ROOT / "CONTRIBUTING.md"), *sorted(ROOT.glob("docs/**/*.md"))]
)
_PATH = re.compile(
    r"`((?:cookbook|recipes|tests|bench|templates|docs)/[\w./-]+|setup\.sh|requirements\.txt)`"
    # A script that is gone is named with the commit that has it.
    r"(?! \(at [0-9a-f]{7}\))"
)
_LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)")


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them, and its own."""
    text = path.read_text(encoding="utf-8")
    titles = [re.sub(r"[^\w\s-]", "", title.lower()) for title in re.findall("(?m)^#+ (.*)$", text)]
    return {re.sub(r"\s", "-", title) for title in titles} | set(re.findall('name="(.*?)"', text))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_paths_and_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name in _PATH.findall(text):
        assert (ROOT / name).exists(), name
    for name, anchor in _LINK.findall(text):
        target = path.parent / name if name else path
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


def test_files_and_modules_named_outside_links_exist() -> None:
    """In comments, data and commands; a dated page, and old data, name the modules of their day."""
    folders = ("bench", "cookbook", "docs", "recipes", "tests")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    named = re.compile(
        r"docs/[a-z-]+/[\w/-]+\.md|python -m (?:bench\.(?!gpu_)|docs\.)[a-z_.]*[a-z_]"
    )
    for path in walked([path for path in paths if path.suffix in (".json", ".md", ".py", ".yaml")]):
        if "notebook/2026" in str(path):
            continue
        for found in named.findall(path.read_text(encoding="utf-8")):
            name = found.removeprefix("python -m ")
            file = name if "/" in name else name.replace(".", "/") + ".py"
            assert (ROOT / file).is_file(), f"{path}: {found}"


def test_the_notebooks_index_has_every_page() -> None:
    index = (ROOT / "docs/notebook/README.md").read_text(encoding="utf-8")
    pages = walked([*(ROOT / "docs/notebook").glob("*/*.md")])
    assert [page.name for page in pages if f"]({page.parent.name}/{page.name})" not in index] == []


# The commands of first-hour.md run below.
GUIDE = walked(
    [
        ROOT / "README.md",
        *(path for path in sorted(ROOT.glob("docs/guide/*.md")) if path.stem != "first-hour"),
    ]
)
# `make` trains or tests for minutes; `doctor` has tests of its own, and may find faults here.
_ELSEWHERE = re.compile(r"make (demo|test)|export COOKBOOK_CLUSTER=|python submit\.py doctor")


@pytest.mark.titan
@pytest.mark.parametrize("page", GUIDE, ids=lambda path: path.stem)
def test_every_command_of_the_guide_runs_or_names_what_it_needs(page: Path, tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    lines = walked([line for block in blocks for line in block.splitlines()])
    folder = copy_checkout(tmp_path / "checkout", assets=True)
    for line in lines:
        if re.search("# needs ", line) or _ELSEWHERE.match(line):
            continue
        words = shlex.split(line, comments=True)
        assert words[:2] == ["python", "submit.py"], f"{line}: say `# needs ...`"
        # The quick form: rules alone, nothing that trains, layouts without a pipeline.
        words += {"check": ["--rules-only"], "plan": ["--set", f"{DEGREES['pp']}=1"]}.get(
            words[2], []
        )
        if words[2] in ("run", "sweep", "profile") and "--dry-run" not in words:
            words.append("--dry-run")
        done = subprocess.run(
            [sys.executable, *words[1:]],
            cwd=folder,
            env=environment(folder / "runs"),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def shown_commands() -> list[list[str]]:
    """The `python submit.py` lines of the guide, in tables and text too, as words."""
    text = "".join(path.read_text(encoding="utf-8") for path in GUIDE)
    lines = re.findall(r"(?:^(?:    \$ )?|`)python submit\.py ([^#`\n]+)", text, re.M)
    return [line.split() for line in dict.fromkeys(line.strip() for line in lines)]


def test_every_verb_and_option_of_the_guide_exists(tmp_path: Path) -> None:
    known: dict[str, str] = {}
    for verb, *words in walked(shown_commands()):
        if verb not in known:
            known[verb] = submit(verb, "--help", runs=tmp_path).stdout
        options = [word for word in words if word.startswith("-")]
        assert verb == "check-line" or all(option in known[verb] for option in options), words


@pytest.mark.parametrize(
    "sweep", walked(sorted(ROOT.glob("docs/evidence/**/sweep.yaml"))), ids=lambda p: p.parent.name
)
def test_the_measured_sweeps_still_expand(sweep: Path, tmp_path: Path) -> None:
    words = ("sweep", str(sweep), "--cluster", "h200-node", "--dry-run")
    assert submit(*words, runs=tmp_path).status == 0


FIRST_HOUR = (ROOT / "docs/guide/first-hour.md").read_text(encoding="utf-8")


def commands_of(section: str) -> list[str]:
    """The commands of a numbered section."""
    text = FIRST_HOUR.split(f"\n## {section}.")[1].split("\n## ")[0]
    blocks = re.findall(r"```bash\n(.*?)```", text, re.S)
    return walked([line for block in blocks for line in block.splitlines()])


@pytest.mark.titan
@pytest.mark.nightly
@pytest.mark.timeout(1200)  # three trainings
def test_a_reader_trains_validates_exports_and_continues(tmp_path: Path) -> None:
    folder = copy_checkout(tmp_path / "checkout")
    for name in ("assets", "docs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(Path(sys.prefix))
    environment = {**os.environ, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}"}
    for name in ("COOKBOOK_CLUSTER", "COOKBOOK_RUNS"):
        environment.pop(name, None)

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-euc", command],
            cwd=folder,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=HANG_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def metrics(name: str) -> list[dict[str, float]]:
        """What the newest run of the cell wrote."""
        newest = max((folder / "runs").glob("my-model-*"), key=lambda path: path.stat().st_mtime)
        lines = (newest / name / "attempt-0/metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    pages = len([*ROOT.glob("docs/guide/*.md")])
    assert f"documents  {400 + pages}" in [run(command) for command in commands_of("2")][-1]
    for command in commands_of("3"):
        run(command)
    recipe = re.findall(r"```yaml\n(.*?)```", FIRST_HOUR, re.S)[0]
    (folder / "recipes/my-model.yaml").write_text(recipe)
    *train, resume = commands_of("5")
    for command in (*commands_of("4"), *train):
        run(command)
    (first,) = (folder / "runs").glob("my-model-*")
    cell = json.loads(run("python submit.py report --format json"))["cells"][0]
    assert cell["status"] == "finished" and cell["steps"] == 8
    trained = metrics(cell["name"])
    validated = {one["step"]: one["validation_loss"] for one in trained if "validation_loss" in one}
    assert list(validated) == [1, 4, 8] and validated[8] < validated[1]
    assert "continues after step 8 of 12" in run(resume.replace("RUN", first.name))
    export, again = commands_of("6")
    assert "exported" in run(export.replace("RUN", first.name))
    assert (folder / "my-export/model.safetensors.index.json").exists()
    run(again)
    # The first step of the second run sees the weights of the first run's last.
    assert metrics(cell["name"])[0]["loss"] < trained[0]["loss"] - 0.05
