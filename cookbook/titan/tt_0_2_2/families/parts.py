"""Code that the model families share: the choice of attention, model arguments, and `FamilyParts`.

TorchTitan builds the cookbook's model class, gets masks from it, and splits it into pipeline stages
as it does its own models. All layers are TorchTitan's; only their attention kernel may be replaced
here (`parallelize.py` later changes MoE and output layers). Under FlashAttention-4
(`common/varlen_attention.py`) the mask is a tensor that marks where documents end, by the same rule
as TorchTitan's own mask.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from types import ModuleType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torchtitan.models.attention import FlexAttentionWrapper, ScaledDotProductAttentionWrapper
from torchtitan.protocols.model import ModelProtocol
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.protocols.train_spec import TrainSpec

from cookbook.base.family import Family, Model
from cookbook.titan.common import varlen_attention
from cookbook.titan.tt_0_2_2.checkpoint import save_when_ranks_agree
from cookbook.titan.tt_0_2_2.float8 import replace_float8_converters
from cookbook.titan.tt_0_2_2.loss_and_optimizer import watch_gradients
from cookbook.titan.tt_0_2_2.mxfp8 import replace_mx_converters
from cookbook.titan.tt_0_2_2.routing import TRAINED, chosen_routing
from cookbook.titan.tt_0_2_2.versions import refuse

FLAVOR = "flavor"
FLASH_ATTENTION_4 = varlen_attention.FLASH_ATTENTION_4

# The families' head dimensions, as (queries and keys, values). FlashAttention-4 supports others
# too, but their gradients have been wrong on some GPUs, and the cookbook does not test them.
_HEAD_DIMS = ((192, 128), (128, 128))

_OWN = {FlexAttentionWrapper: "flex", ScaledDotProductAttentionWrapper: "sdpa"}

_attended = varlen_attention.AttendedLength()


def observe_attention() -> tuple[frozenset[str], float | None]:
    """Return the kinds of attention that ran, and the mean number of keys a token attends to.

    Call this once, after the first step. It waits for the GPU and ends the counting of keys.
    """
    return frozenset(varlen_attention.ran), _attended.close()


def chosen_attention(model_parts: Iterable[nn.Module]) -> frozenset[str]:
    """Return the kinds of attention that the model's layers were built with, such as `flex`."""
    kinds = {**_OWN, DocumentAttentionKernel: FLASH_ATTENTION_4}
    modules = (module for part in model_parts for module in part.modules())
    return frozenset(kinds[type(module)] for module in modules if type(module) in kinds)


def choose_attention(model_args: Any, job_config: Any) -> None:
    """Set the job's choice of attention in `model_args`; raise if the job cannot use it."""
    model_args.attention = job_config.model.attention
    if model_args.attention == FLAVOR:
        return
    reason = varlen_attention.why_not()
    if (head_dims := model_args.sizes().head_dims) not in _HEAD_DIMS:
        allowed = " or ".join(f"{keys}/{values}" for keys, values in _HEAD_DIMS)
        found = "/".join(map(str, head_dims))
        reason = f"it is for heads of {allowed} (queries and keys/values), this model has {found}"
    if reason:
        raise refuse(
            f"model.attention={FLASH_ATTENTION_4}: {reason}; leave it out, or set "
            f"model.attention={FLAVOR}"
        )
    # TorchTitan requests masks only from models whose attention type is `flex`.
    model_args.attn_type = "flex"


class DocumentMask(BlockMask):
    """Cumulative document lengths, as a BlockMask because TorchTitan accepts no other type."""

    def __init__(self, cu_seqlens: Tensor) -> None:
        self.cu_seqlens = cu_seqlens


class DocumentAttentionKernel(nn.Module):
    """FlashAttention-4 in place of FlexAttentionWrapper; under TP, callers pass local tensors."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        block_mask: DocumentMask,
        scale: float,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Take and return (batch, heads, length, head_dim), as FlexAttentionWrapper does."""
        batch, _, length, _ = q.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        out = varlen_attention.varlen_attention(q, k, v, block_mask.cu_seqlens, length, scale)
        return out.unflatten(0, (batch, length)).transpose(1, 2)


class AttentionChoice(ModelProtocol):
    """A mixin that gives a TorchTitan model the attention selected by `model.attention`."""

    def __init__(self, model_args: Any) -> None:
        super().__init__(model_args)
        self.flash_attention_4 = getattr(model_args, "attention", FLAVOR) == FLASH_ATTENTION_4
        self.own_attention = _OWN[type(self.layers["0"].attention.inner_attention)]
        if self.flash_attention_4:
            for block in self.layers.values():
                block.attention.inner_attention = DocumentAttentionKernel()

    def get_attention_masks(
        self, input_batch: Tensor, tokenizer: Any, extra_inputs: dict[str, Tensor] | None = None
    ) -> Any:
        """Return a BlockMask for a batch (batch, length), or document ends for FlashAttention-4.

        Document ends are (batch, documents), so that every pipeline stage can split them by rows
        into microbatches.

        Raises:
            TypeError: the model uses SDPA, which takes no mask. TorchTitan's validator asks for
                one anyway, and expects this error.
        """
        if self.model_args.attn_type == "sdpa":
            raise TypeError("SDPA takes no mask")
        by_document = self.model_args.attn_mask_type == "block_causal"
        assert tokenizer.eos_id is not None or not by_document
        eos_id = tokenizer.eos_id if by_document else None
        ends = varlen_attention.document_ends(input_batch, eos_id)
        if self.training and _attended.is_open:
            _attended.add(ends)
        if not self.flash_attention_4:
            return super().get_attention_masks(input_batch, tokenizer, extra_inputs)
        # This waits until the GPU has finished its queued work.
        capacity = varlen_attention.bounds_capacity(int(ends.sum(dim=1).max()), ends.shape[1])
        return varlen_attention.document_bounds(ends, capacity)

    def forward(
        self, tokens: Tensor, attention_masks: Any = None, positions: Tensor | None = None
    ) -> Tensor:
        """Run TorchTitan's forward of a whole model or of one pipeline stage."""
        if self.flash_attention_4:
            cu_seqlens = varlen_attention.cumulative_lengths(attention_masks)
            # Compile once for each length of `cu_seqlens`, not once for all lengths.
            torch._dynamo.mark_static(cu_seqlens, 0)
            attention_masks = DocumentMask(cu_seqlens)
        else:
            varlen_attention.ran.add(self.own_attention)
            if attention_masks is None and self.training and _attended.is_open:
                # Without a mask each sequence is one document. Under context parallelism `tokens`
                # holds only part of each sequence, so count the full length.
                _attended.add_whole(len(tokens), self.model_args.max_seq_len)
        return super().forward(tokens, attention_masks, positions)


@dataclass(frozen=True)
class FamilyParts:
    """Everything that is specific to one model family."""

    name: str  # TorchTitan's `model.name`
    title: str
    released: Callable[[], TrainSpec]  # returns TorchTitan's own spec
    infra: ModuleType  # the TorchTitan module that defines `parallelize_fn`
    flavors: Mapping[str, Any]  # each flavor's model arguments, as CookbookArgs
    model: type[nn.Module]  # TorchTitan's model with `AttentionChoice`
    attention: type[nn.Module]  # TorchTitan's attention layer
    scale: str  # the attribute of the attention layer that holds the softmax scale
    # See `Family` for the meaning of the fields below.
    weights: Mapping[str, tuple[str | None, ...]]
    extra_layers: int = 0
    has_pipelines: bool = True
    shares_experts: bool = True

    @property
    def family(self) -> Family:
        """This family's description for code that does not import torch."""
        flavors = {name: args.sizes() for name, args in self.flavors.items()}
        # TorchTitan can dequantize published weights only if the adapter overrides this method.
        adapter: Any = self.released().state_dict_adapter
        reads = adapter.get_hf_storage_reader is not StateDictAdapter.get_hf_storage_reader
        names = next(iter(self.flavors.values())).SIZES
        facts = names, reads, self.extra_layers, self.has_pipelines, self.shares_experts
        return Family(self.name, self.title, flavors, self.weights, *facts)

    def config_json(self, args: Any, seq_len: int, dtype: str) -> dict[str, Any]:
        """Return Transformers' `config.json` for a model trained at sequence length `seq_len`."""
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
            **args.transformers_config(seq_len),
        }


def copied(kind: type, released: Mapping[str, Any], shorter: Mapping[str, int]) -> dict[str, Any]:
    """Return copies of the flavors in `released`, converted to the class `kind`.

    `shorter={"16B": 8}` adds the flavor `16B_8layers`, a copy of `16B` with only 8 layers.
    """
    found = {name: kind(**deepcopy(vars(args))) for name, args in released.items()}
    for name, n_layers in shorter.items():
        found[f"{name}_{n_layers}layers"] = replace(deepcopy(found[name]), n_layers=n_layers)
    return found


# The model argument that each of these fields of `Model` is read from, in every family.
SIZES = {"n_layers": "n_layers", "dim": "dim", "heads": "n_heads", "vocab": "vocab_size"}
SIZES |= {"expert_hidden": "moe_inter_dim", "attn_type": "attn_type"}
_ROUTED = ("num_experts", "num_shared_experts", "top_k", "num_expert_groups", "num_limited_groups")
SIZES |= {name: f"moe_args.{name}" for name in (*_ROUTED, "gate_bias")}


class CookbookArgs:
    """A mixin that applies a job's options to TorchTitan's model arguments.

    Each family's class must define SIZES, with more fields of `Model`, and a method:
    `transformers_config(seq_len)` returns the family's entries of `config.json` for a model trained
    at sequence length `seq_len`.
    """

    def sizes(self: Any) -> Model:
        return Model(
            **{field: attrgetter(name)(self) for field, name in self.SIZES.items()},
            shared_hidden=self.moe_inter_dim * self.moe_args.num_shared_experts,
            by_document=self.attn_mask_type == "block_causal",
            # Transformers' routers that score by softmax (DeepSeek-V2, Qwen3-MoE) have no bias.
            publishes_bias=self.moe_args.score_func == "sigmoid",
        )

    def override(self: Any, overrides: Mapping[str, int]) -> None:
        """Set the sizes in `overrides`, which are keyed by names such as `moe_args.top_k`."""
        for name, size in overrides.items():
            if name not in self.SIZES.values():
                raise refuse(f"model.overrides.{name}: the model has no such size")
            owner, _, field = name.rpartition(".")
            setattr(getattr(self, owner, self), field, size)
        # TorchTitan's router would take 0 groups for a limit.
        if self.moe_args.num_expert_groups == 0:
            self.moe_args.num_expert_groups = self.moe_args.num_limited_groups = None

    def update_from_config(self: Any, job_config: Any, **kwargs: Any) -> None:
        """Apply the job's options and patches; TorchTitan calls this before building the model."""
        if not hasattr(job_config, "cookbook"):
            package = __package__.rpartition(".")[0]
            raise refuse(
                f"--experimental.custom_import={package} needs the cookbook's options; add "
                f"--job.custom_config_module={package}.job_config"
            )
        sizes = asdict(job_config.model.overrides)
        sizes |= {f"moe_args.{name}": size for name, size in sizes.pop("moe_args").items()}
        self.override({name: size for name, size in sizes.items() if size is not None})
        replace_mx_converters()
        replace_float8_converters()
        save_when_ranks_agree()
        watch_gradients(job_config)
        choose_attention(self, job_config)
        super().update_from_config(job_config, **kwargs)  # type: ignore[misc]
        self.moe_args._debug_force_load_balance = chosen_routing(job_config) != TRAINED
