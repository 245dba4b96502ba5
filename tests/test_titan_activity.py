"""The report of the first step, what it holds a job to, the metrics, and the names of patches."""

import json
import math
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

from cookbook.observe.metrics import read_steps
from cookbook.run.folder import Attempt
from tests.titan_run import BF16, DEEPEP, EP2, SEQ_LEN, STANDARD, active, job, refusal, refused, run

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
    # Attention, experts, linear layers, dispatch and combine.
    assert found.pop("self_check")["kernels"] == 4
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
    deepep = run(assets, tmp_path / "b", 2, *EP2, *DEEPEP, *BF16, *MINE)
    found = active(deepep)
    # An overlay's name is a label.
    assert (found["precision"], found["ep_backend"]) == ("mine", "ours")
    assert (found["dispatch"], found["patches_applied"]) == ("deepep", ["deepep-padded-groups"])
    assert 0 < apart(deepep, bf16) < ROUNDING
    assert apart(deepep, bf16, "grad_norms") < 10 * ROUNDING


def test_an_undeclared_option_ends_the_run(assets: Path, tmp_path: Path) -> None:
    attempt = tmp_path / "attempt-1"
    half = "--parallelism.expert_parallel_a2a_combine_bwd_precision=mxfp8"
    declared = ("--cookbook.dispatch=mxfp8", "--cookbook.emulated")
    argv = job(assets, tmp_path / "out", *EP2, *MINE, *declared, half, steps=1)
    reason = "EP backend ours declares dispatch mxfp8, but mxfp8 in the combine only is active"
    assert refused(2, argv, attempt) == reason + REMEDY
    # The self-check comes first; environment.json is not written.
    left = {path.name for path in attempt.iterdir()}
    assert "self_check.json" in left and "environment.json" not in left


def view(
    grouped: str | None,
    linear: str,
    dispatch: str | None = None,
    stage: int = 0,
    length: float | None = None,
) -> Any:
    from cookbook.titan.tt_0_2_2.activity import RankActivity

    found = {"grouped_gemms": grouped, "linear_layers": linear, "dispatch": dispatch}
    sets = {name: frozenset([word] if word else []) for name, word in found.items()}
    return RankActivity(stage, sets, length is not None, length, frozenset(), "worker-0")


@pytest.mark.parametrize(
    ("views", "merged"),
    [
        ([view("mxfp8", "mx", "deepep")] * 2, ("mxfp8", "mx", "deepep", False, None)),
        # A stage without experts, and one without a linear layer that the filter leaves.
        (
            [view(None, "mx"), view("mxfp8", "bf16", "standard", 1)],
            ("mxfp8", "mx", "standard", False, None),
        ),
        ([view(None, "bf16"), view(None, "bf16", stage=1)], (None, "bf16", None, False, None)),
        # Ranks that disagree, of which some saw a mask.
        (
            [
                view("mxfp8", "mx", "deepep"),
                *(view("bf16", "float8", "standard", 1, length) for length in (100.0, 201.0)),
            ],
            ("bf16 and mxfp8", "float8 and mx", "deepep and standard", True, 150.5),
        ),
        ([view("bf16", "mx"), view("bf16", "bf16")], ("bf16", "bf16 and mx", None, False, None)),
    ],
)
def test_ranks_are_merged(views: Any, merged: tuple[Any, ...]) -> None:
    from cookbook.titan.tt_0_2_2.activity import merge

    assert tuple(merge(views).values()) == merged


BF16_GEMMS = {"grouped_gemms": "bf16"}
FLOAT8 = {**BF16_GEMMS, "linear_layers": "float8", "precision": "mine"}


@pytest.mark.parametrize(
    ("ep", "declared", "changed", "said"),
    [
        (2, BF16_GEMMS, {"emulated": True}, "declares emulated false, but true is active"),
        (2, BF16_GEMMS | {"emulated": True}, {}, "declares emulated true, but false is active"),
        (2, {"dispatch": "deepep"}, {}, "declares dispatch deepep, but standard is active"),
        (2, FLOAT8, {"linear_layers": None}, "declares linear_layers float8, but none is active"),
        # With one EP rank nothing is sent; an empty declaration declares nothing.
        (1, {"dispatch": "deepep"}, {"dispatch": None}, ""),
        (2, {}, {"emulated": True, "grouped_gemms": "mxfp8"}, ""),
    ],
)
def test_a_job_is_held_to_its_declaration(
    ep: int,
    declared: dict[str, Any],
    changed: dict[str, Any],
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from cookbook.titan.tt_0_2_2.activity import hold_to_declared

    names = ("precision", "ep_backend", "grouped_gemms", "linear_layers", "dispatch")
    labels = {**dict.fromkeys(names, ""), "emulated": False, **declared}
    parallelism = SimpleNamespace(expert_parallel_degree=ep)
    config = SimpleNamespace(cookbook=SimpleNamespace(**labels), parallelism=parallelism)
    plain = {"grouped_gemms": "bf16", "linear_layers": "bf16", "dispatch": "standard"}
    found: dict[str, Any] = {**plain, "emulated": False, **changed}
    if said:
        kind = "EP backend" if "dispatch" in declared else "precision"
        overlay = f"{kind} {labels['precision']}".rstrip()
        assert (
            refusal(lambda: hold_to_declared(config, found), caplog) == f"{overlay} {said}{REMEDY}"
        )
    else:
        hold_to_declared(config, found)


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
        quantization, is_emulated = observe_model([experts])
        assert (*quantization["grouped_gemms"], is_emulated) == wanted


def test_each_logged_step_is_a_line_at_once(tmp_path: Path) -> None:
    from cookbook.titan.tt_0_2_2.metrics import JsonLines

    none: Any = SimpleNamespace(log=lambda *_: None)
    logger = JsonLines(none, tmp_path / "metrics.jsonl", 3)
    metrics = {"loss_metrics/global_avg_loss": 2.5, "grad_norm": float("nan"), "lr": 1e-4}
    names = {"throughput(tps)": 100.0, "tflops": 9.0, "mfu(%)": 1.5, "n_tokens_seen": 4096}
    memory = {"memory/max_reserved(GiB)": 70.0, "memory/max_reserved(%)": 50.0}
    logger.log(metrics | names | memory | {"router_load/busiest_over_mean": 1.25}, 10)
    logger.log({"validation_metrics/loss": 2.75}, 10)
    logger.log({"loss_metrics/global_avg_loss": float("inf")}, 20)
    first, validation, last = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (first["step"], first["rank"], first["grad_norm"]) == (10, 3, "nan")
    assert (first["lr"], first["memory_percent"]) == (1e-4, 50.0)
    assert first["router_busiest_over_mean"] == 1.25 and first["tokens_seen"] == 4096
    assert validation["validation_loss"] == 2.75 and last["loss"] == "inf"
    table = import_module("pandas").read_json(tmp_path / "metrics.jsonl", lines=True)
    assert table.loss.tolist() == pytest.approx([2.5, math.nan, math.inf], nan_ok=True)
    ten, twenty = read_steps(Attempt(tmp_path, 0))
    assert (ten.loss, ten.tokens_per_second, ten.tflops) == (2.5, 100.0, 9.0)
    assert (ten.mfu, ten.memory_gib) == (1.5, 70.0)
    assert (ten.validation_loss, twenty.loss) == (2.75, float("inf"))


def test_last_steps_and_steps_with_a_validation_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    from cookbook.titan.tt_0_2_2 import metrics

    now, said = [0.0], dict[int, float]()
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0])
    monkeypatch.setattr(metrics, "time", clock)

    def log(report: Any, step: int, extra_metrics: dict[str, float]) -> None:
        said[step], report.time_last_log = extra_metrics["time_metrics/end_to_end(s)"], now[0]

    monkeypatch.setattr("torchtitan.components.metrics.MetricsProcessor.log", log)
    for enable, logged in ((False, [1, 20, 33]), (True, [1, 15, 20, 30, 33])):
        report: Any = metrics.CookbookMetrics.__new__(metrics.CookbookMetrics)
        report.job_config = SimpleNamespace(
            metrics=SimpleNamespace(log_freq=20),
            training=SimpleNamespace(steps=33, max_skipped_steps=0),
            validation=SimpleNamespace(enable=enable, freq=15),
        )
        report._load, report._logged_at = SimpleNamespace(log=lambda step: {}), math.inf
        report.time_last_log = now[0]
        said.clear()
        for step in range(1, 34):
            now[0] += 2.5
            if report.should_log(step):
                report.log(step)
        # Each step took 2.5 seconds, however many were made since the last log.
        assert said == dict.fromkeys(logged, 2.5)


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
        options["validation"] = SimpleNamespace(enable=False)
        report.job_config = SimpleNamespace(metrics=SimpleNamespace(log_freq=10), **options)
        report.parallel_dims, report._load = None, object()
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

    from cookbook.titan.tt_0_2_2.routing import count_tokens

    args = MoEArgs(num_experts=4, num_shared_experts=0, top_k=2, use_grouped_mm=False)
    moe: Any = build_moe(args, 8, 8, "standard")
    with torch.no_grad():
        moe.init_weights(0.02, torch.device("cpu"))
    model, dense, block = (nn.Module() for _ in range(3))
    dense.moe_enabled, block.moe_enabled, block.moe = False, True, moe
    model.layers = nn.ModuleDict({"0": dense, "1": block})
    count_tokens(model)
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
