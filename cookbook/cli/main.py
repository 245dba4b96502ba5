"""Parse the command line of `submit.py` and run its verb.

Exit status: 0, success; 1, the work failed; 2, wrong input: nothing was submitted or written.
"""

import argparse
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from cookbook.base.errors import InputError, nearest, run_command

_DESCRIPTION = "Pre-train mixture-of-experts models with TorchTitan, on Slurm or on this machine."
_EPILOG = """\
examples:
  python submit.py sweep matrix --dry-run     what would run, and why not
  python submit.py sweep matrix               queue it, or train it here
  python submit.py run debug --precision mxfp8 --set training.steps=50
  python submit.py run --resume RUN --set training.steps=200
  python submit.py logs -f                    follow the newest run
  python submit.py report                     its results
  python submit.py compare OLD NEW            exit status 1 if a cell is slower
  python submit.py profile debug              where a step's time goes
"""


# Words of other tools for a verb.
_MEANT = {
    **dict.fromkeys(("train", "start", "submit", "launch", "resume", "continue"), "run"),
    **dict.fromkeys(("stop", "kill", "abort"), "cancel"),
    **dict.fromkeys(("watch", "ps", "jobs", "queue"), "status"),
    **dict.fromkeys(("create", "init", "copy"), "new"),
    "validate": "check",
    "estimate": "check",
    "results": "report",
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        wrong = re.match(r"argument VERB: invalid choice: '(.*?)' \(choose from (.*)\)", message)
        known = re.findall(r"[a-z-]+", wrong[2]) if wrong else []
        if wrong and (close := [*filter(None, [_MEANT.get(wrong[1])]), *nearest(wrong[1], known)]):
            message = f"unknown verb {wrong[1]!r}; did you mean {close[0]!r}?"
        if message == "argument --set: expected one argument":
            message += ", such as --set training.steps=3"
        self.exit(2, f"{self.prog}: {message}; see: python {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    as_written = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="submit.py", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=as_written
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, text: str, handler: str) -> argparse.ArgumentParser:
        added = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.set_defaults(handler=handler)
        return added

    def flag(parser: argparse.ArgumentParser, *names: str, text: str) -> None:
        parser.add_argument(*names, action="store_true", help=text)

    verb("list", "list recipes, precisions, EP backends, clusters and sweeps", "inspect:list_all")
    show = verb("show", "print a fully resolved cell as YAML", "inspect:show_cell")
    flag(show, "--origins", text="with the place that set each value")
    render = verb("render", "print the sbatch script of a cell", "inspect:render_cell")
    render.add_argument("-o", "--output", metavar="FILE", help="write it to FILE instead")
    new = verb("new", "copy a recipe, overlay, cluster or sweep, to edit", "inspect:new")
    new.add_argument("name", metavar="NAME")
    new.add_argument("--from", dest="source", metavar="NAME-or-FILE", required=True)

    check = verb("check", "validate cells, and predict their memory and time", "run:show_check")
    check.add_argument("recipe", metavar="RECIPE-or-SWEEP")
    flag(check, "--rules-only", text="do not let TorchTitan build the cells")
    plan = verb("plan", "predict the fastest layouts of a recipe that fit in memory", "plan:plan")
    for shown in (show, render, plan):
        shown.add_argument("recipe", metavar="RECIPE")
    values = "an option, precision or ep_backend, with the values to try; --set holds one"
    plan.add_argument("--vary", metavar="KEY=V,V,...", action="append", default=[], help=values)
    plan.add_argument("--best", metavar="N", type=int, default=10, help="how many to print (10)")
    plan.add_argument("--documents", metavar="MEAN:MEDIAN", help="document lengths, in tokens")
    line = verb("check-line", "validate an sbatch command without submitting it", "run:check_line")
    typed = "as you would type it: PRECISION=mxfp8 sbatch --nodes=16 train_671b.sh ..."
    line.add_argument("line", metavar="LINE", nargs=argparse.REMAINDER, help=typed)

    run = verb("run", "train one cell, or resume one that has ended", "run:run")
    run.add_argument("recipe", metavar="RECIPE", nargs="?")
    newest = "continue from its newest checkpoint; --set and --nodes change its options"
    run.add_argument("--resume", metavar="RUN[/CELL]", help=newest)
    sweep = verb("sweep", "train every cell of a sweep", "run:run_sweep")
    sweep.add_argument("sweep", metavar="SWEEP")
    in_one = "train the cells one after another in one Slurm job, on the same nodes"
    flag(sweep, "--one-allocation", text=in_one)
    often = "train every cell N times, in the order A B B A; the report pairs them"
    sweep.add_argument("--repeat", metavar="N", type=int, default=1, help=often)

    status = verb("status", "show the progress of a run's cells", "follow:show_status")
    to_end = "watch until all cells have ended, then report, as `run` does"
    flag(status, "-w", "--watch", text=to_end)
    logs = verb("logs", "print the log of a cell", "follow:show_logs")
    default = "also CELL of the newest run, or RUN; without: the newest run's running cell"
    logs.add_argument("cell", metavar="RUN/CELL", nargs="?", help=default)
    flag(logs, "-f", "--follow", text="follow it until the cell has ended")
    cancel = verb("cancel", "cancel the waiting and running cells of a run", "follow:cancel")
    report = verb("report", "print the results of a run, and make its page", "follow:show_report")
    for followed in (status, cancel, report):
        followed.add_argument("run", metavar="RUN", nargs="?", help="by default the newest")
    report.add_argument("--format", choices=("md", "json", "html"), help="by default md")
    flag(report, "--all", text="one page over all runs: table and curves, in the folder of runs")
    export = verb("export", "write a cell's weights for transformers", "training:export_weights")
    export.add_argument("cell", metavar="RUN/CELL")
    export.add_argument("--to", metavar="FOLDER", required=True, help="a new folder")
    dtypes, of = ("bfloat16", "float32"), "of all tensors but the routing bias (default: bfloat16)"
    export.add_argument("--dtype", choices=dtypes, default="bfloat16", help=of)
    export.add_argument("--step", metavar="N", type=int, help="by default the newest")
    data = verb("data", "count the documents and tokens of text files", "training:count_texts")
    data.add_argument("files", metavar="FILES", nargs="+", help="globs, files or folders")
    data.add_argument("--tokenizer", metavar="FOLDER", required=True)
    data.add_argument("--text-key", metavar="KEY", default="text")
    data.add_argument("--seq-len", metavar="N", type=int, default=8192)
    two = "compare two runs; exit status 1 if a cell got slower"
    compare = verb("compare", two, "follow:show_comparison")
    compare.add_argument("reference", metavar="RUN", help="the reference")
    compare.add_argument("other", metavar="RUN", help="the run that is compared with it")
    percent = "how much slower a cell may be (default: 5)"
    compare.add_argument("--tolerance", metavar="PERCENT", type=float, default=5.0, help=percent)
    profile = verb("profile", "print where a training step's time goes", "profile:profile")
    of = "a recipe, trained for a few steps; or RUN, RUN/CELL, a folder, or rank0_trace.json"
    profile.add_argument("target", metavar="RECIPE-or-TRACE", help=of)
    profile.add_argument("--ranks", metavar="R,R,...", help="ranks whose traces to read, or: all")
    untried = "skip the memory prediction and TorchTitan's build, but not the rules"
    for launched in (run, sweep, profile):
        launched.set_defaults(repeat=1, one_allocation=False)
        flag(launched, "--dry-run", text="show the cells, submit nothing")
        flag(launched, "--no-check", text=untried)
        flag(launched, "--detach", text="submit, and do not wait")
    often = "any TorchTitan option; may be given several times"
    setting: dict[str, Any] = {"metavar": "SECTION.KEY=VALUE", "action": "append", "default": []}
    for made in (show, render, check, plan, run, sweep, profile):
        group = made.add_argument_group("cell options")
        group.add_argument("--precision", metavar="P", help="bf16, mxfp8, ... (see list)")
        group.add_argument("--ep-backend", metavar="E", help="standard, deepep, ... (see list)")
        group.add_argument("--cluster", metavar="C", help="a profile's name or file")
        group.add_argument("--nodes", metavar="N", type=int)
        group.add_argument("--set", help=often, **setting)
    ready = "check whether this machine is ready, and say how to fix it"
    doctor = verb("doctor", ready, ".doctor:check_machine")
    flag(doctor, "--local", text="check only what runs on this machine alone need")
    doctor.add_argument("--cluster", metavar="C", help="the cluster profile to check for")
    for printed in (check, plan, compare, profile, doctor):
        flag(printed, "--json", text="one JSON object instead of tables")
    flag(doctor, "--numerics", text="compare this machine's kernels with a reference")
    doctor.add_argument("--output", metavar="FILE", type=Path, help="where --numerics writes JSON")
    return parser


def main(words: Sequence[str]) -> int:
    return run_command("submit.py", lambda: _run(words))


def _run(words: Sequence[str]) -> int:
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:
        from cookbook.cli.complete import complete

        complete(parser)
    arguments, unknown = parser.parse_known_args(words or ["--help"])
    if unknown:
        word, *rest = unknown
        settings = getattr(arguments, "set", None)
        if settings is not None and re.match(r"--\w+\.", word):
            setting = word[2:] if "=" in word else "=".join([word[2:], *rest[:1]])
            raise InputError(word, "is an option of TorchTitan", f"write --set {setting}")
        if settings is not None and re.match(r"\w+\.[\w.]+=", word):
            raise InputError(word, "is no option of its own", f"write --set {word}")
        for setting in settings or ():
            if "=" not in setting:
                remedy = f"write --set {setting}={word}"
                raise InputError(f"--set {setting}", "has no value", remedy)
        how = "TorchTitan's options go after --set; " if "set" in arguments else ""
        remedy = f"{how}see: python submit.py {arguments.verb} --help"
        raise InputError(arguments.verb, f"takes no {' '.join(unknown)!r}", remedy)
    if arguments.verb in ("show", "render") and isinstance(sys.stdout, io.TextIOWrapper):
        # Print UTF-8, as in the cookbook's files, even if the terminal has another encoding.
        sys.stdout.reconfigure(encoding="utf-8")
    module, _, function = arguments.handler.partition(":")
    try:
        # Import lazily: `--help` must not wait for submitit, and `doctor` must work without it.
        handler = getattr(importlib.import_module(f".{module}", "cookbook.cli"), function)
        return int(handler(arguments))
    except ModuleNotFoundError as error:
        from cookbook.install import explain_missing

        raise explain_missing(error) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
