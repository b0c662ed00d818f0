"""The rules of MLPerf's closed division for BERT-large, as of its last round, v5.0.

Source: training_rules.adoc, rows `bert` of the table of deprecated hyperparameters and of evaluation
frequencies, its sections about CLOSED, and the reference.
"""

from typing import Any

from common.config.division import Rule, all_equal, first_even_evaluation, reaches
from common.config.schema import LAMB
from common.evidence.log import TARGETS
from language_bert.data.sources import WIKIPEDIA

CADENCE_SHARE, CADENCE_UNIT = 0.05, 25_000  # of a run's expected samples, rounded down to this multiple


def cadence_samples(batch_size: int) -> int:
    """Compute the sequences between two evaluations, such as 150,000 for batches up to 2,048."""
    expected = 230.23 * batch_size + 3_000_000  # of the rules
    return int(CADENCE_SHARE * expected / CADENCE_UNIT) * CADENCE_UNIT


def ask_cadence(config: Any) -> str:
    every = f"{cadence_samples(config.global_batch_size)}sp"
    unset = "no evaluate_offset, no evaluate_from"
    return f"evaluations {every} apart ({unset}) and a max_duration that ends with one"


def has_cadence(config: Any) -> bool:
    every = config.steps(f"{cadence_samples(config.global_batch_size)}sp")
    return bool(config.steps(config.evaluate_every) == every == first_even_evaluation(config))


def repeats_no_sample(config: Any) -> bool:
    return bool(config.plan().num_steps * config.global_batch_size <= config.data.num_train_samples)


SAME_AS_THE_REFERENCE = {  # name of the rule -> keys and their values
    "Hyperparameters: the reference's lamb": {
        "optimizer.max_gradient_norm": 1.0,
        "schedule.power": 1,
        "schedule.end_learning_rate": 0,
    },
    "Graph Definition": {"model.dropout": 0.1, "model.activation": "gelu_pytorch_tanh"},
    "Loss function": {"model.next_sentence": True},
    "Data State at Start of Run": {"data.masked_fraction": 0.15, "data.evaluation_masked_fraction": 0.15},
}
SAME_AT_FULL_SIZE = {
    "Graph Definition": {
        "model.vocab_size": 30_522,
        "model.hidden_size": 1024,
        "model.num_hidden_layers": 24,
        "model.num_attention_heads": 16,
        "model.intermediate_size": 4096,
    },
    "Weight and Bias Initialization": {"model.start": "checkpoint", "model.position_scale": 0},
    "Data State at Start of Run": {"data.corpus": WIKIPEDIA, "data.num_duplicates": 10},
    "Training and Test Sets": {"data.num_evaluation_samples": 10_000},
}
RULES = (
    Rule(
        name="Hyperparameters: the reference's optimizer",
        key="optimizer.name",
        asks="lamb or fused_lamb",
        holds=lambda c: c.optimizer.name in LAMB,
    ),
    Rule(
        name="Hyperparameters: the reference's lamb",
        key="methods.fused_qkv",
        asks="off: a trust ratio for each projection",
        holds=lambda c: "fused_qkv" not in c.methods,
    ),
    Rule(
        name="Hyperparameters: the reference's lamb",
        key="schedule.name",
        asks="polynomial, or linear: of power 1",
        holds=lambda c: c.schedule.name in ("polynomial", "linear"),
    ),
    Rule(
        name="Hyperparameters: the reference's lamb",
        key="schedule.decay_from",
        asks="start with a warm-up, and schedule.name polynomial, which has that key",
        holds=lambda c: c.plan().warmup_steps == 0 or c.schedule.decay_from == "start",
        full_only=True,
    ),
    reaches(TARGETS["bert"]),
    Rule(
        name="Quality measure: evaluation frequency",
        key="evaluate_every",
        asks=ask_cadence,
        holds=has_cadence,
        full_only=True,
    ),
    Rule(
        name="Data Representation",  # which lets training sequences be shorter, and no others
        key="data.max_seq_length",
        asks="512: one length for both sets",
        holds=lambda c: c.data.max_seq_length == 512,
        full_only=True,
    ),
    Rule(
        name="Training Data Order",
        key="data.num_train_samples",
        asks="as many as max_duration takes, each once",
        holds=repeats_no_sample,
        full_only=True,
    ),
    *all_equal(SAME_AS_THE_REFERENCE),
    *all_equal(SAME_AT_FULL_SIZE, full_only=True),
)
