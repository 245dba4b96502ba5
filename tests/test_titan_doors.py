"""How the cookbook enters TorchTitan: by its spec, and with hardly a name replaced."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.started import python
from tests.titan_ranks import run_ranks
from tests.titan_run import A2A, EP2, MXFP8, job, refusal, refused, train

pytestmark = pytest.mark.titan

_ROOTS = ("torchtitan", "torchao")
_TORCH = (
    "torch",
    "torch.distributed",
    "torch.distributed.tensor._random",
    "torch.nn.modules.module",
)
_MISSING = object()


def names() -> dict[str, Any]:
    """Every name of TorchTitan, TorchAO and PyTorch's main modules, by its dotted path.

    Attributes of a module's own classes and entries of its dictionaries count as names too.
    """
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and (name.split(".")[0] in _ROOTS or name in _TORCH):
            for key, value in list(vars(module).items()):
                found[f"{name}.{key}"] = value
                kind = type(value)  # not isinstance, for which deprecated objects warn
                if issubclass(kind, type) and value.__module__ == name:
                    found |= {f"{name}.{key}.{part}": v for part, v in vars(value).items()}
                elif issubclass(kind, dict) and not key.startswith("__"):
                    found |= {f"{name}.{key}[{part}]": v for part, v in value.items()}
    return found


def replaced(before: dict[str, Any]) -> set[str]:
    """The names of `before` that are gone or mean something else now."""
    now = names()
    return {name for name, value in before.items() if now.get(name, _MISSING) is not value}


IMPORT_THE_STACK = """
import importlib, json, os, sys, torch
import torchtitan.train
# Whatever the stack touches, or ever touched.
for module in ("torchtitan.models.llama3", "torchtitan.models.llama4",
               "torchtitan.models.deepseek_v3", "torchtitan.models.deepseek_v3.model.args",
               "torchtitan.distributed.dual_pipe_v", "torchtitan.tools.profiling",
               "torch.distributed.tensor._random",
               "torchao.prototype.moe_training.scaled_grouped_mm",
               "torchao.prototype.moe_training.ep.a2a_dispatch",
               "torchao.prototype.moe_training.ep.a2a_combine",
               "torchao.prototype.mx_formats.mx_linear", "torchao.float8.float8_linear"):
    importlib.import_module(module)
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from tests.test_titan_doors import names, replaced

def replaced_names(is_gpu):
    torch.cuda.is_available = lambda: is_gpu
    before = names()
    import cookbook.titan.tt_0_2_2.job_config
    assert "cookbook.titan.tt_0_2_2.mxfp8" in sys.modules
    return sorted(replaced(before))

def refused(_):
    register_train_spec("deepseek_v3", get_train_spec("llama3"))
    try:
        import cookbook.titan.tt_0_2_2
    except SystemExit as error:
        return error.code

for call, argument in ((replaced_names, True), (replaced_names, False), (refused, None)):
    if not os.fork():
        print(json.dumps(call(argument)), flush=True)
        os._exit(0)
    os.wait()
"""


def test_importing_the_stack_replaces_no_name_but_the_devices() -> None:
    done = python("-c", IMPORT_THE_STACK)
    assert done.returncode == 0, done.stderr[-3000:]
    on_gpu, on_cpu, status = [json.loads(line) for line in done.stdout.splitlines()[-3:]]
    assert on_gpu == []
    # What binds TorchTitan to the CPU, beside modules' own names of the device.
    own = ("device_module", "device_type", "has_cuda_capability")
    assert {name for name in on_cpu if not name.endswith(own)} == {
        "torch.distributed.barrier",
        "torch.distributed.tensor._random._rng_tracker",
        "torch.histc",
        "torchtitan.models.moe.utils.generate_permute_indices",
        "torchtitan.tools.utils.get_peak_flops",
    }
    # Another module's spec of the same name.
    assert status == 1
    refusal = "cookbook refuses: another module has registered its own deepseek_v3"
    assert done.stderr.splitlines()[-1].startswith(refusal)


# Replaced by these tests' runner, and by PyTorch for every optimizer.
OTHERS = {
    "torchtitan.components.metrics.MetricsProcessor.log",
    "torchtitan.components.optimizer.OptimizersContainer.step",
    "torchtitan.train.time",
}


def train_and_compare(argv: list[str]) -> dict[str, Any]:
    # What its import replaces stands above, whoever imported TorchTitan first.
    import cookbook.titan.tt_0_2_2  # noqa: F401

    before = names()
    result = train(argv)
    return result | {"replaced": replaced(before)}


# What an MXFP8 job needs until its end, on a CPU; TorchTitan sets the last one itself.
NEEDED = (
    "torchao.prototype.moe_training.ep.a2a_",
    "torchao.prototype.moe_training.scaled_grouped_mm._emulated_",
    "torchtitan.protocols.model_converter._registry_model_converter_cls[quantize.",
    # So that ranks agree on when to save, and failures name their cause.
    "torchtitan.components.checkpoint.CheckpointManager.",
    "torchtitan.models.moe.utils.TOKEN_GROUP_ALIGN_SIZE_M",
)


def test_a_job_gives_torchtitans_names_back(assets: Path, tmp_path: Path) -> None:
    argv = job(assets, tmp_path, *EP2, *A2A, *MXFP8, steps=1)
    for result in run_ranks(train_and_compare, 2, argv):
        assert len(result["losses"]) == 1
        assert {name for name in result["replaced"] if not name.startswith(NEEDED)} == OTHERS


def test_a_job_of_another_model_family_is_torchtitans_own(assets: Path, tmp_path: Path) -> None:
    # It is held to no declaration either.
    argv = job(assets, tmp_path, "--model.name=llama3", "--cookbook.grouped_gemms=mxfp8", steps=1)
    (result,) = run_ranks(train_and_compare, 1, argv)
    assert len(result["losses"]) == 1 and not result["ended"]
    assert not [text for text in result["said"] if "cookbook active" in text]
    assert result["replaced"] == OTHERS


def test_without_its_options_the_stack_is_refused(assets: Path, tmp_path: Path) -> None:
    argv = [word for word in job(assets, tmp_path, steps=1) if "custom_config_module" not in word]
    reason = refused(1, argv)
    assert "add --job.custom_config_module=cookbook.titan.tt_0_2_2.job_config" in reason


def test_a_size_of_another_family_is_refused(assets: Path, tmp_path: Path) -> None:
    reason = refused(1, job(assets, tmp_path, "--model.overrides.n_kv_heads=2", steps=1))
    assert reason == "model.overrides.n_kv_heads: the model has no such size"


def test_the_spec_is_torchtitans_but_for_its_doors() -> None:
    from torchtitan.models import deepseek_v3
    from torchtitan.protocols.train_spec import get_train_spec

    import cookbook.titan.tt_0_2_2  # noqa: F401

    spec, released = get_train_spec("deepseek_v3"), deepseek_v3.get_train_spec()
    changed = {name for name, value in vars(spec).items() if value != vars(released)[name]}
    builds = ("loss", "metrics_processor", "optimizers", "lr_schedulers", "dataloader", "validator")
    doors = {"model_cls", "parallelize_fn", "state_dict_adapter"}
    doors |= {f"build_{name}_fn" for name in builds}
    assert changed == {*doors, "model_args"}
    assert {getattr(spec, name).__module__.split(".")[0] for name in doors} == {"cookbook"}
    # TorchTitan's flavors, with the same sizes, and two more.
    assert set(spec.model_args) == {*released.model_args, "proxy", "16B_8layers"}
    for name, args in released.model_args.items():
        assert vars(spec.model_args[name]) == vars(args)
        assert spec.model_args[name].moe_args is not args.moe_args
    assert get_train_spec("llama3") is not get_train_spec("llama3")


@pytest.mark.parametrize("package", ["torchtitan", "torchao"])
@pytest.mark.parametrize("found", ["0.3.0", None])
def test_another_version_is_refused_in_one_line(
    package: str, found: str | None, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from cookbook.titan.tt_0_2_2 import versions

    known = versions.installed
    with monkeypatch.context() as patch:
        patch.setattr(versions, "installed", lambda p: found if p == package else known(p))
        reason = refusal(versions.check_versions, caplog)
    assert f"written for {package} " in reason and f"found {found or 'none'}; " in reason
    # A wheel of another index has the CUDA that it was built for in its version.
    monkeypatch.setattr(versions, "installed", lambda package: f"{known(package)}+cu128")
    versions.check_versions()
    assert versions.versions()["torchao"] == "0.16.0+cu128"


def draw_random() -> tuple[torch.Tensor, ...]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, zeros

    import cookbook.titan.tt_0_2_2  # noqa: F401
    from cookbook.titan.tt_0_2_2.cpu import seed_shards_apart

    torch.manual_seed(42)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    placed = zeros(64, device_mesh=mesh, placements=[Replicate(), Shard(0)])

    def draw() -> torch.Tensor:
        return placed.normal_().to_local().clone()

    found = [draw(), draw(), torch.rand(4)]
    # As the next job does, with a seed of its own and with the same.
    for seed in (43, 42):
        seed_shards_apart()
        torch.manual_seed(seed)
        found.append(draw())
    return tuple(found)


def test_shards_draw_other_numbers_and_replicas_the_same() -> None:
    ranks = run_ranks(draw_random, 4)
    (a, b, c, d) = (rank[0] for rank in ranks)
    assert torch.equal(a, c) and torch.equal(b, d)
    assert not torch.isin(a, b).any()
    for first, second, plain, other_seed, same_seed in ranks:
        assert not torch.equal(first, second)
        assert torch.equal(first, same_seed) and not torch.isin(first, other_seed).any()
        # Numbers outside of DTensors are drawn as if there were none.
        assert torch.equal(plain, ranks[0][2])
