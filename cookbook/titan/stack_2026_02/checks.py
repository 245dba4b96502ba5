"""In: a job's options and its parallelism. Out: nothing, or a refusal of what cannot be right."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from importlib.util import find_spec
from typing import Any

import torchtitan.models.deepseek_v3 as deepseek_v3
import torchtitan.models.deepseek_v3.model.model as deepseek_model
import torchtitan.models.llama4.infra.parallelize as llama4_parallelize
from torchtitan.distributed.expert_parallel import ExpertParallel

from cookbook.titan.stack_2026_02.versions import refuse


def check_job(job_config: Any, parallel_dims: Any) -> None:
    from cookbook.titan.stack_2026_02.quantized_a2a import Precisions

    backend = job_config.parallelism.expert_parallel_comm_backend
    if Precisions.of(job_config).any:
        if backend != "standard":
            raise refuse(
                "the MXFP8 all-to-all is a part of the standard backend; set "
                "--parallelism.expert_parallel_comm_backend=standard or leave out the "
                "expert_parallel_a2a_* options"
            )
        if not parallel_dims.ep_enabled or parallel_dims.etp_enabled:
            raise refuse(
                "the MXFP8 all-to-all needs parallelism.expert_parallel_degree > 1 and "
                "parallelism.expert_tensor_parallel_degree=1"
            )


def _checked_parallelize(parallelize: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(parallelize)
    def check_and_parallelize(model: Any, parallel_dims: Any, job_config: Any) -> Any:
        from cookbook.titan.stack_2026_02.quantized_a2a import (
            Precisions,
            QuantizedExpertParallel,
            prepare_quantized_a2a,
        )

        check_job(job_config, parallel_dims)
        precisions = Precisions.of(job_config)
        # The plan makes an ExpertParallel for each layer, by this name and without arguments.
        llama4_parallelize.ExpertParallel = ExpertParallel
        if precisions.any:
            prepare_quantized_a2a()
            llama4_parallelize.ExpertParallel = partial(QuantizedExpertParallel, precisions)
        return parallelize(model, parallel_dims, job_config)

    return check_and_parallelize


def _checked_build_moe(build_moe: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(build_moe)
    def check_and_build_moe(
        args: Any, dim: int, hidden_dim: int, moe_impl: str = "standard"
    ) -> Any:
        if moe_impl == "deepep" and find_spec("deep_ep") is None:
            raise refuse(
                "EP backend deepep needs the package deep_ep, which is not installed here; "
                "build it (setup.sh does) or take the standard backend"
            )
        return build_moe(args, dim=dim, hidden_dim=hidden_dim, moe_impl=moe_impl)

    return check_and_build_moe


def hook_checks() -> None:
    deepseek_v3.parallelize_deepseekv3 = _checked_parallelize(deepseek_v3.parallelize_deepseekv3)
    deepseek_model.build_moe = _checked_build_moe(deepseek_model.build_moe)
