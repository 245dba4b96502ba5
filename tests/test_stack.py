"""Options, values and layouts: the words that TorchTitan reads, and degrees that divide."""

import re
from collections import Counter
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import strategies as st

from cookbook.base.errors import InputError
from cookbook.base.family import is_v_shaped, loss_rank, stages_of
from cookbook.config.cell import Finding
from cookbook.config.dialect.argv import argv_of, parse_argv
from cookbook.config.dialect.classes import (
    DEFAULT_ONLY,
    PASSED_ON,
    PASSED_ON_OPTIONS,
    REFUSED,
    UNDERSTOOD,
    class_of,
)
from cookbook.config.dialect.names import DEGREES, FACTS
from cookbook.config.facts import EXCHANGES, Facts, facts_of
from cookbook.config.options import Options, Setting
from cookbook.config.stack import Option, load_stack
from cookbook.config.validate.layout import layout_findings
from tests.cells import STACK
from tests.check_cells import cell_of
from tests.golden import OPTION_TABLE, option_table
from tests.titan_config import parse, typed

EXTENDED = ["--job.custom_config_module=cookbook.titan.tt_0_2_2.job_config"]
# TorchTitan reads this one itself before it reads the others, and wants the file to be there.
NOT_HERE = {"job.config_file", "job.custom_config_module", "experimental.custom_args_module"}
# TorchTitan copies one into the other, and checks these further than by their type.
NOT_HERE |= {"model.tokenizer_path", "parallelism.context_parallel_load_balancer"}
NOT_HERE |= {"validation.steps"}
TEXTS = [name for name, option in STACK.options.items() if option.kind == "str"]
# Whatever a user may write: shell syntax, other scripts, line breaks, leading dashes, look-alikes.
NASTY = [
    *["", " ", "a b", "  a  ", "'", '"', "a'b", 'a"b', "\\", "\\n", "a\nb", "\n", "\t", "\r", "#"],
    *["$(touch executed)", "`touch executed`", "$HOME", "${HOME}", "!!", "~", "*", "?", "[a]"],
    *["; touch executed", "&& touch executed", "| touch executed", "> executed", "{a,b}"],
    *["-a", "--b", "--training.steps=5", "a=b", "=", "=a", "a,b", ",", "None ", "True", "false"],
    *["1", "1e-8", "null", "{{ a }}", "{% a %}", "äöü", "日本語", "\u200b", "\U0001f600"],
    *["a_b-c", "--no-a", "\u2028", "\ufeff", "%s", "%j", "@file"],
]
ANY_TEXT = st.one_of(
    st.sampled_from(NASTY),
    # Without control characters, which no text may hold.
    st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t"), max_size=30),
).filter(lambda text: text not in ("None", "null"))


@pytest.mark.titan
def test_the_option_table_is_the_installed_torchtitans() -> None:
    assert OPTION_TABLE.read_text(encoding="utf-8") == option_table(), "renew it: make golden"


def _argv(values: dict[str, Any]) -> list[str]:
    return argv_of(STACK, {name: Setting(value, "") for name, value in values.items()})


def _examples(option: Option) -> list[Any]:
    values: dict[str, list[Any]] = {
        "bool": [True, False],
        "int": [7, -1, 0, 10**12],
        "float": [1e-08, 0.1, -2.5, 3.0, 1e300, 123456789.123456789, 5e-324],
        "str": ["text", "", "a 'b' \"c\" $(touch d)\n-e=f"],
        "choice": list(option.choices),
        "list": [["a"], ["a", "b c", "-d", "e=f"]] + ([] if option.default else [[]]),
        "lists": [],
    }
    return values[option.kind] + ([None] if option.optional else [])


def _round(number: int) -> dict[str, Any]:
    """The `number`th example of every option, all at once: a parse takes a while."""
    values = {}
    for name, option in STACK.options.items():
        if name not in NOT_HERE:
            examples = _examples(option)
            values[name] = examples[number % len(examples)]
    return values


ROUNDS = range(max(len(_examples(option)) for option in STACK.options.values()))


@pytest.mark.titan
@pytest.mark.parametrize("number", ROUNDS)
def test_every_option_reaches_torchtitan_unchanged(number: int) -> None:
    values = _round(number)
    checked = {name: STACK.options[name].check(name, value) for name, value in values.items()}
    parsed = parse([*EXTENDED, *_argv(checked)])
    assert typed({name: parsed[name] for name in values}) == typed(checked)


@pytest.mark.parametrize("number", ROUNDS)
def test_words_are_read_back_as_the_values_that_made_them(number: int) -> None:
    values = _round(number)
    words = _argv(values)
    # An empty list is TorchTitan's default, and has no words.
    said = {name: value for name, value in values.items() if value != []}
    assert typed(parse_argv(words, "words", STACK).values) == typed(said)


@pytest.mark.parametrize(
    "words",
    [
        ["--training.steps", "5"],
        ["--training.steps=5", "--training.steps=6"],
        ["--training.local-batch-size=5"],
        ["--compile.no_enable"],
        ["--training.dataset_path=None"],
        ["--optimizer.lr=1"],
    ],
)
@pytest.mark.titan
def test_torchtitan_reads_the_same_words(words: list[str]) -> None:
    values = parse_argv(words, "words", STACK).values
    parsed = parse([*EXTENDED, *words])
    assert len(values) == 1 and typed(values) == typed({name: parsed[name] for name in values})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["training.steps=5"], "found 'training.steps=5'; TorchTitan's begin with --"),
        (["--training.steps"], "words: training.steps: has no value"),
        (["--compile.enable=true"], "takes no value, found 'true'; write --compile.enable or"),
    ],
)
def test_wrong_words_are_named(words: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_argv(words, "words", STACK)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("training.steps", 2.0, "found the number 2.0, allowed: a whole number"),
        ("training.steps", True, "found true, allowed: a whole number"),
        ("compile.enable", "yes", "found the text 'yes', allowed: true or false"),
        ("model.flavor", 16, "found the number 16, allowed: a text"),
        ("model.converters", ["a,b"], "items may hold no comma"),
        ("model.converters", 5, "found the number 5, allowed: a list of texts"),
        ("compile.components", [], "found an empty list"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(name: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"^here: .*{re.escape(message)}") as caught:
        STACK.option(name, name).check("here", value)
    assert "\n" not in str(caught.value)


MODEL = {"model.name": "deepseek_v3", "model.flavor": "16B"}


def _options(**degrees: int) -> dict[str, Any]:
    return {DEGREES[short]: degree for short, degree in degrees.items()}


def _findings(options: dict[str, Any], world: int) -> list[Finding]:
    """As of the command line; without a model, what is left are ranks that divide."""
    stack = STACK if "model.name" in options else replace(STACK, families={})
    settings = {name: Setting(value, f"--set {name}") for name, value in options.items()}
    return layout_findings(Facts(Options(stack, settings), world))


@pytest.mark.parametrize(
    ("options", "world", "option", "found", "remedy"),
    [
        (_options(tp=0), 8, "tp", "found 0, allowed: 1 and up", ""),
        (_options(dp_shard=0), 8, "dp_shard", "found 0, allowed: -1 or 1 and up", ""),
        (_options(pp=3), 8, "pp", "3 does not divide 8 ranks", "try 2"),
        (_options(cp=5), 8, "cp", "5 does not divide 8 ranks", "try 4"),
        (_options(tp=3), 8, "tp", "3 does not divide 8 ranks", "try 2"),
        (_options(dp_replicate=16), 8, "dp_replicate", "16 does not divide 8 ranks", "try 8"),
        (_options(dp_shard=3), 8, "dp_shard", "is 3 ranks, the job has 8", "set it to -1"),
        (_options(pp=2, ep=8), 8, "ep", "8 does not divide 4 ranks of a stage", "try 4"),
        (_options(tp=2, etp=2, ep=8), 8, "ep", "8 does not divide 4 ranks of a stage", "try 4"),
        (_options(tp=4, etp=2, ep=2), 8, "etp", "found 2, allowed: 1 or the tensor parallel", ""),
        (_options(tp=8, ep=2), 8, "dp_shard", "comes to 1 with CP 1", "use fewer TP"),
    ],
)
def test_a_degree_that_does_not_divide_is_named_with_the_nearest_that_does(
    options: dict[str, Any], world: int, option: str, found: str, remedy: str
) -> None:
    problem = _findings(options, world)[0]
    assert problem.option == DEGREES[option]
    assert found in problem.reason
    assert problem.remedy.startswith(remedy)


@pytest.mark.parametrize("world", [192, 24, 12, 256])
@pytest.mark.parametrize("backend", ["standard", "deepep"])
def test_the_remedy_helps(world: int, backend: str) -> None:
    others = {**MODEL, "parallelism.expert_parallel_comm_backend": backend}
    found = {
        degree: _findings({**others, **_options(ep=degree)}, world) for degree in range(1, 200)
    }
    wrong = [problems for problems in found.values() if problems]
    # Few of 199 degrees divide a power of two, or of two and three.
    assert len(wrong) > 150
    for problems in wrong:
        *_, last = words = problems[0].remedy.split()
        if words[0] == "set":  # FSDP cannot cut the experts: another option helps
            degree = next(one for one, its in found.items() if its is problems)
            assert not _findings({**others, **_options(ep=degree), words[1]: int(last)}, world)
            continue
        assert not _findings({**others, **_options(ep=int(last))}, world)
        assert backend == "standard" or int(last) in (1, *EXCHANGES["deepep"].sizes)


def test_every_option_is_judged_and_a_new_one_is_not() -> None:
    judged = Counter(class_of(name) for name in STACK.options)
    assert judged.keys() == {UNDERSTOOD, REFUSED, PASSED_ON}, "judge it in dialect/classes.py"
    assert class_of("training.new_option") is None
    listed = {*PASSED_ON_OPTIONS, *(name for name in DEFAULT_ONLY if "." in name)}
    assert listed <= STACK.options.keys()
    assert not PASSED_ON_OPTIONS & {fact.option for fact in FACTS}


@pytest.mark.parametrize("replicate", [1, 4])
def test_a_global_batch_is_a_multiple_of_all_replicas_local_batches(replicate: int) -> None:
    total = "training.global_batch_size"
    options = MODEL | {"training.local_batch_size": 2} | _options(dp_replicate=replicate)
    # 384 is a multiple of 128 ranks and of 2 sequences, and not of 256.
    (finding,) = _findings(options | {total: 384}, 128)
    assert (finding.option, finding.remedy) == (total, "try 256")
    assert "384 is not a multiple of local batch 2 x 128 data-parallel ranks" in finding.reason
    assert not [size for size in (256, 512, -1) if _findings(options | {total: size}, 128)]


@pytest.mark.parametrize(
    ("schedule", "per_rank", "stages"),
    [
        ("1F1B", 1, [[0], [1], [2]]),
        ("Interleaved1F1B", 2, [[0, 3], [1, 4], [2, 5]]),
        ("ZBVZeroBubble", 2, [[0, 5], [1, 4], [2, 3]]),
        ("DualPipeV", 2, [[0, 5], [1, 4], [2, 3]]),
        # TorchTitan takes names in any case.
        ("dualpipev", 2, [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_the_rank_of_the_loss(schedule: str, per_rank: int, stages: list[list[int]]) -> None:
    found = [stages_of(schedule, rank, 3, per_rank) for rank in range(3)]
    assert found == stages
    (last,) = [rank for rank, own in enumerate(found) if 3 * per_rank - 1 in own]
    # Of 24 ranks, eight to a pipeline rank.
    assert loss_rank(schedule, 3, 24) == 8 * last
    assert is_v_shaped(schedule) == (found[0] != [0] and 5 in found[0])


def test_a_record_has_the_facts_of_its_cell() -> None:
    options = {"checkpoint.folder": "mine", "validation.enable": True, "validation.steps": 1}
    cell = cell_of("deepseek_v3_671b", options)
    facts = facts_of(cell.record())
    assert facts.layout == cell.layout and facts.readers == cell.facts.readers
    assert (facts.checkpoint_folder, facts.validates) == ("mine", True)
    # Options that the record does not name have their defaults.
    assert facts.text_key == "text" and Facts.text_key == "data.text_key"
    with pytest.raises(FrozenInstanceError):
        facts.seq_len = 1


@pytest.mark.parametrize(
    ("mode", "selective", "kept", "recomputed"),
    [
        ("none", "2", 0, ""),
        ("memory_budget", "2", 0, ""),
        ("full", "2", 0, "1234"),
        ("full", "2", 1, "123"),
        ("selective", "op", 1, "123"),
        ("selective", "2", 0, "24"),
        ("selective", "3", 2, ""),
    ],
)
def test_the_layers_that_a_backward_recomputes(
    mode: str, selective: str, kept: int, recomputed: str
) -> None:
    """Of a stage of four layers, by their number on the rank."""
    options = {Facts.ac_mode: mode, Facts.ac_selective: selective, Facts.ac_layers_kept: kept}
    settings = {name: Setting(value, "") for name, value in options.items()}
    facts = Facts(Options(STACK, settings), 1)
    found = [number for number in range(1, 5) if facts.recomputes(number - 1, 4, number)]
    assert "".join(map(str, found)) == recomputed


@pytest.mark.parametrize(
    ("world", "tp", "dtype"), [(1, 1, "bfloat16"), (2, 1, "bfloat16"), (2, 2, "float32")]
)
def test_autocast_and_fsdp_compute_in_bf16_and_tp_alone_in_fp32(
    world: int, tp: int, dtype: str
) -> None:
    settings = {Facts.tp: Setting(tp, "")}
    assert Facts(Options(STACK, settings), world).param_dtype == dtype


def test_an_option_that_the_stack_lacks_is_not_set() -> None:
    """Its fact has no name: see `Fact`."""
    assert not Options(STACK, {}).override({"": Setting(1, "")}).settings


def test_nothing_is_compiled_where_compilation_is_off() -> None:
    for enabled in (False, True):
        facts = Facts(Options(STACK, {Facts.is_compile_on: Setting(enabled, "")}), 1)
        assert facts.is_compiled is facts.is_loss_compiled is enabled


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a,b", ["a", "b"]),
        ("[a, b]", ["a", "b"]),
        ("[experts]", ["experts"]),
        ("[]", []),
        ("[ab]*.jsonl", ["[ab]*.jsonl"]),
    ],
)
def test_a_list_is_written_as_in_a_recipe_or_with_commas(text: str, value: list[str]) -> None:
    option = load_stack().options["quantize.grouped_mm.mx.fqns"]
    assert option.parse("--set", text) == value
