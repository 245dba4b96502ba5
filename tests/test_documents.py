"""The documents' paths and links lead somewhere, and their commands are real."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from cookbook.base.paths import ROOT
from cookbook.config.options import DEGREES
from tests.cells import walked
from tests.checkout import copy_checkout
from tests.submit import environment, submit

DOCUMENTS = walked(
    [
        *(ROOT / "README.md", ROOT / "CONTRIBUTING.md"),
        *sorted(ROOT.glob("docs/**/*.md")),
    ]
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


# The commands of first-hour.md run in tests/test_first_hour.py.
GUIDE = walked(
    [
        ROOT / "README.md",
        *(path for path in sorted(ROOT.glob("docs/guide/*.md")) if path.stem != "first-hour"),
    ]
)
# `make demo` trains for minutes; `doctor` has tests of its own, and may find faults here.
_ELSEWHERE = re.compile(r"make demo|export COOKBOOK_CLUSTER=|python submit\.py doctor")


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
