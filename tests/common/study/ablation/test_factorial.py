"""Fractional factorial designs against their definition."""

import itertools
import math

import numpy as np
import pytest

from common.study.ablation.factorial import design, effect, sign, smallest

SIZES = [
    (2, 16),
    (3, 8),
    (3, 16),
    (5, 16),
    (6, 16),
    (7, 16),
    (8, 16),
    (6, 32),
    (7, 32),
    (12, 32),
    (16, 32),
    (9, 16),
]


def names(count):
    return tuple("ABCDEFGHIJKLMNOP"[:count])


def column(word, runs):
    """Return a word's column as the definition says: the product of the levels of its factors."""
    return np.array([math.prod(1 if factor in on else -1 for factor in word) for on in runs])


def shortest_constant_word(factors, runs):
    """Return the length of the shortest word whose column never changes, by trying all of them."""
    for size in range(1, len(factors) + 1):
        for word in itertools.combinations(factors, size):
            if abs(column(word, runs).sum()) == len(runs):
                return size
    return math.inf


@pytest.mark.parametrize(("count", "max_runs"), SIZES)
def test_a_design_is_balanced_orthogonal_and_of_the_resolution_it_states(count, max_runs):
    made = design(names(count), max_runs)
    runs = made.runs
    assert len(runs) == len(set(runs)) == 2 ** len(made.base) <= max_runs
    assert frozenset(names(count)) in runs  # the configuration itself
    levels = np.array([column(factor, runs) for factor in names(count)])
    assert (levels @ levels.T == len(runs) * np.eye(count)).all()
    assert (levels.sum(axis=1) == 0).all()
    assert made.resolution == shortest_constant_word(names(count), runs)


@pytest.mark.parametrize(
    ("count", "max_runs", "num_runs", "resolution"),
    [(3, 16, 8, math.inf), (5, 16, 16, 5), (6, 16, 16, 4), (8, 16, 16, 4), (9, 16, 16, 3), (6, 32, 32, 6)],
)
def test_the_resolution_is_the_highest_that_so_many_runs_allow(count, max_runs, num_runs, resolution):
    made = design(names(count), max_runs)  # Box, Hunter and Hunter, table of 2^(k-p) designs
    assert (len(made.runs), made.resolution) == (num_runs, resolution)


@pytest.mark.parametrize(("count", "max_runs"), [(5, 16), (6, 16), (7, 16), (8, 16), (9, 16)])
def test_aliases_are_the_words_with_the_same_column(count, max_runs):
    made = design(names(count), max_runs)
    small = [frozenset(w) for size in (1, 2) for w in itertools.combinations(names(count), size)]
    for word in small:
        same = [w for w in small if w != word and (column(w, made.runs) == column(word, made.runs)).all()]
        assert set(made.aliases(word)) == set(same)
        assert all(
            sign(word, on) == level for on, level in zip(made.runs, column(word, made.runs), strict=True)
        )


def test_effects_are_recovered_exactly_where_nothing_is_an_alias():
    made, generator = design(names(5), 16), np.random.default_rng(0)
    words = [frozenset(w) for size in (1, 2) for w in itertools.combinations(names(5), size)]
    true = {word: generator.normal() for word in words}
    responses = {on: 3.0 + sum(true[w] / 2 * column(w, [on])[0] for w in words) for on in made.runs}
    for word in words:
        assert effect(word, responses) == pytest.approx(true[word], abs=1e-12)


def test_a_string_of_aliases_estimates_the_sum_of_its_interactions():
    made, generator = design(names(6), 16), np.random.default_rng(1)
    strings = made.interactions()
    true = {word: generator.normal() for string in strings for word in string}
    assert len(true) == 15 and any(len(string) > 1 for string in strings)
    responses = {on: sum(value / 2 * column(w, [on])[0] for w, value in true.items()) for on in made.runs}
    for string in strings:
        assert effect(string[0], responses) == pytest.approx(sum(true[word] for word in string), abs=1e-12)
        assert "=" in made.describe()


@pytest.mark.parametrize(("count", "max_runs"), [(16, 16), (5, 6), (5, 7), (2, 3), (4, 7), (9, 15)])
def test_more_factors_than_runs_are_refused(count, max_runs):
    with pytest.raises(ValueError, match=f"{count} factors need"):
        design(names(count), max_runs)
    assert len(design(names(count), smallest(count)).runs) == smallest(count)


def test_a_design_says_which_interactions_are_aliases_of_single_factors():
    made = design(names(3), 4)
    assert made.resolution == 3 and made.interactions() == []
    assert made.describe().endswith("unseen, being aliases of single factors: A x B, A x C, B x C")
    assert "unseen" not in design(names(6), 16).describe()
