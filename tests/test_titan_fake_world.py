"""The dry run finds the kernels that a job's first step would find, without a table of names."""

import json
import os
import signal
import sys
import time
from typing import Any

import pytest

from cookbook.titan.tt_0_2_2 import dry_build
from tests.self_check_fault import FLOAT8
from tests.started import python
from tests.titan_run import EP2, FLASH, FLEX, FULL, JOB, PP2, TP2

pytestmark = pytest.mark.titan

MX_GROUPED = ("--model.converters=quantize.grouped_mm.mx", "--quantize.grouped_mm.mx.fqns=experts")
LINEAR = ("--quantize.linear.mx.filter_fqns=output,moe,attention",)
HP = ("--quantize.grouped_mm.mx.recipe_name=mxfp8_wgrad_with_hp",)

# The GPU's generation, the options, and what the first rank of each stage finds.
CASES: dict[str, tuple[float | None, tuple[str, ...], list[tuple[str | None, str]]]] = {
    "bf16": (10.0, (), [("bf16", "bf16")]),
    "mxfp8, weight gradient in BF16": (10.0, (*MX_GROUPED, *HP), [("mxfp8_wgrad_with_hp", "bf16")]),
    "float8": (9.0, FLOAT8, [("fp8", "fp8")]),
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

COMPILED = ("--compile.enable", "--compile.components=model", *FULL)
# By what computes attention, its options.
ATTENTION: dict[str, tuple[str, ...]] = {
    "flex": FLEX,
    "flash_attention_4": (*FLEX, *FLASH, *COMPILED, *TP2),
}


def request(capability: float | None, options: tuple[str, ...]) -> dict[str, Any]:
    argv = [*(*JOB, *EP2, "--training.seq_len=64", "--metrics.enable_tensorboard", *options)]
    pp = 2 if PP2[0] in options else 1
    gpu = {"compute_capability": capability}
    return {
        "argv": argv,
        "world": 4,
        "pp": pp,
        "ranks_per_node": 4,
        "stand_ins": {},
        "reads_texts": False,
    } | gpu


@pytest.fixture(scope="module")
def answers() -> dict[str, Any]:
    """All cases and a few more, built by one process."""
    requests = {name: request(gpu, options) for name, (gpu, options, _) in CASES.items()}
    requests |= {name: request(9.0, options) for name, options in ATTENTION.items()}
    requests["failed"] = request(10.0, ("--optimizer.name=Adagrad",))
    unknown = "--parallelism.pipeline_parallel_schedule=Nope"
    requests["failed in torch"] = request(10.0, (*PP2, unknown))
    requests["refused"] = request(9.0, MX_GROUPED)
    done = python(
        *("-m", "cookbook.titan.tt_0_2_2.dry_build"),
        variables={"CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "disabled"},
        input="".join(f"{json.dumps(one)}\n" for one in requests.values()),
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
    assert [view["active"]["attention"] for view in views] == [case] * len(views)
    notes = [note for view in views for note in view["not_exercised"] if "FlashAttention" in note]
    assert len(notes) == (len(views) if "flash" in case else 0)


def test_a_failure_is_put_where_torchtitan_raised_it(answers: dict[str, Any]) -> None:
    (view,) = answers["failed"]["ranks"]
    assert "Adagrad" in view["error"] and view["kind"] == "NotImplementedError"
    assert view["place"].startswith("torchtitan/components/optimizer.py:")
    # Where TorchTitan called what raised it: torch's own place says little.
    for view in answers["failed in torch"]["ranks"]:
        assert "Nope" in view["error"]
        assert view["place"].startswith("torchtitan/")


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda request, rank, *_: {"rank": rank}, None),
        (lambda *_: os.kill(os.getpid(), signal.SIGKILL), "the process ended with signal 9"),
        (lambda *_: sys.exit(1), "the process ended with status 1"),
        (lambda *_: time.sleep(10), "not built within 1 s"),
    ],
)
def test_the_first_rank_of_every_stage_is_built_or_its_end_is_said(
    build: Any, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dry_build, "_build_rank", build)
    monkeypatch.setattr(dry_build, "_LIMIT_S", 1.0)
    found = dry_build.build_cell({"world": 12, "pp": 3})["ranks"]
    assert (found[0]["rank"], found[0].get("error")) == (0, said)
    assert said or [view["rank"] for view in found] == [0, 4, 8]


def test_torchtitans_warnings_and_the_jobs_refusals_are_quoted(answers: dict[str, Any]) -> None:
    (view,) = answers["bf16"]["ranks"]
    assert any(text.startswith("HF assets path ") for text in view["warnings"])
    assert len(set(view["warnings"])) == len(view["warnings"])
    # But for those of the fake world.
    assert not [text for text in view["warnings"] if "fake" in text or "peak flops" in text]
    (view,) = answers["refused"]["ranks"]
    assert view["kind"] == "SystemExit"
    assert view["error"].startswith("MXFP8 needs a GPU of SM100 (B200) or later")
