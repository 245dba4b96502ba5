"""Weights, texts and validation that would fail in a job are refused before it is queued."""

import gzip
import json
import pickle
import shlex
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cookbook.base.text_files import find_sources
from cookbook.check.check import check_cells
from cookbook.cli.main import main
from cookbook.config.dialect.names import OVERRIDES
from cookbook.config.validate import validation_errors
from cookbook.run.folder import CellFolder
from cookbook.run.status import AttemptEnd, Cause, write_attempt_end
from tests.check_cells import STACK, cell_of
from tests.made_up_run import Run, metrics_line
from tests.saved import FILES, Metadata, cut
from tests.saved import save as save_checkpoint

C, V, D = "checkpoint", "validation", "data"
DRY_RUN, QWEN3 = (f"run {name} --dry-run --cluster local" for name in ("debug", "qwen3_debug"))
WORKERS = "dataloader.num_workers"
HELD_OUT = {f"{V}.dataset": "text", f"{D}.validation_files": "{}/good.jsonl"}
VALIDATE = {f"{V}.enable": True, f"{V}.steps": 1}
LOAD = {f"{C}.enable": True, f"{C}.initial_load_in_hf": True, f"{C}.initial_load_path": "{}/hf"}
SHARED, GROUPS = (f"{OVERRIDES}moe_args.num_{one}" for one in ("shared_experts", "expert_groups"))
MODEL = {"model.name": "deepseek_v3", "model.flavor": "debugmodel"}
FP8 = {f"{C}.initial_load_in_hf_quantized": True}
NATIVE = {f"{C}.initial_load_in_hf": False}


def text(files: str, **more: Any) -> dict[str, Any]:
    return {"training.dataset": "text", f"{D}.files": f"{{}}/{files}", **more}


def weights(folder: str, **more: Any) -> dict[str, Any]:
    return LOAD | {f"{C}.initial_load_path": f"{{}}/{folder}"} | more


# A command, its options, and the words of the refusal; {} is the folder of `inputs`.
WRONG: list[tuple[str, dict[str, Any], str]] = [
    # Published weights in.
    (DRY_RUN, weights("nothing"), "nothing is not there"),
    (DRY_RUN, weights("other-layers"), "has 27 layers, DeepSeek-V3 debugmodel has 6"),
    (DRY_RUN, weights("other-vocabulary"), "is [99, 256], DeepSeek-V3 debugmodel has"),
    (
        DRY_RUN,
        LOAD | {f"{OVERRIDES}moe_args.num_experts": 4},
        "is [8, 256], DeepSeek-V3 debugmodel with overrides has [4",
    ),
    (DRY_RUN, weights("other-family"), "has no model.layers.0.self_attn.kv_b_proj.weight"),
    (DRY_RUN, weights("quantized"), "FP8, whose raw values would be trained on; set it to true"),
    (QWEN3, weights("quantized") | FP8, "FP8, and TorchTitan dequantizes no weights of Qwen3-MoE"),
    (DRY_RUN, LOAD | FP8, "hf is not quantized"),
    (DRY_RUN, weights("lacks-a-file"), "lacks 1 of its files, b.safetensors first"),
    (DRY_RUN, weights("not-weights"), "cannot be read"),
    (DRY_RUN, weights("short"), "short cannot be read (ValueError: a.safetensors has "),
    (DRY_RUN, weights("gap"), "has no model.layers.3.self_attn.kv_b_proj.weight, which other lay"),
    (DRY_RUN, weights("renamed"), "a.safetensors has no lm_head.weight, which its index names"),
    (DRY_RUN, weights("folder", **NATIVE), "folder: has no .metadata"),
    (
        DRY_RUN,
        weights("hf", **NATIVE),
        "safetensors files; set checkpoint.initial_load_in_hf: true",
    ),
    (DRY_RUN, weights("native", **NATIVE), "; set it to {}/native/step-27"),
    (DRY_RUN, weights("native/step-27", **NATIVE), "has 27 layers and an embedding of [2048, 256]"),
    (
        DRY_RUN,
        weights("native/step-6", **NATIVE, **{f"{C}.initial_load_model_only": False}),
        "is false, and {}/native/step-6 lacks dataloader, lr_scheduler, optimizer",
    ),
    (
        DRY_RUN,
        {f"{C}.enable": True, f"{C}.last_save_in_hf": True},
        "needs the model alone: the run would end with an error in its last save",
    ),
    # What TorchTitan would ignore, or die of after its first steps.
    *[
        (DRY_RUN, dict(pair.split("=") for pair in options.split()), says)
        for options, says in {
            "comm.mode=local_tensor": "and the ranks would exchange nothing",
            "optimizer.name=SGD": "found 'SGD', allowed: Adam, AdamW",
            "optimizer.beta2=1": "found 1.0, allowed: 0 to below 1",
            "optimizer.eps=0": "found 0.0, allowed: above 0 in FP32",
            "optimizer.eps=1e-300": "found 1e-300, allowed: above 0 in FP32",
            "comm.trace_buf_size=2147483648": "allowed: up to 2,147,483,647",
            "metrics.log_freq=99999999999": "allowed: up to 2,147,483,647",
            "training.enable_cpu_offload=true": "needs GPUs, cluster local runs on the CPU",
            "checkpoint.enable=true checkpoint.folder=~/x": "found ~/x, and nothing is expanded",
            "checkpoint.enable=true checkpoint.folder=.": "the name of another file of the cell",
            "checkpoint.enable=true checkpoint.folder=cell.yaml": "of another file of the cell",
            "checkpoint.enable=true checkpoint.folder=attempt-0": "of another file of the cell",
            "checkpoint.enable=true checkpoint.folder=/dev/null": "/dev/null is no folder",
            "training.dataset_path={}/links": "b.jsonl is no file, or a link to none",
            "activation_checkpoint.determinism_check=x": "found 'x', allowed: default, none",
            "lr_scheduler.total_steps=0": "found 0, allowed: 1 and up",
            "profiling.profiler_active=0": "found 0, allowed: 1 and up",
            "profiling.enable_profiling=true profiling.profile_freq=9": "up to the 8 steps, or no",
            "training.dataloader.persistent_workers=true": "no effect with training.dataloader.num",
            "checkpoint.enable=true checkpoint.load_step=5": "a new run has no steps",
            "model.hf_assets_path=": "names no folder",
            "quantize.linear.mx.filter_fqns=null": "found nothing, allowed: a list of texts",
            "data.text_key=null": "found nothing, allowed: a text",
            "profiling.enable_memory_snapshot=true": "memory_snapshot: needs GPUs",
            "parallelism.context_parallel_degree=2": "context parallelism is unproved",
            "validation.enable=true validation.steps=1 validation.dataset_path=null": "of the hub",
            "training.dataset_path={}/other": "a.jsonl:1: has no key 'text', found: content",
        }.items()
    ],
    (DRY_RUN, {f"{C}.initial_load_in_hf": True}, "has no effect without checkpoints"),
    (DRY_RUN, {f"{C}.enable": True} | FP8, "is for published"),
    (DRY_RUN, LOAD | {f"{C}.initial_load_model_only": False}, "hold the model alone"),
    # Weights out.
    (
        "run deepseek_v3_671b --dry-run --cluster soperator-b200",
        {f"{C}.enable": True, f"{C}.last_save_in_hf": True},
        "rank 0 would write 2,616 GB",
    ),
    (
        DRY_RUN,
        {f"{C}.enable": True, f"{C}.last_save_in_hf": True, SHARED: 0},
        "last_save_in_hf: no published format: checkpoints of DeepSeek-V3 have shared experts",
    ),
    ("export RUN/no-format --to {}/out", {}, "has no published format: DeepSeek-V2's router"),
    ("export RUN/nothing --to {}/out", {}, "unknown cell 'nothing'"),
    ("export RUN/never-saved --to {}/out", {}, "has no whole checkpoint"),
    ("export RUN/cell --to {}/out --step 4", {}, "--step: found 4, allowed: 2"),
    ("export RUN/in-hf --to {}/out", {}, "last_save_in_hf); use them there; for another: --step 4"),
    ("export RUN/nan --to {}/out", {}, "step-4: already holds safetensors files"),
    ("export RUN/nan --to {}/out --step 8", {}, "step-8: was saved after step 6, the last one"),
    # Validation.
    (DRY_RUN, {f"{V}.enable": True}, "found -1, allowed: 1 and up batches"),
    (DRY_RUN, VALIDATE, "is c4_validation, of the hub, and the recipe trains on texts of its own"),
    (DRY_RUN, VALIDATE | {f"{V}.freq": 0}, "found 0, allowed: 1 and up"),
    (DRY_RUN, VALIDATE | {f"{V}.seq_len": 64}, "found 64, and validation runs with training's"),
    (DRY_RUN, VALIDATE | {f"{V}.dataset": "text"}, "is empty, and validation.dataset is text"),
    (DRY_RUN, VALIDATE | {f"{V}.dataset": "c4_tset"}, "did you mean 'c4_test'?"),
    (DRY_RUN, VALIDATE | {f"{V}.dataset_path": "{}/nothing"}, "nothing is not there"),
    (DRY_RUN, VALIDATE | {f"{V}.dataset_path": "{}/good.jsonl"}, "is a file, allowed: a folder"),
    # Own texts.
    (DRY_RUN, text("good.jsonl") | {"training.dataset": "c4"}, "training.dataset is c4"),
    (DRY_RUN, text("god*.jsonl"), "god*.jsonl' matches no file"),
    (DRY_RUN, text("broken.jsonl"), "broken.jsonl:2: is not a line of JSON"),
    (DRY_RUN, text("other-key.jsonl"), "other-key.jsonl:2: has no key 'text', found: content"),
    (DRY_RUN, text("deep.jsonl"), "deep.jsonl:1: is not a line of JSON (maximum recursion depth"),
    (DRY_RUN, text("empty.jsonl"), "empty.jsonl is empty"),
    (DRY_RUN, text("blank.jsonl"), "blank.jsonl: has no documents"),
    (DRY_RUN, text("cut.jsonl.gz"), "cut.jsonl.gz: cannot be read"),
    (DRY_RUN, text("no.parquet"), "no.parquet: cannot be read: "),
    (DRY_RUN, text("not.jsonl.gz"), "not.jsonl.gz: cannot be read: Error -3 while decompressing"),
    (DRY_RUN, text("cut.jsonl.zst"), "cut.jsonl.zst: cannot be read: Truncated"),
    (DRY_RUN, text("a.md"), "a.md, allowed: .jsonl"),
    (DRY_RUN, text("folder"), "matches no file; for its folders, write {}/folder/**/*.gz"),
    (DRY_RUN, text("latin.txt"), "latin.txt:1: byte 3 of the document is not UTF-8"),
    (DRY_RUN, text("half.jsonl"), "half.jsonl:1: character 1 of the text is half a surrogate pair"),
    (DRY_RUN, text("good.jsonl#body"), "good.jsonl:1: has no key 'body', found: text"),
    (DRY_RUN, text("latin.txt#body"), ".txt files have no keys; remove #body"),
    (DRY_RUN, text("good.jsonl#"), "'#' is followed by no key of a text"),
    (DRY_RUN, text("good.jsonl,{}/*.jsonl.gz,{}/goo*"), "good.jsonl twice; name it once, or"),
    (DRY_RUN, text("good.jsonl", **{f"{D}.text_key": ""}), "text_key: is empty; name the key"),
    (DRY_RUN, {"training.dataset": "text", f"{D}.files": "hub:imdb"}, "is no data set or folder"),
    (
        DRY_RUN,
        {"training.dataset": "text", f"{D}.files": "hub:a/b"},
        "hub:a/b: cannot be read (",
    ),
    (DRY_RUN, {"training.dataset": "text", f"{D}.files": "hub:{}/hub:en"}, "'en' not found"),
    (DRY_RUN, text("good.jsonl,hub:{}/hub"), "no weight and a data set of the hub is one of sev"),
    (DRY_RUN, {f"{D}.shuffle_seed": -2}, "found -2, allowed: -1 and up"),
    (DRY_RUN, {"training.dataloader.prefetch_factor": 0}, "found 0, allowed: 1 and up"),
    (DRY_RUN, {f"{D}.shuffle_seed": 1}, "has no effect with training.dataset c4_test"),
    (DRY_RUN, {"training.dataset_path": "None"}, "TorchTitan's package lacks the texts of c4_test"),
    (DRY_RUN, text("good.jsonl", **{f"training.{WORKERS}": 9}), "has 8 documents for"),
    (DRY_RUN, VALIDATE | HELD_OUT | {f"{V}.{WORKERS}": 9}, f"{D}.validation_files: "),
    (DRY_RUN, text("good.jsonl,0.5:{}/good.jsonl"), "has no weight and others have one"),
    (DRY_RUN, {"training.dataset": "text", f"{D}.files": "0:{}/good.jsonl"}, "has weight 0"),
    (DRY_RUN, {"training.dataset": "text", f"{D}.files": "70%:{}/good.jsonl"}, "such as 0.7, not"),
    (DRY_RUN, {"model.hf_assets_path": "{}/large"}, "has tokens up to 2048, DeepSeek-V3"),
    *[
        (DRY_RUN, {"model.hf_assets_path": f"{{}}/{folder}"}, says)
        for folder, says in {
            "appends": "has tokens up to 2048, DeepSeek-V3",
            "no-config": "has no tokenizer_config.json, so that nothing would mark the end",
            "malformed": "malformed cannot be read (AttributeError",
            "no-eos": "names no eos_token, so that nothing would mark the end",
            "one-token": "BOS and EOS are both '<eos>', and TorchTitan would put it before",
            "truncates": "stores truncation, which would change every document",
        }.items()
    ],
    ("data {}/good.jsonl --tokenizer {}", {}, "tokenizer.json is not there"),
    ("data {}/good.jsonl --tokenizer {}/no-tokenizer", {}, "is no tokenizer"),
    # What a long run needs.
    (DRY_RUN, {f"{C}.enable": True, f"{C}.folder": "s3://bucket/x"}, "found s3://bucket/x"),
    (DRY_RUN, {f"{C}.enable": True, f"{C}.folder": "../mine"}, "leaves the cell's folder"),
]


def save(folder: Path, shapes: dict[str, list[int]], index: bool = True) -> None:
    """Headers of safetensors files, as far as the rules read them."""
    folder.mkdir(parents=True)
    entry = {"dtype": "F32", "data_offsets": [0, 0]}
    header = json.dumps({name: entry | {"shape": shape} for name, shape in shapes.items()}).encode()
    (folder / "a.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    if index:
        listed = json.dumps({"weight_map": dict.fromkeys(shapes, "a.safetensors")})
        (folder / "model.safetensors.index.json").write_text(listed)


class Size(tuple[int, ...]):
    """As torch.Size, whose pickle calls the class."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Size, (tuple(self),)


def save_native(folder: Path, layers: int) -> None:
    sizes = {"tok_embeddings.weight": (2048, 256), **{f"layers.{n}.x": (1,) for n in range(layers)}}
    path = save_checkpoint(folder, layers, ())
    shapes = {name: SimpleNamespace(size=Size(size)) for name, size in sizes.items()}
    (path / ".metadata").write_bytes(pickle.dumps(Metadata(shapes, {})))


def shapes_of(**changes: Any) -> dict[str, list[int]]:
    model = replace(STACK.families["deepseek_v3"].flavors["debugmodel"], **changes)
    norms = {f"model.layers.{n}.input_layernorm.weight": [1] for n in range(model.n_layers)}
    return norms | {
        "model.embed_tokens.weight": [model.vocab, model.dim],
        "model.layers.0.mlp.gate_proj.weight": [model.dense_hidden, model.dim],
        **{
            f"model.layers.{n}.self_attn.kv_b_proj.weight": [256, model.kv_lora]
            for n in range(model.n_layers)
        },
        **{
            f"model.layers.{n}.mlp.gate.weight": [model.num_experts, model.dim]
            for n in range(1, model.n_layers)
        },
    }


def write_tokenizer(folder: Path, size: int, config: Any, **state: Any) -> None:
    folder.mkdir()
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    vocab = {f"t{number}": number for number in range(size - 1)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "t0"}
    special = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": size - 1, "content": "<eos>", "special": True, **special}]
    content = {"version": "1.0", "model": model, "added_tokens": added, **state}
    (folder / "tokenizer.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files with one fault each."""
    folder = tmp_path_factory.mktemp("inputs")
    good = '{"text": "x"}\n'
    for name, content in {
        "good.jsonl": good * 8,
        "broken.jsonl": good + '{"text": \n',
        "other-key.jsonl": good + '{"content": "x"}\n',
        "deep.jsonl": "[" * 100_000,
        "empty.jsonl": "",
        "blank.jsonl": "\n\n",
        "no.parquet": "no parquet",
        "a.md": "x",
        "folder/below/a.txt.gz": "x",
        "latin.txt": "caf\xe9",
        "half.jsonl": '{"text": "x\\ud83d"}\n' * 8,
        "hub/a.jsonl": good * 8,
        "links/a.jsonl": good * 8,
        "lines/a.txt": "a document a line\n" * 8,
        "other/a.jsonl": '{"content": "x"}\n' * 8,
        "no-tokenizer/tokenizer.json": "{}",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="latin1")
    (folder / "links/b.jsonl").symlink_to("nowhere")
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(good.encode() * 999, mtime=0)[:-9])
    (folder / "not.jsonl.gz").write_bytes(gzip.compress(b"x" * 99, mtime=0)[:10] + b"\xff" * 99)
    # Eight good lines, and of their last block one byte less.
    frame = "28b52ffd2070ad0000707b2274657874223a202278227d0a01001fd354"
    (folder / "cut.jsonl.zst").write_bytes(bytes.fromhex(frame))
    ends = {"eos_token": "<eos>"}
    write_tokenizer(folder / "large", 2049, ends)
    write_tokenizer(folder / "appends", 2048, ends | {"pad_token": {"content": "<pad>"}})
    write_tokenizer(folder / "no-config", 99, None)
    write_tokenizer(folder / "malformed", 99, [ends])
    write_tokenizer(folder / "no-eos", 99, {"bos_token": "<eos>"})
    write_tokenizer(folder / "one-token", 99, ends | {"bos_token": {"content": "<eos>"}})
    write_tokenizer(folder / "truncates", 99, ends, truncation={"max_length": 9})
    save(folder / "hf", shapes_of())
    save(folder / "other-layers", shapes_of(n_layers=27))
    save(folder / "other-vocabulary", shapes_of(vocab=99), index=False)
    family = {name: shape for name, shape in shapes_of().items() if "kv_b_proj" not in name}
    save(folder / "other-family", family)
    save(folder / "quantized", shapes_of() | {"model.layers.0.x.weight_scale_inv": [1]}, False)
    save(folder / "lacks-a-file", shapes_of())
    index = folder / "lacks-a-file/model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"] | {"lm_head.weight": "b.safetensors"}
    index.write_text(json.dumps({"weight_map": listed}))
    save(folder / "gap", {n: s for n, s in shapes_of().items() if "3.self_attn.kv_b" not in n})
    save(folder / "renamed", shapes_of())
    (folder / "renamed/model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys([*shapes_of(), "lm_head.weight"], "a.safetensors")})
    )
    save(folder / "short", shapes_of())
    with (folder / "short/a.safetensors").open("ab") as file:
        file.write(b"x")
    for layers in (6, 27):
        save_native(folder / "native", layers)
    (folder / "not-weights").mkdir()
    (folder / "not-weights/a.safetensors").write_bytes(b"<html>not found</html>")
    run = Run(folder / "runs")
    options = {"training.steps": 8, f"{C}.enable": True, f"{C}.folder": "checkpoint"}
    groups = {GROUPS: 4, GROUPS.replace("expert", "limited"): 3}
    cells = {"cell": (2, 4), "never-saved": (), "in-hf": (4,), "nan": (), "no-format": (4,)}
    for cell, steps in cells.items():
        asked = options | (MODEL | groups if cell == "no-format" else {})
        path = run.add(cell, metrics_line(1), options=asked, stack=STACK.name, cluster="local")
        for step in steps:
            save_checkpoint(path / "checkpoint", step)
    cut(run.folder / "cell/checkpoint/step-4" / FILES[1])
    for name in ("in-hf/checkpoint/step-8", "nan/checkpoint/step-4", "nan/checkpoint/step-8"):
        save(run.folder / name, {})
    end = AttemptEnd(1, Cause.NAN_LOSS, last_good_step=6)
    write_attempt_end(CellFolder(run.folder / "nan").attempt(1), end)
    run.write()
    return folder


# Packages say so that come with the training stack.
OF_THE_STACK = (
    *(
        "no.parquet: cannot be read: ",
        "tokenizer.json is not there",
        "is no tokenizer",
        "'en' not found",
    ),
    *("cut.jsonl.zst: cannot be read: Truncated", "hub:a/b: cannot be read ("),
)


@pytest.mark.parametrize(
    ("command", "options", "says"),
    [
        pytest.param(
            *one, id=f"{n}: {one[2][-30:]}", marks=[pytest.mark.titan] * (one[2] in OF_THE_STACK)
        )
        for n, one in enumerate(WRONG)
    ],
)
def test_a_wrong_input_is_refused_in_one_line(
    command: str, options: dict[str, Any], says: str, inputs: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("COOKBOOK_RUNS", str(inputs / "runs"))
    words = command.replace("RUN", Run(inputs).folder.name).split()
    for name, value in options.items():
        words += ["--set", f"{name}={value}"]
    before = sorted(inputs.rglob("*"))
    assert main([word.replace("{}", str(inputs)) for word in words]) in (1, 2)
    shown = capsys.readouterr()
    lines = [
        line
        for line in (shown.out + shown.err).splitlines()
        if says.replace("{}", str(inputs)) in line
    ]
    assert lines, shlex.join(words) + "\n" + shown.out + shown.err
    assert sorted(inputs.rglob("*")) == before


def test_right_inputs_are_not(inputs: Path, capsys: Any) -> None:
    unused = {f"{V}.dataset": "none", f"{V}.dataset_path": "{}/nothing"}
    saved = {f"{C}.enable": True, f"{C}.last_save_in_hf": True, f"{C}.last_save_model_only": True}
    lines = {"training.dataset_path": "{}/lines"}
    for options in (saved, text("good.jsonl"), VALIDATE | HELD_OUT, LOAD, unused, lines):
        given = [f"{name}={value}".replace("{}", str(inputs)) for name, value in options.items()]
        words = [word for one in given for word in ("--set", one)]
        assert main([*DRY_RUN.split(), *words]) == 0, capsys.readouterr().out


def advice(options: dict[str, Any]) -> dict[str, str]:
    (check,) = check_cells([cell_of("debug", options, cluster="local")], build=False)
    return {one.rule: one.reason for one in check.advice}


def test_a_warm_up_longer_than_the_run_is_warned_of() -> None:
    warm_up = {"lr_scheduler.warmup_steps": 9}
    assert "9 steps are longer than the run" in advice(warm_up)["warm_up_ends"]
    assert "warm_up_ends" not in advice({"lr_scheduler.warmup_steps": 8})
    assert "warm_up_ends" not in advice(warm_up | {"lr_scheduler.total_steps": 9})
    assert "warm_up_ends" not in advice(warm_up | {"debug.moe_force_load_balance": True})


def test_a_folder_names_its_text_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.json.gz", "README.md", ".c.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    (source,) = find_sources([str(tmp_path)], "text")
    assert [file.path.name for file in source.files] == ["a.json.gz", "b.jsonl"]


@pytest.mark.parametrize(("chunks", "errors"), [({}, 0), ({"loss.num_chunks": 4}, 1)])
def test_the_output_layer_may_be_quantized_where_no_chunked_loss_reads_it(
    chunks: dict[str, Any], errors: int
) -> None:
    options = {"quantize.linear.float8.filter_fqns": ["router.gate"], **chunks}
    cell = cell_of("debug", options, precision="float8", cluster="local")
    assert len(validation_errors(cell)) == errors
