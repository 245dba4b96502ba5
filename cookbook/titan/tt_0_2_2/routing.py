"""The router's choices: counts of each expert's tokens, and forced routing for benchmarks.

TorchTitan updates the expert bias from each MoE layer's token counts, `tokens_per_expert`. Version
0.2.2 also counts the tokens of validation and of a pipeline's shape inference, which runs on zeros.
The hooks here exclude those tokens. They also keep a second count, `cookbook_load`, from which the
experts' load is logged. `tokens_per_expert` cannot be used for this, because recomputation adds the
same tokens again, and the optimizer resets the count.

TorchTitan's forced routing gives each token consecutive experts. With 256 experts, top 8 and EP 32,
these are all on one rank. Random experts spread a token over as many ranks as trained routing does.
Each router gets its random experts once, as a table, so that recomputation selects the same ones.
"""

import json
import math
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torchtitan.tools.logging import logger

from cookbook.titan.common.process import attempt_folder
from cookbook.titan.tt_0_2_2 import activity
from cookbook.titan.tt_0_2_2.recomputation import in_recompute
from cookbook.titan.tt_0_2_2.versions import refuse

# An expert is starved if its load is below this fraction of its layer's mean.
STARVED = 0.1
# A run writes all experts' token counts at most this many times, to limit the file's size.
_MOST_COUNTS = 50


def count_tokens(model: nn.Module) -> None:
    """Make the MoE layers of `model` count tokens in training steps only."""
    for moe in moe_layers([model]).values():
        moe.register_forward_pre_hook(_before)
        moe.register_forward_hook(_after)


def _before(moe: Any, inputs: Any) -> None:
    if not torch.is_grad_enabled():
        moe.cookbook_counts = moe.tokens_per_expert.clone()
    elif not in_recompute():
        if not hasattr(moe, "cookbook_load"):
            moe.cookbook_load = torch.zeros_like(moe.tokens_per_expert, dtype=torch.float64)
        moe.cookbook_load.sub_(moe.tokens_per_expert)


def _after(moe: Any, inputs: Any, output: Any) -> None:
    if not torch.is_grad_enabled():
        moe.tokens_per_expert.copy_(moe.cookbook_counts)
        activity.patches_applied.add("tokens-counted-in-training-only")
    elif not in_recompute():
        moe.cookbook_load.add_(moe.tokens_per_expert)


def moe_layers(model_parts: Iterable[nn.Module]) -> dict[int, Any]:
    """Return the MoE layers, keyed by layer number in the whole model."""
    return {
        int(number): block.moe
        for part in model_parts
        for number, block in part.get_submodule("layers").named_children()
        if block.moe_enabled
    }


class RouterLoad:
    """The tokens routed to each expert of the whole model since the metrics were last logged."""

    def __init__(self, processor: Any, first_step: int, writes: bool) -> None:
        job_config, model_args = processor.job_config, processor.model_args
        self._own = moe_layers(processor.model_parts)
        self._device = next(processor.model_parts[0].parameters()).device
        self._shape = model_args.n_layers, model_args.moe_args.num_experts
        # Do not sum over TP: the ranks of a TP group count the same tokens.
        meshes = [processor.parallel_dims.get_optional_mesh(name) for name in ("loss", "pp")]
        self._groups = [mesh.get_group() for mesh in meshes if mesh is not None]
        self._forced = chosen_routing(job_config) != TRAINED
        self._writes = writes
        attempt = attempt_folder()
        self._file = attempt / "router_load.jsonl" if attempt else None
        num_logs = job_config.training.steps / job_config.metrics.log_freq
        if (validation := job_config.validation).enable:
            num_logs += job_config.training.steps / validation.freq
        self._logs_per_counts = math.ceil(num_logs / _MOST_COUNTS)
        self._kept = torch.zeros(self._shape, dtype=torch.float64)
        self._kept_from = self._first_step = first_step
        self._num_logs = 0

    def log(self, step: int) -> dict[str, float]:
        """Write the router load of the steps since the last call, up to and including `step`.

        All ranks must call this. Return the metrics, or an empty dict on ranks that do not write.
        """
        counts = self.take_counts()
        if not self._writes:
            return {}
        first_step, self._first_step = self._first_step, step + 1
        counts = counts.cpu()
        layers = counts.sum(1).nonzero().flatten().tolist()
        if not layers:
            return {}
        share = counts[layers] / counts[layers].mean(1, keepdim=True)
        busiest = [round(value, 4) for value in share.amax(1).tolist()]
        starved = (share < STARVED).sum(1).tolist()
        line = {"first_step": first_step, "step": step, "forced": self._forced, "layers": layers}
        line |= {"busiest_over_mean": busiest, "starved_experts": starved}
        self._kept += counts
        self._num_logs += 1
        if self._num_logs % self._logs_per_counts == 0:
            line |= {"counts_from": self._kept_from, "counts": self._kept[layers].long().tolist()}
            self._kept.zero_()
            self._kept_from = self._first_step
        self._write(line)
        name = "router_load/busiest_over_mean"
        by_layer = zip(layers, busiest, strict=True)
        return {
            name: max(busiest),
            "router_load/starved_experts": float(sum(starved)),
            **{f"{name}/layer_{layer:02}": value for layer, value in by_layer},
        }

    def take_counts(self) -> Tensor:
        """Return token counts (layers, experts) over all ranks, and reset this rank's to zero."""
        table = torch.zeros(self._shape, dtype=torch.float64, device=self._device)
        for layer, moe in self._own.items():
            if (load := getattr(moe, "cookbook_load", None)) is not None:
                table[layer] = load
                load.zero_()
        for group in self._groups:
            dist.all_reduce(table, group=group)
        return table

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            # A failure to write statistics must not stop the job.
            logger.warning(f"cookbook: no more router load: {self._file}: {error.strerror}")
            self._file = None


TRAINED, ROUND_ROBIN, RANDOM = "trained", "round_robin", "random"


def chosen_routing(job_config: Any) -> str:
    """Return the job's routing; TorchTitan's `debug.moe_force_load_balance` means round-robin."""
    debug = job_config.debug
    if not debug.moe_force_load_balance:
        return str(debug.moe_routing)
    if debug.moe_routing == RANDOM:
        raise refuse(
            "debug.moe_force_load_balance deals experts round-robin, debug.moe_routing=random "
            "at random; leave one of them out"
        )
    return ROUND_ROBIN


def deal_experts(
    router: Any, num_tokens: int, generator: torch.Generator, device: torch.device
) -> Tensor:
    """Draw each token's experts, (tokens, top k) int16, within the router's expert-group limit."""
    draws = torch.rand(num_tokens, router.num_experts, generator=generator, device=device)
    if router.num_expert_groups is not None:
        shape = num_tokens, router.num_expert_groups
        groups = torch.rand(shape, generator=generator, device=device)
        open_groups = torch.zeros_like(groups, dtype=torch.bool)
        open_groups.scatter_(1, groups.topk(router.num_limited_groups).indices, True)
        closed = ~open_groups.repeat_interleave(router.num_experts // groups.shape[1], 1)
        draws = draws.masked_fill(closed, -1.0)
    return draws.topk(router.top_k).indices.to(torch.int16)


def route_at_random(
    model: nn.Module, parallel_dims: Any, job_config: Any, device: torch.device
) -> None:
    """Give each router of `model` a table of random experts; call this before compiling.

    The table lists the experts of every token of one local batch. Each sequence has its own
    seed, so the experts do not depend on how DP ranks split the batch, and TP ranks, which route
    the same tokens, get the same table. With PP or gradient accumulation, every microbatch reads
    the table from its first row.
    """
    mesh = parallel_dims.get_optional_mesh("loss")
    rank = 0 if mesh is None else mesh.get_local_rank()
    training = job_config.training
    batch, num_tokens = training.local_batch_size, training.seq_len // parallel_dims.cp
    for layer, moe in moe_layers([model]).items():
        tables = []
        for sequence in range(rank * batch, (rank + 1) * batch):
            seed = hash((job_config.debug.seed or 0, layer, sequence)) & (1 << 62) - 1
            generator = torch.Generator(device).manual_seed(seed)
            tables.append(deal_experts(moe.router, num_tokens, generator, device))
        moe.router.cookbook_dealt = torch.cat(tables)
        # With forced routing, the router calls this method to choose experts, so patch it.
        moe.router._debug_force_load_balance_routing = MethodType(_look_up, moe.router)


def _look_up(router: Any, scores: Tensor) -> tuple[Tensor, Tensor]:
    experts = router.cookbook_dealt[: scores.shape[0]].long()
    return experts, scores.gather(1, experts)


def observe_routing(model_parts: Iterable[nn.Module]) -> frozenset[str]:
    """Return how this rank's MoE layers route: `trained`, `round_robin` or `random`."""
    found = set()
    for moe in moe_layers(model_parts).values():
        forced = RANDOM if hasattr(moe.router, "cookbook_dealt") else ROUND_ROBIN
        found.add(forced if moe.router._debug_force_load_balance else TRAINED)
    return frozenset(found)
