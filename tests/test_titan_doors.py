"""How the cookbook enters TorchTitan: by its spec, and with hardly a name replaced."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.titan_names import names, replaced
from tests.titan_ranks import run_ranks
from tests.titan_refusal import refusal
from tests.titan_run import A2A, EP2, MXFP8, job, refused, train

pytestmark = pytest.mark.titan

# What binds TorchTitan to the CPU.
CPU_NAMES = {
    "torch.distributed.barrier",
    "torch.distributed.tensor._random._rng_tracker",
    "torch.histc",
    "torchtitan.components.metrics.device_module",
    "torchtitan.components.metrics.device_type",
    "torchtitan.distributed.dual_pipe_v.device_module",
    "torchtitan.distributed.dual_pipe_v.device_type",
    "torchtitan.distributed.parallel_dims.device_type",
    "torchtitan.distributed.utils.device_module",
    "torchtitan.distributed.utils.device_type",
    "torchtitan.models.deepseek_v3.model.args.has_cuda_capability",
    "torchtitan.models.llama4.model.args.has_cuda_capability",
    "torchtitan.models.moe.utils.generate_permute_indices",
    "torchtitan.tools.profiling.device_module",
    "torchtitan.tools.utils.device_module",
    "torchtitan.tools.utils.device_type",
    "torchtitan.tools.utils.get_peak_flops",
}


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
from tests.titan_names import names, replaced

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


@pytest.fixture(scope="module")
def imported() -> tuple[list[Any], str]:
    """The answers of three processes that import the stack, and what they said."""
    command = [sys.executable, "-c", IMPORT_THE_STACK]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()[-3:]], done.stderr


def test_importing_the_stack_replaces_no_name_but_the_devices(
    imported: tuple[list[Any], str],
) -> None:
    on_gpu, on_cpu, _ = imported[0]
    assert (set(on_gpu), set(on_cpu)) == (set(), CPU_NAMES)


def test_another_modules_spec_of_the_same_name_is_refused(imported: tuple[list[Any], str]) -> None:
    answers, said = imported
    assert answers[-1] == 1
    refusal = "cookbook refuses: another module has registered its own deepseek_v3"
    assert said.splitlines()[-1].startswith(refusal)


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


def test_a_job_gives_torchtitans_names_back(assets: Path, tmp_path: Path) -> None:
    argv = job(assets, tmp_path, *EP2, *A2A, *MXFP8, steps=1)
    for result in run_ranks(train_and_compare, 2, argv, seconds=200):
        assert len(result["losses"]) == 1
        assert result["replaced"] == {
            # What an MXFP8 job needs until its end, on a CPU.
            "torchao.prototype.moe_training.ep.a2a_combine.all_to_all_single",
            "torchao.prototype.moe_training.ep.a2a_combine.triton_to_mxfp8_dim0",
            "torchao.prototype.moe_training.ep.a2a_dispatch.all_to_all_single",
            "torchao.prototype.moe_training.ep.a2a_dispatch.triton_to_mxfp8_dim0",
            "torchao.prototype.moe_training.scaled_grouped_mm._emulated_mxfp8_scaled_grouped_mm_2d_2d",
            "torchtitan.protocols.model_converter._registry_model_converter_cls[quantize.grouped_mm.mx]",
            "torchtitan.protocols.model_converter._registry_model_converter_cls[quantize.linear.mx]",
            # So that ranks agree on when to save, and failures name their cause.
            *(
                f"torchtitan.components.checkpoint.CheckpointManager.{name}"
                for name in (
                    *("__init__", "save", "load", "maybe_wait_for_staging", "_async_wait", "close"),
                )
            ),
            # By TorchTitan's own function.
            "torchtitan.models.moe.utils.TOKEN_GROUP_ALIGN_SIZE_M",
            *OTHERS,
        }


def test_a_job_of_another_model_family_is_torchtitans_own(assets: Path, tmp_path: Path) -> None:
    # It is held to no declaration either.
    argv = job(assets, tmp_path, "--model.name=llama3", "--cookbook.grouped_gemms=mxfp8", steps=1)
    (result,) = run_ranks(train_and_compare, 1, argv, seconds=200)
    assert len(result["losses"]) == 1 and not result["ended"]
    assert not [text for text in result["said"] if "cookbook active" in text]
    assert result["replaced"] == OTHERS


def test_without_its_options_the_stack_is_refused(assets: Path, tmp_path: Path) -> None:
    argv = [word for word in job(assets, tmp_path, steps=1) if "custom_config_module" not in word]
    reason = refused(1, argv)
    assert "add --job.custom_config_module=cookbook.titan.tt_0_2_2.job_config" in reason


def test_the_spec_is_torchtitans_but_for_its_doors() -> None:
    from torchtitan.models import deepseek_v3
    from torchtitan.protocols.train_spec import get_train_spec

    import cookbook.titan.tt_0_2_2  # noqa: F401

    spec, released = get_train_spec("deepseek_v3"), deepseek_v3.get_train_spec()
    changed = {name for name, value in vars(spec).items() if value != vars(released)[name]}
    assert changed == {
        "model_cls",
        "model_args",
        "parallelize_fn",
        "build_loss_fn",
        "build_metrics_processor_fn",
        "build_optimizers_fn",
        "build_lr_schedulers_fn",
        "state_dict_adapter",
        "build_dataloader_fn",
        "build_validator_fn",
    }
    ours = {
        value.__module__.split(".")[0]
        for name in changed - {"model_args"}
        for value in [getattr(spec, name)]
    }
    assert ours == {"cookbook"}
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
    monkeypatch.setattr(versions, "installed", lambda p: found if p == package else known(p))
    reason = refusal(versions.check_versions, caplog)
    assert f"written for {package} " in reason and f"found {found or 'none'}; " in reason


def parse(*options: str) -> Any:
    from torchtitan.config import ConfigManager

    module = "--job.custom_config_module=cookbook.titan.tt_0_2_2.job_config"
    return ConfigManager().parse_args([module, *options])


def test_a_build_of_the_known_version_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel of another index has the CUDA that it was built for in its version."""
    from cookbook.titan.tt_0_2_2 import versions

    known = versions.installed
    monkeypatch.setattr(versions, "installed", lambda package: f"{known(package)}+cu128")
    versions.check_versions()
    found = versions.versions()
    assert found["torch"] == torch.__version__ and found["torchao"] == "0.16.0+cu128"


def test_each_exchange_is_quantized_by_its_own_option() -> None:
    from cookbook.titan.tt_0_2_2.mxfp8 import Precisions

    option = "--parallelism.expert_parallel_a2a_{}_precision=mxfp8"
    for way, wanted in (("dispatch_fwd", (True, False)), ("combine_bwd", (False, True))):
        assert Precisions.of(parse(option.format(way))) == Precisions(*wanted)


def draw_random() -> tuple[torch.Tensor, ...]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, zeros

    import cookbook.titan.tt_0_2_2  # noqa: F401
    from cookbook.titan.tt_0_2_2.cpu import seed_shards_apart

    torch.manual_seed(42)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    placed = zeros(64, device_mesh=mesh, placements=[Replicate(), Shard(0)])
    first = placed.normal_().to_local().clone()
    second = placed.normal_().to_local().clone()
    plain = torch.rand(4)
    # As the next job does, with a seed of its own and with the same.
    started_anew = []
    for seed in (43, 42):
        seed_shards_apart()
        torch.manual_seed(seed)
        started_anew.append(placed.normal_().to_local().clone())
    return first, second, plain, *started_anew


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
