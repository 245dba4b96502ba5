"""Pins and options as they are read from their files: what holds, and which place set it."""

from __future__ import annotations

from pathlib import Path

from cookbook.config.options import Options, Setting
from cookbook.config.stack import load_stack, read_pins, stack_name

PINS = """# stack 2030.01
torch==2.10.0  # from the index
flash-attn-4==4.0.0b36; extra == 'flash_attention'
# torchao==0.17.0
deep_ep @ git+https://github.com/deepseek-ai/DeepEP@29d31c0 ; extra == "deepep"
"""


def test_pins_are_versions_or_commits_some_of_them_extra(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text(PINS)
    assert stack_name(file) == "2030.01"
    pins = read_pins(file)
    assert [(pin.name, pin.value, pin.extra) for pin in pins] == [
        ("torch", "2.10.0", ""),
        ("flash-attn-4", "4.0.0b36", "flash_attention"),
        ("deep_ep", "29d31c0", "deepep"),
    ]
    # What pip is given for one that a plain install leaves out.
    assert [pin.requirement for pin in pins] == [
        "torch==2.10.0",
        "flash-attn-4==4.0.0b36",
        "deep_ep @ git+https://github.com/deepseek-ai/DeepEP@29d31c0",
    ]


def test_what_is_set_last_holds_and_names_its_place() -> None:
    steps, length, flavor = "training.steps", "training.seq_len", "model.flavor"
    recipe = Options(load_stack(), {steps: Setting(5, "mine.yaml:3: training.steps")})
    assert recipe[steps] == 5 and recipe[length] == load_stack().options[length].default
    assert steps in recipe and length not in recipe
    layers = ({steps: Setting(6, "sweep.yaml:2")}, {steps: Setting(7, "--set")})
    over = recipe.override(*layers)
    assert (over[steps], recipe[steps]) == (7, 5)
    # Each place ends with the option.
    assert recipe.origin(steps) == "mine.yaml:3: training.steps"
    assert over.origin(steps) == "--set: training.steps"
    assert over.origin(length) == length
    named = {"model.name": Setting("deepseek_v3", ""), flavor: Setting("16B", "")}
    model = recipe.override(named).model
    assert model is not None and model.n_layers == 27
    assert recipe.override(named, {flavor: Setting("17B", "")}).model is None
