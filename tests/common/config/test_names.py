"""Names of configurations with changes: what they mean, and what is refused."""

import pytest

from common.config.names import find_base, split_name
from common.errors import UserError
from common.repository import ROOT, benchmarks, configurations
from common.study.sweep import sweep_cells
from common.training.load import load_config
from tests.command import ttt_here


def load(name, *settings, benchmark="language_bert", size="mini"):
    return load_config(benchmark, name, size=size, settings=list(settings)).config


@pytest.mark.parametrize("benchmark", benchmarks())
def test_a_plain_name_has_no_settings(benchmark):
    for name in configurations(benchmark):
        assert split_name(benchmark, name, size="mini") == (name, [])


def test_an_added_method_has_the_settings_of_the_configuration_that_uses_it():
    changed, optimized = load("baseline+unpad"), load("optimized")
    assert changed.methods == load("baseline").methods | {"unpad": optimized.methods["unpad"]}
    assert changed.configuration == "baseline"  # as with --set
    full = load("baseline+ema", benchmark="image_classification", size="full").methods["ema"]
    mini = load("baseline+ema", benchmark="image_classification").methods["ema"]
    assert full["half_life_steps"] == 100 and mini["half_life_steps"] == 12


def test_a_dry_run_names_the_configuration_whose_settings_an_added_method_takes():
    done = ttt_here("run", "language_bert", "baseline+ema", "--size", "mini", "--dry-run")
    assert "methods.ema.every_steps: in the name baseline+ema, as efficient has it" in done.stdout


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("optimized-unpad", {"unpad": None}),
        ("optimized-unpad-fused_qkv", {"unpad": None, "fused_qkv": None}),
        ("optimized+methods.unpad=false", {"unpad": None}),
        ("optimized-unpad+sam", {"unpad": None, "sam": {}}),
        ("optimized+unpad.round_to=32", {"unpad": {"round_to": 32}}),
        ("optimized+sam.rho=0.1-unpad", None),  # a value goes on to the next +
        ("baseline+sam.rho=0.1+sam.every_steps=2", {"sam": {"rho": 0.1, "every_steps": 2}}),
    ],
)
def test_methods_are_added_changed_and_left_out(name, changes):
    if changes is None:
        with pytest.raises(UserError, match="sam.rho"):
            load(name)
        return
    before = load(find_base("language_bert", name)).methods
    expected = {key: value for key, value in (before | changes).items() if value is not None}
    assert load(name).methods == expected


def test_other_keys_are_set_and_later_settings_win():
    assert load("baseline+optimizer.learning_rate=1e-4").optimizer.learning_rate == 1e-4
    config = load("baseline+global_batch_size=8+sam", "global_batch_size=24", "methods.sam=false")
    assert config.global_batch_size == 24 and "sam" not in config.methods


def test_a_file_is_named_by_its_path(tmp_path):
    path = tmp_path / "fast-one.yaml"
    path.write_text("extends: baseline\nmethods: {sam: {rho: 0.2}}\n")
    assert load(str(path)).methods["sam"] == {"rho": 0.2}
    assert "sam" not in load(f"{path}-sam").methods
    assert load(f"{path}+unpad").methods.keys() >= {"sam", "unpad"}
    with pytest.raises(UserError, match="'sam' is on already"):
        load(f"{path}+sam")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("basline+sam", "unknown configuration 'basline\\+sam'.*did you mean baseline"),
        ("baseline+samm", "baseline.samm: no such method 'samm'; did you mean sam"),
        ("optimized-sam", "optimized-sam: 'sam' is not on at size mini"),
        ("optimized+unpad", r"'unpad' is on already.*\+unpad\.KEY=VALUE"),
        ("baseline-unpad.round_to=3", "cannot read '-unpad.round_to=3'"),
        ("baseline+", "cannot read"),
        ("baseline+methods.samm={}", "no such method"),
        (
            "baseline+sam.rh=1",
            r"in the name \S+: methods.sam.rh: unknown key; did you mean rho",
        ),
        ("baseline+budget=x", r"^in the name baseline\+budget=x: budget: input should be a valid number"),
        ("baseline+budget=0.0001", r"budget 0.0001 of \S+ is no step"),
        ("../baseline", "unknown configuration"),
    ],
)
def test_a_name_that_means_nothing_is_refused(name, message):
    with pytest.raises(UserError, match=message):
        load(name)


@pytest.mark.parametrize(
    ("command", "names", "options", "shown"),
    [
        ("run", ["baseline+sam"], ["--dry-run"], "sam"),
        ("sweep", ["baseline", "baseline+sam"], ["--budgets", "0.5", "--dry-run"], "baseline-0.5+sam"),
        ("compare", ["baseline", "baseline+sam"], ["--dry-run"], "sam"),
        ("estimate", ["baseline+sam"], ["--scaling", "--devices", "2", "--measured", "70@56"], "2"),
    ],
)
def test_commands_take_such_a_name(command, names, options, shown, tmp_path):
    results = [] if command == "run" else ["--results", str(tmp_path)]
    result = ttt_here(command, "language_bert", *names, "--size", "mini", *options, *results)
    assert result.returncode == 0 and shown in result.stdout, result.stderr


def test_a_cell_of_a_sweep_is_named_by_its_configuration_budget_and_changes():
    names = ["baseline", "optimized-unpad", str(ROOT / "x" / "own.yaml+sam")]
    cells = sweep_cells("language_bert", names, [0.25])
    assert [cell.name for cell in cells] == ["baseline-0.25", "optimized-0.25-unpad", "own-0.25+sam"]
    assert [cell.configuration for cell in cells] == names
