"""Exported weights are those of the checkpoint, and transformers computes the same with them."""

import copy
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cookbook.base.errors import InputError, JobError
from tests.titan_run import BF16, EP2, MXFP8, NUM_HEADS, NUM_LAYERS, PP2, STANDARD, TP2, run

pytestmark = pytest.mark.titan


def use_flavor(patch: pytest.MonkeyPatch, name: str, args: Any) -> None:
    """Let the family have this one flavor."""
    from cookbook.titan.tt_0_2_2.families import FAMILIES

    parts = dataclasses.replace(FAMILIES["deepseek_v3"], flavors={name: args})
    patch.setitem(FAMILIES, "deepseek_v3", parts)


def small_model(**changes: Any) -> Any:
    """Arguments of a small model of the 671B's kind: sigmoid scores, groups of experts, q LoRA."""
    from cookbook.titan.tt_0_2_2.families.deepseek_v3 import PROXY

    small = {"vocab_size": 97, "dim": 64, "inter_dim": 96, "moe_inter_dim": 48, "n_layers": 3}
    small |= {"n_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "max_seq_len": 64}
    heads = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"num_experts": 8, "top_k": 3, "num_expert_groups": 4, "num_limited_groups": 2}
    moe = dataclasses.replace(PROXY.moe_args, **experts, use_grouped_mm=False)
    more: dict[str, Any] = {"norm_eps": 1e-6, "mscale": 1.0, "moe_args": moe}
    args: Any = dataclasses.replace(PROXY, **{**small, **heads, **more, **changes})
    args.moe_impl = "standard"
    return args


def save_model(args: Any, folder: Path) -> Any:
    """Write a native checkpoint of a model; return the model."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model

    torch.manual_seed(1)
    model = DeepSeekV3Model(args)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer.copy_(torch.randn_like(buffer))
        for parameter in model.parameters():
            parameter.mul_(3)
    dcp.save(model.state_dict(), checkpoint_id=str(folder), no_dist=True)
    return model


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Any]:
    """A native checkpoint of the small model, and the model."""
    args = small_model()
    use_flavor(monkeypatch, "small", args)
    return tmp_path / "step-3", save_model(args, tmp_path / "step-3")


def request(checkpoint: Path, to: Path, **changes: Any) -> Any:
    from cookbook.titan.tt_0_2_2.export import Request

    default = Request(
        str(checkpoint), str(to), "deepseek_v3", "small", 64, "float32", file_bytes=40_000
    )
    return dataclasses.replace(default, **changes)


def tensors_of(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        for name, tensor in load_file(folder / file).items():
            assert index["weight_map"][name] == file
            found[name] = tensor
    assert set(found) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    return found


def test_files_hold_the_checkpoint_and_the_bias_stays_float32(
    checkpoint: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from torchtitan.models.deepseek_v3.model.state_dict_adapter import DeepSeekV3StateDictAdapter

    from cookbook.titan.tt_0_2_2.export import export

    folder, model = checkpoint
    export(request(folder, tmp_path / "hf", dtype="bfloat16"))
    assert "routing biases" not in capsys.readouterr().out
    expected = DeepSeekV3StateDictAdapter(model.model_args, None).to_hf(model.state_dict())
    found = tensors_of(tmp_path / "hf")
    assert set(found) == set(expected)
    for name, tensor in found.items():
        kept = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if kept else torch.bfloat16)
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 5 and max(file.stat().st_size for file in files) < 60_000
    # Colleagues can read every file.
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "hf").iterdir()} == {0o644}


def test_a_softmax_router_s_bias_is_written_but_transformers_routes_without_it(
    assets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch
    import transformers

    from cookbook.titan.tt_0_2_2.export import export

    args = small_model()
    moe = {"score_func": "softmax", "route_norm": False, "num_expert_groups": None}
    args.moe_args = dataclasses.replace(args.moe_args, **moe)
    use_flavor(monkeypatch, "small", args)
    model = save_model(args, tmp_path / "step-3")
    export(request(tmp_path / "step-3", tmp_path / "hf", tokenizer=str(assets / "tokenizer")))
    assert "wrote, for use here only, 2 routing biases of at most 2.9" in capsys.readouterr().out
    assert sum("e_score_correction_bias" in name for name in tensors_of(tmp_path / "hf")) == 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="float32")
    # Generation stops at the tokenizer's end of text, which is not the default of its class.
    special = theirs.generation_config
    assert (special.bos_token_id, special.eos_token_id) == (0, 1)
    tokens = torch.randint(0, 97, (2, 48), generator=torch.Generator().manual_seed(2))
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.zero_()
    with torch.no_grad():
        expected, found = model(tokens), theirs(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("seq_len", "flavor", "overrides"),
    [
        (64, {}, {}),
        # Another flavor, from which the model's sizes differ.
        (8192, {"n_layers": 5, "vocab_size": 98}, {"n_layers": 3, "vocab_size": 97}),
        (64, {"q_lora_rank": 0}, {"q_lora_rank": 32, "moe_args.num_limited_groups": 2}),
    ],
)
def test_transformers_computes_the_same_logits(
    seq_len: int,
    flavor: dict[str, Any],
    overrides: dict[str, int],
    checkpoint: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch
    import transformers
    from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model

    from cookbook.titan.tt_0_2_2.export import export

    folder, model = checkpoint
    use_flavor(monkeypatch, "small", small_model(**flavor))
    export(request(folder, tmp_path / "hf", seq_len=seq_len, overrides=overrides))
    # Positions are scaled where training is longer than the original 4,096.
    ours = DeepSeekV3Model(small_model(max_seq_len=seq_len))
    with torch.no_grad():
        ours.init_weights(buffer_device=torch.device("cpu"))
    ours.load_state_dict(model.state_dict())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="float32")
    tokens = torch.randint(0, 97, (2, 48), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, found = ours(tokens), theirs(tokens).logits
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_an_interrupted_export_continues(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    from cookbook.titan.tt_0_2_2.export import export

    folder, _ = checkpoint
    to = tmp_path / "hf"
    export(request(folder, to))
    files = sorted(to.glob("*.safetensors"))
    whole = {file.name: file.read_bytes() for file in files}
    before = {file: file.stat().st_mtime_ns for file in files}
    (to / "model.safetensors.index.json").unlink()
    for file in files[3:]:
        file.unlink()
    export(request(folder, to))
    assert {file.name: file.read_bytes() for file in sorted(to.glob("*.safetensors"))} == whole
    assert [file.stat().st_mtime_ns for file in files[:3]] == [before[f] for f in files[:3]]
    assert (to / "model.safetensors.index.json").exists()


def test_wrong_requests_are_refused(
    checkpoint: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cookbook.titan.tt_0_2_2 import export

    folder, _ = checkpoint
    to = tmp_path / "hf"
    with pytest.raises(InputError, match="is not a whole checkpoint"):
        export.export(request(tmp_path / "step-9", tmp_path / "a"))
    other = small_model()
    other.vocab_size = 98
    with monkeypatch.context() as patch, pytest.raises(InputError, match="tok_embeddings"):
        use_flavor(patch, "small", other)
        export.export(request(folder, tmp_path / "b"))
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
    export.export(request(folder, to))
    with pytest.raises(InputError, match="another checkpoint or dtype"):
        export.export(request(folder, to, dtype="bfloat16"))
    # The step was trained again after a roll-back.
    save_model(small_model(), folder)
    with pytest.raises(InputError, match="another checkpoint or dtype"):
        export.export(request(folder, to))
    (tmp_path / "c").mkdir()
    (tmp_path / "c/mine.txt").write_text("x")
    with pytest.raises(InputError, match="is not empty"):
        export.export(request(folder, tmp_path / "c"))
    with monkeypatch.context() as patch, pytest.raises(JobError, match="GB are free"):
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10))
        export.export(request(folder, tmp_path / "d"))
    data = next(folder.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:5000])
    with pytest.raises(JobError, match=data.name):
        export.export(request(folder, tmp_path / "e"))
    data.unlink()
    with pytest.raises(JobError, match=r"raise checkpoint\.keep_latest_k"):
        export.export(request(folder, tmp_path / "e"))
    assert not list((tmp_path / "e").glob("*.safetensors"))


def test_a_file_that_reads_back_otherwise_is_no_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from safetensors.torch import save_file

    from cookbook.titan.tt_0_2_2 import export

    def write_wrong(tensors: dict[str, Any], *rest: Any) -> None:
        save_file({name: tensor + 1 for name, tensor in tensors.items()}, *rest)

    monkeypatch.setattr(export, "save_file", write_wrong)
    with pytest.raises(JobError, match="reads back different"):
        export.write_file(tmp_path / "a.safetensors", {"x": torch.zeros(3)})
    assert not (tmp_path / "a.safetensors").exists()


ASKED = {"flavor": "debugmodel", "file_bytes": 3_000_000}


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The debug model's weights as safetensors."""
    from cookbook.titan.tt_0_2_2 import export
    from cookbook.titan.tt_0_2_2.families.deepseek_v3 import DEEPSEEK_V3

    args = copy.deepcopy(DEEPSEEK_V3.flavors["debugmodel"])
    args.n_layers, args.n_heads, args.moe_impl = NUM_LAYERS, NUM_HEADS, "standard"
    use_flavor(monkeypatch, "debugmodel", args)
    save_model(args, tmp_path / "step-0")
    export.export(request(tmp_path / "step-0", tmp_path / "in", **ASKED))
    return tmp_path / "in"


def assert_kept(
    weights: Path, assets: Path, expected: dict[str, Any], ranks: int, *options: str
) -> None:
    """A step that learns nothing exports the weights that it loads."""
    import torch

    from cookbook.titan.tt_0_2_2 import export

    out, to = weights.with_name("out"), weights.with_name("hf")
    load = "--checkpoint.initial_load_"
    loading = ("--checkpoint.enable", f"{load}in_hf", f"{load}path={weights}", "--optimizer.lr=0.0")
    run(assets, out, ranks, *options, *loading, steps=1)
    export.export(request(out / "checkpoint/step-1", to, **ASKED))
    found = tensors_of(to)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        if name.endswith("e_score_correction_bias"):
            # The optimizer's hook moves it by at most twice 1e-3, whatever the learning rate.
            assert (found[name] - tensor).abs().max() <= 2.1e-3
        else:
            assert torch.equal(found[name], tensor), name


def test_weights_in_blocks_of_fp8_are_read_as_they_were_meant(weights: Path, assets: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    index_file = weights / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    expected = {}
    for file in sorted(weights.glob("*.safetensors")):
        tensors = load_file(file)
        for name, weight in list(tensors.items()):
            expected[name] = weight
            if "experts." not in name and "o_proj" not in name:
                continue
            # As DeepSeek-V3 is published: a scale for each block of 128 by 128.
            rows, columns = (-(-size // 128) for size in weight.shape)
            scale = torch.rand(rows, columns) * 1e-3 + 1e-4
            spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            spread = spread[: weight.shape[0], : weight.shape[1]]
            tensors[name] = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
            index["weight_map"][f"{name}_scale_inv"] = file.name
            expected[name] = tensors[name].float() * spread
        save_file(tensors, file)
    index_file.write_text(json.dumps(index))
    quantized = "--checkpoint.initial_load_in_hf_quantized"
    assert_kept(weights, assets, expected, 2, *EP2, *STANDARD, *BF16, quantized)


@pytest.mark.parametrize(
    ("score_func", "saved", "asked"),
    [
        ("softmax", set(), {"weight"}),
        ("softmax", {"1.e_score_correction_bias"}, None),
        ("sigmoid", set(), None),
    ],
    ids=["no bias", "a layer's bias lost", "DeepSeek-V3's biases lost"],
)
def test_a_damaged_checkpoint_is_asked_for_every_routing_bias(
    score_func: str, saved: set[str], asked: set[str] | None
) -> None:
    from cookbook.titan.tt_0_2_2.checkpoint import without_missing_bias

    metadata = SimpleNamespace(state_dict_metadata=saved | {"weight"})

    class Released:
        model_args = SimpleNamespace(moe_args=SimpleNamespace(score_func=score_func))

        def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
            return dict(state_dict)

        def get_hf_storage_reader(self, path: str, from_quantized: bool) -> Any:
            return SimpleNamespace(read_metadata=lambda: metadata)

    adapter = without_missing_bias(Released)()
    names = {"weight", "1.e_score_correction_bias", "2.e_score_correction_bias"}
    found = adapter.to_hf(dict.fromkeys(names))
    adapter.get_hf_storage_reader("in")
    assert set(found) == (asked or names)


@pytest.mark.parametrize(
    ("ranks", "options", "without_bias"),
    [
        (4, (*TP2, *EP2, *STANDARD, *BF16), False),
        (2, (*PP2, *BF16, "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"), False),
        (2, (*EP2, *STANDARD, *MXFP8), False),
        # DeepSeek-V2-Lite's published weights have no routing bias: it was balanced by its loss.
        (2, (*EP2, *STANDARD, *BF16), True),
    ],
    ids=["tp2-ep2", "interleaved", "mxfp8", "without routing bias"],
)
def test_weights_go_in_and_out_unchanged(
    ranks: int, options: tuple[str, ...], without_bias: bool, weights: Path, assets: Path
) -> None:
    from safetensors.torch import load_file, save_file

    expected = tensors_of(weights)
    for file in weights.glob("*.safetensors") if without_bias else ():
        tensors = load_file(file).items()
        save_file({name: one for name, one in tensors if not name.endswith("bias")}, file)
    if without_bias:
        expected |= {name: one * 0 for name, one in expected.items() if name.endswith("bias")}
    assert_kept(weights, assets, expected, ranks, *options)
