"""Closed runs of size full: their logs state the rules' values, and MLCommons' checkers accept them."""

import json
import time

import pytest

from common.evidence.audit import audit_log
from common.evidence.compare import rcp
from common.evidence.log import NUM_RUNS, load, read_log
from common.evidence.rules.rule import chain, edit, edit_all
from common.evidence.submission import official
from common.evidence.submission.official import judge_convergence, judge_package, rulesets
from common.repository import ROOT
from common.run import mllog
from tests.common.evidence.submission.closed_logs import write_log

SLOW = ('_start"', '_stop"', '"throughput"')  # records that take 100 ms to write
RUNS = {  # configuration: its benchmark, and the evaluation that reaches the target
    "closed": ("image_classification", 9),  # after epoch 35
    "closed_sgd": ("image_classification", 9),  # after epoch 36
    "bert": ("language_bert", 17),
}
HYPERPARAMETERS = json.loads((ROOT / "tests/golden/closed_hyperparameters.json").read_text())


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A log of each configuration."""
    logs = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, (benchmark, reached_at) in RUNS.items():
            folder = tmp_path_factory.mktemp(name)
            configuration = "closed" if name == "bert" else name
            logs[name] = write_log(monkeypatch, folder, benchmark, configuration, reached_at=reached_at)
    return logs


def test_a_log_on_a_slow_disk_breaks_no_rule(tmp_path, monkeypatch):
    write = mllog.Lines.emit

    def write_slowly(self, record):
        write(self, record)
        time.sleep(0.1 * any(key in record.getMessage() for key in SLOW))

    monkeypatch.setattr(mllog.Lines, "emit", write_slowly)
    log = read_log(write_log(monkeypatch, tmp_path, "language_bert", "closed", reached_at=2))
    found = {finding.rule for finding in audit_log(log)}
    assert log.duration_s > 0.1 * len(log.events("block_start", "block_stop", "throughput")) > 0.5
    assert not found & {"T205", "T218", "Q310"}


@pytest.mark.parametrize("name", RUNS)
def test_a_closed_log_states_the_hyperparameters_that_run(written, name):
    log = read_log(written[name])
    assert log.is_closed and log.is_converged
    stated = {key: [event.value for event in log.events(key)] for key in HYPERPARAMETERS[name]}
    assert stated == {key: [value] for key, value in HYPERPARAMETERS[name].items()}


def change(path, folder, *mutations, number=0):
    """Write a changed copy of a log, of another number, into a folder of the same names."""
    lines = chain(*mutations)(path.read_text().splitlines())
    copy = (folder / path.relative_to(path.parents[3])).with_name(f"result_{number}.txt")
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text("\n".join(lines) + "\n")
    return copy


def judged(path):
    (run_set,) = load([path.parent])
    assert rulesets(run_set) == ({"resnet": "4.0.0", "bert": "5.0.0"}[run_set.lead.benchmark],)
    return official.judge(run_set)


@pytest.mark.parametrize("name", RUNS)
def test_the_official_closed_ruleset_accepts_the_log(written, name):
    (verdict,) = judged(written[name])
    assert verdict.verdict == "SUCCESS", verdict


@pytest.mark.parametrize(
    ("name", "mutation"),
    [
        ("closed", edit("lars_opt_weight_decay", value=6e-5)),
        ("closed_sgd", edit("sgd_opt_base_learning_rate", value=4.5885)),
        ("bert", edit_all("eval_accuracy", lambda record: {"value": record["value"] * 0.9})),
    ],
)
def test_the_official_closed_ruleset_refuses_other_values(written, tmp_path, name, mutation):
    (verdict,) = judged(change(written[name], tmp_path, mutation))
    assert verdict.refuses


def write_runs(path, root, golden, *, repeats_a_seed=False, epoch_factor=1.0):
    """Write a whole set of changed copies of a log, and the description of its system."""
    name = path.parent.parent.name
    for number in range(NUM_RUNS[path.parent.name]):
        seed = edit("seed", value=77 if repeats_a_seed else 1000 + number)
        sooner = edit_all(
            "eval_accuracy", lambda r: {"epoch_num": round(r["metadata"]["epoch_num"] * epoch_factor)}
        )
        change(path, root, seed, sooner, number=number)
    description = golden.description() | {"division": "closed", "system_name": name}
    (root / "systems").mkdir()
    (root / "systems" / f"{name}.json").write_text(json.dumps(description))
    (run_set,) = load([root / "results"])
    (packaged,) = [verdict for verdict in judge_package([run_set]) if verdict.checker == "package"]
    (convergence,) = judge_convergence(run_set)
    (seeds,) = official.judge_seeds(run_set)
    return packaged, convergence, seeds


@pytest.mark.parametrize("name", ["closed", "bert"])
def test_a_closed_set_passes_the_package_seed_and_convergence_checkers(written, tmp_path, golden, name):
    verdicts = write_runs(written[name], tmp_path, golden)
    assert [verdict.verdict for verdict in verdicts] == ["SUCCESS"] * 3
    assert all(verdict.is_applied for verdict in verdicts)
    assert not list(tmp_path.rglob("scaling.json"))  # the checker writes it into its copy


@pytest.mark.parametrize(
    ("change", "passes"),
    [({"repeats_a_seed": True}, [False, True, False]), ({"epoch_factor": 0.8}, [False, False, True])],
)
def test_equal_seeds_and_too_few_epochs_are_refused(written, tmp_path, golden, change, passes):
    verdicts = write_runs(written["closed"], tmp_path, golden, **change)
    assert [verdict.verdict == "SUCCESS" for verdict in verdicts] == passes
    assert [not verdict.refuses for verdict in verdicts] == passes


def test_a_committed_set_is_not_compared_with_itself(written, tmp_path, monkeypatch):
    monkeypatch.setattr(rcp, "COMMITTED", tmp_path)

    def commit(hardware):
        folder = tmp_path / f"results/reference-{hardware}-mini-closed/resnet"
        folder.mkdir(parents=True)
        for number in range(NUM_RUNS["resnet"]):
            later = edit_all(
                "eval_accuracy", lambda r, by=number: {"epoch_num": r["metadata"]["epoch_num"] + by}
            )
            mini = edit("benchmark_size", value="mini")
            log = change(written["closed"], tmp_path / f"{hardware}{number}", mini, later)
            log.rename(folder / f"result_{number}.txt")
        return folder

    (run_set,) = load([commit("x")])
    assert rcp.committed_points(run_set.lead) == {}
    (alone,) = judge_convergence(run_set)
    assert (alone.verdict, alone.detail) == ("not run", "the set itself is the reference")
    commit("y")
    (point,) = rcp.committed_points(run_set.lead).values()
    assert len(point["Epochs to converge"]) == NUM_RUNS["resnet"]
    (beside,) = judge_convergence(run_set)
    assert beside.verdict == "SUCCESS", beside
