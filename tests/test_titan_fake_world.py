"""The dry run finds the kernels that a job's first step would find, without a table of names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from cookbook.titan import dry_build
from cookbook.titan.common.schedules import in_flight, rank_actions

pytestmark = pytest.mark.titan

MX_GROUPED = ("--model.converters=quantize.grouped_mm.mx", "--quantize.grouped_mm.mx.fqns=experts")
LINEAR = ("--quantize.linear.mx.filter_fqns=output,moe,attention",)
FLOAT8 = (
    "--model.converters=quantize.linear.float8,quantize.grouped_mm.float8",
    "--quantize.linear.float8.recipe_name=rowwise",
    "--quantize.linear.float8.filter_fqns=output,router.gate",
    "--quantize.grouped_mm.float8.fqns=experts",
)
PP2 = ("--parallelism.pipeline_parallel_degree=2",)
HP = ("--quantize.grouped_mm.mx.recipe_name=mxfp8_wgrad_with_hp",)

# The GPU's generation, the options, and what the first rank of each stage finds.
CASES: dict[str, tuple[float | None, tuple[str, ...], list[tuple[str | None, str]]]] = {
    "bf16": (10.0, (), [("bf16", "bf16")]),
    "mxfp8, weight gradient in BF16": (10.0, (*MX_GROUPED, *HP), [("mxfp8_wgrad_with_hp", "bf16")]),
    "float8": (9.0, FLOAT8, [("fp8_rowwise", "float8")]),
    "emulated": (None, (*MX_GROUPED, "--quantize.grouped_mm.mx.emulate"), [("mxfp8", "bf16")]),
    # The only dense layer, of which the filter leaves something, is on the first stage.
    "linear layers of one stage": (
        10.0,
        ("--model.converters=quantize.linear.mx", *LINEAR, *PP2),
        [("bf16", "mx"), ("bf16", "bf16")],
    ),
    # Below SM90 TorchTitan loops over the experts, and nothing quantizes.
    "a loop over experts": (8.0, (), [("bf16", "bf16")]),
}

FLEX = ("--model.flavor=debugmodel_flex_attn",)
FLASH = ("--model.attention=flash_attention_4",)
COMPILED = ("--compile.enable", "--compile.components=model", "--activation_checkpoint.mode=full")
TP2 = ("--parallelism.tensor_parallel_degree=2",)
# The options, and what computes attention.
ATTENTION: dict[str, tuple[tuple[str, ...], str]] = {
    "FlexAttention": (FLEX, "flex"),
    "FlashAttention-4": ((*FLEX, *FLASH, *COMPILED, *TP2), "flash_attention_4"),
}


def request(capability: float | None, options: tuple[str, ...]) -> dict[str, Any]:
    argv = [
        "--job.custom_config_module=cookbook.titan.tt_0_2_2.job_config",
        "--experimental.custom_import=cookbook.titan.tt_0_2_2",
        *("--model.name=deepseek_v3", "--model.flavor=debugmodel", "--training.seq_len=64"),
        *("--parallelism.expert_parallel_degree=2", "--metrics.enable_tensorboard", *options),
    ]
    pp = 2 if PP2[0] in options else 1
    gpu = {"compute_capability": capability}
    return {"argv": argv, "world": 4, "pp": pp, "ranks_per_node": 4} | gpu


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """All cases and a few more, built by one process."""
    requests = {name: request(gpu, options) for name, (gpu, options, _) in CASES.items()}
    for name, (options, _) in ATTENTION.items():
        requests[name] = request(9.0, options)
    requests["failed"] = request(10.0, ("--optimizer.name=Adagrad",))
    unknown = "--parallelism.pipeline_parallel_schedule=Nope"
    requests["failed in torch"] = request(10.0, (*PP2, unknown))
    requests["refused"] = request(9.0, MX_GROUPED)
    done = subprocess.run(
        [sys.executable, "-m", "cookbook.titan.dry_build", "cookbook.titan.tt_0_2_2"],
        input="".join(f"{json.dumps(one)}\n" for one in requests.values()),
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    _, *lines = done.stdout.splitlines()
    assert len(lines) == len(requests), done.stderr[-3000:]
    return dict(zip(requests, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_what_quantizes_is_seen(answers: dict[str, Any], case: str) -> None:
    found = [view.get("active", view) for view in answers[case]["ranks"]]
    names = ("grouped_gemms", "linear_layers")
    assert found == [
        dict(zip(names, wanted, strict=True)) | {"attention": "sdpa"} for wanted in CASES[case][2]
    ]


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_is_seen_on_every_stage(answers: dict[str, Any], case: str) -> None:
    views = answers[case]["ranks"]
    assert [view["active"]["attention"] for view in views] == [ATTENTION[case][1]] * len(views)
    notes = [note for view in views for note in view["not_exercised"] if "FlashAttention" in note]
    assert len(notes) == (len(views) if "flash" in ATTENTION[case][1] else 0)


def test_a_failure_is_put_where_torchtitan_raised_it(answers: dict[str, Any]) -> None:
    (view,) = answers["failed"]["ranks"]
    assert "Adagrad" in view["error"] and view["kind"] == "NotImplementedError"
    assert view["place"].startswith("torchtitan/components/optimizer.py:")
    # Where TorchTitan called what raised it: torch's own place says little.
    for view in answers["failed in torch"]["ranks"]:
        assert "Nope" in view["error"]
        assert view["place"].startswith("torchtitan/")


def killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def build_cell(world: int, pp: int) -> list[dict[str, Any]]:
    """The answers of a cell whose ranks a test builds itself."""
    ranks: list[dict[str, Any]] = dry_build.build_cell({"world": world, "pp": pp}, dict)["ranks"]
    return ranks


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (killed, "the process ended with signal 9"),
        (lambda *_: sys.exit(1), "the process ended with status 1"),
        (lambda *_: time.sleep(10), "not built within 1 s"),
    ],
)
def test_a_rank_without_an_answer_is_told(
    build: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_build, "_build_rank", build)
    monkeypatch.setattr(dry_build, "_LIMIT_S", 1.0)
    (first, *_) = build_cell(8, 1)
    assert (first["rank"], first["error"]) == (0, said)


def test_the_first_rank_of_every_stage_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_build, "_build_rank", lambda request, rank, *_: {"rank": rank})
    assert [view["rank"] for view in build_cell(12, 3)] == [0, 4, 8]


def test_torchtitans_warnings_are_kept_and_not_those_of_the_fake_world(
    answers: dict[str, Any],
) -> None:
    (view,) = answers["bf16"]["ranks"]
    assert any(text.startswith("HF assets path ") for text in view["warnings"])
    assert len(set(view["warnings"])) == len(view["warnings"])
    assert not [text for text in view["warnings"] if "fake" in text or "peak flops" in text]


def test_the_jobs_refusals_are_quoted(answers: dict[str, Any]) -> None:
    (view,) = answers["refused"]["ranks"]
    assert view["kind"] == "SystemExit"
    assert view["error"].startswith("MXFP8 needs a GPU of SM100 (B200) or later")


def actions(*words: str) -> list[Any]:
    """`F0` is a forward of stage 0; B a whole backward, I and W its halves."""
    kinds = {"F": "FORWARD", "B": "FULL_BACKWARD", "I": "BACKWARD_INPUT", "W": "BACKWARD_WEIGHT"}
    return [
        SimpleNamespace(
            sub_actions=None,
            stage_index=int(word[1]),
            computation_type=SimpleNamespace(name=kinds[word[0]]),
            microbatch_index=place,
        )
        for place, word in enumerate(words)
    ]


def test_microbatches_in_flight_end_with_the_gradients_of_the_weights() -> None:
    def counts(stages: list[int], *words: str) -> list[list[int]]:
        return in_flight(rank_actions(actions(*words), is_single=True), stages)

    assert counts([0], "F0", "B0", "F0", "B0") == [[1]]
    assert counts([0], "F0", "F0", "B0", "F0", "B0", "B0") == [[2]]
    # What the weights need is kept until then.
    assert counts([0], "F0", "I0", "F0", "W0", "I0", "W0") == [[2]]
    # Two of one stage at a time, and two of the other at another.
    order = ("F0", "F0", "B0", "F1", "B0", "F1", "B1", "B1")
    assert counts([0, 1], *order) == [[0, 2], [1, 1], [2, 0]]


def test_a_ranks_actions_are_in_its_own_order() -> None:
    order = actions("F0", "F0", "B0", "I0", "W0")
    kinds = [kind for _, kind, _ in rank_actions(order, is_single=False)]
    assert kinds == ["F", "F", "B", "I", "W"]
    assert [number for *_, number in rank_actions(order, is_single=False)] == [0, 1, 2, 3, 4]
    # Of a rank with one stage each kind is counted by itself.
    assert [number for *_, number in rank_actions(order, is_single=True)] == [0, 1, 0, 0, 0]
