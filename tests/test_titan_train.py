"""Real TorchTitan Trainers on CPU ranks: what agrees with what, and what ends a run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.titan_ranks import run_ranks

pytestmark = pytest.mark.titan

SEQ_LEN = 64
CHARACTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]


def write_assets(folder: Path) -> None:
    """A tokenizer of letters, varied text, and text of which every sequence is the same."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    words = ["<bos>", "<eos>", "<unk>", *CHARACTERS]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(special))
    # TorchTitan cuts its stream every SEQ_LEN + 1 tokens, and adds two to each document.
    one = "".join(CHARACTERS[(7 * i * i + 3 * i) % 26] for i in range(SEQ_LEN - 1))
    varied = ["".join(CHARACTERS[(i * i * k + k) % 26] for i in range(200)) for k in range(1, 200)]
    for name, documents in (("same", [one] * 200), ("varied", varied)):
        (folder / name).mkdir()
        lines = [json.dumps({"text": text}) + "\n" for text in documents]
        (folder / name / "data.jsonl").write_text("".join(lines))


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("assets")
    write_assets(folder)
    yield folder


def train(arguments: list[str], attempt: str | None) -> dict[str, Any]:
    """Run TorchTitan's main in this rank; what it would have logged of each step."""
    import os

    from torchtitan import train as titan
    from torchtitan.components.metrics import MetricsProcessor

    if attempt:
        os.environ["COOKBOOK_ATTEMPT_DIR"] = attempt
    os.environ["HF_HUB_OFFLINE"] = "1"
    found: dict[str, Any] = {"losses": [], "grad_norms": []}
    log = MetricsProcessor.log

    def keep(self: Any, step: int, loss: float, most: float, norm: float, **extra: Any) -> None:
        found["losses"].append(loss)
        found["grad_norms"].append(norm)
        log(self, step, loss, most, norm, **extra)

    MetricsProcessor.log = keep
    # It took its default from the command line when it was imported.
    titan.ConfigManager.parse_args.__defaults__ = (arguments,)
    titan.main(titan.Trainer)
    return found


def run(
    assets: Path,
    out: Path,
    ranks: int,
    *options: str,
    data: str = "varied",
    steps: int = 2,
    batch: int = 2,
    attempt: Path | None = None,
) -> dict[str, Any]:
    arguments = [
        "--job.custom_config_module=cookbook.titan.stack_2026_02.job_config",
        "--experimental.custom_import=cookbook.titan.stack_2026_02",
        f"--job.dump_folder={out}",
        "--model.name=deepseek_v3",
        "--model.flavor=debugmodel",
        f"--model.hf_assets_path={assets / 'tokenizer'}",
        "--training.dataset=c4_test",
        f"--training.dataset_path={assets / data}",
        f"--training.seq_len={SEQ_LEN}",
        f"--training.local_batch_size={batch}",
        f"--training.steps={steps}",
        "--lr_scheduler.warmup_steps=1",
        "--activation_checkpoint.mode=none",
        "--metrics.log_freq=1",
        "--comm.trace_buf_size=0",
        "--debug.seed=42",
        *options,
    ]
    results = run_ranks(train, ranks, arguments, str(attempt) if attempt else None, seconds=200)
    found: dict[str, Any] = results[0]
    return found


def apart(one: dict[str, Any], other: dict[str, Any], key: str = "losses") -> float:
    found: list[float] = [abs(a - b) / abs(b) for a, b in zip(one[key], other[key], strict=True)]
    return max(found)


EP2 = ("--parallelism.expert_parallel_degree=2",)
EP4 = ("--parallelism.expert_parallel_degree=4",)
TP2 = ("--parallelism.tensor_parallel_degree=2",)
DEEPEP = ("--parallelism.expert_parallel_comm_backend=deepep", "--cookbook.ep_backend=deepep")
STANDARD = ("--cookbook.ep_backend=standard",)
BF16 = ("--cookbook.precision=bf16",)
MXFP8 = (
    "--model.converters=quantize.grouped_mm.mx",
    "--quantize.grouped_mm.mx.fqns=experts",
    "--quantize.grouped_mm.mx.emulate",
    "--cookbook.precision=mxfp8",
    "--cookbook.emulated",
)
A2A = (
    "--parallelism.expert_parallel_a2a_dispatch_fwd_precision=mxfp8",
    "--parallelism.expert_parallel_a2a_combine_bwd_precision=mxfp8",
    "--cookbook.ep_backend=mxfp8_a2a",
)

# Both backends round to BF16, at different places: a part of 2**-9 of a loss over few tokens.
ROUNDING = 3e-4


def test_backends_agree_and_say_so(assets: Path, tmp_path: Path) -> None:
    attempt = tmp_path / "attempt-1"
    bf16 = run(assets, tmp_path / "a", 2, *EP2, *STANDARD, *BF16, attempt=attempt)
    active = json.loads((attempt / "environment.json").read_text())
    assert active["precision"] == "bf16" and active["ep_backend"] == "standard"
    assert active["emulated"] is False and active["device"] == "cpu" and active["gpu"] is None
    assert active["corrections"] == [] and active["nodes"]
    assert active["versions"]["torchtitan"] == "0.2.2"

    deepep = run(assets, tmp_path / "b", 2, *EP2, *DEEPEP, *BF16, attempt=attempt)
    active = json.loads((attempt / "environment.json").read_text())
    assert active["ep_backend"] == "deepep"
    assert active["corrections"] == ["deepep-padded-groups"]
    assert 0 < apart(deepep, bf16) < ROUNDING
    assert apart(deepep, bf16, "grad_norms") < 10 * ROUNDING


def test_mxfp8_backends_agree_with_real_routing(assets: Path, tmp_path: Path) -> None:
    attempt = tmp_path / "attempt-1"
    standard = run(assets, tmp_path / "a", 2, *EP2, *STANDARD, *MXFP8)
    deepep = run(assets, tmp_path / "b", 2, *EP2, *DEEPEP, *MXFP8, attempt=attempt)
    active = json.loads((attempt / "environment.json").read_text())
    assert active["precision"] == "mxfp8" and active["emulated"] is True
    assert apart(deepep, standard) < ROUNDING
    # Rounding once for the way and once for the GEMM is rounding once.
    quantized = run(assets, tmp_path / "c", 2, *EP2, *A2A, *MXFP8)
    assert quantized["losses"] == standard["losses"]
    assert quantized["grad_norms"] == standard["grad_norms"]


def test_tensor_parallel_ranks_compute_what_one_does(assets: Path, tmp_path: Path) -> None:
    """Every sequence is the same, so that 4 x 1 and 2 x 2 sequences are the same batch."""
    seed = ("--checkpoint.enable", "--checkpoint.create_seed_checkpoint")
    run(assets, tmp_path / "seed", 1, *seed)
    same_weights = (
        "--optimizer.lr=1e-4",
        "--checkpoint.enable",
        f"--checkpoint.initial_load_path={tmp_path / 'seed' / 'checkpoint' / 'step-0'}",
    )
    one = run(assets, tmp_path / "a", 4, *EP4, *same_weights, data="same", batch=1)
    for name, backend in (("b", STANDARD), ("c", DEEPEP)):
        options = (*EP4, *TP2, *backend, *BF16, *same_weights)
        two = run(assets, tmp_path / name, 4, *options, data="same", batch=2)
        assert apart(two, one) < ROUNDING, name
        # Released TorchTitan 0.2.2 is off by 3e-3 here: shared experts and routers.
        assert apart(two, one, "grad_norms") < 1e-3, name


def test_a_pipeline_has_the_gradients_of_a_run_without_one(assets: Path, tmp_path: Path) -> None:
    options = (*EP2, "--parallelism.pipeline_parallel_degree=2", *DEEPEP, *BF16)
    piped = run(assets, tmp_path / "a", 4, *options, steps=1)
    flat = run(assets, tmp_path / "b", 2, *EP2, *DEEPEP, *BF16, steps=1)
    # Other initial weights on the second stage, yet of one size; released: 256 times as large.
    assert piped["grad_norms"][0] == pytest.approx(flat["grad_norms"][0], rel=0.5)


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
    in_bf16 = run(assets, tmp_path / "c", 2, *options, *BF16, steps=3)
    assert in_bf16["losses"][0] == pytest.approx(whole["losses"][2], rel=ROUNDING)


def test_what_is_not_active_ends_the_run(assets: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="SystemExit"):
        run(assets, tmp_path, 2, *EP2, *STANDARD, "--cookbook.precision=mxfp8", steps=1)
