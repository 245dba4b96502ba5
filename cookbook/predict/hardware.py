"""What a prediction needs beyond the cell: speeds of GPUs and links, and lengths of documents.

Hardware facts come from `recipes/hardware/*.yaml`, each with its source. A token attends only to
earlier tokens of its own document and sequence, so attention takes longer for long documents. Ranks
synchronize in every layer, so the rank with the longest documents in its batch sets the pace.
"""

import functools
import itertools
import math
import random
import shlex
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from cookbook.base.errors import InputError
from cookbook.base.paths import RECIPES, ROOT
from cookbook.base.text_files import find_sources, read_lengths
from cookbook.base.yamlfile import Number, Text, fill, read_yaml
from cookbook.config.cell import Cell
from cookbook.config.facts import TEXT, Facts
from cookbook.predict.rank import model_of


@dataclass(frozen=True)
class _Sourced:
    value: Number
    source: Text


if TYPE_CHECKING:
    Fact = float
else:
    # A hardware file gives each fact as a mapping with `value` and `source`. Not `attrgetter`: from
    # Python 3.12.2 on, pydantic refuses its signature.
    Fact = Annotated[_Sourced, AfterValidator(lambda fact: fact.value)]


@dataclass(frozen=True)
class Hardware:
    """Speeds of a GPU and its links. Names end in the unit; a `_share` is a fraction, 0 to 1.

    The InfiniBand fields are None if the hardware file does not describe a network between nodes.
    """

    name: Text = field(metadata={"key": "gpu"})
    path: Path
    bf16_peak_tflops: Fact
    fp8_peak_tflops: Fact
    memory_bandwidth_gb_per_s: Fact
    nvlink_gb_per_s: Fact
    dense_gemm_share: Fact
    grouped_gemm_share: Fact
    fp8_dense_gemm_share: Fact
    fp8_grouped_gemm_share: Fact
    memory_bandwidth_share: Fact
    nccl_nvlink_share: Fact
    nccl_beside_compute_share: Fact
    compute_beside_nccl_share: Fact
    flex_attention_forward_tflops: Fact
    flex_attention_backward_tflops: Fact
    flex_attention_waste_tokens: Fact
    flash_attention_4_forward_tflops: Fact
    flash_attention_4_backward_tflops: Fact
    flash_attention_4_waste_tokens: Fact
    flash_attention_4_128_forward_tflops: Fact
    flash_attention_4_128_backward_tflops: Fact
    sdpa_forward_tflops: Fact
    sdpa_backward_tflops: Fact
    deepep_latency_ms: Fact
    deepep_nvlink_gb_per_s: Fact
    compute_beside_deepep_share: Fact
    all_to_all_latency_ms: Fact
    all_to_all_nvlink_share: Fact
    scatter_add_gb_per_s: Fact
    released_deepep_rows_gb_per_s: Fact
    float8_quantize_bytes: Fact
    float8_quantize_weight_bytes: Fact
    mxfp8_quantize_bytes: Fact
    host_ms_per_routed_layer: Fact
    host_ms_per_step: Fact
    text_us_per_token: Fact
    infiniband_gb_per_s: Fact | None = None
    nccl_infiniband_share: Fact | None = None
    all_to_all_infiniband_share: Fact | None = None
    deepep_infiniband_share: Fact | None = None


def hardware_of(cell: Cell) -> Hardware:
    """Return the speeds of the cell's GPU and links; raise InputError if any of them is unknown."""
    place, gpu = f"cluster {cell.cluster.name}", cell.cluster.gpu
    if gpu is None:
        wrong = "has no GPU, and times are predicted for GPUs only"
        raise InputError(place, wrong, "name another: --cluster h200-node")
    known = [load_hardware(path) for path in sorted((RECIPES / "hardware").glob("*.yaml"))]
    # Cards with PCIe are slower than the modules of their name.
    words = set(gpu.name.split())
    found = next((one for one in known if one.name in words and not words & {"PCIe", "NVL"}), None)
    if found is None:
        remedy = f"describe it in recipes/hardware/, as {', '.join(one.path.name for one in known)}"
        raise InputError(place, f"nothing is known of the speed of a {gpu.name}", remedy)
    if cell.nodes > 1 and None in vars(found).values():
        reason = "says nothing of the network between nodes"
        remedy = "add infiniband_gb_per_s and its shares, or use one node"
        raise InputError(f"recipes/hardware/{found.path.name}", reason, remedy)
    return found


def weights_of(cell: Cell) -> Hardware | None:
    """Return the GPU whose rates weigh the work of a cell, if those of its own are unknown."""
    try:
        hardware_of(cell)
    except InputError:
        if cell.cluster.gpu is None:
            raise
        # H200's rates are measured; B200's file has a network.
        return load_hardware(RECIPES / "hardware" / f"{'h200' if cell.nodes == 1 else 'b200'}.yaml")
    return None


@functools.cache
def load_hardware(path: Path) -> Hardware:
    """Read a hardware file; raise InputError if its facts are incomplete or invalid."""
    return fill(Hardware, read_yaml(path), beside=("description",), path=path)


_SEED = 42
# The number of sequences to simulate, and how many times to draw each rank's batch from them.
_SEQUENCES, _DRAWS = 2000, 400


@dataclass(frozen=True)
class Documents:
    """Log-normal document lengths, in tokens; `source` says where mean and median come from."""

    mean_tokens: float
    median_tokens: float
    source: str


C4 = Documents(430, 260, "arXiv:2104.08758 and arXiv:2310.20707, lognormal, median 260")
LOCAL = Documents(6453, 3520, "counted: docs/evidence/performance/h200x2-8layers.json")


def documents_of(cell: Cell, named: Documents | None = None) -> Documents | None:
    """Return the document lengths if tokens attend only within their document, else None.

    `named`, if given, replaces the lengths of the dataset. Raise InputError if lengths are needed
    but unknown.
    """
    if not model_of(cell).by_document:
        return None
    if named:
        return named
    facts = cell.facts
    name, path = facts.dataset, facts.dataset_path
    if name == TEXT:
        files, key, assets = facts.text_files, facts.text_key, facts.assets or ""
        tokenizer, lengths = ROOT / assets / "tokenizer.json", None
        if tokenizer.is_file():
            lengths = read_lengths(find_sources(files, key, ROOT), tokenizer)
        if lengths is None:
            words = ["data", *files, "--tokenizer", assets]
            words += ["--text-key", key] if key != "text" else []
            found = "the length of their documents was not counted, and attention depends on it"
            remedy = f"run: python submit.py {shlex.join(words)}"
            raise InputError(cell.options.origin(Facts.text_files), found, remedy)
        mean, median = lengths
        return Documents(mean, min(mean, median), "counted by submit.py data")
    if name == "c4" or (name == "c4_test" and not path):
        return C4
    if path and path.rstrip("/").endswith("assets/local/corpus"):
        return LOCAL
    place = cell.options.origin(Facts.dataset_path if path else Facts.dataset)
    found = f"the length of the documents in {path or name} is not known, and attention depends on"
    raise InputError(place, f"{found} it", "pass it to plan: --documents MEAN:MEDIAN, in tokens")


def attended_text(documents: Documents | None, seq_len: int) -> str:
    """Describe whether tokens attend within their document or across the whole sequence."""
    if documents is None:
        return f"whole sequences of {seq_len:,} tokens, across documents"
    return f"documents of {documents.mean_tokens:,.0f} tokens on average ({documents.source})"


def parse_documents(place: str, text: str) -> Documents:
    """Parse document lengths, `MEAN:MEDIAN` in tokens."""
    mean, _, median = text.partition(":")
    try:
        found = Documents(float(mean), float(median), place)
    except ValueError:
        found = None
    if found is None or not 1 <= found.median_tokens < found.mean_tokens < math.inf:
        raise InputError(place, f"found {text!r}, allowed: MEAN:MEDIAN in tokens, as 430:260")
    return found


@functools.cache
def slowest_attended_tokens(
    documents: Documents, seq_len: int, sequences: int, ranks: int
) -> float:
    """Return the mean number of keys that a token attends to on the slowest of `ranks` ranks."""
    sums = [*itertools.accumulate(_attended(documents, seq_len), initial=0.0)]
    drawn, taken = random.Random(_SEED), min(sequences, _SEQUENCES)

    def batch() -> float:
        # Draw consecutive sequences, because a long document continues in the next sequence.
        start = drawn.randint(0, _SEQUENCES - taken)
        return (sums[start + taken] - sums[start]) / taken

    return statistics.fmean(max(batch() for _ in range(ranks)) for _ in range(_DRAWS))


@functools.cache
def _attended(documents: Documents, seq_len: int) -> tuple[float, ...]:
    drawn = random.Random(_SEED)
    mu = math.log(documents.median_tokens)
    sigma = math.sqrt(2 * math.log(documents.mean_tokens / documents.median_tokens))
    found, left = [], 0
    for _ in range(_SEQUENCES):
        room, pairs = seq_len, 0
        while room:
            left = left or max(1, round(drawn.lognormvariate(mu, sigma)))
            piece = min(left, room)
            pairs += piece * (piece + 1) // 2
            left -= piece
            room -= piece
        found.append(pairs / seq_len)
    return tuple(found)
