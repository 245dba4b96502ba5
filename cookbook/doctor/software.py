"""The doctor's checks of the software (Python, pins, compiled packages, data) and of Slurm."""

import platform
import re
import sys
import sysconfig
from pathlib import Path

from cookbook.config.dialect.names import Names
from cookbook.config.pins import read_pins, stack_name
from cookbook.doctor.check import Outcome, Surroundings, check
from cookbook.install import attention, find_distribution, package_folder
from cookbook.install.corpus import is_made
from cookbook.install.deepep import find_deepep, find_nvshmem, torch_cuda

# All GPU figures of docs/evidence were measured on it.
MEASURED_TORCH = "2.11"


@check("python", local=True)
def python(here: Surroundings) -> Outcome:
    version = sys.version_info[:2]
    found = f"{platform.python_version()} in {sys.prefix}"
    if version < (3, 11):
        return "problem", found, "use 3.11 or later: ./setup.sh --python python3.13"
    if version > (3, 14):
        return "warning", found, "3.11 to 3.14 are the tested ones"
    return "ok", found


@check("pins", local=True)
def pins(here: Surroundings) -> Outcome:
    requirements = here.repository / "requirements.txt"
    pinned = [pin for pin in read_pins(requirements) if not pin.extra]
    found = attention.differences(pinned, here.site)
    if len(found) == len(pinned) and all(one.endswith("is missing") for one in found):
        remedy = "run ./setup.sh"
        if (here.repository / ".venv/bin/python").exists():
            remedy = "run this with .venv/bin/python, or `source .venv/bin/activate` first"
        return "problem", "none of the packages is installed here", remedy
    if found:
        return "problem", "; ".join(found), "run ./setup.sh"
    words = f"stack {stack_name(requirements)}, {len(pinned)} packages as pinned"
    return "ok", f"{words} (the documents' GPU figures are from torch {MEASURED_TORCH})"


@check("torchao kernels", of_ranks=True)
def torchao_kernels(here: Surroundings) -> Outcome:
    """Check that TorchAO's CUDA kernels, built for one CUDA major version, can load."""
    cuda, folder = torch_cuda(here.site), package_folder("torchao", here.site)
    if folder is None or not cuda:
        return "not here", "torch or torchao has no CUDA here"
    libraries = sorted(folder.glob("_C_mxfp8*.so"))
    major = cuda.split(".")[0]
    if not libraries or f"libcudart.so.{major}".encode() not in libraries[0].read_bytes():
        remedy = "install torch and torchao from the same index: ./setup.sh --torch-index URL"
        return "warning", f"its MXFP8 kernels are not for torch's CUDA {cuda}", remedy
    return "ok", f"MXFP8 kernels for CUDA {major}"


@check("compiler", local=True, of_ranks=True)
def compiler(here: Surroundings) -> Outcome:
    """Check for the C compiler and the Python headers that torch.compile and Triton need."""
    missing = [] if any(map(here.which, ("gcc", "cc", "clang"))) else ["a C compiler"]
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        missing.append("Python.h")
    if missing:
        found = f"{' and '.join(missing)} missing, which torch.compile needs"
        remedy = "install gcc and the headers of this Python (Debian and Ubuntu: gcc, python3-dev)"
        return "problem" if here.gpus else "warning", found, remedy
    return "ok", "C compiler and Python headers"


@check("deepep", of_ranks=True)
def deepep(here: Surroundings) -> Outcome:
    pin = next(pin for pin in read_pins(here.repository / "requirements.txt") if pin.source)
    built = find_deepep(here.site)
    gpu = here.cluster.gpu if here.cluster else None
    arch = f" --arch {gpu.compute_capability:.1f}" if gpu else ""
    rebuild = f"run ./setup.sh{arch} on a machine with a CUDA toolkit"
    if not arch:
        rebuild += " (--arch where it has no GPU)"
    if built is None:
        found = "not installed: cells with deepep are refused"
        return "warning" if here.trains_for_real else "not here", found, rebuild
    if built.commit != pin.value:
        found = f"{built.version} from {built.commit[:7] or 'another source'}"
        return "problem", f"{found}, pinned {pin.value[:7]}", rebuild
    if built.library is None:
        return "problem", f"{built.version} without its library", rebuild
    if not built.internode:
        found = f"{built.version}, intra-node kernels only: one node at most"
        return "warning", found, f"{rebuild}; torch must bring its NVSHMEM wheel"
    # DeepEP's library looks for NVSHMEM in the wheel, but LD_LIBRARY_PATH takes precedence.
    linked = here.answer(("ldd", str(built.library))).output
    loaded = re.search(r"libnvshmem_host\S* => (/\S+)", linked)
    folder, version = find_nvshmem(here.site) or (None, "")
    if loaded and folder and Path(loaded[1]).parent.resolve() != (folder / "lib").resolve():
        found = f"{built.version}, linked with NVSHMEM {version} in {folder}/lib, would"
        remedy = f"take {Path(loaded[1]).parent} out of LD_LIBRARY_PATH"
        return "problem", f"{found} load {loaded[1]}", remedy
    nvshmem = f", NVSHMEM in {loaded[1]}" if loaded else ""
    return "ok", f"{built.version}, inter-node kernels{nvshmem}"


@check("flash attention", local=True, of_ranks=True)
def flash_attention(here: Surroundings) -> Outcome:
    models = [gpu.model for gpu in here.gpus]
    if here.is_login_node and here.cluster:
        models = [here.cluster.gpu] if here.cluster.gpu else []
    if models and not any(attention.runs_on(model.compute_capability) for model in models):
        return "not here", "FlashAttention-4 needs Hopper or Blackwell GPUs"
    if not models and not here.trains_for_real:
        return None
    pinned = attention.flash_attention_pins(here.repository / "requirements.txt")
    version = next(pin.value for pin in pinned if pin.name == attention.PACKAGE)
    if find_distribution(attention.PACKAGE, here.site) is None:
        found = f"not installed: cells with {Names.attention}=flash_attention_4 are refused"
        return "warning", found, "run ./setup.sh"
    if differing := attention.differences(pinned, here.site):
        return "problem", "; ".join(differing), "run ./setup.sh"
    return "ok", version


@check("local corpus", local=True)
def local_corpus(here: Surroundings) -> Outcome:
    if is_made(here.repository / "assets/local"):
        return "ok", "assets/local"
    return "warning", "not made: local runs have no data", "run ./setup.sh --local"


CONFIG = ("scontrol", "show", "config")


@check("slurm")
def slurm(here: Surroundings) -> Outcome:
    if not here.has_slurm:
        if here.cluster:
            return "problem", f"no sbatch, which {here.cluster.name} needs", "log in to the cluster"
        return "not here", "no sbatch: runs use this machine (--cluster local)"
    if here.which("srun") is None:
        return "problem", "sbatch without srun", "install Slurm's client commands"
    config = here.answer(CONFIG)
    if "dns_srv" in config.error or "configuration source" in config.error:
        found = "Slurm's commands are here without a configuration (slurm.conf)"
        remedy = "use --cluster local, or set SLURM_CONF"
        return "problem" if here.cluster else "warning", found, remedy
    if config.status != 0:
        reason = (config.error or config.output).strip().partition("\n")[0]
        found = f"the controller does not answer{': ' + reason if reason else ''}"
        return "problem", found, "ask who runs the cluster; --cluster local works without Slurm"
    version = re.search(r"^SLURM_VERSION\s*=\s*(\S+)", config.output, re.MULTILINE)
    states = "sacct" if "slurmdbd" in config.output else "squeue and each run's status file"
    return "ok", f"{version[1] if version else 'its'} controller answers; states come from {states}"
