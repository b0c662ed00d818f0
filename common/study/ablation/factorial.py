"""Two-level fractional factorial designs: few runs that tell main effects and interactions apart.

A word is a set of factors; its column is the product of their levels, +1 (on) and -1. Effects whose words
differ by a defining word have the same column in every run of the fraction: they are aliases, only their sum
can be estimated. The resolution is the length of the shortest defining word: at IV no main effect is an alias
of an interaction of two, at V no interaction of two is one of another. Source: Box, Hunter and Hunter,
Statistics for Experimenters, chapter 6.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Word = frozenset[str]

IDENTITY: Word = frozenset()
CLEAR = 5  # of this resolution on main effects and interactions of two are all told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """The `base` factors take every combination of levels; each of `generators` is a product of some."""

    factors: tuple[str, ...]
    base: tuple[str, ...]
    generators: dict[str, Word]

    @property
    def runs(self) -> list[Word]:
        """The factors that are on in each run, all of them in one run."""
        runs = []
        for size in range(len(self.base), -1, -1):
            for chosen in itertools.combinations(self.base, size):
                on = set(chosen)
                on |= {name for name, word in self.generators.items() if sign(word, on) > 0}
                runs.append(frozenset(on))
        return runs

    @property
    def defining_words(self) -> list[Word]:
        return products([word | {name} for name, word in self.generators.items()])

    @property
    def resolution(self) -> float:
        return min((len(word) for word in self.defining_words), default=math.inf)

    def aliases(self, word: Word, longest: int = 2) -> list[Word]:
        """Return the other words of at most so many factors with the same column."""
        same = [word ^ defining for defining in self.defining_words]
        return sorted((alias for alias in same if 0 < len(alias) <= longest), key=ordered)

    @property
    def pairs(self) -> list[Word]:
        """Every two factors."""
        return [frozenset(pair) for pair in itertools.combinations(self.factors, 2)]

    def hides(self, pair: Word) -> bool:
        """Return whether the interaction of a pair is an alias of a single factor: it cannot be seen."""
        return bool(self.aliases(pair, longest=1))

    def interactions(self) -> list[list[Word]]:
        """Return the interactions of two factors that can be seen, with those that each is an alias of."""
        seen: set[Word] = set()
        strings = []
        for pair in self.pairs:
            if pair not in seen and not self.hides(pair):
                strings.append([pair, *self.aliases(pair)])
                seen |= set(strings[-1])
        return strings

    def describe(self) -> str:
        """Return size, resolution and alias structure in words."""
        count, num_factors, runs = len(self.generators), len(self.factors), 2 ** len(self.base)
        if not count:
            return f"full factorial of {num_factors} factors in {runs} runs: nothing is an alias"
        made = ", ".join(f"{name} = {spelled(word)}" for name, word in self.generators.items())
        strings = [string for string in self.interactions() if len(string) > 1]
        paired = "; ".join(" = ".join(map(spelled, string)) for string in strings)
        hidden = ", ".join(spelled(pair) for pair in self.pairs if self.hides(pair))
        kinds = {"aliases of each other": paired, "unseen, being aliases of single factors": hidden}
        aliases = [f"{what}: {words}" for what, words in kinds.items() if words]
        return (
            f"2^({num_factors}-{count}) in {runs} runs, resolution {roman(self.resolution)}: {made}; "
            f"{'; '.join(aliases) or 'interactions of two are told apart'}"
        )


def sign(word: Word, on: set[str] | Word) -> int:
    """Return the level of a word's column in the run where these factors are on."""
    return -1 if len(word - on) % 2 else 1


def products(words: Sequence[Word]) -> list[Word]:
    """Return all products of one or more of these words; a factor times itself is 1."""
    products = [IDENTITY]
    for word in words:
        products += [word ^ other for other in products]
    return products[1:]


def effect(word: Word, responses: dict[Word, float]) -> float:
    """Return the mean response where a word's column is +1 minus that where it is -1.

    Of a main effect this is what switching the factor on changes, averaged over the levels of the others; of
    an interaction of two, half of how much one changes what the other does.
    """
    return 2 * sum(sign(word, on) * response for on, response in responses.items()) / len(responses)


def smallest(num_factors: int) -> int:
    """Return the runs of the smallest design: the power of two that is more than its factors."""
    return 1 << num_factors.bit_length()


def design(factors: Sequence[str], max_runs: int) -> Design:
    """Return the design of the highest resolution in at most `max_runs` runs, of those the smallest.

    More than resolution V is not asked for. Among equals the one with the fewest shortest defining words.
    """
    if max_runs < smallest(len(factors)):
        raise ValueError(f"{len(factors)} factors need {smallest(len(factors))} runs, not {max_runs}")
    best: Design | None = None
    for num_base in range(1, min(len(factors), max_runs.bit_length() - 1) + 1):
        if 2**num_base > len(factors):
            candidate = fraction(tuple(factors), num_base)
            if best is None or min(candidate.resolution, CLEAR) > min(best.resolution, CLEAR):
                best = candidate
    assert best is not None  # the smallest design is among those tried
    return best


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
        for chosen in itertools.islice(itertools.combinations(candidates, len(added)), 5000)
    )
    return min(made, key=aberration)


def aberration(design: Design) -> list[int]:
    lengths = [len(word) for word in design.defining_words]
    return [lengths.count(length) for length in range(1, len(design.factors) + 1)]


def ordered(word: Word) -> tuple[int, list[str]]:
    """Sort key: main effects before interactions."""
    return len(word), sorted(word)


def spelled(word: Word) -> str:
    """Return a word as text."""
    return " x ".join(sorted(word))


def roman(resolution: float) -> str:
    numerals = {3: "III", 4: "IV", 5: "V", 6: "VI", 7: "VII", 8: "VIII"}
    return numerals.get(int(resolution), str(int(resolution)))
