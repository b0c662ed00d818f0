"""The recipe of a run, which the runs of a set share, and the only comparison of two recipes.

It is the merged configuration, the ranks, the device, the threads where the CPU computes, the versions and
the code: MLPerf wants one system, one framework and one code for a set. The code is compared by a digest of
the files that a run can load, from the head of the log: a set goes on after a commit to a page, a test or a
report, not after one to the loop, a method or a YAML file. Logs without a digest are compared by commit.

Some keys are free: those that name the submission, the place of the data (their fingerprint is compared
elsewhere) and how often a checkpoint is kept.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from common import yaml_file
from common.evidence.log import Log
from common.evidence.records import printable

Recipe = dict[str, Any]  # key path -> value
FREE = ("submission.", "checkpoint_every", "data.directory")  # beginnings of keys
SOFTWARE = ("code", "commit", "version ")  # beginnings of keys
NO_EFFECT = ("mlperf-logging",)  # a package that only writes results
MACHINE = ("ranks", "device", "threads")
MISSING = object()


class Difference(NamedTuple):
    """A key in which two recipes differ, with both values as text."""

    key: str
    before: str
    after: str

    @property
    def is_software(self) -> bool:
        return self.key.startswith(SOFTWARE)


def recipe_name(log: Log) -> str:
    """Return the configuration and the changes in its folder's name: `optimized+target=0.1`."""
    _, plus, changes = log.system.partition("+")
    return log.configuration + (plus + changes if log.is_ours else "")


def flat(values: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested values by their key paths."""
    pairs: dict[str, Any] = {}
    for key, value in values.items():
        deeper = isinstance(value, dict) and value
        pairs |= flat(value, f"{path}{key}.") if deeper else {f"{path}{key}": value}
    return pairs


def of_configuration(values: Mapping[str, Any]) -> Recipe:
    """Return a merged configuration by its keys, without those that are free."""
    return {key: value for key, value in flat(values).items() if not key.startswith(FREE)}


def recipe_of(log: Log, complete: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> Recipe:
    """Return the parts of the recipe that a log states.

    `complete` adds the keys that are younger than the log to the configuration. The code of a resumed run,
    which a score counts only on request, is left out.
    """
    stated = configuration_of(log.settings)
    num_accelerators = log.value("num_accelerators")
    facts: Recipe = {"ranks": log.value("num_ranks")}
    if num_accelerators is not None:
        facts["device"] = "GPU" if num_accelerators else "CPU"
        threads = log.value("num_threads") if log.threads is None else log.threads
        facts["threads"] = None if num_accelerators else threads
    if not log.is_resumed:
        facts |= software(log.header("versions"), log.header("code"), log.header("commit"))
    facts = {key: value for key, value in facts.items() if value not in (None, "")}
    return facts if stated is None else of_configuration(complete(stated)) | facts


@cache
def configuration_of(settings: tuple[str, ...]) -> dict[str, Any] | None:
    return yaml_file.parse_head(settings) or None


def count_steps(duration: str, batch_size: int, steps_per_epoch: int) -> int:
    """Return a duration such as `90ep`, `55ba` or `24640sp` in steps, rounded up."""
    count, unit = int(duration[:-2]), duration[-2:]
    if unit == "sp":
        return math.ceil(count / batch_size)
    return count * steps_per_epoch if unit == "ep" else count


def evaluation_steps(
    num_steps: int, every: int, *, offset: int, earliest: int, is_untrained: bool
) -> Iterator[int]:
    """Yield the steps after which a run is evaluated: `offset`, then one in `every` steps, and the last.

    Steps before the `earliest` are left out. With `is_untrained` step 0 comes first.
    """
    offset %= every
    first = max(offset or every, earliest)
    first += (offset - first) % every
    return chain([0] * is_untrained, range(first, num_steps, every), [num_steps])


def software(versions: str, code: str, commit: str) -> Recipe:
    """Return the versions and the code in the head of a log as parts of a recipe."""
    packages = (package.partition(" ") for package in versions.split(", ") if " " in package)
    recipe: Recipe = {f"version {name}": version for name, _, version in packages if name not in NO_EFFECT}
    return recipe | {"code": code, "commit": commit}


def all_differences(before: Recipe, after: Recipe) -> Iterator[Difference]:
    """Yield the keys in which two recipes differ, in their order: configuration, machine, versions, code.

    A key that only one recipe states counts in the configuration alone: a log may lack the rest. The commit
    counts if one of them states no digest of the code.
    """
    has_code = before.get("code") and after.get("code")
    both_configured = "benchmark" in before and "benchmark" in after
    for key in sorted({**after, **before}, key=lambda key: key.startswith(SOFTWARE)):
        is_compared = both_configured
        if key in MACHINE or key.startswith(SOFTWARE):
            is_compared = key in before and key in after and not (key == "commit" and has_code)
        if is_compared and before.get(key, MISSING) != after.get(key, MISSING):
            values = (printable(r[key], 60) if key in r else "missing" for r in (before, after))
            yield Difference(key, *values)


def identity(log: Log) -> tuple[tuple[str, str], ...]:
    """Return a recipe in a form that is equal for equal ones; the commit counts where no code is stated."""
    recipe = recipe_of(log)
    left_out = "commit" if "code" in recipe else ""
    return tuple(sorted((key, repr(value)) for key, value in recipe.items() if key != left_out))


def differing_logs(
    logs: Sequence[Log], counts: Callable[[Difference], bool] = lambda difference: True
) -> Iterator[tuple[Log, Log, Difference]]:
    """Yield the first log of this suite, one whose recipe differs from it, and the first difference."""
    recipes = [(log, recipe_of(log)) for log in logs if log.is_ours]
    for log, recipe in recipes[1:]:
        first, expected = recipes[0]
        for difference in islice(filter(counts, all_differences(expected, recipe)), 1):
            yield first, log, difference


def mixture(logs: Sequence[Log]) -> str:
    """Say which key of the recipe differs first within a set; '' if none does."""
    for first, log, (key, before, after) in differing_logs(logs):
        files = Path(first.path).name, Path(log.path).name
        return f"{printable(key, 60)} is {before} in {files[0]}, {after} in {files[1]}"
    return ""
