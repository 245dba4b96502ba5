"""Refuses a job whose options cannot work, before its model is built."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from cookbook.titan.tt_0_2_2.quantized_a2a import Precisions
from cookbook.titan.tt_0_2_2.recomputation import OPERATORS
from cookbook.titan.tt_0_2_2.versions import refuse


def check_job(job_config: Any) -> None:
    """End this rank with one line where the options of the job cannot work."""
    if not hasattr(job_config, "cookbook"):
        raise refuse(
            f"--experimental.custom_import={__package__} needs the cookbook's options; add "
            f"--job.custom_config_module={__package__}.job_config"
        )
    check_save_list(job_config.activation_checkpoint)
    check_kept_layers(job_config.activation_checkpoint)
    options = job_config.parallelism
    backend = options.expert_parallel_comm_backend
    if backend == "deepep" and find_spec("deep_ep") is None:
        raise refuse(
            "EP backend deepep needs the package deep_ep, which is not installed here; "
            "build it (setup.sh does) or take the standard backend"
        )
    if Precisions.of(job_config).any:
        if backend != "standard":
            raise refuse(
                "the MXFP8 all-to-all is a part of the standard backend; set "
                "--parallelism.expert_parallel_comm_backend=standard or leave out the "
                "expert_parallel_a2a_* options"
            )
        if options.expert_parallel_degree == 1 or options.expert_tensor_parallel_degree > 1:
            raise refuse(
                "the MXFP8 all-to-all needs parallelism.expert_parallel_degree > 1 and "
                "parallelism.expert_tensor_parallel_degree=1"
            )


def check_save_list(options: Any) -> None:
    """End this rank where selective recomputation is to save what nobody knows, or does not run."""
    found = options.op_sac_save_list
    if unknown := [name for name in found if name not in OPERATORS]:
        raise refuse(
            f"activation_checkpoint.op_sac_save_list: found {unknown[0]!r}, allowed: "
            f"{', '.join(OPERATORS)}"
        )
    if found and (options.mode != "selective" or options.selective_ac_option != "op"):
        raise refuse(
            "activation_checkpoint.op_sac_save_list is for activation_checkpoint.mode=selective "
            "with activation_checkpoint.selective_ac_option=op; set them, or leave the list out"
        )


def check_kept_layers(options: Any) -> None:
    """End this rank where layers are to be kept that nothing recomputes."""
    kept = options.num_layers_kept
    if kept < 0:
        raise refuse(f"activation_checkpoint.num_layers_kept: found {kept}, allowed: 0 or more")
    if kept and options.mode not in ("full", "selective"):
        raise refuse(
            "activation_checkpoint.num_layers_kept is for activation_checkpoint.mode=full or "
            f"selective, found {options.mode}; set one, or leave the number out"
        )
