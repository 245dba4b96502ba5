"""Runs TorchTitan's own Trainer on CPU ranks and returns what it would have logged."""

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.titan_ranks import run_ranks

SEQ_LEN = 64
# Of the debug models in these tests; TorchTitan's have six layers of sixteen heads, which takes
# twice as long and shows no more. The first layer is dense.
NUM_LAYERS, NUM_HEADS = 4, 4
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


def train(arguments: list[str], attempt: Path | None = None) -> dict[str, Any]:
    """Run TorchTitan's main in this rank.

    Returns:
        `losses` and `grad_norms` of each step, all that it `said`, and whether it `ended` itself.
    """
    from torchtitan import train as titan
    from torchtitan.components.metrics import MetricsProcessor

    if attempt:
        os.environ["COOKBOOK_ATTEMPT_DIR"] = str(attempt)
    os.environ["HF_HUB_OFFLINE"] = "1"
    _make_debug_models_small()
    found: dict[str, Any] = {"losses": [], "grad_norms": [], "said": []}
    log = MetricsProcessor.log

    def keep(self: Any, step: int, loss: float, most: float, norm: float, **extra: Any) -> None:
        found["losses"].append(loss)
        found["grad_norms"].append(norm)
        log(self, step, loss, most, norm, **extra)

    MetricsProcessor.log = keep

    def note(record: logging.LogRecord) -> bool:
        found["said"].append(record.getMessage())
        return True

    # Rank 0 would wait 2 s for the others, which end by themselves here.
    vars(titan)["time"] = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    # TorchTitan removes the handlers of its logger, and leaves the filters.
    logging.getLogger().addFilter(note)
    # It took its default from the command line when it was imported.
    titan.ConfigManager.parse_args.__defaults__ = (arguments,)
    try:
        titan.main(titan.Trainer)
    except SystemExit as ended:
        assert ended.code == 1
        return found | {"ended": True}
    return found | {"ended": False}


def _make_debug_models_small() -> None:
    from torchtitan.models.deepseek_v3 import deepseekv3_args
    from torchtitan.protocols.train_spec import get_train_spec

    registered = (get_train_spec(name).model_args for name in ("deepseek_v3", "qwen3"))
    for flavors in (deepseekv3_args, *registered):
        for name, arguments in flavors.items():
            if name.startswith("debugmodel"):
                arguments.n_layers, arguments.n_heads = NUM_LAYERS, NUM_HEADS
                if hasattr(arguments, "n_kv_heads"):
                    # Half of them, and experts enough for several on each rank.
                    arguments.n_layers, arguments.n_kv_heads = NUM_LAYERS // 2, NUM_HEADS // 2
                    arguments.moe_args.num_experts = 16


def job(
    assets: Path, out: Path, *options: str, data: str = "varied", steps: int = 2, batch: int = 2
) -> list[str]:
    """The argv of a small job; an option that is named again wins."""
    return [
        *JOB,
        f"--job.dump_folder={out}",
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


def run(
    assets: Path,
    out: Path,
    ranks: int,
    *options: str,
    attempt: Path | None = None,
    of_rank: int = 0,
    by: Callable[..., dict[str, Any]] = train,
    **settings: Any,
) -> dict[str, Any]:
    """Train to the end; `losses` and `grad_norms` of each step, and all that the ranks `said`.

    Args:
        of_rank: whose losses; under PP the last rank knows them.
    """
    if attempt:
        attempt.mkdir(parents=True, exist_ok=True)
    argv = job(assets, out, *options, **settings)
    results = run_ranks(by, ranks, argv, attempt)
    for result in results:
        assert not result["ended"], result["said"][-3:]
    said = [text for result in results for text in result["said"]]
    return dict(results[of_rank]) | {"said": said}


def refused(ranks: int, argv: list[str], attempt: Path | None = None) -> str:
    """Train until every rank refuses; the reason, the same one on all of them."""
    results = run_ranks(train, ranks, argv, attempt)
    reasons = {
        tuple(text for text in result["said"] if text.startswith("cookbook refuses: "))
        for result in results
    }
    assert all(result["ended"] and not result["losses"] for result in results), reasons
    ((reason,),) = reasons
    assert "\n" not in reason
    return str(reason.removeprefix("cookbook refuses: "))


def refusal(call: Callable[[], object], caplog: Any) -> str:
    """The one line with which `call` ends the process; any refusal raises the same."""
    caplog.clear()
    try:
        call()
    except SystemExit as ended:
        assert ended.code == 1
    else:
        raise AssertionError("nothing was refused")
    (record,) = [one for one in caplog.records if one.levelname == "ERROR"]
    message: str = record.getMessage()
    begin, _, reason = message.partition("cookbook refuses: ")
    assert not begin and reason and "\n" not in reason, message
    return reason


def active(result: dict[str, Any]) -> dict[str, Any]:
    """What the run said was active; one rank says so, once."""
    (line,) = [text for text in result["said"] if text.startswith("cookbook active: ")]
    found: dict[str, Any] = json.loads(line.removeprefix("cookbook active: "))
    return found


# The words of every job that trains DeepSeek-V3's debug model.
JOB = (
    "--job.custom_config_module=cookbook.titan.tt_0_2_2.job_config",
    "--experimental.custom_import=cookbook.titan.tt_0_2_2",
    "--model.name=deepseek_v3",
    "--model.flavor=debugmodel",
)
FLEX = ("--model.flavor=debugmodel_flex_attn",)
FLASH = ("--model.attention=flash_attention_4",)
FULL = ("--activation_checkpoint.mode=full",)
SELECTIVE = (
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=op",
)
SAVE = (*SELECTIVE, "--activation_checkpoint.op_sac_save_list=attention,communication,grouped_mm")
QWEN3 = ("--model.name=qwen3", "--model.flavor=debugmodel_moe")
EP2 = ("--parallelism.expert_parallel_degree=2",)
EP4 = ("--parallelism.expert_parallel_degree=4",)
TP2 = ("--parallelism.tensor_parallel_degree=2",)
PP2 = ("--parallelism.pipeline_parallel_degree=2",)
STANDARD = ("--cookbook.ep_backend=standard", "--cookbook.dispatch=standard")
DEEPEP = (
    "--parallelism.expert_parallel_comm_backend=deepep",
    "--cookbook.ep_backend=deepep",
    "--cookbook.dispatch=deepep",
)
A2A = (
    "--parallelism.expert_parallel_a2a_dispatch_fwd_precision=mxfp8",
    "--parallelism.expert_parallel_a2a_combine_bwd_precision=mxfp8",
    "--cookbook.ep_backend=mxfp8_a2a",
    "--cookbook.dispatch=mxfp8",
)
BF16 = (
    "--cookbook.precision=bf16",
    "--cookbook.grouped_gemms=bf16",
    "--cookbook.linear_layers=bf16",
)
MXFP8 = (
    "--model.converters=quantize.grouped_mm.mx",
    "--quantize.grouped_mm.mx.fqns=experts",
    "--quantize.grouped_mm.mx.emulate",
    "--cookbook.precision=mxfp8",
    "--cookbook.grouped_gemms=mxfp8",
    "--cookbook.linear_layers=bf16",
    "--cookbook.emulated",
)
