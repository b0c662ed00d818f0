"""Find the published set that a run set stands beside, where a person names none."""

import math
import re

from common.evidence.compare.reported import SOURCE, Published, Reported
from common.evidence.log import RunSet
from common.evidence.recipes import recipe_name
from common.evidence.score import Score, score

DIGITS_MINUTES, DIGITS_QUALITY = 2e-4, 2e-6  # of reported.yaml, rounded


def choose_published(reported: Reported, run_set: RunSet) -> Published | None:
    """Return the entry of the same runs; else of a foreign set by its name, of ours by configuration."""
    ours = score(run_set)
    entries = reported.sets + reported.peers
    same = next((entry for entry in entries if are_same_runs(ours, entry.score)), None)
    by_name = None if run_set.lead.is_ours else find_named(reported, run_set)
    return same or by_name or reported.of_configuration(recipe_name(run_set.lead))


def find_named(reported: Reported, run_set: RunSet) -> Published | None:
    """Find the one entry with the submitter, system and, where the path tells it, round of a set."""
    lead = run_set.lead
    place = SOURCE.search(lead.file.parent.as_posix() if lead.file else "")
    version, submitter = (place[1], place[2]) if place else ("", lead.text("submission_org"))
    matches = [
        entry
        for entry in reported.sets + reported.peers
        if entry.name == lead.system
        and letters(entry.submitter) == letters(submitter)
        and version in ("", entry.round)
    ]
    return matches[0] if len(matches) == 1 else None


def letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def are_same_runs(ours: Score, published: Score) -> bool:
    """True if minutes and final accuracies of all runs agree to the published digits."""
    return all(
        len(values[0]) == len(values[1])
        and all(math.isclose(a, b, abs_tol=tolerance) for a, b in zip(*values, strict=True))
        for values, tolerance in (
            ([sorted(run.minutes for run in s.counting) for s in (ours, published)], DIGITS_MINUTES),
            ([sorted(run.quality or 0 for run in s.counting) for s in (ours, published)], DIGITS_QUALITY),
        )
    )
