"""The closed division: each rule refuses the setting that breaks it, by its name, before anything starts."""

import re

import pytest

from common.config import division
from common.errors import UserError
from common.measure import device_run
from common.repository import ROOT, benchmarks, config_class, configurations
from common.training.load import load_config
from language_bert.closed import cadence_samples
from tests.command import one_line
from tests.command import ttt_here as ttt

EMA = "{half_life_steps: 100, every_steps: 20}"
OTHER_SCHEDULE = ("schedule.name=cosine", "schedule.power=1.0", "schedule.end_learning_rate=0.0")
BROKEN = {  # (benchmark, configuration): the key that is refused, its rule, the settings
    ("image_classification", "closed"): [
        ("optimizer.name", "opt_name", "optimizer.name=decoupled_sgd", "optimizer.epsilon=1e-8"),
        ("optimizer.momentum", "lars_opt_momentum", "optimizer.momentum=0.95"),
        ("optimizer.nesterov", "lars_opt_momentum", "optimizer.nesterov=true"),
        ("optimizer.weight_decay", "lars_opt_weight_decay", "optimizer.weight_decay=6e-5"),
        ("optimizer.epsilon", "lars_epsilon", "optimizer.epsilon=1e-9"),
        ("optimizer.trust_coefficient", "the reference's lars", "optimizer.trust_coefficient=0.002"),
        ("schedule.name", "decay_poly_power", *OTHER_SCHEDULE, "schedule.decay=null"),
        ("schedule.power", "lars_opt_learning_rate_decay_poly_power", "schedule.power=1.0"),
        ("schedule.end_learning_rate", "end_learning_rate", "schedule.end_learning_rate=0.001"),
        ("schedule.decay_from", "lars_opt_learning_rate_decay_steps", "schedule.decay_from=start"),
        ("methods.label_smoothing.smoothing", "label smoothing", "methods.label_smoothing.smoothing=0.08"),
        ("methods.blurpool", "Graph Execution", "methods.blurpool={min_channels: 16}"),
        ("methods.ema", "Graph Execution", f"methods.ema={EMA}"),
        ("model.initial_weights", "Weight and Bias", "model.initial_weights=mosaic"),
        ("data.loader", "Data Representation", "data.loader=resident"),
        ("target", "Quality measure", "target=0.75"),
        ("target", "Quality measure", "target=0.76"),
        ("evaluate_every", "evaluation frequency", "evaluate_every=2ep"),
        ("evaluate_every", "evaluation frequency", "evaluate_from=12ep"),
        ("evaluate_every", "evaluation frequency", "evaluate_offset=100ba"),
        ("evaluate_every", "evaluation frequency", "max_duration=38ep"),
        ("model.name", "Graph Definition", "model.name=resnet101"),
        ("model.num_classes", "Graph Definition", "model.num_classes=100"),
        ("data.num_train_samples", "Training and Test Sets", "data.num_train_samples=1000000"),
        ("data.num_evaluation_samples", "Training and Test Sets", "data.num_evaluation_samples=5000"),
        ("data.train_crop_px", "Data Representation", "data.train_crop_px=192"),
        ("data.crop_px_by_epoch", "Data Representation", "data.crop_px_by_epoch=[128, 224]"),
        ("data.evaluation_resize_px", "Data Representation", "data.evaluation_resize_px=232"),
        ("data.evaluation_crop_px", "Data Representation", "data.evaluation_crop_px=256"),
        ("data.encoded_px", "Data Representation", "data.encoded_px=320"),
        ("data.min_crop_area", "Preprocessing", "data.min_crop_area=0.08"),
        ("data.flip_probability", "Preprocessing", "data.flip_probability=0.4"),
        ("data.alternates_flips", "Preprocessing", "data.alternates_flips=true"),
        ("stop_at_target", "stop at the target", "stop_at_target=false"),
        ("budget", "number of training steps", "budget=0.5"),
    ],
    ("image_classification", "closed_sgd"): [
        ("optimizer.momentum", "sgd_opt_momentum", "optimizer.momentum=0.95", "global_batch_size=65536"),
        ("optimizer.learning_rate", "sgd_opt_base_learning_rate", "optimizer.learning_rate=4.5885"),
        ("schedule.warmup", "opt_learning_rate_warmup_epochs", "schedule.warmup=100ba"),
        ("methods.no_norm_decay", "sgd_opt_weight_decay", "methods.no_norm_decay=false"),
    ],
    ("language_bert", "closed"): [
        ("optimizer.name", "optimizer", "optimizer.name=adamw"),
        ("optimizer.max_gradient_norm", "the reference's lamb", "optimizer.max_gradient_norm=2.0"),
        ("schedule.name", "lamb", "schedule.name=cosine", "schedule.decay_from=warmup"),
        ("schedule.power", "lamb", "schedule.power=0.5"),
        ("schedule.end_learning_rate", "lamb", "schedule.end_learning_rate=1e-5"),
        ("schedule.decay_from", "lamb", "schedule.warmup=100ba"),
        ("methods.fused_qkv", "the reference's lamb", "methods.fused_qkv={}"),
        ("model.dropout", "Graph Definition", "model.dropout=0.0"),
        ("model.activation", "Graph Definition", "model.activation=gelu"),
        ("model.next_sentence", "Loss function", "model.next_sentence=false"),
        ("data.masked_fraction", "Data State", "data.masked_fraction=0.2"),
        ("data.evaluation_masked_fraction", "Data State", "data.evaluation_masked_fraction=0.2"),
        ("target", "Quality measure", "target=0.7"),
        ("evaluate_every", "evaluation frequency", "evaluate_every=24640sp"),
        ("evaluate_every", "evaluation frequency", "evaluate_from=500000sp"),
        ("evaluate_every", "evaluation frequency", "max_duration=6701ba"),
        ("data.num_train_samples", "Training Data Order", "data.num_train_samples=3000000"),
        ("data.num_evaluation_samples", "Training and Test Sets", "data.num_evaluation_samples=100"),
        ("data.corpus", "Data State", "data.corpus=books"),
        ("data.max_seq_length", "Data Representation", "data.max_seq_length=128"),
        ("data.num_duplicates", "Data State", "data.num_duplicates=1"),
        ("model.vocab_size", "Graph Definition", "model.vocab_size=30528"),
        ("model.hidden_size", "Graph Definition", "model.hidden_size=512"),
        ("model.num_hidden_layers", "Graph Definition", "model.num_hidden_layers=12"),
        ("model.num_attention_heads", "Graph Definition", "model.num_attention_heads=8"),
        ("model.intermediate_size", "Graph Definition", "model.intermediate_size=2048"),
        ("model.start", "Weight and Bias", "model.start=random"),
        ("model.position_scale", "Weight and Bias", "model.position_scale=0.1"),
        ("methods.position_rows", "Graph Execution", "methods.position_rows={}"),
    ],
}
CASES = [(*name, *case) for name, cases in BROKEN.items() for case in cases]


@pytest.mark.parametrize(
    ("benchmark", "configuration", "key", "rule", "settings"), [(*c[:4], c[4:]) for c in CASES]
)
def test_a_setting_that_a_rule_forbids_is_refused_by_the_rules_name(
    benchmark, configuration, key, rule, settings
):
    with pytest.raises(UserError) as error:
        load_config(benchmark, configuration, size="full", settings=list(settings))
    line = str(error.value)
    place, named = re.fullmatch(r"(\S+): (\S+): is .*", line).groups()
    assert named == key and place.startswith(("--set", benchmark))
    assert re.search(
        rf"\(training_rules, [^()]*{re.escape(rule)}[^()]*\); --set submission.division=open", line
    )
    load_config(benchmark, configuration, size="full", settings=[*settings, division.OPEN])


def test_every_rule_has_a_setting_that_breaks_it():
    broken = {name: set() for name in benchmarks()}
    for benchmark, configuration, _, _, *settings in CASES:
        config = load_config(
            benchmark, configuration, size="full", settings=[*settings, division.OPEN]
        ).config
        rules = (*division.RULES, *config.closed_rules)
        broken[benchmark] |= {id(rule) for rule in rules if not rule.holds(config)}
    for benchmark, found in broken.items():
        assert [rule for rule in config_class(benchmark).closed_rules if id(rule) not in found] == []
    assert [rule for rule in division.RULES if not any(id(rule) in found for found in broken.values())] == []


@pytest.mark.parametrize(
    ("benchmark", "settings"),
    [
        ("image_classification", ("evaluate_every=5ba", "evaluate_from=9ba", "target=0.9")),
        ("language_bert", ("evaluate_every=50ba", "data.num_train_samples=1000", "target=0.73")),
    ],
)
def test_size_mini_keeps_the_kinds_and_not_the_numbers(benchmark, settings):
    load_config(benchmark, "closed", size="mini", settings=list(settings))
    for broken in (
        "target=0.5",
        f"methods.ema={EMA}",
        "stop_at_target=false",
        "optimizer.name=adamw optimizer.epsilon=1e-8",  # lars may have 0
    ):
        key, changed = broken.partition("=")[0], [broken] if "{" in broken else broken.split()
        with pytest.raises(UserError, match=rf": {re.escape(key)}: is .*; the closed division asks for"):
            load_config(benchmark, "closed", size="mini", settings=changed)


def test_exact_methods_and_approved_formats_are_allowed():
    for benchmark, method in (
        ("image_classification", "compile={backend: aot_eager}"),
        ("language_bert", "compile={backend: aot_eager}"),
        ("language_bert", "fp8={}"),
    ):
        settings = [f"methods.{method}", "precision=bf16"]
        loaded = load_config(benchmark, "closed", size="full", settings=settings).config
        assert method.partition("=")[0] in loaded.methods


@pytest.mark.parametrize(
    ("benchmark", "configuration", "setting", "message"),
    [
        ("language_bert", "closed", "methods.unpad={}", "methods.unpad: the packed encoder has no dropout"),
        ("image_classification", "closed_sgd", "methods.no_norm_decay=false", "no_norm_decay: is off; "),
        ("language_bert", "optimized", "submission.division=closed", "is adamw; the .* asks for lamb"),
    ],
)
def test_a_refusal_says_what_is_missing_off_or_asked_for(benchmark, configuration, setting, message):
    with pytest.raises(UserError, match=message):
        load_config(benchmark, configuration, size="full", settings=[setting])


@pytest.mark.parametrize("settings", [("optimizer.momentum=0.8",), ("--seed", "5")])
def test_a_run_is_refused_before_it_starts_and_by_a_dry_run(tmp_path, settings):
    command = ["run", "resnet", "closed", "--size", "mini", "--results", tmp_path]
    command += settings if settings[0] == "--seed" else ["--set", *settings]
    for more in ([], ["--dry-run"]):
        line = one_line(ttt(*command, *more))
        assert "closed division" in line and "(training_rules, " in line
    assert list(tmp_path.iterdir()) == []


def test_bert_is_evaluated_by_the_formula_of_the_rules():
    # policy: 150,000 for batches of 256 to 2,048, 175,000 for 3,072 to 4,096, 225,000 for 8,192
    batches = {256: 150_000, 448: 150_000, 2048: 150_000, 3072: 175_000, 4096: 175_000, 8192: 225_000}
    assert {size: cadence_samples(size) for size in batches} == batches
    steps = load_config("language_bert", "closed", size="full", settings=[]).config.plan().evaluation_steps
    assert steps[0] * 448 == 150_080 and len(steps) == 20 and steps[-1] == 6700  # NVIDIA's logs: 150,080


def test_resnet_is_evaluated_every_fourth_epoch_from_any_of_the_first_four():
    def epochs(*settings):
        config = load_config("image_classification", "closed", size="full", settings=list(settings)).config
        return [config.plan().epoch(step) for step in config.plan().evaluation_steps]

    assert epochs() == [*range(3, 40, 4)]
    assert epochs("evaluate_offset=0ep", "max_duration=40ep") == [*range(4, 41, 4)]
    assert epochs("evaluate_offset=1ep", "max_duration=41ep") == [*range(1, 42, 4)]


def other_batches(benchmark):
    """Yield batch, configuration and settings of the rows of a page's table of other batch sizes."""
    page = (ROOT / benchmark / "README.md").read_text()
    row = r"^\| ([\d,]+) \| `(closed\w*)` \| [^|]+ \| (?:`--set ([^`]+)`|none: the file as it is) \|$"
    for batch, name, settings in re.findall(row, page, re.MULTILINE):
        yield int(batch.replace(",", "")), name, settings.split()


@pytest.mark.parametrize("benchmark", benchmarks())
def test_the_batches_of_the_page_keep_the_rules(benchmark):
    rows = list(other_batches(benchmark))
    assert len(rows) >= 4
    for batch, name, settings in rows:
        assert name in configurations(benchmark)
        config = load_config(benchmark, name, size="full", settings=settings).config
        assert (config.submission.division, config.global_batch_size) == ("closed", batch)


@pytest.mark.parametrize("benchmark", benchmarks())
def test_a_part_of_a_closed_batch_can_be_measured(benchmark):
    config = device_run.load(benchmark, "closed", size="full")
    assert config.submission.division == "open" and config.optimizer.name in ("lars", "lamb")
    ema = [f"methods.ema={EMA}"]  # which the division refuses
    loaded = device_run.load_for_ranks(benchmark, "closed", size="full", settings=ema, num_ranks=3)
    assert loaded.config.global_batch_size > 1 and "ema" in loaded.config.methods
    assert "ema" in device_run.load("image_classification", "closed+ema", size="full").methods
