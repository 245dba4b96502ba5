"""Let torchrun fork its ranks after it has imported TorchTitan, for which a new Python takes 6 s.

Python imports this module when its folder is on PYTHONPATH (tests/submit.py). The processes stay
torchrun's own children, in sessions of their own, with their own output and environment.
"""

import atexit
import io
import os
import runpy
import signal
import subprocess
import sys
import traceback
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RANK = ["-u", "-m", "torchtitan.train"]


class ForkingPopen(subprocess.Popen[Any]):
    """Popen that forks for a rank's command, and starts all others."""

    def _execute_child(self, args: Any, *others: Any) -> None:
        if not isinstance(args, tuple | list) or list(args[1:4]) != RANK:
            super()._execute_child(args, *others)  # type: ignore[misc]
            return
        import torchtitan.train  # noqa: F401

        # As subprocess orders them: environment, then the child's ends of output and errors.
        environment, output, errors = others[5], others[12], others[14]
        self.pid = os.fork()
        if not self.pid:
            _become_rank(args[4:], environment, output, errors)
        self._child_created = True


def _become_rank(
    words: Sequence[str], environment: Mapping[str, str], output: int, errors: int
) -> None:
    status = 1
    try:
        os.setsid()
        for opened, target in ((output, 1), (errors, 2)):
            if opened != -1:
                os.dup2(opened, target)
        os.closerange(3, 4096)
        os.environ.clear()
        os.environ.update(environment)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # The parent's: they would remove its files.
        atexit._clear()
        weakref.finalize._registry.clear()  # type: ignore[attr-defined]
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True)
            for number in (1, 2)
        )
        import torch
        from torchtitan.config import ConfigManager

        torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", 1)))
        sys.argv[1:], sys.path[0] = words, str(Path.cwd())
        # It took its default from the command line when it was imported.
        ConfigManager.parse_args.__defaults__ = (list(words),)
        runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        os._exit(status)


if any(word.endswith(("/torchrun", "torch.distributed.run")) for word in sys.orig_argv[1:4]):
    subprocess.Popen = ForkingPopen  # type: ignore[misc]
