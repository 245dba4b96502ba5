"""The report of the first step, what it holds a job to, the metrics, and the names of patches."""

from __future__ import annotations

import json
import math
import shutil
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from cookbook.observe.metrics import read_steps
from cookbook.run.folder import Attempt
from tests.titan_refusal import refusal
from tests.titan_run import (
    A2A,
    BF16,
    DEEPEP,
    EP2,
    MXFP8,
    SEQ_LEN,
    STANDARD,
    active,
    job,
    refused,
    run,
)

pytestmark = pytest.mark.titan

REMEDY = "; correct the overlay's `expect` or its options"
# Names that no overlay of the cookbook has.
MINE = ("--cookbook.precision=mine", "--cookbook.ep_backend=ours")
# Both backends round to BF16, at different places: a part of 2**-9 of a loss over few tokens.
ROUNDING = 3e-4


def apart(one: dict[str, Any], other: dict[str, Any], key: str = "losses") -> float:
    found: list[float] = [abs(a - b) / abs(b) for a, b in zip(one[key], other[key], strict=True)]
    return max(found)


def test_backends_agree_and_say_so(assets: Path, tmp_path: Path) -> None:
    attempt = tmp_path / "attempt-1"
    bf16 = run(assets, tmp_path / "a", 2, *EP2, *STANDARD, *BF16, attempt=attempt)
    found = json.loads((attempt / "environment.json").read_text())
    assert found.pop("nodes")
    assert found == active(bf16)
    assert found.pop("versions")["torchtitan"] == "0.2.2"
    proved = found.pop("self_check")
    assert 0 < proved["worst"] < 1 and proved["seconds"] > 0
    # Attention, experts, linear layers, dispatch and combine.
    assert proved["kernels"] == 4 and isinstance(proved["worst_kernel"], str)
    file = json.loads((attempt / "self_check.json").read_text())
    assert file["ok"] and len(file["proofs"]) == 4
    assert found == {
        "precision": "bf16",
        "ep_backend": "standard",
        "grouped_gemms": "bf16",
        "linear_layers": "bf16",
        "dispatch": "standard",
        "emulated": False,
        "attention": "sdpa",
        "mean_attended_length": (SEQ_LEN + 1) / 2,
        "loss": "cross_entropy",
        "recomputation": "none",
        "moe_routing": "trained",
        "rows": None,
        "saved": None,
        "device": "cpu",
        "gpu": None,
        "driver": None,
        "patches_applied": [],
    }
    deepep = run(assets, tmp_path / "b", 2, *EP2, *DEEPEP, *BF16)
    assert active(deepep)["dispatch"] == "deepep"
    assert active(deepep)["patches_applied"] == ["deepep-padded-groups"]
    assert 0 < apart(deepep, bf16) < ROUNDING
    assert apart(deepep, bf16, "grad_norms") < 10 * ROUNDING


def test_a_quantized_exchange_before_quantized_gemms_changes_no_bit(
    assets: Path, tmp_path: Path
) -> None:
    """Rounding once for the way and once for the GEMM is rounding once."""
    standard = run(assets, tmp_path / "a", 2, *EP2, *STANDARD, *MXFP8)
    quantized = run(assets, tmp_path / "b", 2, *EP2, *A2A, *MXFP8, *MINE)
    assert quantized["losses"] == standard["losses"]
    assert quantized["grad_norms"] == standard["grad_norms"]
    # An overlay's name is a label.
    found = active(quantized)
    assert (found["precision"], found["ep_backend"]) == ("mine", "ours")
    assert (found["grouped_gemms"], found["linear_layers"]) == ("mxfp8", "bf16")
    assert (found["dispatch"], found["emulated"]) == ("mxfp8", True)


def test_replicas_without_shards_have_averaged_gradients(assets: Path, tmp_path: Path) -> None:
    """Why `replicas_are_summed` warns; where this fails, TorchTitan has been fixed."""
    degree = "--parallelism.data_parallel_"
    replicas = (f"{degree}replicate_degree=2", f"{degree}shard_degree=1")
    one = run(assets, tmp_path / "one", 1, data="same", steps=1)
    two = run(assets, tmp_path / "two", 2, *replicas, data="same", steps=1)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    # All sequences are the same, so that the mean is half of the right gradient.
    assert one["grad_norms"][0] / two["grad_norms"][0] == pytest.approx(2, rel=1e-2)


@pytest.mark.nightly
def test_a_quantized_run_resumes_where_it_stopped_also_in_bf16(
    assets: Path, tmp_path: Path
) -> None:
    options = (
        *(*EP2, *STANDARD, "--lr_scheduler.decay_ratio=0.0", "--checkpoint.enable"),
        *("--checkpoint.interval=2", "--checkpoint.no-last-save-model-only"),
    )
    whole = run(assets, tmp_path / "a", 2, *options, *MXFP8, steps=3)
    shutil.rmtree(tmp_path / "a" / "checkpoint" / "step-3")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    resumed = run(assets, tmp_path / "a", 2, *options, *MXFP8, steps=3)
    assert resumed["losses"] == whole["losses"][2:]
    assert resumed["grad_norms"] == whole["grad_norms"][2:]
    # The checkpoint holds the weights themselves, so that BF16 reads them as well.
    in_bf16 = run(assets, tmp_path / "b", 2, *options, *BF16, steps=3)
    assert in_bf16["losses"][0] == pytest.approx(whole["losses"][2], rel=ROUNDING)


# The number of ranks, the options, and the reason; each job trains but for its declaration.
REFUSALS: dict[str, tuple[int, tuple[str, ...], str]] = {
    "one layer of five": (
        1,
        (*MXFP8, *MINE, "--quantize.grouped_mm.mx.fqns=layers.3.moe.experts"),
        "precision mine declares grouped_gemms mxfp8, but bf16 and mxfp8 is active",
    ),
    "one exchange of two": (
        2,
        (
            *(*EP2, *MINE, "--cookbook.dispatch=mxfp8", "--cookbook.emulated"),
            "--parallelism.expert_parallel_a2a_combine_bwd_precision=mxfp8",
        ),
        "EP backend ours declares dispatch mxfp8, but mxfp8 in the combine only is active",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_an_undeclared_option_ends_the_run(case: str, assets: Path, tmp_path: Path) -> None:
    ranks, options, reason = REFUSALS[case]
    attempt = tmp_path / "attempt-1"
    argv = job(assets, tmp_path / "out", *options, steps=1)
    assert refused(ranks, argv, attempt) == reason + REMEDY
    # The self-check comes first; environment.json is not written.
    left = {path.name for path in attempt.iterdir()}
    assert "self_check.json" in left and "environment.json" not in left


def view(
    grouped: str | None = "bf16",
    linear: str = "bf16",
    attention: str = "flex",
    length: float | None = None,
    patches: tuple[str, ...] = (),
    stage: int = 0,
    emulated: bool = False,
    node: str = "worker-0",
    **words: str,
) -> Any:
    from cookbook.titan.tt_0_2_2.activity import RankActivity

    aspects = ("dispatch", "rows", "loss", "recomputation", "saved", "moe_routing")
    found: dict[str, Any] = {**dict.fromkeys(aspects), "grouped_gemms": grouped}
    found |= {"linear_layers": linear, "attention": attention, **words}
    sets = {name: frozenset([word] if word else []) for name, word in found.items()}
    return RankActivity(stage, sets, emulated, length, frozenset(patches), node)


@pytest.mark.parametrize(
    ("views", "merged"),
    [
        ([view("mxfp8", "mx", dispatch="deepep")] * 2, ("mxfp8", "mx", "deepep")),
        # A stage without experts, and one without a linear layer that the filter leaves.
        (
            [view(None, "mx"), view("mxfp8", "bf16", dispatch="standard", stage=1)],
            ("mxfp8", "mx", "standard"),
        ),
        ([view(None, "bf16"), view(None, "bf16", stage=1)], (None, "bf16", None)),
        # Ranks that disagree.
        (
            [view("mxfp8", "mx", dispatch="standard"), view("bf16", "float8", stage=1)],
            ("bf16 and mxfp8", "float8 and mx", "standard"),
        ),
        ([view("bf16", "mx"), view("bf16", "bf16")], ("bf16", "bf16 and mx", None)),
    ],
)
def test_ranks_are_merged(views: Any, merged: tuple[str | None, ...]) -> None:
    from cookbook.titan.tt_0_2_2.activity import merge

    found = merge(views)
    assert (found["grouped_gemms"], found["linear_layers"], found["dispatch"]) == merged


def test_every_rank_counts_in_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from cookbook.titan.tt_0_2_2 import metrics

    views = [
        view(dispatch="standard", recomputation="full"),
        view(
            dispatch="deepep",
            recomputation="selective",
            saved="attention",
            patches=("one",),
            length=100.0,
        ),
        view(emulated=True, patches=("two",), node="worker-1", attention="sdpa", length=201.0),
    ]
    monkeypatch.setattr(dist, "get_world_size", lambda *_: len(views))
    monkeypatch.setattr(dist, "get_rank", lambda *_: 0)
    monkeypatch.setattr(
        dist, "all_gather_object", lambda found, own: found.__setitem__(slice(None), views)
    )
    monkeypatch.setattr(metrics, "metrics_rank", lambda *_: 0)
    monkeypatch.setenv("COOKBOOK_ATTEMPT_DIR", str(tmp_path))
    report: Any = metrics.CookbookMetrics.__new__(metrics.CookbookMetrics)
    report.job_config, report.parallel_dims = declared(precision="mine"), None
    report._observe = lambda: views[0]
    caplog.set_level("INFO")
    report._report()
    (line,) = [one.getMessage() for one in caplog.records if "cookbook active" in one.getMessage()]
    found = json.loads(line.partition(": ")[2])
    expected = {
        "precision": "mine",
        "ep_backend": None,
        "dispatch": "deepep and standard",
        "recomputation": "full and selective",
        "saved": "attention",
        "loss": None,
        "patches_applied": ["one", "two"],
        "emulated": True,
        "attention": "flex and sdpa",
        # Of the ranks that saw a mask.
        "mean_attended_length": 150.5,
    }
    assert {name: found[name] for name in expected} == expected
    kept = json.loads((tmp_path / "environment.json").read_text())
    assert kept == found | {"nodes": ["worker-0", "worker-1"]}


def declared(degree: int = 2, **options: Any) -> Any:
    names = ("precision", "ep_backend", "grouped_gemms", "linear_layers", "dispatch")
    labels = {**dict.fromkeys(names, ""), "emulated": False}
    return SimpleNamespace(
        cookbook=SimpleNamespace(**(labels | options)),
        parallelism=SimpleNamespace(expert_parallel_degree=degree),
    )


@pytest.mark.parametrize(
    ("config", "changed", "said"),
    [
        (
            declared(grouped_gemms="bf16"),
            {"emulated": True},
            "precision declares emulated false, but true is active",
        ),
        (
            declared(grouped_gemms="bf16", emulated=True),
            {},
            "precision declares emulated true, but false is active",
        ),
        (
            declared(dispatch="deepep"),
            {},
            "EP backend declares dispatch deepep, but standard is active",
        ),
        (
            declared(linear_layers="float8", grouped_gemms="bf16", precision="mine"),
            {"linear_layers": None},
            "precision mine declares linear_layers float8, but none is active",
        ),
        # With one EP rank nothing is sent; an empty declaration declares nothing.
        (declared(1, dispatch="deepep"), {"dispatch": None}, ""),
        (declared(), {"emulated": True, "grouped_gemms": "mxfp8"}, ""),
    ],
)
def test_a_job_is_held_to_its_declaration(
    config: Any, changed: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    from cookbook.titan.tt_0_2_2.activity import check

    plain = {"grouped_gemms": "bf16", "linear_layers": "bf16", "dispatch": "standard"}
    found: dict[str, Any] = {**plain, "emulated": False, **changed}
    if said:
        assert refusal(lambda: check(config, found), caplog) == said + REMEDY
    else:
        check(config, found)


def test_a_loop_over_experts_quantizes_nothing() -> None:
    """TorchAO replaces the grouped GEMM alone, which a loop does not call."""
    from torchtitan.models.moe.moe import GroupedExperts

    from cookbook.titan.tt_0_2_2.activity import observe_model
    from cookbook.titan.tt_0_2_2.mxfp8 import MXGroupedMMConverter

    mx = SimpleNamespace(fqns=["experts"], recipe_name="mxfp8", emulate=True)
    config: Any = SimpleNamespace(
        model=SimpleNamespace(converters=["quantize.grouped_mm.mx"]),
        quantize=SimpleNamespace(grouped_mm=SimpleNamespace(mx=mx)),
    )
    dims: Any = SimpleNamespace()
    experts = GroupedExperts(32, 32, 2, use_grouped_mm=True)
    MXGroupedMMConverter(config, dims).convert(nn.ModuleDict({"experts": experts}))
    for is_grouped, wanted in ((True, ("mxfp8", True)), (False, ("bf16", False))):
        experts.use_grouped_mm = is_grouped
        found = observe_model([experts])
        assert (*found.grouped_gemms, found.emulated) == wanted


def test_each_logged_step_is_a_line_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cookbook.titan.tt_0_2_2.metrics import JsonLines

    logger = JsonLines(tmp_path / "metrics.jsonl", 3)
    metrics = {"loss_metrics/global_avg_loss": 2.5, "grad_norm": float("nan"), "lr": 1e-4}
    names = {"throughput(tps)": 100.0, "tflops": 9.0, "mfu(%)": 1.5, "n_tokens_seen": 4096}
    memory = {"memory/max_reserved(GiB)": 70.0, "memory/max_reserved(%)": 50.0}
    logger.log(metrics | names | memory | {"router_load/busiest_over_mean": 1.25}, 10)
    logger.log({"validation_metrics/loss": 2.75}, 10)
    logger.log({"loss_metrics/global_avg_loss": float("inf")}, 20)
    first, validation, last = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["step"], first["rank"], first["grad_norm"]) == (10, 3, "nan")
    assert first["router_busiest_over_mean"] == 1.25 and first["tokens_seen"] == 4096
    assert validation["validation_loss"] == 2.75 and last["loss"] == "inf"
    table = import_module("pandas").read_json(tmp_path / "metrics.jsonl", lines=True)
    assert table.loss.tolist() == pytest.approx([2.5, math.nan, math.inf], nan_ok=True)
    ten, twenty = read_steps(Attempt(tmp_path, 0))
    assert (ten.loss, ten.lr, ten.tokens_per_second, ten.tflops) == (2.5, 1e-4, 100.0, 9.0)
    assert (ten.mfu, ten.memory_gib, ten.memory_percent) == (1.5, 70.0, 50.0)
    assert (ten.validation_loss, twenty.loss) == (2.75, float("inf"))


def test_unlogged_steps_are_logged_once_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The supervisor takes a silent log for a hang, until it knows how long a step takes."""
    from cookbook.titan.tt_0_2_2 import metrics

    now = [5000.0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(metrics, "metrics_rank", lambda *_: 0)
    ranks = iter([0] * 6 + [1] * 6)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: next(ranks))
    monkeypatch.delenv("COOKBOOK_ATTEMPT_DIR", raising=False)
    caplog.set_level("INFO")
    for _ in range(2):
        report: Any = metrics.CookbookMetrics.__new__(metrics.CookbookMetrics)
        options = {"training": SimpleNamespace(steps=900), "comm": None}
        report.job_config = SimpleNamespace(metrics=SimpleNamespace(log_freq=10), **options)
        report.parallel_dims, report.reported = None, True
        for step in range(13, 32):
            now[0] += 25
            assert report.should_log(step) is (step in (20, 30))
    said = [f"cookbook: made step {n}, which is not logged" for n in (13, 16, 19, 23, 26, 29)]
    assert [record.getMessage() for record in caplog.records] == said


def loss_with(pp: bool, global_batch: int) -> tuple[float, torch.Tensor]:
    """The loss of 6 tokens and its gradient, at 2 x 3 data-parallel ranks and a batch of 4 x 5."""
    from cookbook.titan.tt_0_2_2.loss_and_optimizer import build_loss

    training = SimpleNamespace(global_batch_size=global_batch, local_batch_size=4, seq_len=5)
    config: Any = SimpleNamespace(
        loss=SimpleNamespace(num_chunks=0),
        compile=SimpleNamespace(enable=False, components=[]),
        training=training,
    )
    dims = SimpleNamespace(pp_enabled=pp, dp_replicate=2, dp_shard=3)
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 7, requires_grad=True)
    loss = build_loss(config, parallel_dims=dims)(logits, torch.arange(6).view(2, 3))
    (grad,) = torch.autograd.grad(loss, logits)
    return float(loss.detach()), grad


@pytest.mark.parametrize(("global_batch", "sequences"), [(-1, 4 * 2 * 3), (48, 48)])
def test_a_pipeline_reports_the_loss_and_gets_gradients_per_token(
    global_batch: int, sequences: int, patches_applied: set[str]
) -> None:
    plain, whole = loss_with(False, global_batch)
    assert not patches_applied
    value, grad = loss_with(True, global_batch)
    # The sum is reported, of which TorchTitan makes the mean afterwards.
    assert value == pytest.approx(plain, rel=1e-6)
    torch.testing.assert_close(grad, whole / (sequences * 5))
    assert patches_applied == {"pipeline-gradients-per-token"}


def test_only_training_counts_tokens(patches_applied: set[str]) -> None:
    from torchtitan.models.moe.moe import MoEArgs, build_moe

    from cookbook.titan.tt_0_2_2.routing import count_in_training_only

    args = MoEArgs(num_experts=4, num_shared_experts=0, top_k=2, use_grouped_mm=False)
    moe: Any = build_moe(args, 8, 8, "standard")
    with torch.no_grad():
        moe.init_weights(0.02, torch.device("cpu"))
    model, dense, block = (nn.Module() for _ in range(3))
    dense.moe_enabled, block.moe_enabled, block.moe = False, True, moe
    model.layers = nn.ModuleDict({"0": dense, "1": block})
    count_in_training_only(model)
    tokens = torch.randn(1, 6, 8)
    moe(tokens)
    counted = moe.tokens_per_expert.clone()
    assert counted.sum() == 6 * 2 and not patches_applied
    with torch.no_grad():
        moe(tokens)
    assert moe.tokens_per_expert.tolist() == counted.tolist()
    assert patches_applied == {"tokens-counted-in-training-only"}
    moe(tokens)
    assert moe.tokens_per_expert.tolist() == (2 * counted).tolist()
