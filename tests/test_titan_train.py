"""Real TorchTitan Trainers on CPU ranks: what agrees with what."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.titan_run import (
    A2A,
    BF16,
    DEEPEP,
    EP2,
    EP4,
    MXFP8,
    PP2,
    SEQ_LEN,
    STANDARD,
    TP2,
    active,
    run,
    write_assets,
)

pytestmark = pytest.mark.titan


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    yield folder


def apart(one: dict[str, Any], other: dict[str, Any], key: str = "losses") -> float:
    found: list[float] = [abs(a - b) / abs(b) for a, b in zip(one[key], other[key], strict=True)]
    return max(found)


# Both backends round to BF16, at different places: a part of 2**-9 of a loss over few tokens.
ROUNDING = 3e-4


def test_backends_agree_and_say_so(assets: Path, tmp_path: Path) -> None:
    attempt = tmp_path / "attempt-1"
    bf16 = run(assets, tmp_path / "a", 2, *EP2, *STANDARD, *BF16, attempt=attempt)
    found = json.loads((attempt / "environment.json").read_text())
    assert found.pop("nodes")
    assert found == active(bf16)
    assert found.pop("versions")["torchtitan"] == "0.2.2"
    proved = found.pop("self_check")
    assert 0 < proved.pop("worst") < 1 and proved.pop("seconds") > 0
    # Attention, experts, linear layers, dispatch and combine.
    assert proved.pop("kernels") == 4 and isinstance(proved.pop("worst_kernel"), str)
    assert not proved
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

    for option in ("--deepep.num_chunks=3", "--deepep.score_activations"):
        other = run(assets, tmp_path / option, 2, *EP2, *DEEPEP, *BF16, option)
        assert 0 < apart(other, deepep) < ROUNDING
        assert apart(other, deepep, "grad_norms") < 10 * ROUNDING


def test_mxfp8_backends_agree_with_real_routing(assets: Path, tmp_path: Path) -> None:
    standard = run(assets, tmp_path / "a", 2, *EP2, *STANDARD, *MXFP8)
    deepep = run(assets, tmp_path / "b", 2, *EP2, *DEEPEP, *MXFP8)
    assert active(deepep)["grouped_gemms"] == "mxfp8" and active(deepep)["emulated"] is True
    assert apart(deepep, standard) < ROUNDING
    # Rounding once for the way and once for the GEMM is rounding once.
    quantized = run(assets, tmp_path / "c", 2, *EP2, *A2A, *MXFP8)
    assert quantized["losses"] == standard["losses"]
    assert quantized["grad_norms"] == standard["grad_norms"]


def weights_of_one_rank(assets: Path, folder: Path) -> tuple[str, ...]:
    """The options by which runs on any ranks begin with the same weights."""
    seed = ("--checkpoint.enable", "--checkpoint.create_seed_checkpoint")
    run(assets, folder / "seed", 1, *seed)
    return (
        "--optimizer.lr=1e-4",
        "--checkpoint.enable",
        f"--checkpoint.initial_load_path={folder / 'seed' / 'checkpoint' / 'step-0'}",
    )


def test_tensor_parallel_ranks_compute_what_one_does(assets: Path, tmp_path: Path) -> None:
    """Every sequence is the same, so that 4 x 1 and 2 x 2 sequences are the same batch."""
    same_weights = weights_of_one_rank(assets, tmp_path)
    one = run(assets, tmp_path / "a", 4, *EP4, *same_weights, data="same", batch=1)
    for name, backend in (("b", STANDARD), ("c", DEEPEP)):
        options = (*EP4, *TP2, *backend, *BF16, *same_weights)
        two = run(assets, tmp_path / name, 4, *options, data="same", batch=2)
        assert apart(two, one) < ROUNDING, name
        # Released TorchTitan 0.2.2 is off by 3e-3 here: shared experts and routers.
        assert apart(two, one, "grad_norms") < 1e-3, name


def test_a_pipeline_has_the_gradients_of_a_run_without_one(assets: Path, tmp_path: Path) -> None:
    options = (*EP2, *DEEPEP, *BF16, *weights_of_one_rank(assets, tmp_path))
    piped = run(assets, tmp_path / "a", 4, *options, *PP2)
    flat = run(assets, tmp_path / "b", 2, *options)
    # In the released TorchTitan 0.2.2 they are 256 times as large. The second step's are those of
    # weights that the first has changed.
    assert apart(piped, flat, "grad_norms") < ROUNDING


def test_replicas_without_shards_have_averaged_gradients(assets: Path, tmp_path: Path) -> None:
    """Why `replicas_are_summed` warns; where this fails, TorchTitan has been fixed."""
    degree = "--parallelism.data_parallel_"
    replicas = (f"{degree}replicate_degree=2", f"{degree}shard_degree=1")
    one = run(assets, tmp_path / "one", 1, data="same", steps=1)
    two = run(assets, tmp_path / "two", 2, *replicas, data="same", steps=1)
    assert two["losses"] == pytest.approx(one["losses"], rel=1e-4)
    # All sequences are the same, so that the mean is half of the right gradient.
    assert one["grad_norms"][0] / two["grad_norms"][0] == pytest.approx(2, rel=1e-2)


def test_a_quantized_run_resumes_where_it_stopped_also_in_bf16(
    assets: Path, tmp_path: Path
) -> None:
    options = (
        *(*EP2, *STANDARD, "--lr_scheduler.decay_ratio=0.0", "--checkpoint.enable"),
        *("--checkpoint.interval=2", "--checkpoint.no-last-save-model-only"),
    )
    whole = run(assets, tmp_path / "a", 2, *options, *MXFP8, steps=3)
    run(assets, tmp_path / "b", 2, *options, *MXFP8, steps=2)
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    resumed = run(assets, tmp_path / "b", 2, *options, *MXFP8, steps=3)
    assert resumed["losses"] == whole["losses"][2:]
    assert resumed["grad_norms"] == whole["grad_norms"][2:]
    # The checkpoint holds the weights themselves, so that BF16 reads them as well.
    in_bf16 = run(assets, tmp_path / "c", 2, *options, *BF16, steps=3)
    assert in_bf16["losses"][0] == pytest.approx(whole["losses"][2], rel=ROUNDING)
