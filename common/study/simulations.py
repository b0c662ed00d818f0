"""Simulated studies with a known truth: how often each rule is wrong, and the coverage of its intervals.

Every rule is the function that the commands call. common/study/page.py puts the table into SIMULATIONS.md;
tests/common/study/test_simulations.py checks it. Every simulation has a fixed seed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from common.evidence import intervals
from common.evidence.compare.sequential import decide
from common.evidence.disturbance import slow_runs
from common.evidence.intervals import ALPHA
from common.evidence.ledger import EffectTest, Trained
from common.evidence.page import markdown_table
from common.study.ablation.factorial import design, interaction
from common.study.ablation.ledger import minutes_saved
from common.study.ablation.measurements import Measurements, test_contrasts
from common.study.ablation.switches import State, Step
from common.study.ranking import bound_qualities, bound_times
from common.study.simulated_sweeps import (
    LEVEL,
    NUM_STUDIES,
    QUALITY_SPREAD,
    RISING,
    SATURATING,
    SOONER,
    false_crossings,
    false_leads,
    frontier_quality,
    frontier_time,
    holds,
    sweep_ratio,
)
from common.study.trials import Trial

NUM_TURNS = 9
WRONG, HELD, FOUND = "false positives", "coverage", "found"
NUM_IMAGES = 360  # that a quality is measured on
BASE_LOG_SAMPLES = 8.0  # of an ablation
FIRST = Step(before=State(), after=State({"switch0"}))  # of its switches
ALIKE = (0, 1.0)  # no recipe varies more than the others


def ablations(
    num_switches: int,
    num_seeds: int,
    generator: np.random.Generator,
    *,
    samples: float = 0.0,
    seed_spread: float = 0.2,
    noisy: tuple[int, float] = (0, 1.0),
) -> Iterator[Measurements]:
    """Yield measurements of a base and of each switch alone; none does anything but change log samples.

    `noisy` is a state, 0 for the base, and how many times as much as the others it varies.
    """
    states = [State(), *(State({f"switch{number}"}) for number in range(num_switches))]
    for _ in range(NUM_STUDIES):
        of_seeds = generator.standard_normal(num_seeds)  # good or bad for all states alike
        noise = generator.standard_normal((2, len(states), num_seeds))
        noise[:, noisy[0]] *= noisy[1]
        logs = BASE_LOG_SAMPLES + 0.1 * noise[0] + seed_spread * of_seeds
        logs[1:] += samples
        qualities = 0.9 + 0.01 * noise[1] - 0.02 * of_seeds
        turns = np.exp(0.05 * generator.standard_normal((len(states), NUM_TURNS)))
        yield Measurements(
            base_s=1.0,
            turns=dict(zip(states, turns.tolist(), strict=True)),
            runs={
                state: [
                    Trained.model_construct(
                        seed=str(seed), samples=math.exp(log), quality=quality, is_bound=False
                    )
                    for seed, (log, quality) in enumerate(zip(logs[row], qualities[row], strict=True))
                ]
                for row, state in enumerate(states)
            },
            shares={},
        )


@cache
def test_idle_switches(
    num_switches: int, num_seeds: int, noisy: tuple[int, float] = (0, 1.0)
) -> list[list[dict[str, EffectTest]]]:
    """Test the switches in every ablation, none of which does anything."""
    base, *states = [State(), *(State({f"switch{number}"}) for number in range(num_switches))]
    contrasts = [{state: 1.0, base: -1.0} for state in states]
    tests = []
    for study in ablations(num_switches, num_seeds, np.random.default_rng(num_switches), noisy=noisy):
        turns = [study.log_ratios(state, base) for state in states]
        tests.append(test_contrasts(study, contrasts, "throughput", turns))
    return tests


def false_effects(
    figure: str, num_switches: int, num_seeds: int, base_noise: float, _: np.random.Generator
) -> Iterator[bool]:
    """Yield whether an ablation of switches that do nothing shows an effect of one of them."""
    for rows in test_idle_switches(num_switches, num_seeds, (0, base_noise)):
        yield any(tests[figure].is_shown for tests in rows)


def effect_coverage(
    num_switches: int, num_seeds: int, switch_noise: float, generator: np.random.Generator
) -> Iterator[bool]:
    """Yield whether the interval of a switch's samples holds the truth, a tenth fewer."""
    truth = math.log(0.9)
    for study in ablations(num_switches, num_seeds, generator, samples=truth, noisy=(1, switch_noise)):
        if estimate := study.log_samples.estimate(FIRST.contrast):
            yield holds(estimate.interval, truth)


def saved_coverage(num_switches: int, num_seeds: int, generator: np.random.Generator) -> Iterator[bool]:
    """Yield whether the interval of the minutes that a switch saves holds the truth, half of them.

    The interval is for the seeds that were run. What these have in common would scale it and the truth alike
    and is left out.
    """
    truth = math.exp(BASE_LOG_SAMPLES) / 60 / 2
    for study in ablations(num_switches, num_seeds, generator, samples=math.log(0.5), seed_spread=0.0):
        log_time = intervals.median(study.log_ratios(FIRST.after, FIRST.before))
        if log_samples := study.log_samples.estimate(FIRST.contrast):
            yield holds(minutes_saved(study, FIRST, log_time, log_samples).interval, truth)


def false_interactions(num_factors: int, generator: np.random.Generator) -> Iterator[bool]:
    """Yield whether a factorial of two runs a state shows an interaction of samples where there is none."""
    made = design([f"switch{number}" for number in range(num_factors)], 2**num_factors)
    contrasts = [interaction(words[0], made.runs) for words in made.interactions]
    for study in ablations(len(made.runs), 2, generator):
        runs = dict(zip(made.runs, study.runs.values(), strict=False))
        rows = test_contrasts(replace(study, runs=runs), contrasts, "lost_ms", [[0.0]] * len(contrasts))
        yield any(tests["samples"].is_shown for tests in rows)


def false_gains(num_switches: int, generator: np.random.Generator) -> Iterator[bool]:
    """Yield whether one of many switches that gain just their bound seems to gain more."""
    for study in generator.standard_normal((NUM_STUDIES, num_switches, NUM_TURNS)):
        p_values = [intervals.sign_p_value(gains, is_above=True) for gains in study]
        yield min(intervals.holm(p_values)) < ALPHA


def false_leaders(
    figure: str, num_recipes: int, num_runs: int, noisy: tuple[int, float], generator: np.random.Generator
) -> Iterator[bool]:
    """Yield whether one of many equal recipes is shown to be faster, or to end at a higher accuracy.

    `noisy` is a number of recipes, and how many times as much as the others they vary.
    """
    noise = generator.standard_normal((NUM_STUDIES, num_recipes, num_runs))
    noise[:, : noisy[0]] *= noisy[1]
    if figure == "quality":
        studies = np.round((0.95 + QUALITY_SPREAD * noise) * NUM_IMAGES) / NUM_IMAGES
        steps = dict.fromkeys(range(num_recipes), 1 / NUM_IMAGES)
        bound = partial(bound_qualities, steps=steps)
    else:
        studies, bound = np.exp(0.15 * noise), partial(bound_times)
    for study in studies.tolist():
        bounds = bound(dict(enumerate(study))).values()
        yield min(high for _, high in bounds) < max(low for low, _ in bounds)


def best_trial_coverage(
    num_trials: int, num_runs: int, between: float, slow_spread: float, generator: np.random.Generator
) -> Iterator[bool]:
    """Yield whether the interval of the best trials' speed-up holds the ratio of their expected times.

    One side takes twice the time. Its runs of a trial vary by `slow_spread`, those of the other side by 15 %,
    recipes by `between`.
    """
    for _ in range(NUM_STUDIES):
        sides = []
        for log_time, spread in ((math.log(2), slow_spread), (0.0, 0.15)):
            truths = log_time + between * generator.standard_normal(num_trials)
            minutes = np.exp(truths[:, None] + spread * generator.standard_normal((num_trials, num_runs)))
            trials = [Trial(settings=(), minutes=tuple(runs), samples=()) for runs in minutes.tolist()]
            best = min(range(num_trials), key=lambda number: trials[number].rank)
            sides.append((truths[best], minutes[best]))
        (slow, slow_minutes), (fast, fast_minutes) = sides
        yield holds(intervals.ratio(slow_minutes, fast_minutes).interval, math.exp(slow - fast))


def find_differences(num_pairs: int, shift: float, generator: np.random.Generator) -> Iterator[bool]:
    """Yield whether a comparison, looked at after every pair, shows a difference of `shift` deviations."""
    for pairs in shift + generator.standard_normal((NUM_STUDIES, num_pairs)):
        outcome = decide(pairs, margin=0.0, max_pairs=num_pairs).outcome
        yield outcome == "higher" or (outcome == "lower" and not shift)


def flag_runs(
    num_runs: int, num_slow: int, spread: float, block_spread: float, generator: np.random.Generator
) -> Iterator[bool]:
    """Yield whether all slow runs of a set are flagged; of a set without them, whether any run is.

    The first ones are 1.5 times slower; runs vary by `spread`, their blocks by `block_spread`.
    """
    slow = set(range(num_slow))
    for _ in range(NUM_STUDIES):
        runs, blocks = (generator.standard_normal((num_runs, size)) for size in (1, 6))
        rates = np.exp(spread * runs + block_spread * blocks)
        rates[:num_slow] /= 1.5
        flagged = set(slow_runs([dict(enumerate(run)) for run in rates.tolist()]))
        yield slow <= flagged if slow else bool(flagged)


def score_coverage(num_runs: int, generator: np.random.Generator) -> Iterator[bool]:
    """Yield whether a score's interval holds the expected score of so many runs, which vary by 15 %."""
    many = np.sort(np.exp(0.15 * generator.standard_normal((200_000, num_runs))), axis=1)
    expected = float(many[:, 1:-1].mean())
    for minutes in np.exp(0.15 * generator.standard_normal((NUM_STUDIES, num_runs))):
        yield holds(intervals.student_of_logs(minutes), expected)


def speedup_coverage(num_slow: int, num_fast: int, generator: np.random.Generator) -> Iterator[bool]:
    """Yield whether a speed-up's interval holds the truth; the fast runs vary by 15 %, the slow by 5 %."""
    for _ in range(NUM_STUDIES):
        slow, fast = map(generator.standard_normal, (num_slow, num_fast))
        yield holds(intervals.ratio(2 * np.exp(0.05 * slow), np.exp(0.15 * fast)).interval, 2.0)


Simulate = Callable[..., Iterator[bool]]
Truths = Sequence[tuple[str, str, tuple[Any, ...]]]  # a rule, a truth in words and as arguments
RULES: dict[str, tuple[str, str, Simulate]] = {  # name, meaning of the share of studies, simulation
    "crossing": ("sweep: a crossing", WRONG, false_crossings),
    "ahead": ("sweep: ahead", WRONG, false_leads),
    "quality": ("sweep: quality within a time", HELD, frontier_quality),
    "quality, noisy": ("sweep: quality within a time", HELD, partial(frontier_quality, time_spread=0.13)),
    "time": ("sweep: time to a quality", HELD, frontier_time),
    "ratio": ("sweep: how many times sooner", HELD, sweep_ratio),
    "best trial": ("sweep: the best of the trials", HELD, best_trial_coverage),
    "different": ("compare: a difference", WRONG, find_differences),
    "found": ("compare: a difference", FOUND, find_differences),
    "samples": ("ablate: an effect on samples", WRONG, partial(false_effects, "samples")),
    "throughput": ("ablate: an effect on throughput", WRONG, partial(false_effects, "throughput")),
    "fewer samples": ("ablate: samples of a switch", HELD, effect_coverage),
    "bound": ("ablate: more than Amdahl's bound", WRONG, false_gains),
    "better switch": ("ablate: an effect on quality", WRONG, partial(false_effects, "quality")),
    "saved": ("ablate: minutes saved", HELD, saved_coverage),
    "interaction": ("ablate: an interaction of samples", WRONG, false_interactions),
    "faster": ("explore: a recipe is faster", WRONG, false_leaders),
    "better": ("explore: a recipe is better", WRONG, false_leaders),
    "disturbed": ("score: a disturbed run", WRONG, flag_runs),
    "slow": ("score: a disturbed run", FOUND, flag_runs),
    "score": ("score: its interval", HELD, score_coverage),
    "speed-up": ("score: a speed-up", HELD, speedup_coverage),
}
TRUTHS: Truths = (
    ("crossing", "equal curves, 3 seeds", (SATURATING, SATURATING, 3)),
    ("crossing", "one is sooner at one asymptote, 5 seeds", (SOONER, SATURATING, 5)),
    ("quality", "rising, 3 seeds", (RISING, 3, 20.0)),
    ("quality", "saturating, 5 seeds", (SATURATING, 5, 50.0)),
    ("quality", "level, 3 seeds", (LEVEL, 3, 50.0)),
    ("time", "saturating, 3 seeds", (SATURATING, 3, 0.85)),
    ("time", "rising, 5 seeds", (RISING, 5, 0.8)),
    ("samples", "8 idle switches, 2 seeds", (8, 2, 1.0)),
    ("throughput", "8 idle switches, 9 independent turns, one process", (8, 2, 1.0)),
    ("fewer samples", "a tenth fewer, 2 seeds", (8, 2, 1.0)),
    ("bound", "14 switches gain just that, 9 independent turns, one process", (14,)),
    ("interaction", "3 idle switches, 2 seeds", (3,)),
    ("faster", "20 equal recipes, 2 runs each", ("time", 20, 2, ALIKE)),
    ("disturbed", "none, 2 runs", (2, 0, 0.08, 0.08)),
    ("disturbed", "none, 10 runs", (10, 0, 0.08, 0.08)),
    ("score", "5 runs", (5,)),
    ("score", "10 runs", (10,)),
    ("ahead", "equal curves, 360 images, 2 seeds", (SATURATING, 360, 2)),
    ("slow", "two of ten runs 1.5x slower, spread 3 %", (10, 2, 0.03, 0.03)),
    (
        "faster",
        "20 equal recipes, half of them with three times the spread, 2 runs each",
        ("time", 20, 2, (10, 3.0)),
    ),
    ("better", "20 equal recipes, 360 images, 2 runs each", ("quality", 20, 2, ALIKE)),
    ("speed-up", "2, by 5 runs of each, one side with three times the spread", (5, 5)),
    ("quality", "level, 5 seeds, after a third of the time", (LEVEL, 5, 20.0)),
    ("better switch", "8 idle switches, 2 seeds", (8, 2, 1.0)),
    ("saved", "half of the samples, 2 seeds, which the interval is for", (8, 2)),
    ("ratio", "rising against saturating, 3 seeds", (RISING, SATURATING, 3, 0.8)),
    ("time", "rising, 5 seeds, where half of the runs of a budget reach it", (RISING, 5, 0.765)),
    ("best trial", "8 trials of 3 runs; recipes vary by 30 %", (8, 3, 0.3, 0.15)),
    (
        "best trial",
        "8 trials of 3 runs, one side with three times the spread; recipes vary by 30 %",
        (8, 3, 0.3, 0.05),
    ),
    ("different", "none, a look after each of 20 pairs", (20, 0.0)),
    ("found", "two standard deviations of a pair, 10 pairs", (10, 2.0)),
)
LIMITS: Truths = (  # where an assumption of the rule does not hold
    ("samples", "8 idle switches, 2 seeds, the base with three times the spread", (8, 2, 3.0)),
    ("fewer samples", "a tenth fewer, 2 seeds, with three times the spread of the other states", (8, 2, 3.0)),
    (
        "faster",
        "20 equal recipes, one of them with ten times the spread, 2 runs each",
        ("time", 20, 2, (1, 10.0)),
    ),
    (
        "faster",
        "60 equal recipes, 5 of them with five times the spread, 2 runs each",
        ("time", 60, 2, (5, 5.0)),
    ),
    ("speed-up", "2, by 5 runs and by 2 runs with three times the spread", (5, 2)),
    ("disturbed", "none, 10 runs that vary by 17 %, their blocks by 8 %", (10, 0, 0.17, 0.08)),
    (
        "quality, noisy",
        "saturating, 3 seeds, run times vary by 13 %, early in training",
        (SATURATING, 3, 9.0),
    ),
)


def rows_of(truths: Truths) -> list[tuple[str, str, str]]:
    """Return rule, truth and the meaning of the share of each."""
    return [(RULES[rule][0], truth, RULES[rule][1]) for rule, truth, _ in truths]


def share(simulate: Simulate, *arguments: object, seed: int) -> float:
    return float(np.mean([*simulate(*arguments, np.random.default_rng(seed))]))


def simulate_all(truths: Truths) -> list[float]:
    """Return the share of studies of each; about 20 s for TRUTHS."""
    return [
        share(RULES[rule][2], *arguments, seed=seed) for seed, (rule, _, arguments) in enumerate(truths, 1)
    ]


def write_table(truths: Truths, shares: Sequence[float]) -> str:
    rows = [
        (rule, truth, f"{kind} {100 * share:.1f} %")
        for (rule, truth, kind), share in zip(rows_of(truths), shares, strict=True)
    ]
    return markdown_table(("rule", "truth", "in 2,000 studies"), rows)
