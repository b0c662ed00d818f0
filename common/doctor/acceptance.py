"""The acceptance of a machine: the doctor's checks, then the rate of training steps against what is expected.

Each part is a process of its own, with a limit: the whole keeps to its minutes, and a part that fails leaves
the others alone.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import repository
from common.config.schema import RunConfig
from common.doctor import checks
from common.doctor.devices import run_probes
from common.doctor.verdicts import (
    BELOW,
    DOCTOR,
    REFUSED,
    UNKNOWN,
    expect_rate,
    find_causes,
    is_disturbed,
    judge_checks,
    judge_failure,
    judge_rate,
    name_speed,
)
from common.errors import EXIT_FINDINGS, EXIT_OK, UserError
from common.evidence.records import counted
from common.evidence.submission.package import TAR_ENDINGS, refuse_existing, write_tar
from common.evidence.submission.snapshot import Item
from common.files import (
    check_writable,
    create_next,
    explain_os_error,
    temporary_folder,
    to_json,
    undo_on_failure,
    write_whole,
)
from common.machine import hardware, record, system
from common.machine.line import Line
from common.measure.device_run import load_for_ranks

DOCTOR_SHARE = 0.4  # of the time, at most
END_S = 10  # for the archive
LEAST_S = 5  # less is not enough to start a process
UNWRITABLE = "no archive can be written here"


@dataclass(kw_only=True)
class Acceptance:
    """The options and the state of an acceptance; `logs` are the lines that each part printed.

    `share` is the least passing share of the expected rate, `seconds` the duration of the timed steps.
    `num_asked` is the number of ranks that a person chose; None: one for each GPU.
    """

    benchmarks: Sequence[str]
    size: str
    num_asked: int | None
    minutes: float
    share: float
    seconds: float
    is_quick: bool
    results: Path
    report: Callable[[str], None]
    checks: list[Line] = field(default_factory=list)
    verdicts: list[Line] = field(default_factory=list)
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)
    logs: dict[str, list[str]] = field(default_factory=dict)
    is_whole: bool = False

    def __post_init__(self) -> None:
        self.started, self.time = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.num_ranks = self.num_asked or hardware.count_gpus() or 1
        named = checks.load_configs(self.benchmarks, self.size)
        configs = [config for of_benchmark in named.values() for config in of_benchmark.values()]
        self.configs = sorted(configs, key=lambda config: len(config.methods))  # what compiles comes last

    @property
    def left_s(self) -> float:
        """Seconds until the archive has to be written."""
        return 60 * self.minutes - END_S - (time.monotonic() - self.started)

    @property
    def code(self) -> int:
        """The exit code; EXIT_FINDINGS also if no rate was compared."""
        is_refused = any(line.state in REFUSED for line in self.verdicts)
        return EXIT_FINDINGS if is_refused or not self.is_judged else EXIT_OK

    @property
    def is_judged(self) -> bool:
        """True if a rate was compared with an expected one, or could not be measured."""
        return any(line.state != UNKNOWN for line in self.verdicts if line.check != DOCTOR)

    @property
    def outcome(self) -> str:
        if not self.is_whole:
            return "interrupted: not all was measured"
        num_refused = sum(line.state in REFUSED for line in self.verdicts)
        num_unknown = sum(line.state == UNKNOWN for line in self.verdicts)
        if num_refused:
            return f"not accepted, for {num_refused} of {len(self.verdicts)} verdicts"
        if not self.is_judged:
            return "not judged: no rate had an expectation"
        unjudged = f", {counted(num_unknown, 'rate')} without an expectation" if num_unknown else ""
        return f"accepted{unjudged}"

    def describe_plan(self) -> str:
        """Describe the time of each part. Raises UserError where the timed steps do not fit into it."""
        whole_s = 60 * self.minutes - END_S
        doctor_s = DOCTOR_SHARE * whole_s
        each_s = (whole_s - doctor_s) / len(self.configs)
        if each_s < self.seconds:
            what = f"{each_s:.0f} s for each of {len(self.configs)} configurations: fewer than --seconds"
            hint = "give it more minutes, or time fewer --seconds or --benchmarks"
            raise UserError(what, where=f"--minutes {self.minutes:g}", hint=hint)
        return (
            f"{self.minutes:g} min at most: {doctor_s:.0f} s for the doctor's checks, "
            f"{each_s:.0f} s for each of {len(self.configs)} configurations, of which "
            f"{self.seconds:g} s are timed; what one leaves over, the next may take"
        )

    def list_configs_to_prepare(self) -> list[RunConfig]:
        """Return one configuration of each benchmark whose data of size mini the doctor trains on."""
        if self.is_quick or self.size != "mini":
            return []
        return list({config.benchmark: config for config in self.configs}.values())

    def run(self) -> None:
        """Make the checks, then measure each configuration; each result is kept as soon as it is known."""
        with temporary_folder() as folder:
            self.examine(folder / "doctor", DOCTOR_SHARE * self.left_s)
            for number, config in enumerate(self.configs):
                self.measure(config, folder / str(number), self.left_s / (len(self.configs) - number))
        self.is_whole = True

    def examine(self, folder: Path, limit_s: float) -> None:
        """Make the doctor's checks; after a failure the checks before it are kept."""
        extent = "quick" if self.is_quick else "whole"
        words = (self.results.resolve(), self.size, self.num_asked or 0, extent, *self.benchmarks)
        try:
            trouble = self.run_part(DOCTOR, "checks", words, 1, folder, limit_s)
        finally:
            self.checks = read_checks(folder / "output")
        self.verdicts.append(judge_checks(self.checks, trouble))

    def measure(self, config: RunConfig, folder: Path, limit_s: float) -> None:
        """Measure the rate of a configuration, judge it, and keep it unless it is below or disturbed."""
        name, ranks = f"{config.benchmark} {config.configuration}", self.num_ranks
        if limit_s < LEAST_S:
            self.verdicts.append(judge_failure(name, "no time was left", ()))
            return
        words = (config.benchmark, config.configuration, self.size, self.seconds)
        trouble = self.run_part(name, "rate_probe", words, ranks, folder, limit_s)
        if trouble is not None:
            self.verdicts.append(judge_failure(name, trouble, find_causes(self.checks, {})))
            return
        figures = self.measured[name] = json.loads((folder / "output").read_text())
        config = load_for_ranks(*words[:2], size=self.size, num_ranks=ranks).config
        try:
            expected = expect_rate(config, ranks, self.results)
        except UserError as error:  # figures of `ttt bench` that cannot be read
            self.report(f"  warning: {error}")
            expected = None
        verdict = judge_rate(name, figures, expected, self.share, find_causes(self.checks, figures))
        self.verdicts.append(verdict)
        # else a slow machine would be compared with itself
        if verdict.state != BELOW and not is_disturbed(figures):
            trouble = record.keep_speed(name_speed(config, ranks), figures["samples_per_s"])
            if trouble:
                self.report(f"  warning: this rate {trouble}")

    def run_part(
        self, name: str, module: str, words: Sequence[object], num_ranks: int, folder: Path, limit_s: float
    ) -> str | None:
        """Run a module as each rank, which writes `folder`/output; returns why it failed."""
        self.report(f"{name}: {limit_s:.0f} s at most")
        lines = self.logs.setdefault(name, [])

        def keep(line: str) -> None:
            lines.append(line)
            self.report(f"  {line}")

        folder.mkdir()
        arguments = [*repository.MODULE, f"common.doctor.{module}", str(folder / "output"), *map(str, words)]
        return run_probes(arguments, num_ranks, folder, limit_s=limit_s, report=keep)

    def as_json(self) -> dict[str, Any]:
        """Return verdicts, checks and figures; `is_whole` is false after an interruption."""
        return {
            "machine": record.record_path().stem,
            "time": self.time,
            "seconds": round(time.monotonic() - self.started, 1),
            "size": self.size,
            "num_ranks": self.num_ranks,
            "share": self.share,
            "is_whole": self.is_whole,
            "is_accepted": self.is_whole and self.code == EXIT_OK,
            "verdicts": [asdict(line) for line in self.verdicts],
            "doctor": [asdict(line) for line in self.checks],
            "measured": self.measured,
        }

    def list_items(self) -> dict[str, Item]:
        """Return the files of the archive by their names: verdicts, system description, versions, logs."""
        versions = system.versions() | hardware.driver() | {"commit": repository.commit()}
        texts = {
            "verdicts.json": to_json(self.as_json()),
            "system.json": system.as_json(system.collect_description(system.hardware_name())),
            "versions.json": to_json(versions),
        }
        for name, lines in self.logs.items():
            texts[f"logs/{name.replace(' ', '-')}.txt"] = "".join(f"{line}\n" for line in lines)
        hidden = {name: repository.hide_folders(text) for name, text in texts.items()}
        return {name: Item(path=name, content=text.encode()) for name, text in hidden.items()}


def read_checks(path: Path) -> list[Line]:
    """Read the lines of the checks; the last one may be cut."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [Line(**json.loads(line)) for line in lines]


def check_place(out: Path | None, folder: Path) -> None:
    """Raise UserError, before time is spent, unless an archive can be written: to `out`, else in `folder`."""
    if out is not None:
        if not out.name.endswith(TAR_ENDINGS):
            raise UserError("not the name of a .tar.gz", where=f"--out {out}")
        refuse_existing(out)
        folder = out.parent
    with explain_os_error(UNWRITABLE, folder):
        check_writable(folder)


def write_archive(acceptance: Acceptance, out: Path | None, folder: Path) -> Path:
    """Write the archive whole, to `out`, else to a new file in `folder` that names the machine."""
    name = record.record_path().stem
    items = {f"{name}/{path}": item for path, item in acceptance.list_items().items()}
    with explain_os_error(UNWRITABLE, out or folder):
        out = out or create_next(folder, f"{name}_{{}}.tar.gz")
        with undo_on_failure(out.unlink), write_whole(out) as draft, draft.open("xb") as stream:
            write_tar(items, stream)
    return out
