"""The published results and claims in each benchmark's reported.yaml, recomputed from their runs."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError, list_some, nearest
from common.evidence.compare.factors import TimeSplit
from common.evidence.compare.masked_accuracy import MARK, MOSAIC, OFFICIAL
from common.evidence.records import printable
from common.evidence.score import Run, Score
from common.repository import ROOT

SOURCE = re.compile(r"training_results_(v[0-9.]+)/([^/]+)/results/([^/]+)/[a-z]+$")  # of an entry
MAX_TITLES = 8  # of a line that names several sets


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published run set. `configurations` are ours that reproduce it; none for a peer.

    `evaluated_every`: samples between its last two evaluations; 0 where its logs do not count samples.
    `mosaic_minutes`, `mosaic_samples`: where a set of bert that stopped at the official target had passed it
    by MosaicML's count. `repeated_in`: folders of later rounds with the same logs. `samples_factor`: the
    estimated samples to the official target over its own samples, if its runs stopped below that target.
    """

    name: str
    submitter: str
    round: str
    division: str
    accelerators: str
    configurations: tuple[str, ...]
    masked_tokens: int  # of bert: the denominator of its quality
    mosaic_minutes: tuple[float, ...]
    mosaic_samples: tuple[float, ...]
    batch_size: int
    evaluated_every: int
    repeated_in: tuple[str, ...]
    samples_factor: float
    score: Score

    @property
    def label(self) -> str:
        return f"{self.submitter} {self.round} {self.name}"

    @property
    def title(self) -> str:
        return f"{self.label} ({self.accelerators}, {self.division})"

    def has_words(self, name: str) -> bool:
        """True if the title (spaces or not), or a folder with the same logs, has each word of `name`."""
        title = self.title.lower()
        texts = (title + " " + title.replace(" ", ""), *map(str.lower, self.repeated_in))
        return any(all(word in text for word in name.lower().split()) for text in texts)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A stated figure: the `ratio` of minutes, samples or samples_per_s of a set in `against` over `of`."""

    says: str
    value: float
    ratio: str
    of: Published
    against: tuple[Published, ...]
    source: str
    form: str = ""

    @property
    def is_less_time(self) -> bool:
        """True if the figure is a share: 1 - 1 / ratio."""
        return self.form == "less"


@dataclass(frozen=True, kw_only=True)
class Reported:
    """The published results of one benchmark: the sets to reproduce, the closest others, and the claims."""

    benchmark: str
    folder: str  # of the benchmark
    target: float
    sets: tuple[Published, ...]
    peers: tuple[Published, ...]
    claims: tuple[Claim, ...]

    def of_configuration(self, configuration: str) -> Published | None:
        return next((entry for entry in self.sets if configuration in entry.configurations), None)

    def find(self, name: str) -> Published:
        """Return the entry that is called `name`, or the only one that `has_words` of it.

        Raises: UserError with the near names.
        """
        entries = self.sets + self.peers
        matches = select_named(entries, name) or [entry for entry in entries if entry.has_words(name)]
        if len(matches) == 1:
            return matches[0]
        what = f"published result of {self.benchmark} is called '{printable(name)}'"
        if not matches:
            hint = nearest(name, (entry.name for entry in entries))
            where = f"{self.folder}/reported.yaml lists them"
            raise UserError(f"no {what}", hint=where if hint.startswith("known") else hint)
        titles = list_some([entry.label for entry in matches], MAX_TITLES)
        raise UserError(f"more than one {what}", hint=f"name one of: {titles}")


def select_named(entries: Sequence[Published], name: str) -> list[Published]:
    """Select the entries whose system, or submitter, round and system, is `name`."""
    return [entry for entry in entries if name in (entry.name, entry.label)]


def read_facts(path: Path) -> dict[str, Any]:
    """Read a reported.yaml, by libyaml's loader if PyYAML has it: it is several times as fast."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    facts: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
    return facts


def load_reported(root: Path = ROOT) -> dict[str, Reported]:
    """Return benchmark -> the facts in <root>/<benchmark folder>/reported.yaml. Raises: UserError."""
    matches = {}
    for path in sorted(root.glob("*/reported.yaml")):
        try:
            facts = read_facts(path)
            matches[facts["benchmark"]] = _reported(facts, path.parent.name)
        except (yaml.YAMLError, LookupError, TypeError, ValueError) as error:
            raise UserError(printable(str(error)), where=f"{path.parent.name}/{path.name}") from error
    return matches


def find_published(folder: str, configuration: str) -> Published | None:
    """Return the set that a configuration is compared with; None without one, or without reported.yaml."""
    facts = (facts for facts in load_reported().values() if facts.folder == folder)
    return next((entry for one in facts if (entry := one.of_configuration(configuration))), None)


def reported(root: Path = ROOT) -> list[Score]:
    return [entry.score for facts in load_reported(root).values() for entry in facts.sets]


def _reported(facts: dict[str, Any], folder: str) -> Reported:
    sets, peers = (
        tuple(_published(facts, entry) for entry in facts.get(part, ())) for part in ("sets", "peers")
    )

    def find(name: str) -> Published:
        matches = select_named(sets + peers, name)
        if len(matches) != 1:
            raise ValueError(f"a claim: {len(matches)} sets are called '{name}'")
        return matches[0]

    claims = tuple(
        Claim(**claim | {"of": find(claim["of"]), "against": tuple(map(find, claim["against"]))})
        for claim in facts.get("claims", ())
    )
    return Reported(
        benchmark=facts["benchmark"],
        folder=folder,
        target=facts["quality_target"],
        sets=sets,
        peers=peers,
        claims=claims,
    )


def _published(facts: dict[str, Any], entry: dict[str, Any]) -> Published:
    hardware, _, configuration = entry["system"].rpartition("-")
    rates = entry.get("training_samples_per_s") or [None] * len(entry["minutes"])
    rows = zip(entry["minutes"], entry["samples_to_target"], rates, entry["quality"], strict=True)
    runs = tuple(_run(entry, index, *row) for index, row in enumerate(rows))
    tokens = entry.get("masked_tokens", OFFICIAL)
    counting = f", {MARK}" * (tokens == MOSAIC)
    score = Score(
        benchmark=facts["benchmark"],
        system=entry["system"],
        hardware=hardware,
        configuration=configuration,
        is_proxy=False,
        label=f"reported, {entry['submitter']} {entry['round']} {entry['division']}{counting}",
        runs=runs,
        counted=tuple(range(len(runs))),
        target=facts["quality_target"],
        source=entry["source"],
    )
    lists = ("configurations", "mosaic_minutes", "mosaic_samples", "repeated_in")
    fields = {name: entry[name] for name in ("submitter", "round", "division", "accelerators")}
    fields |= {name: tuple(entry.get(name, ())) for name in lists}
    return Published(
        name=entry["system"],
        masked_tokens=tokens,
        batch_size=entry["global_batch_size"],
        evaluated_every=entry.get("evaluated_every", 0),
        samples_factor=entry.get("samples_factor", 1),
        score=score,
        **fields,
    )


def _run(
    entry: dict[str, Any],
    index: int,
    minutes: float,
    samples: float | None,
    rate: float | None,
    quality: float,
) -> Run:
    """Return one run; without samples to target it missed the target.

    Its evaluation is the time that the published rate of training leaves over, else the set's mean. Start-up
    and overshoot are the set's means; which seconds of evaluation fell into the overshoot is not published.
    """
    parts = (entry.get(f"{name}_s") for name in ("evaluation", "startup", "overshoot"))
    evaluation, startup, overshoot = (None if part is None else part / 60 for part in parts)
    if rate and samples:
        evaluation = minutes - samples / (60 * rate)
    training = None if evaluation is None else minutes - evaluation
    split = None
    if not (training is None or evaluation is None or startup is None or overshoot is None):
        rest = training - startup - overshoot
        split = TimeSplit(startup, rest, evaluation, overshoot, samples=None)
    return Run(
        name=f"result_{index}.txt",
        minutes=minutes if samples else math.inf,
        samples=samples,
        samples_per_s=samples / (60 * training) if samples and training else None,
        samples_per_s_overall=samples / (60 * minutes) if samples else None,
        evaluation=evaluation,
        quality=quality,
        split=split,
    )
