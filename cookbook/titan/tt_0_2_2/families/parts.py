"""The parts of a model family that training, self-check and export need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

import torch.nn as nn
from torchtitan.protocols.train_spec import TrainSpec

from cookbook.base.family import Family, Model
from cookbook.titan.tt_0_2_2.attention import choose_attention
from cookbook.titan.tt_0_2_2.checkpoint import save_when_ranks_agree
from cookbook.titan.tt_0_2_2.moe_routing import TRAINED, chosen_routing
from cookbook.titan.tt_0_2_2.mxfp8 import replace_mx_converters
from cookbook.titan.tt_0_2_2.optimizer import watch_gradients
from cookbook.titan.tt_0_2_2.versions import refuse


@dataclass(frozen=True)
class FamilyParts:
    """One model family.

    Attributes:
        released: makes TorchTitan's own spec.
        infra: TorchTitan's module of `parallelize_fn`, whose names are replaced while it runs.
        flavors: makes the arguments of each flavor, of a class with `CookbookArgs`.
        sizes: reads a flavor's arguments.
        model: TorchTitan's model with `attention.AttentionChoice`.
        attention: TorchTitan's attention layer, and its attribute that scales scores.
        transformers_config: makes the family's own keys of `config.json` from a flavor's arguments
            and the sequence length of training, which decides whether positions are scaled.
        weights, extra_layers, has_pipelines: as in `Family`.
    """

    title: str
    released: Callable[[], TrainSpec]
    infra: ModuleType
    flavors: Callable[[], dict[str, Any]]
    sizes: Callable[[Any], Model]
    model: type[nn.Module]
    attention: type[nn.Module]
    scale: str
    transformers_config: Callable[[Any, int], dict[str, Any]]
    weights: Mapping[str, tuple[str | None, ...]]
    extra_layers: int = 0
    has_pipelines: bool = True

    @property
    def name(self) -> str:
        """TorchTitan's `model.name`."""
        return self.infra.__name__.split(".")[2]

    @property
    def family(self) -> Family:
        """The description for the driver."""
        known = self.flavors()
        flavors = {name: self.sizes(args) for name, args in known.items()}
        adapter: Any = self.released().state_dict_adapter
        named = adapter(next(iter(known.values())), None).from_hf_map.values()
        has_bias = any("expert_bias" in (name or "") for name in named)
        facts = self.weights, self.extra_layers, self.has_pipelines, has_bias
        return Family(self.name, self.title, flavors, *facts)

    def config_json(self, flavor: str, seq_len: int, dtype: str) -> dict[str, Any]:
        """Return transformers' `config.json` of a flavor."""
        args = self.flavors()[flavor]
        return {
            "torch_dtype": dtype,
            "vocab_size": args.vocab_size,
            "hidden_size": args.dim,
            "moe_intermediate_size": args.moe_inter_dim,
            "num_hidden_layers": args.n_layers,
            "num_attention_heads": args.n_heads,
            "num_experts_per_tok": args.moe_args.top_k,
            "norm_topk_prob": args.moe_args.route_norm,
            "hidden_act": "silu",
            "rms_norm_eps": args.norm_eps,
            "rope_theta": args.rope_theta,
            "attention_bias": False,
            **self.transformers_config(args, seq_len),
        }


def copied(kind: type, released: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of TorchTitan's flavors, as arguments of class `kind`."""
    return {
        name: kind(**{one.name: deepcopy(getattr(args, one.name)) for one in fields(args)})
        for name, args in released.items()
    }


def sizes_of(args: Any, **own: Any) -> Model:
    """Return a flavor's sizes; `own` are those whose arguments have other names in each family."""
    moe = args.moe_args
    return Model(
        dim=args.dim,
        heads=args.n_heads,
        expert_hidden=args.moe_inter_dim,
        shared_hidden=args.moe_inter_dim * moe.num_shared_experts,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        vocab=args.vocab_size,
        gate_bias=moe.gate_bias,
        n_layers=args.n_layers,
        num_expert_groups=moe.num_expert_groups,
        num_limited_groups=moe.num_limited_groups,
        attn_type=args.attn_type,
        by_document=args.attn_mask_type == "block_causal",
        **own,
    )


class CookbookArgs:
    """Mixed into TorchTitan's arguments of a model; the first door that gets a job's options."""

    def update_from_config(self: Any, job_config: Any, **kwargs: Any) -> None:
        """Apply the job's options to the arguments; called before the model is built."""
        if not hasattr(job_config, "cookbook"):
            package = __package__.rpartition(".")[0]
            raise refuse(
                f"--experimental.custom_import={package} needs the cookbook's options; add "
                f"--job.custom_config_module={package}.job_config"
            )
        replace_mx_converters()
        save_when_ranks_agree()
        watch_gradients(job_config)
        choose_attention(self, job_config)
        super().update_from_config(job_config, **kwargs)  # type: ignore[misc]
        self.moe_args._debug_force_load_balance = chosen_routing(job_config) != TRAINED
