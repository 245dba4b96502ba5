"""The cookbook's part in a training process of stack 2026.02: its parts, and the door of each.

TorchTitan imports this package, before its Trainer exists, with `--job.custom_config_module`
(`.job_config`) and `--experimental.custom_import`. A registered spec wins over the built-in one of
the same name, so a job of one of the `families` gets this one, and a job of another family gets
TorchTitan's own. A new part enters here: a function or a class in a file of its own, and one line
below. Nothing in site-packages is edited; other versions of TorchTitan are refused.

Some things have no door. Each is replaced in one place, which says why:

- the names that a family's `parallelize_fn` and its `apply_moe_ep_tp` look up: `parallelize.py`,
  while these functions run
- the converters called `quantize.*.mx`: `mxfp8.py`, when a job of this model starts
- functions that TorchAO's emulation calls: `mxfp8.py`, where a job uses them
- the device of TorchTitan's modules: `cpu.py`, on machines without CUDA
- when a checkpoint is saved, whether another step follows, how failures are named: `checkpoint.py`
- clipping, which knows whether gradients are finite: `loss_and_optimizer.py`, where a job asks
- the end of the process: `common/process.py`
"""

# ruff: noqa: E402  (TorchTitan's internals are imported once the version is known to be right)
from cookbook.titan.tt_0_2_2.versions import check_versions, refuse

check_versions()

from dataclasses import replace

import torch
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

from cookbook.titan.common.process import die_with_parent, exit_without_teardown
from cookbook.titan.tt_0_2_2.checkpoint import without_missing_bias
from cookbook.titan.tt_0_2_2.cpu import prepare_cpu
from cookbook.titan.tt_0_2_2.families import FAMILIES
from cookbook.titan.tt_0_2_2.loss_and_optimizer import (
    build_loss,
    build_lr_schedulers,
    build_optimizers,
)
from cookbook.titan.tt_0_2_2.metrics import build_metrics_processor
from cookbook.titan.tt_0_2_2.parallelize import parallelize
from cookbook.titan.tt_0_2_2.text_data import build_dataloader, build_validator


def register() -> None:
    """Register TorchTitan's own specs, but for the doors named here, once in a process."""
    for name, parts in FAMILIES.items():
        released = parts.released()
        spec = replace(
            released,
            # A choice of attention, and its mask.
            model_cls=parts.model,
            # The cookbook's flavors; and a job's options are checked before its model is built.
            model_args=parts.flavors(),
            # TP and EP with the right sums, DeepEP, the quantized all-to-all; plain checkpoints.
            parallelize_fn=parallelize,
            # A pipeline's gradients are per token.
            build_loss_fn=build_loss,
            # The first step reports the options in force, and ends a job that differs from its
            # overlays' declaration; each logged step writes metrics and the router's load.
            build_metrics_processor_fn=build_metrics_processor,
            # Move the routing bias, which released Qwen3 does not; steps with infinite gradients
            # can be skipped.
            build_optimizers_fn=build_optimizers,
            # A resumed run with more steps keeps its schedule.
            build_lr_schedulers_fn=build_lr_schedulers,
            # Published weights may lack the routing bias.
            state_dict_adapter=without_missing_bias(released.state_dict_adapter),
            # The user's own texts.
            build_dataloader_fn=build_dataloader,
            # The same batches each time; some of TorchTitan's models have none.
            build_validator_fn=build_validator,
        )
        try:
            register_train_spec(name, spec)
        except ValueError:
            # TorchTitan takes a name once. A second import of this package changes nothing.
            if get_train_spec(name).parallelize_fn.__module__ != parallelize.__module__:
                raise refuse(
                    f"another module has registered its own {name} with TorchTitan; remove that, "
                    f"or leave out --experimental.custom_import={__package__}"
                ) from None


if not torch.cuda.is_available():
    prepare_cpu()
register()
exit_without_teardown()
die_with_parent()
