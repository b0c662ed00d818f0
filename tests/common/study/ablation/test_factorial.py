"""Fractional factorial designs against their definition."""

import itertools
import math

import numpy as np
import pytest

from common.study.ablation.factorial import design, effect, smallest


def words(factors, longest):
    sizes = range(1, longest + 1)
    return [frozenset(word) for size in sizes for word in itertools.combinations(factors, size)]


def column(word, runs):
    """Return a word's column as the definition says: the product of the levels of its factors."""
    return np.array([math.prod(1 if factor in on else -1 for factor in word) for on in runs])


@pytest.mark.parametrize(
    ("count", "max_runs", "num_runs", "resolution"),  # Box, Hunter and Hunter, table of 2^(k-p) designs
    [
        (2, 16, 4, math.inf),
        (3, 4, 4, 3),
        (3, 16, 8, math.inf),
        (5, 16, 16, 5),
        (6, 16, 16, 4),
        (8, 16, 16, 4),
        (9, 16, 16, 3),
        (6, 32, 32, 6),
        (7, 32, 16, 4),
        (12, 32, 32, 4),
        (16, 32, 32, 4),
    ],
)
def test_a_design_is_balanced_orthogonal_and_of_the_highest_resolution(count, max_runs, num_runs, resolution):
    factors = tuple("ABCDEFGHIJKLMNOP"[:count])
    made = design(factors, max_runs)
    runs = made.runs
    assert len(runs) == len(set(runs)) == num_runs and made.resolution == resolution
    assert frozenset(factors) in runs  # the configuration itself
    levels = np.array([column(factor, runs) for factor in factors])
    assert (levels @ levels.T == num_runs * np.eye(count)).all() and (levels.sum(axis=1) == 0).all()
    longest = count if resolution == math.inf else resolution
    constant = [len(word) for word in words(factors, longest) if abs(column(word, runs).sum()) == num_runs]
    assert min(constant, default=math.inf) == resolution


@pytest.mark.parametrize(
    ("count", "max_runs", "says"),
    [
        (3, 4, "unseen, being aliases of single factors: B x C, A x C, A x B"),
        (5, 16, "interactions of two are told apart"),
        (6, 16, "aliases of each other"),
        (9, 16, "aliases of each other"),
    ],
)
def test_an_effect_is_the_sum_of_its_aliases_and_exact_where_it_has_none(count, max_runs, says):
    factors = "ABCDEFGHI"[:count]
    made, generator = design(factors, max_runs), np.random.default_rng(count)
    true = {word: generator.normal() for word in words(factors, 2)}
    responses = {
        on: 3.0 + sum(value / 2 * column(word, [on])[0] for word, value in true.items()) for on in made.runs
    }
    assert set(itertools.chain(*made.aliases)) == true.keys()
    for string in made.aliases:
        levels = column(string[0], made.runs)
        assert all((column(word, made.runs) == levels).all() for word in string)
        assert effect(string[0], responses) == pytest.approx(sum(true[word] for word in string), abs=1e-12)
    singles = [string for string in made.aliases if len(string[0]) == 1]
    assert len(singles) == count and made.interactions == made.aliases[count:]
    assert says in made.describe()


@pytest.mark.parametrize("count", [16, 5, 2, 4, 9])
def test_the_smallest_design_has_as_many_runs_as_it_says(count):
    assert len(design("ABCDEFGHIJKLMNOP"[:count], smallest(count)).runs) == smallest(count)
