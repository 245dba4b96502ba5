"""Cells of all kinds and what is predicted for them, as tests/predictions.json keeps it.

Pipelines are not among them, since torch lists their actions: see tests/test_predict_pipeline.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cookbook.base.errors import InputError
from cookbook.base.gpus import Gpu
from cookbook.config.cell import Cell
from cookbook.config.resolve import cell_on, this_machine
from cookbook.predict.hardware import Documents
from cookbook.predict.memory import predict_memory
from cookbook.predict.rank import describe_ranks
from cookbook.predict.step import predict_step
from tests.check_cells import cell_of
from tests.predict_machine import on_gpus

PREDICTIONS = Path(__file__).parent / "predictions.json"
MODE, LIST = "activation_checkpoint.mode", "activation_checkpoint.op_sac_save_list"
EVERY_NTH = "activation_checkpoint.selective_ac_option"
BATCH, POLICY = "training.local_batch_size", "parallelism.fsdp_reshard_after_forward"
TP, EP, ETP = (
    f"parallelism.{one}_parallel_degree" for one in ("tensor", "expert", "expert_tensor")
)
REPLICAS = "parallelism.data_parallel_replicate_degree"
FORCED, ROUTING = "debug.moe_force_load_balance", "debug.moe_routing"
EAGER: dict[str, Any] = {"compile.enable": False}
EAGER_LOSS: dict[str, Any] = {"compile.components": ["model"]}
OP, FLASH = {MODE: "selective", EVERY_NTH: "op"}, {"model.attention": "flash_attention_4"}
SAVED = ["attention", "communication", "grouped_mm", "mm"]
BUDGET = {MODE: "memory_budget", "activation_checkpoint.memory_budget": 0.25}
# With all logits at once the peak is in the loss, with chunks it is in a layer's backward.
WHOLE, ROWS = {"loss.num_chunks": 0}, {"cookbook.row_kernels": True}
# Options of the 16B on 4 H200, whose loss is chunked.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole loss": WHOLE,
    "whole loss, TP 2": WHOLE | {TP: 2},
    "whole loss, TP 2, whole vocabulary": WHOLE
    | {TP: 2, "parallelism.disable_loss_parallel": True},
    "whole, eager loss": WHOLE | EAGER_LOSS,
    "whole, eager loss, TP 2": WHOLE | EAGER_LOSS | {TP: 2},
    "whole loss, never resharded": WHOLE | {POLICY: "never"},
    "TP 2": {TP: 2},
    "TP 2, EP 1, ETP 2": {TP: 2, ETP: 2, EP: 1},
    "TP 2, EP 2, ETP 2": {TP: 2, ETP: 2, EP: 2},
    "replicas": {REPLICAS: 2, EP: 1},
    "eager": EAGER,
    "eager loss": EAGER_LOSS,
    "foreach": {"optimizer.implementation": "foreach", BATCH: 1, "training.seq_len": 256},
    "never resharded": {POLICY: "never"},
    "offloaded": {"training.enable_cpu_offload": True},
    "none": {MODE: "none"},
    "none, eager": {MODE: "none", **EAGER},
    "full, two layers kept": {MODE: "full", "activation_checkpoint.num_layers_kept": 2},
    "every second layer": {MODE: "selective", EVERY_NTH: "2"},
    "budget": BUDGET,
    "saves attention": OP | FLASH | {LIST: SAVED[:1]},
    "saves attention and communication": OP | FLASH | {LIST: SAVED[:2]},
    "saves three": OP | FLASH | {LIST: SAVED[:3]},
    "saves all": OP | FLASH | {LIST: SAVED},
    "saves all, FlexAttention": OP | {LIST: SAVED},
    "saves mm, eager": OP | EAGER | {LIST: ["attention", "mm"]},
    "saves three, TP 2": OP | {TP: 2, LIST: SAVED[1:]},
    "trained routing": {FORCED: False},
    "random routing": {FORCED: False, ROUTING: "random"},
    "row kernels": ROWS,
    "row kernels, saves all": ROWS | OP | {LIST: SAVED},
    "three rounds": {"training.global_batch_size": 3 * 4 * 4},
    "a worker": {"training.dataloader.num_workers": 1},
}
DEEPEP = ("plain", "TP 2", "none", "saves all", "trained routing", "eager", "budget")
ALONE = ("plain", "whole loss", "none", "none, eager", "budget", "row kernels", "saves all")


def cells() -> Iterator[tuple[str, Cell]]:
    for name, options in OPTIONS.items():
        yield name, on_gpus(4, {"loss.num_chunks": 8} | options)
    scored = {"deepep.score_activations": True, "deepep.num_chunks": 2}
    for name in DEEPEP:
        yield f"DeepEP, {name}", on_gpus(4, OPTIONS[name], ep_backend="deepep")
        cell = on_gpus(4, OPTIONS[name] | scored, ep_backend="deepep")
        yield f"DeepEP, {name}, scored halves", cell
    gpu = Gpu("NVIDIA H200", 9.0, 139.8)
    mapped = this_machine(4, gpu, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    for name, machine in (("mapped", mapped), ("A100", this_machine(4, Gpu("A100", 8.0, 80)))):
        options = {BATCH: 4, EP: 4}
        yield name, cell_on(machine, "deepseek_v3_16b", "bf16", "standard", options)
    for name in ALONE:
        options = OPTIONS[name] | {EP: 1, "model.overrides.n_layers": 8}
        one = this_machine(1, gpu)
        yield f"alone, {name}", cell_on(one, "deepseek_v3_16b", "bf16", "standard", options)
        yield f"FP8, {name}", cell_on(one, "deepseek_v3_16b", "float8", "standard", ROWS | options)
    for precision in ("mxfp8", "mxfp8_wgrad_hp", "mxfp8_linear", "float8"):
        for backend in ("standard", "deepep", "mxfp8_a2a"):
            recipe = "deepseek_v3_16b" if precision == "mxfp8_linear" else "deepseek_v3_16b_fast"
            where: dict[str, Any] = {"precision": precision, "ep_backend": backend, "nodes": 2}
            yield f"{precision}, {backend}", cell_of(recipe, {BATCH: 4, EP: 8}, **where)
    for backend in ("standard", "deepep"):
        for word, value in ((TP, 1), (FORCED, True), (TP, 2)):
            more: dict[str, Any] = {EP: 16, word: value}
            cell = cell_of("deepseek_v3_16b", more, ep_backend=backend, nodes=4)
            yield f"EP 16, {backend}, {word}={value}", cell
    for degree, kind in ((1, "flavor"), (1, "flash_attention_4"), (4, "flavor")):
        asked: dict[str, Any] = {TP: degree, "model.attention": kind}
        cell = cell_of("qwen3_30b_a3b", asked, cluster="h200-node")
        yield f"Qwen3, TP {degree}, {kind}", cell
    yield "slice", cell_of("deepseek_v3_671b_slice", precision="float8", cluster="h200-node")


def predicted(cell: Cell, **how: Any) -> dict[str, Any]:
    """Memory and time of the only pipeline stage of `cell`, to six digits."""
    ranks = describe_ranks(cell)
    memory = predict_memory(cell, *ranks)
    found: dict[str, Any] = {"moment": memory.moment, "outside": memory.outside}
    found["GiB"] = dict(memory.terms)
    try:
        step = predict_step(cell, ranks, **how)
        found |= {"ms": dict(step.terms_ms), "again": step.recompute_ms}
        found["tokens"] = step.tokens_per_gpu
    except InputError as error:
        found["no step"] = f"{error.found}; {error.remedy}"
    return dict(json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.6g}")))


def predictions() -> dict[str, dict[str, Any]]:
    found = {name: predicted(cell) for name, cell in cells()}
    deepep = on_gpus(4, {TP: 2}, ep_backend="deepep")
    found["released DeepEP, TP 2"] = predicted(deepep, released=True)
    found["DeepEP beside nothing"] = predicted(deepep, overlapped=False)
    found["short documents"] = predicted(on_gpus(4), documents=Documents(64.5, 64, ""))
    return found


def predictions_text() -> str:
    """One line a cell."""
    lines = [f"{json.dumps(name)}: {json.dumps(one)}" for name, one in predictions().items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"
