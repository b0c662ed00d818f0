"""Configurations: faulty ones are refused, and a merged one has the values of its files in order."""

import os
import shutil
import sys

import pytest

from common import repository, yaml_file
from common.config import merge
from common.errors import UserError
from common.machine import hardware
from common.machine.system import system_id
from common.repository import ROOT, benchmarks, configurations
from common.training.load import load_config, read_config
from tests.command import run


def bert(*settings, configuration="baseline"):
    return load_config("language_bert", configuration, size="mini", settings=list(settings))


def plan(*settings):
    return bert(*settings).config.plan()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("global_batch_size=1000000000", "--set: global_batch_size: .* is more than the training set"),
        ("evaluate_every=0ba", "--set: evaluate_every: must be at least one step"),
        ("data.num_train_samples=1", "global_batch_size: 32 is more than the training set"),
        ("max_duration=0ep", "--set: max_duration: 0ep is no step"),
        ("budget=0.0001", "max_duration: budget 0.0001 of 8ep is no step"),
    ],
)
def test_a_plan_without_a_step_is_refused_before_a_method_counts_its_steps(setting, message):
    with pytest.raises(UserError, match=message):
        load_config("image_classification", "optimized", size="mini", settings=[setting])


def test_numbers_are_numbers_and_names_are_names():
    values = yaml_file.parse("a: 5e-4\nb: 12:30\nc: no\nd: true\ne: '7'\nf: 3\n", "x.yaml").values
    assert values == {"a": 5e-4, "b": "12:30", "c": "no", "d": True, "e": "7", "f": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "x.yaml:2: 'a' is written twice"),
        ("- 1\n", "x.yaml:1: expected"),
        ("a: [1\n", "x.yaml:2: not YAML"),
        ("{a: " * 14 + "1" + "}" * 14, "nested too deeply"),
        ('a: "\\UFFFFFFFF"\n', "x.yaml: not YAML"),
        ("a: 1\n" * 10**6, "x.yaml: has more than"),
    ],
)
def test_bad_yaml_is_refused_with_file_and_line(text, message):
    with pytest.raises(UserError, match=message):
        yaml_file.parse(text, "x.yaml")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("optimizer.learning_rat=1", "--set: optimizer.learning_rat: .*did you mean learning_rate"),
        ("target=75.9", r"--set: target: .*less than 1.*75\.9.*fraction"),
        ("global_batch_size=many", "--set: global_batch_size: .*integer"),
        ("global_batch_size=-1", "greater than 0"),
        ("global_batch_size=40000", "more than the training set"),
        (f"global_batch_size={'9' * 5000}", "global_batch_size"),
        ("max_duration=90 epochs", "max_duration: .*write 90ep, 90ba or 90sp"),
        (f"max_duration={'9' * 5000}ep", "max_duration: .{1,300}$"),
        ("max_duration=9999999999ba", "--set: max_duration: .*more than 1,000,000 evaluations"),
        ("schedule.warmup=99ep", "must be shorter"),
        ("schedule.milestones=[3ba, 4x]", r"schedule.milestones.1: .*write 4ep"),
        ("methods.unpadd={}", "no such method .*did you mean unpad"),
        ("methods.unpad.round=3", "unknown key; did you mean round_to"),
        ("methods.ema={}", "^--set: methods.ema.half_life_steps: field required$"),
        ("methods=3", "methods: expected"),
        ("methods=all", "methods: expected"),
        ("model.num_attention_heads=3", "model: hidden_size 128 is not a multiple of num_attention_heads 3"),
        ("data.masked_fraction=0.006", "data: masked_fraction masks no token of max_seq_length 160"),
        ("data.evaluation_masked_fraction=0", "data: evaluation_masked_fraction masks no token"),
        *((f"methods.seq_length_warmup.duration={share}", "duration: ") for share in (0, 1.1)),
        ("data.max_seq_length=1000", "data.max_seq_length: .*less than or equal to 512"),
        ("target", "expected key=value"),
        *((f"{key}=x", f"{key}: is chosen") for key in ("size", "benchmark", "configuration")),
        *((f"optimizer.{key}=1e400", key) for key in ("learning_rate", "epsilon", "weight_decay")),
        ("submission.hardware=../elsewhere", r"submission\.hardware"),
        ("optimizer={name: lars, weight_decay: 0.0}", "weight_decay: lars takes no trust ratio"),
        ("optimizer={name: lamb, nesterov: true}", "nesterov needs"),
        ("optimizer={name: lamb, epsilon: 0.0}", "epsilon: only lars"),
        ("optimizer={name: lamb, trust_coefficient: 0.1}", "trust_coefficient is read by lars alone"),
        ("optimizer.max_gradient_norm=null", "max_gradient_norm is read by lamb and fused_lamb alone"),
        ("schedule.power=2.0", "schedule.power: .*polynomial alone"),
        ("schedule.end_learning_rate=0.1", "schedule.end_learning_rate: .*polynomial alone"),
        ("schedule.decay=9ba", "schedule.decay: .*polynomial alone"),
        ("schedule.decay_from=start", "schedule.decay_from: .*polynomial alone"),
        ("schedule.decay=9x", "schedule.decay: .*write 9ep"),
        ("schedule={name: polynomial, end_learning_rate: 9.0}", "schedule: .*above optimizer.learning_rate"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_key_and_what_was_expected(setting, message):
    with pytest.raises(UserError, match=message):
        bert(setting)


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(UserError, match="did you mean language_bert"):
        load_config("langage_bert", "baseline", size="mini", settings=[])
    with pytest.raises(UserError, match="did you mean optimized"):
        bert(configuration="optimised")


def test_a_method_can_be_removed_and_the_others_keep_their_order():
    methods = bert("methods.fused_qkv=false", "precision=bf16", configuration="optimized").config.methods
    assert list(methods) == [
        *("unpad", "sparse_head", "last_layer_subset", "chunked_head", "low_precision_layernorm")
    ]
    assert bert("methods=", configuration="optimized").config.methods == {}


@pytest.mark.parametrize("benchmark", benchmarks())
def test_a_size_adjusts_methods_and_never_switches_one_on(benchmark):
    for name in configurations(benchmark):
        sizes = (read_config(benchmark, name, size=size, settings=[]) for size in ("full", "mini"))
        full, mini = (config.methods for config, _, _ in sizes)
        assert [method for method in full if method in mini] == list(mini)


def test_the_plan_counts_in_epochs_batches_and_samples_rounds_up_and_evaluates_the_last_step_once():
    long = plan("max_duration=2ep", "evaluate_every=1600sp", "evaluate_from=0sp", "schedule.warmup=7ba")
    assert (long.num_steps, long.steps_per_epoch, long.warmup_steps) == (4096, 2048, 7)
    assert long.evaluation_steps[:2] == (100, 200) and long.evaluation_steps[-2:] == (4000, 4096)
    odd = plan("max_duration=1601sp", "evaluate_every=30ba", "evaluate_from=31ba", "schedule.warmup=17sp")
    assert (odd.num_steps, odd.warmup_steps, odd.evaluation_steps) == (101, 2, (60, 90, 101))
    exact = plan("max_duration=90ba", "evaluate_every=30ba", "evaluate_from=0sp", "schedule.warmup=0ba")
    assert exact.evaluation_steps == (30, 60, 90)


def test_each_key_knows_where_it_was_written_and_a_person_can_name_the_machine():
    loaded = bert("target=0.3", "submission.hardware=my-laptop")
    assert loaded.origins["target",] == "--set"
    assert loaded.origins["optimizer", "beta2"].startswith("language_bert/baseline.yaml:")
    assert loaded.origins["max_duration",].startswith("language_bert/mini.yaml:")
    assert system_id(loaded.config) == "my-laptop-mini-baseline"


@pytest.mark.parametrize(
    ("gpus", "flags", "precision"),
    [(0, "avx2 fma", "fp32"), (0, "avx512f avx512_bf16", "bf16"), (1, "avx2", "bf16")],
)
def test_size_mini_takes_the_precision_that_is_fast_here_unless_a_person_chooses(
    monkeypatch, gpus, flags, precision
):
    monkeypatch.setattr(hardware, "count_gpus", lambda: gpus)
    monkeypatch.setattr(hardware, "processor_flags", flags.split)
    loaded = bert("evaluation_precision=fp16")
    assert (loaded.config.precision, loaded.config.evaluation_precision) == (precision, "fp16")
    assert loaded.origins["precision",].endswith(" (auto)")
    assert loaded.origins["evaluation_precision",] == "--set"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of the configurations of language_bert that a test may edit."""
    for methods in ("language_bert/methods", "common/methods"):
        shutil.copytree(ROOT / methods, tmp_path / methods)
    for file in ("benchmark.py", "baseline.yaml", "optimized.yaml", "mini.yaml"):
        shutil.copy(ROOT / "language_bert" / file, tmp_path / "language_bert")
    for module in (repository, merge):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    return tmp_path / "language_bert"


def append(path, text):
    path.write_text(path.read_text() + text)


def test_an_overlay_adjusts_a_method_that_is_on_and_ignores_one_that_is_off(folder):
    append(folder / "mini.yaml", "  fused_qkv: false\n")
    assert bert().config.methods == {}
    adjusted = bert(configuration="optimized").config.methods
    assert adjusted["unpad"] == {"round_to": 64} and "fused_qkv" not in adjusted  # 512 at size full
    assert bert("methods.unpad=false", configuration="optimized").config.methods.get("unpad") is None
    (folder / "derived.yaml").write_text("extends: optimized\nmethods: {unpad: false}\n")
    assert "unpad" not in bert(configuration="derived").config.methods


def test_a_configuration_has_values_of_its_own_for_size_mini(folder):
    append(folder / "optimized.yaml", "mini: {target: 0.6, schedule: {warmup: 7ba}}\n")
    mini = "mini: {target: 0.4, methods: {unpad: false}}\n"
    (folder / "derived.yaml").write_text(f"extends: optimized\ntarget: 0.5\n{mini}")
    loaded = bert(configuration="derived")
    assert (loaded.config.target, loaded.config.schedule.warmup) == (0.4, "7ba")
    assert loaded.origins["target",] == "language_bert/derived.yaml:3"
    assert loaded.config.schedule.name == "linear"  # of mini.yaml
    assert "unpad" not in loaded.config.methods and "sparse_head" in loaded.config.methods
    assert bert("target=0.3", configuration="derived").config.target == 0.3
    full = load_config("language_bert", "derived", size="full", settings=[]).config
    assert full.target == 0.5 and "unpad" in full.methods


def test_a_file_outside_of_the_folder_is_a_file_and_has_no_values_for_size_mini(tmp_path):
    (tmp_path / "own.yaml").write_text("extends: baseline\nmini: {target: 0.3}\n")
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "folder.yaml").mkdir()
    for name, why in (("own", ":2: .*without `mini:`"), ("pipe", ": .*regular"), ("folder", ": .*regular")):
        with pytest.raises(UserError, match=f"{name}.yaml{why}"):
            bert(configuration=str(tmp_path / f"{name}.yaml"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("baseline\n\nschedule: {warmpu: 3ba}", r"derived.yaml:3: schedule.warmpu: .*mean warmup"),
        ("baseline\nmini: {schedule: {warmpu: 3ba}}", r"derived.yaml:2: schedule.warmpu: .*mean warmup"),
        ("baseline\nmini: 3", r"derived.yaml:2: mini: expected"),
        ("baseline\nmini: {extends: optimized}", r"derived.yaml:2: extends: unknown key"),
        ("derived", r"derived.yaml:1: extends: goes too deep"),
        ("basline", r"derived.yaml:1: extends: no such file .*did you mean baseline"),
        ("[baseline]", r"derived.yaml:1: extends: expected one name"),
        (
            "baseline\nmethods: {alibi: true}",
            r"derived.yaml:2: methods.alibi: .*`methods.alibi=\{\}` turns it on",
        ),
        ("", "optimizer.name: .*`extends: baseline`"),
        ("baseline\n# für", "language_bert/derived.yaml:2: .*UTF-8"),
    ],
)
def test_a_fault_in_a_file_is_named_with_file_and_line(folder, content, message):
    (folder / "derived.yaml").write_text(f"extends: {content}\n", encoding="latin-1")
    with pytest.raises(UserError, match=message):
        bert(configuration="derived")


@pytest.mark.parametrize("part", ["data.prepare", "mini.yaml"])
def test_a_benchmark_without_one_of_its_files_is_a_mistake_that_names_the_file(folder, part):
    for file in ("benchmark.py", "baseline.yaml", "__init__.py"):
        (folder.parent / "third").mkdir(exist_ok=True)
        (folder.parent / "third" / file).touch()
    with pytest.raises(
        UserError, match=f"third/{part.replace('data.prepare', 'data/prepare.py')}: no such file"
    ):
        (repository.read_title if part.endswith(".yaml") else repository.benchmark_module)("third", part)


def test_a_file_is_utf_8_whatever_the_locale_says(folder):
    append(folder / "baseline.yaml", "# für\n")
    shutil.copytree(ROOT / "common", folder.parent / "common", dirs_exist_ok=True)
    code = "from common.config.merge import read; print(read('language_bert', 'baseline').values['target'])"
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": ""}
    done = run(sys.executable, "-c", code, env=os.environ | plain, cwd=folder.parent)
    assert (done.returncode, done.stderr) == (0, "") and float(done.stdout) > 0
