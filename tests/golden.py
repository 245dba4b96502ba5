"""Renews the recorded scripts and tables of the cookbook.

    python -m tests.golden        (or: make golden)

Recorded are a cell's script in tests/golden, tests/predictions.json, train_671b.sh, train_16b.sh
and the table of the installed TorchTitan's options. Tests compare all of them exactly; look at
`git diff` before you commit what this has renewed.
"""

import subprocess
import sys
from pathlib import Path

from cookbook.base.files import write_whole
from cookbook.base.paths import ROOT
from cookbook.config.cluster import load_cluster
from cookbook.config.dialect.names import PACKAGE
from cookbook.config.recipe import load_ep_backend, load_precision, load_recipe
from cookbook.config.resolve import merge_config, resolve_cell
from cookbook.launch.script import render_launcher, render_script
from tests.predictions import PREDICTIONS, predictions_text

GOLDEN = Path(__file__).parent / "golden"
OPTION_TABLE = ROOT.joinpath(*PACKAGE.split("."), "options.json")
LAUNCHERS = {"train_671b.sh": "deepseek_v3_671b", "train_16b.sh": "deepseek_v3_16b"}
# Scripts name the folder of the cookbook, which is elsewhere on every machine.
_ROOT = Path("/shared/moe-cookbook")
_CONTAINER = str(Path(__file__).parent / "clusters/container.yaml")


def golden_scripts() -> dict[str, str]:
    """The text of each script in tests/golden, by its file name."""
    overlays = load_precision("mxfp8"), load_ep_backend("mxfp8_a2a")
    parts = load_recipe("deepseek_v3_16b"), *overlays, load_cluster(_CONTAINER)
    cell = resolve_cell(merge_config(*parts))
    # A profile that is outside recipes/ is named by its path.
    script = render_script(cell, _ROOT).replace(str(ROOT), str(_ROOT))
    return {f"{cell.name}-{cell.cluster.name}.sh": script}


def launchers() -> dict[str, str]:
    """The text of train_671b.sh and train_16b.sh, by file name."""
    cluster = load_cluster("soperator-b200")
    return {
        name: render_launcher(load_recipe(recipe), cluster, name)
        for name, recipe in LAUNCHERS.items()
    }


def option_table() -> str:
    """The table of the installed TorchTitan, as the stack's `options.json` holds it."""
    command = [sys.executable, "-m", f"{PACKAGE}.job_config"]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    """Renew all records; scripts that are no longer made are removed."""
    # The driver reads the table, so it comes first.
    write_whole(OPTION_TABLE, option_table())
    scripts = golden_scripts()
    for path in GOLDEN.glob("*.sh"):
        if path.name not in scripts:
            path.unlink()
    for name, text in scripts.items():
        write_whole(GOLDEN / name, text, mode=0o755)
    for name, text in launchers().items():
        write_whole(ROOT / name, text, mode=0o755)
    write_whole(PREDICTIONS, predictions_text())
    renewed = [OPTION_TABLE.name, PREDICTIONS.name, *scripts, *LAUNCHERS]
    print(f"renewed {', '.join(renewed)}")


if __name__ == "__main__":
    main()
