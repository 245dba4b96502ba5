"""Copy this checkout for tests that change or install a part of it."""

import shutil
import subprocess
from pathlib import Path

from cookbook.base.paths import ROOT
from tests.waiting import HANG_S

# A folder for PYTHONPATH: stand-ins for packages that need a GPU.
STAND_IN = ROOT / "tests/stand_in"
# The server of ranks imports these before it forks.
PRELOADED = [
    "torch",
    "torchtitan.train",
    "cookbook.titan.tt_0_2_2",
    "torchao.prototype.moe_training",
]


def copy_checkout(folder: Path, assets: bool = False) -> Path:
    """Copy the files of scripts, driver and set-up into `folder`; `assets`: fake its downloads."""
    for name in ("cookbook", "recipes", "templates"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.py"), *ROOT.glob("*.sh"), *ROOT.glob("requirements*.txt")):
        shutil.copy2(path, folder)
    if assets:
        for name in ("hf/DeepSeek-V3.1-Base", "hf/deepseek-moe-16b-base", "local/tokenizer"):
            tokenizer = folder / "assets" / name / "tokenizer.json"
            tokenizer.parent.mkdir(parents=True)
            tokenizer.write_text("{}")
            tokenizer.with_name("tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
        text = folder / "assets/local/corpus/some.jsonl"
        text.parent.mkdir()
        text.write_text('{"text": "some"}\n' * 64)
    return folder


def commit_all(folder: Path) -> str:
    """Commit all files of `folder`, a repository of its own; its commit."""
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in ("init -q", "add .", "commit -q -m all"):
        subprocess.run([*git, *words.split()], check=True, timeout=HANG_S)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return head.stdout.strip()
