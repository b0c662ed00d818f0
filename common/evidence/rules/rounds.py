"""R: the round of MLPerf Training by whose rules a run set is to be judged."""

from collections.abc import Iterator
from typing import NamedTuple

from common.evidence.log import RunSet
from common.evidence.rules.rule import Found, rule

ROUNDS = {  # ruleset: the month after its round, and our benchmarks in it
    "2.0.0": ("2022-07", ("resnet", "bert")),
    "2.1.0": ("2023-01", ("resnet", "bert")),
    "3.0.0": ("2023-07", ("resnet", "bert")),
    "3.1.0": ("2024-01", ("resnet", "bert")),
    "4.0.0": ("2024-07", ("resnet", "bert")),
    "4.1.0": ("2025-01", ("bert",)),
    "5.0.0": ("2025-07", ("bert",)),
    "5.1.0": ("2026-01", ()),
    "6.0.0": ("2026-07", ()),
    "6.1.0": ("2027-01", ()),
}


class ChosenRound(NamedTuple):
    """A run set and the round that a person chose for it."""

    run_set: RunSet
    ruleset: str


def last_round(benchmark: str) -> str:
    """Return the ruleset of the last round with a benchmark: 4.0.0 of resnet, 5.0.0 of bert."""
    return max(ruleset for ruleset, (_, names) in ROUNDS.items() if benchmark in names)


@rule("R701", "error", "logging: benchmark_meta", breaks=lambda chosen: chosen._replace(ruleset="6.1.0"))
def round_has_the_benchmark(subject: ChosenRound) -> Iterator[Found]:
    """The chosen round has the benchmark; else MLCommons' package checker prints SUCCESS and reads no log."""
    benchmark = subject.run_set.lead.benchmark
    if benchmark and benchmark not in ROUNDS[subject.ruleset][1]:
        text = f"{subject.ruleset} skips {benchmark}, whose last round was {last_round(benchmark)}"
        yield Found(0, text, path=subject.run_set.folder)
