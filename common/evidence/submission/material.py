"""The files that MLPerf asks for beside code and logs: how to repeat a run set, and its starting weights.

Everything is taken from the logs of the run set; facts that these lack are stated as not collected.
"""

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from common import yaml_file
from common.arguments import spread_settings
from common.evidence.compare.lines import convergence_lines
from common.evidence.compare.rcp import compare_with_reference
from common.evidence.log import NUM_RUNS, Log, RunSet
from common.evidence.page import fill_template
from common.evidence.paths import UNCOUNTED, result_name
from common.evidence.score import UNVERIFIED, Score, score, sort_by_launch, timed_logs
from common.evidence.sealed.anchors import ANCHORS
from common.evidence.sealed.runs import read_sealing
from common.evidence.sealed.seal import RUNS, SEAL
from common.evidence.submission.snapshot import Item
from common.evidence.system import NOT_COLLECTED

UNKNOWN = f"{NOT_COLLECTED}the logs do not say"
MAX_SETTINGS = 500  # lines; a merged configuration has 40
INPUTS = {
    "resnet": "uint8 pixels (RGB), normalized to float32",
    "bert": "int64 token ids",
}
SEALED_FILES = (SEAL, RUNS, ANCHORS)  # beside the results of a sealed set
CHECKPOINT = (
    "model.safetensors, made by init_datasets.sh of MLCommons' model.ckpt-28252 (BERT-large, phase 1)"
)
TEMPLATES = Path(__file__).parents[1] / "templates/package"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One run set in a package."""

    run_set: RunSet
    implementation: str

    @property
    def system(self) -> str:
        return self.run_set.lead.folders[0]

    @property
    def benchmark(self) -> str:
        return self.run_set.lead.benchmark

    @property
    def folder(self) -> str:
        """The benchmark's folder in the code."""
        return self.run_set.lead.header("benchmark")

    @cached_property
    def scored(self) -> Score:
        return score(self.run_set)

    @cached_property
    def launched(self) -> list[Log]:
        """The logs of the runs that are scored, by launch."""
        return sort_by_launch(timed_logs(self.run_set.logs))

    @property
    def counted(self) -> list[Log]:
        return [self.launched[index] for index in self.scored.counted]

    @property
    def sealed_files(self) -> list[Path]:
        folder = self.run_set.lead.file.parent if self.run_set.lead.file else Path()
        return [path for name in SEALED_FILES if (path := folder / name).is_file()]

    @cached_property
    def names(self) -> dict[Path | None, str]:
        """The names of the results in the package: numbered from 0, or as the list of a sealed set has them.

        A sealed set may have more results than count; the others get a name that no checker reads.
        """
        files = [log.file for log in self.run_set.logs]
        if not self.sealed_files:
            return {file: f"result_{index}.txt" for index, file in enumerate(files)}
        counted = [log.file for log in self.counted]
        return {file: UNCOUNTED * (file not in counted) + result_name(file) for file in files if file}

    @property
    def size(self) -> str:
        return "mini" if self.run_set.is_proxy else "full"

    @property
    def command(self) -> list[str]:
        """The command that repeats the run set, with the changes that the logged command made.

        At size mini it states the precision, which another machine might choose otherwise.
        """
        command = ["ttt", "run", self.folder, self.name, "--size", self.size]
        keys = ("precision", "evaluation_precision") if self.run_set.is_proxy else ()
        stated = [f"{key}={self.settings[key]}" for key in keys if key in self.settings]
        changes = [part for change in (*self.changes, *stated) for part in ("--set", change)]
        return [*command, "--runs", "official", *changes]

    @property
    def changes(self) -> list[str]:
        """The `--set` values of the logged command."""
        pairs = zip(self.words, [*self.words, ""][1:], strict=True)
        return [after if word == "--set" else word[6:] for word, after in pairs if word.startswith("--set")]

    @property
    def name(self) -> str:
        """The configuration with the changes in its name, as the logged command has it: `optimized-unpad`."""
        plain = self.run_set.lead.configuration
        changed = re.compile(rf"{re.escape(plain)}([+-].+)?")
        names = {word for word in self.words if changed.fullmatch(word)}
        return names.pop() if len(names) == 1 else plain

    @cached_property
    def words(self) -> list[str]:
        """The words of the logged command; none if a quote in it is open."""
        try:
            return spread_settings(shlex.split(self.run_set.lead.header("command")))
        except ValueError:
            return []

    @property
    def settings(self) -> dict[str, Any]:
        """The merged configuration in the logs; empty where there is none."""
        return yaml_file.parse_head(self.run_set.lead.settings[:MAX_SETTINGS]) or {}

    @property
    def methods(self) -> list[str]:
        return [str(event.value) for event in self.run_set.lead.events("method")]


def material(entry: Entry, prefix: str) -> list[Item]:
    """Return the five files of one system and implementation."""
    texts = {
        "README.md": readme(entry),
        f"{entry.system}_{entry.implementation}.json": json.dumps(started_from(entry), indent=4) + "\n",
        **scripts(entry),
    }
    return [
        Item(
            path=f"{prefix}/{entry.system}/{name}", content=text.encode(), is_executable=name.endswith(".sh")
        )
        for name, text in texts.items()
    ]


def started_from(entry: Entry) -> dict[str, str]:
    """Return the facts that the rules ask of an implementation, from the logged configuration."""
    model, precision = entry.settings.get("model"), entry.settings.get("precision")
    is_known = isinstance(model, dict)
    has_checkpoint = isinstance(model, dict) and model.get("start") == "checkpoint"
    start = "TensorFlow's variables renamed and transposed for PyTorch" if has_checkpoint else "none"
    methods = f"; methods applied: {', '.join(entry.methods)}" if entry.methods else ""
    products = "" if precision == "fp32" else f", matrix products in {precision}"
    random = "none: random initialization, drawn from the seed of each run"
    return {
        "starting_weights_filename": CHECKPOINT if has_checkpoint else random if is_known else UNKNOWN,
        "weight_transformations": start + methods if is_known else UNKNOWN,
        "weight_data_types": f"fp32{products}" if isinstance(precision, str) else UNKNOWN,
        "input_data_types": INPUTS[entry.benchmark],
        "retraining": "none: each run trains from the starting weights to the target, once",
    }


def scripts(entry: Entry) -> dict[str, str]:
    """Return the three scripts, which call `ttt` in the folder of the implementation."""
    data = entry.settings.get("data")
    prepare = ["ttt", "data", "prepare", entry.folder, "--size", entry.size, "--configuration", entry.name]
    prepare += [part for change in entry.changes if change.startswith("data.") for part in ("--set", change)]
    values: dict[str, Any] = {
        "extras": "train,dali" if isinstance(data, dict) and data.get("loader") == "dali" else "train",
        "prepare": shlex.join(prepare),
        "command": shlex.join(entry.command),
        "num_runs": NUM_RUNS[entry.benchmark],
    }
    names = ("setup.sh", "init_datasets.sh", "run_and_time.sh")
    return {name: fill_template(TEMPLATES / f"{name}.j2", {}, entry=entry, **values) for name in names}


def readme(entry: Entry) -> str:
    """Return the page of one run set: its recipe, how to repeat it, and its results."""
    return fill_template(
        TEMPLATES / "README.md.j2",
        entry=entry,
        lead=entry.run_set.lead,
        scored=entry.scored,
        unverified=UNVERIFIED,
        convergence=closed_line(entry),
        runs=list(zip(entry.launched, entry.scored.runs, strict=True)),
        infinity=math.inf,
        seal=read_sealing(entry.run_set).describe(),
    )


def closed_line(entry: Entry) -> str | None:
    """Compare a full closed set with MLCommons' reference in a line; None for any other set."""
    if entry.run_set.is_proxy or not entry.run_set.lead.is_closed:
        return None
    convergence = compare_with_reference(entry.benchmark, entry.counted)
    return " ".join(" ".join(convergence_lines(convergence)).split())


def implementation_readme(entries: Sequence[Entry], commit: str) -> str:
    """Return the page of the code that the run sets of one benchmark share."""
    commands = [shlex.join(entry.command) for entry in entries]
    return fill_template(
        TEMPLATES / "implementation.md.j2", lead=entries[0], commit=commit, commands=commands
    )
