"""A job is held to what its overlays declare, under whatever names they have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.titan_refusal import refusal
from tests.titan_run import (
    A2A,
    BF16,
    EP2,
    MXFP8,
    MXFP8_OPTIONS,
    PP2,
    STANDARD,
    TP2,
    active,
    job,
    refused,
    run,
    write_assets,
)

pytestmark = pytest.mark.titan

REMEDY = "; correct the overlay's active block or its options"
# Names that no overlay of the cookbook has.
MINE = ("--cookbook.precision=mine", "--cookbook.ep_backend=ours")


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    yield folder


# The number of ranks, the options, and the reason; each job trains but for its declaration.
REFUSALS: dict[str, tuple[int, tuple[str, ...], str]] = {
    "grouped GEMMs": (
        1,
        (*MINE, "--cookbook.grouped_gemms=mxfp8"),
        "precision mine declares grouped_gemms mxfp8, but bf16 is active",
    ),
    "another recipe": (
        1,
        (*MXFP8, *MINE, "--quantize.grouped_mm.mx.recipe_name=mxfp8_wgrad_with_hp"),
        "precision mine declares grouped_gemms mxfp8, but mxfp8_wgrad_with_hp is active",
    ),
    "one layer of five": (
        1,
        (*MXFP8, *MINE, "--quantize.grouped_mm.mx.fqns=layers.3.moe.experts"),
        "precision mine declares grouped_gemms mxfp8, but bf16 and mxfp8 is active",
    ),
    "linear layers": (
        1,
        (*MINE, "--cookbook.linear_layers=mx"),
        "precision mine declares linear_layers mx, but bf16 is active",
    ),
    "emulation": (
        1,
        (*MXFP8_OPTIONS, *MINE, "--cookbook.grouped_gemms=mxfp8"),
        "precision mine declares emulated false, but true is active",
    ),
    "one exchange of two": (
        2,
        (
            *(*EP2, *MINE, "--cookbook.dispatch=mxfp8", "--cookbook.emulated"),
            "--parallelism.expert_parallel_a2a_dispatch_fwd_precision=mxfp8",
        ),
        "EP backend ours declares dispatch mxfp8, but mxfp8 in the dispatch only is active",
    ),
    "the other exchange": (
        2,
        (
            *(*EP2, *MINE, "--cookbook.dispatch=mxfp8", "--cookbook.emulated"),
            "--parallelism.expert_parallel_a2a_combine_bwd_precision=mxfp8",
        ),
        "EP backend ours declares dispatch mxfp8, but mxfp8 in the combine only is active",
    ),
    "two at once, without names": (
        2,
        (*EP2, "--cookbook.grouped_gemms=mxfp8", "--cookbook.dispatch=deepep"),
        "precision declares grouped_gemms mxfp8, but bf16 is active; "
        "EP backend declares dispatch deepep, but standard is active",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_declared_ends_the_run(case: str, assets: Path, tmp_path: Path) -> None:
    ranks, options, reason = REFUSALS[case]
    attempt = tmp_path / "attempt-1"
    argv = job(assets, tmp_path / "out", *options, steps=1)
    assert refused(ranks, argv, attempt) == reason + REMEDY
    # Its kernels were proved before; what is active was not written down.
    assert [path.name for path in attempt.iterdir()] == ["self_check.json"]


def test_names_are_labels(assets: Path, tmp_path: Path) -> None:
    found = active(run(assets, tmp_path, 2, *EP2, *A2A, *MXFP8, *MINE, steps=1))
    assert (found["precision"], found["ep_backend"]) == ("mine", "ours")
    assert (found["grouped_gemms"], found["linear_layers"]) == ("mxfp8", "bf16")
    assert (found["dispatch"], found["emulated"]) == ("mxfp8", True)


def test_a_job_that_declares_nothing_is_held_to_nothing(assets: Path, tmp_path: Path) -> None:
    found = active(run(assets, tmp_path, 1, *MXFP8_OPTIONS, steps=1))
    assert (found["precision"], found["ep_backend"]) == (None, None)
    assert (found["grouped_gemms"], found["emulated"]) == ("mxfp8", True)
    assert found["dispatch"] is None


def test_with_one_ep_rank_no_dispatch_is_expected(assets: Path, tmp_path: Path) -> None:
    assert active(run(assets, tmp_path, 1, *STANDARD, *BF16, steps=1))["dispatch"] is None


def test_the_dispatch_under_expert_tensor_parallelism_is_seen(assets: Path, tmp_path: Path) -> None:
    etp = "--parallelism.expert_tensor_parallel_degree=2"
    found = active(run(assets, tmp_path, 4, *EP2, *TP2, etp, *STANDARD, *BF16, steps=1))
    assert found["dispatch"] == "standard"


def test_stages_of_a_pipeline_are_merged(assets: Path, tmp_path: Path) -> None:
    """Only one stage has a linear layer that the filter leaves; the other one has no say."""
    options = (
        *(*PP2, "--model.converters=quantize.linear.mx", "--quantize.linear.mx.emulate"),
        "--quantize.linear.mx.recipe_name=mxfp8_cublas_rceil",
        # Layer 0, on the first stage, is the only dense one.
        "--quantize.linear.mx.filter_fqns=output,moe,attention",
        *("--cookbook.grouped_gemms=bf16", "--cookbook.linear_layers=mx", "--cookbook.emulated"),
    )
    found = active(run(assets, tmp_path, 2, *options, steps=1))
    assert (found["grouped_gemms"], found["linear_layers"]) == ("bf16", "mx")


def view(grouped: str | None, linear: str, dispatch: str | None = None, stage: int = 0) -> Any:
    from cookbook.titan.tt_0_2_2.activity import ModelActivity
    from cookbook.titan.tt_0_2_2.attention import AttentionActivity
    from cookbook.titan.tt_0_2_2.metrics import RankActivity

    sets = [frozenset({word} if word else ()) for word in (grouped, linear, dispatch)]
    model = ModelActivity(sets[0], sets[1], emulated=False)
    nothing: Any = frozenset()
    return RankActivity(
        stage,
        model,
        AttentionActivity(frozenset({"flex"}), None),
        sets[2],
        rows=nothing,
        loss=nothing,
        recomputation=nothing,
        saved=nothing,
        emulated=False,
        patches_applied=nothing,
        node="node",
    )


@pytest.mark.parametrize(
    ("views", "merged"),
    [
        ([view("mxfp8", "mx", "deepep")] * 2, ("mxfp8", "mx", "deepep")),
        # A stage without experts, and one without a linear layer that the filter leaves.
        ([view(None, "mx"), view("mxfp8", "bf16", "standard", 1)], ("mxfp8", "mx", "standard")),
        ([view(None, "bf16"), view(None, "bf16", stage=1)], (None, "bf16", None)),
        # Ranks that disagree.
        (
            [view("mxfp8", "mx", "standard"), view("bf16", "float8", "deepep", 1)],
            ("bf16 and mxfp8", "float8 and mx", "deepep and standard"),
        ),
        ([view("bf16", "mx"), view("bf16", "bf16")], ("bf16", "bf16 and mx", None)),
    ],
)
def test_ranks_are_merged(views: Any, merged: tuple[str | None, ...]) -> None:
    from cookbook.titan.tt_0_2_2.metrics import merge

    found = merge(views)
    assert (found["grouped_gemms"], found["linear_layers"], found["dispatch"]) == merged


def test_deepep_and_half_a_quantized_exchange_have_names_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cookbook.titan.tt_0_2_2 import activity

    both = {activity.MXFP8_DISPATCH, activity.MXFP8_COMBINE}
    for sent, words in (
        (both, {"mxfp8"}),
        ({activity.MXFP8_COMBINE, "standard"}, {activity.MXFP8_COMBINE, "standard"}),
        ({"deepep"}, {"deepep"}),
        (set(), set()),
    ):
        monkeypatch.setattr(activity, "dispatches", sent)
        assert activity.observe_dispatch() == words


def test_a_declaration_is_compared_aspect_by_aspect(caplog: Any) -> None:
    from cookbook.titan.tt_0_2_2.metrics import check

    declared = {"precision": "mine", "ep_backend": "", "dispatch": "", "emulated": False}
    config = SimpleNamespace(
        cookbook=SimpleNamespace(**declared, grouped_gemms="bf16", linear_layers="float8"),
        parallelism=SimpleNamespace(expert_parallel_degree=2),
    )
    found = {"grouped_gemms": "bf16", "linear_layers": "float8", "dispatch": "deepep"}
    check(config, found | {"emulated": False})
    reason = refusal(
        lambda: check(config, found | {"linear_layers": None, "emulated": False}), caplog
    )
    assert reason == (f"precision mine declares linear_layers float8, but none is active{REMEDY}")
