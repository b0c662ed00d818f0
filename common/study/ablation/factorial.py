"""Two-level fractional factorial designs: few runs that tell main effects and interactions apart.

A word is a set of factors; its column is the product of their levels, +1 (on) and -1. Effects whose words
differ by a defining word have the same column in every run of the fraction: they are aliases, only their sum
can be estimated. The resolution is the length of the shortest defining word: at IV no main effect is an alias
of an interaction of two, at V no interaction of two is one of another. Source: Box, Hunter and Hunter,
Statistics for Experimenters, chapter 6.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

Word = frozenset[str]

CLEAR = 5  # from this resolution on all main effects and interactions of two are told apart
MAX_TRIALS = 5000  # fractions of one size that are compared
ROMAN = {3: "III", 4: "IV", 5: "V", 6: "VI", 7: "VII", 8: "VIII"}


@dataclass(frozen=True, kw_only=True)
class Design:
    """The `base` factors take every combination of levels; each of `generators` is a product of some."""

    factors: tuple[str, ...]
    base: tuple[str, ...]
    generators: dict[str, Word]

    @cached_property
    def runs(self) -> list[Word]:
        """The factors that are on in each run, all of them in one run."""
        runs = []
        for size in range(len(self.base), -1, -1):
            for on in map(frozenset, itertools.combinations(self.base, size)):
                runs.append(on | {name for name, word in self.generators.items() if sign(word, on) > 0})
        return runs

    @cached_property
    def defining_words(self) -> list[Word]:
        """All products of one or more generators with their factors; a factor times itself is 1."""
        products: list[Word] = [frozenset()]
        for name, word in self.generators.items():
            products += [word ^ {name} ^ other for other in products]
        return products[1:]

    @property
    def resolution(self) -> float:
        return min(map(len, self.defining_words), default=math.inf)

    @cached_property
    def aliases(self) -> list[list[Word]]:
        """The words of one or two factors, single ones first, each with those of the same column."""
        columns: dict[tuple[int, ...], list[Word]] = defaultdict(list)
        for names in itertools.chain.from_iterable(itertools.combinations(self.factors, n) for n in (1, 2)):
            word = frozenset(names)
            columns[tuple(sign(word, on) for on in self.runs)].append(word)
        return list(columns.values())

    @property
    def interactions(self) -> list[list[Word]]:
        """The interactions of two factors that can be seen, each with those that it is an alias of."""
        return [words for words in self.aliases if len(words[0]) == 2]

    def describe(self) -> str:
        count, num_factors, runs = len(self.generators), len(self.factors), 2 ** len(self.base)
        if not count:
            return f"full factorial of {num_factors} factors in {runs} runs: nothing is an alias"
        numeral = ROMAN.get(int(self.resolution), f"{self.resolution:g}")
        made = ", ".join(f"{name} = {spell(word)}" for name, word in self.generators.items())
        paired = "; ".join(" = ".join(map(spell, words)) for words in self.interactions if len(words) > 1)
        of_single = [word for words in self.aliases if len(words[0]) == 1 for word in words[1:]]
        hidden = ", ".join(map(spell, of_single))
        kinds = {"aliases of each other": paired, "unseen, being aliases of single factors": hidden}
        aliases = "; ".join(f"{what}: {words}" for what, words in kinds.items() if words)
        return (
            f"2^({num_factors}-{count}) in {runs} runs, resolution {numeral}: {made}; "
            f"{aliases or 'interactions of two are told apart'}"
        )


def spell(word: Word) -> str:
    return " x ".join(sorted(word))


def sign(word: Word, on: Word) -> int:
    """Return the level of a word's column in the run where these factors are on."""
    return -1 if len(word - on) % 2 else 1


def effect(word: Word, responses: dict[Word, float]) -> float:
    """Return the mean response where a word's column is +1 minus that where it is -1.

    A main effect is the change by switching the factor on, averaged over the levels of the others. An
    interaction of two is half of the change that one factor makes in the effect of the other.
    """
    return 2 * sum(sign(word, on) * response for on, response in responses.items()) / len(responses)


def interaction(word: Word, runs: Sequence[Word]) -> dict[Word, float]:
    """Return the weight of each run's response in the change that one factor makes in another's effect."""
    return {on: 4 * sign(word, on) / len(runs) for on in runs}


def smallest(num_factors: int) -> int:
    """Return the runs of the smallest design: the power of two that is more than its factors."""
    return 1 << num_factors.bit_length()


def design(factors: Sequence[str], max_runs: int) -> Design:
    """Return the design of the highest resolution in at most `max_runs` runs, of those the smallest.

    Resolutions above V count as V. In one size the design with the fewest shortest defining words is best.
    `max_runs` is at least `smallest(len(factors))`.
    """
    fewest, most = len(factors).bit_length(), max_runs.bit_length() - 1
    sizes = range(fewest, min(len(factors), most) + 1)
    fractions = (fraction(tuple(factors), num_base) for num_base in sizes)
    return max(fractions, key=lambda made: min(made.resolution, CLEAR))


def fraction(factors: tuple[str, ...], num_base: int) -> Design:
    """Return the best fraction in 2^num_base runs; generators of an odd length where there are many."""
    base, added = factors[:num_base], factors[num_base:]
    words = [
        frozenset(word) for size in range(num_base, 1, -1) for word in itertools.combinations(base, size)
    ]
    longer = [word for word in words if len(word) > 2]  # else a main effect is an alias of an interaction
    odd = [word for word in longer if len(word) % 2]
    few = len(added) <= 4
    candidates = next(some for some in (longer if few else odd, longer, words) if len(some) >= len(added))
    made = (
        Design(factors=factors, base=base, generators=dict(zip(added, chosen, strict=True)))
        for chosen in itertools.islice(itertools.combinations(candidates, len(added)), MAX_TRIALS)
    )
    return max(made, key=lambda design: sorted(map(len, design.defining_words)))
