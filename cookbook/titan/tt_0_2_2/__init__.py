"""The cookbook's extensions to TorchTitan, for the training processes of stack 2026.02.

TorchTitan imports this package before it builds a Trainer: `--job.custom_config_module` imports
`.job_config`, and `--experimental.custom_import` the package itself. A registered spec overrides
the built-in spec of the same name, so the models in `families` use the cookbook's spec and all
others use TorchTitan's. To extend TorchTitan, write a function or a class in a file of its own
and add one line below. Nothing in site-packages is edited; versions other than 0.2.2 are refused.

TorchTitan has no extension point for the following. Each is patched in one file:

- functions and classes that TorchTitan's `parallelize_fn` and `apply_moe_ep_tp` use:
  `parallelize.py`, only while these two run
- the converters `quantize.*.mx`: `mxfp8.py`, in jobs that train one of `families`
- functions that TorchAO calls for MXFP8: `mxfp8.py`, in jobs that emulate MXFP8
- the device of TorchTitan's modules: `cpu.py`, on machines without CUDA
- when to save, when to stop training, and the errors of saves and loads: `checkpoint.py`
- gradient clipping, to record the norm: `loss_and_optimizer.py`, in jobs that may skip steps
- which rank logs the metrics: `metrics.py`
- the exit of the process: `common/process.py`
"""

# ruff: noqa: E402  (TorchTitan's internals must not be imported before the version check)
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
from cookbook.titan.tt_0_2_2.metrics import CookbookMetrics
from cookbook.titan.tt_0_2_2.parallelize import parallelize
from cookbook.titan.tt_0_2_2.text_data import RepeatableValidator, build_dataloader


def register() -> None:
    """Register every family's spec with TorchTitan, with some fields replaced by the cookbook's."""
    for name, parts in FAMILIES.items():
        released = parts.released()
        spec = replace(
            released,
            # Builds the attention that `model.attention` selects, and its mask.
            model_cls=parts.model,
            # Adds the cookbook's flavors, and checks the job's options before the model is built.
            model_args=parts.flavors,
            # Corrects gradients under TP and EP; adds DeepEP and an MXFP8 all-to-all; takes
            # TorchAO's wrapper off the tensors in checkpoints.
            parallelize_fn=parallelize,
            # Divides a pipeline's gradients by the number of tokens.
            build_loss_fn=build_loss,
            # Adds metrics. After the first step, checks that the chosen precision is really used.
            build_metrics_processor_fn=CookbookMetrics,
            # Updates the routing bias, which TorchTitan never does for Qwen3; can skip steps whose
            # gradients are not finite.
            build_optimizers_fn=build_optimizers,
            # Keeps the original learning-rate schedule when a run is resumed with more steps.
            build_lr_schedulers_fn=build_lr_schedulers,
            # Loads published weights that lack the routing bias.
            state_dict_adapter=without_missing_bias(released.state_dict_adapter),
            # Trains on the user's own text files, if the job names some.
            build_dataloader_fn=build_dataloader,
            build_validator_fn=RepeatableValidator,
        )
        try:
            register_train_spec(name, spec)
        except ValueError:
            # The name is taken, which is fine if an earlier import of this package registered it.
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
