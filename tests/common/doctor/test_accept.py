"""`ttt accept`: a slow machine is refused with its cause, a good one is not, and the archive holds it all."""

import json
import os
import re
import signal
import sys
import tarfile
import time
from dataclasses import asdict

import psutil
import pytest

from common.doctor import acceptance, devices, verdicts
from common.doctor.verdicts import BELOW, FAILED, PASS, UNKNOWN, Expectation
from common.errors import EXIT_FINDINGS, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from common.machine import hardware, record, system
from common.machine.line import fault, ok, warning
from common.measure.device_run import load_for_ranks
from tests.command import one_line, start, ttt_here
from tests.runs import until

pytestmark = pytest.mark.usefixtures("no_record")

BASELINE, OPTIMIZED = "language_bert baseline", "language_bert optimized"
SOUND = [ok("versions", "python 3.12"), warning("open files", "256 allowed", "ulimit -n 1024")]
BUSY = warning("processors", "other programs use 1.3 of 2 cores (cc1 97%)", "end them, or wait")
BROKEN = fault("GPU health", "GPU 3: 2 uncorrected memory errors", "replace it")


def entry(name, num_ranks=1):
    benchmark, configuration = name.split()
    config = load_config(benchmark, configuration, "mini", num_ranks)
    return verdicts.name_speed(config, num_ranks)


def load_config(benchmark, configuration, size="full", num_ranks=8):
    return load_for_ranks(benchmark, configuration, size=size, num_ranks=num_ranks).config


def figures(samples_per_s, **more):
    quiet = {"taken_cores": 0.0, "cores": 2.0, "gpus": [{}]}
    return {"size": "mini", "samples": "sequences", "samples_per_s": samples_per_s} | quiet | more


@pytest.fixture
def machine(monkeypatch):
    """A machine whose checks and rates two dictionaries give; a rate may also be an error to raise."""
    checks, rates = list(SOUND), {BASELINE: 100.0, OPTIMIZED: 400.0}

    def run_probes(arguments, num_ranks, folder, *, limit_s, report):
        module, output, *words = arguments[arguments.index("-m") + 1 :]
        report(f"{module} says so, in {folder}/x/y")
        if module.endswith("checks"):
            text = "".join(json.dumps(asdict(line)) + "\n" for line in checks)
            (folder / "output").write_text(text + '{"check": "cut he')
            return None
        rate = rates[" ".join(words[:2])]
        if isinstance(rate, BaseException):
            raise rate
        if isinstance(rate, str):
            return rate
        (folder / "output").write_text(json.dumps(rate if isinstance(rate, dict) else figures(rate)))
        assert output == str(folder / "output") and limit_s > 10
        return None

    monkeypatch.setattr(acceptance, "run_probes", run_probes)
    return checks, rates


def accept(tmp_path, *options):
    """Run the command; returns its end, the files of its archive, and the verdicts by their subjects."""
    out = tmp_path / f"accept{len(list(tmp_path.glob('*.tar.gz')))}.tar.gz"
    where = ["--results", tmp_path / "results", "--out", out]
    done = ttt_here("accept", "--size", "mini", "--benchmarks", "bert", "--quick", *where, *options)
    return done, *read(out)


def read(path):
    with tarfile.open(path) as archive:
        texts = {
            member.name.partition("/")[2]: archive.extractfile(member).read().decode() for member in archive
        }
    return texts, {line["check"]: line for line in json.loads(texts["verdicts.json"])["verdicts"]}


@pytest.mark.parametrize(
    ("best", "line", "rate", "states", "printed"),
    [
        (105.0, None, 100.0, (PASS, PASS), "95% of 105.0 (this machine's best so far)"),
        (1000.0, BUSY, 100.0, (PASS, BELOW), f"likely cause: {BUSY}"),
        (1000.0, None, 100.0, (PASS, BELOW), f"no cause was seen: .*ttt inspect profile {BASELINE}"),
        (100.0, BROKEN, 100.0, (FAILED, PASS), "1 fault, .*GPU 3: 2 uncorrected memory errors; replace it"),
        (100.0, BUSY, "rank 1 ended by SIGKILL", (PASS, FAILED), "not measured: .*SIGKILL; the archive"),
        (100.0, None, "rank 1 ended: OutOfMemoryError", (PASS, FAILED), "not measured: .*OutOfMemoryError"),
    ],
)
def test_a_machine_is_accepted_or_refused_with_the_cause(
    tmp_path, machine, best, line, rate, states, printed
):
    checks, rates = machine
    checks += [line] if line else []
    rates[BASELINE] = rate
    record.keep_speed(entry(BASELINE), best)
    done, _, lines = accept(tmp_path)
    assert (lines["doctor"]["state"], lines[BASELINE]["state"]) == states
    assert done.returncode == (EXIT_OK if states == (PASS, PASS) else EXIT_FINDINGS), done.stderr
    assert re.search(printed, done.stdout) or printed in done.stdout
    summary = "accepted, 1 rate without" if states == (PASS, PASS) else "not accepted, for 1 of 3 verdicts"
    assert f"\n{summary}" in done.stdout
    assert lines[OPTIMIZED]["state"] == UNKNOWN
    assert record.best_speed(entry(OPTIMIZED)) == 400.0, "what had no expectation is the next one's"
    assert record.best_speed(entry(BASELINE)) == best, "a lower rate is no record"


@pytest.mark.parametrize("kept", [400.0, 1500.0])
def test_a_record_counts_only_where_it_demands_more(machine, tmp_path, monkeypatch, kept):
    """A rate that passed once at a small --share does not become the reference of the next test."""
    known = Expectation(samples_per_s=1000.0, source="published")
    monkeypatch.setattr(verdicts, "from_published", lambda config, num_ranks: known)
    record.keep_speed(entry(BASELINE), kept)
    for share, state in ((0.05, PASS), (0.9, BELOW)):
        _, _, lines = accept(tmp_path, "--share", share)
        assert lines[BASELINE]["state"] == state
        assert lines[BASELINE]["values"]["expected_per_s"] == max(kept, 1000.0)


def test_a_record_is_of_one_batch_and_recipe():
    config = load_config("language_bert", "optimized", "mini", 1)
    name = verdicts.name_speed(config, 1)
    larger = config.model_copy(update={"global_batch_size": 2 * config.global_batch_size})
    data = config.data.model_copy(update={"directory": "/data/of/another"})
    elsewhere = config.model_copy(update={"data": data})
    other = config.model_copy(update={"methods": {}})
    assert verdicts.name_speed(elsewhere, 1) == name
    assert len({name, verdicts.name_speed(larger, 1), verdicts.name_speed(other, 1)}) == 3


def test_where_nothing_was_compared_the_machine_is_not_judged_and_the_next_call_compares(tmp_path, machine):
    _, rates = machine
    rates[BASELINE] = figures(100.0, taken_cores=1.0)
    done, texts, lines = accept(tmp_path)
    assert done.returncode == EXIT_FINDINGS and "\nnot judged: no rate had an expectation -> " in done.stdout
    assert not json.loads(texts["verdicts.json"])["is_accepted"]
    assert record.best_speed(entry(BASELINE)) is None, "others took its cores"
    assert lines[BASELINE]["advice"].startswith("this rate is not kept: processors: other programs used 1.0")
    done, _, lines = accept(tmp_path)
    assert done.returncode == EXIT_OK
    assert [lines[name]["state"] for name in (BASELINE, OPTIMIZED)] == [UNKNOWN, PASS]


def test_srun_accepts_each_node_by_its_own_gpus(tmp_path, machine, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "4")
    assert hardware.count_nodes() == 4
    _, texts, _ = accept(tmp_path)
    assert json.loads(texts["system.json"])["number_of_nodes"] == "1"


def test_without_time_nothing_is_started(tmp_path, machine, monkeypatch):
    monkeypatch.setattr(acceptance, "LEAST_S", 600)
    done, texts, lines = accept(tmp_path)
    assert done.returncode == EXIT_FINDINGS and "no time was left" in lines[OPTIMIZED]["found"]
    assert json.loads(texts["verdicts.json"])["measured"] == {}


def test_the_archive_holds_verdicts_checks_system_versions_and_logs_without_folders(tmp_path, machine):
    record.keep_speed(entry(BASELINE), 100.0)
    done, texts, lines = accept(tmp_path, "--json", "--minutes", "3", "--seconds", "2")
    kept = json.loads(texts["verdicts.json"])
    assert json.loads(done.stdout) | {"seconds": 0} == kept | {"seconds": 0}
    assert kept["is_whole"] and kept["is_accepted"]
    assert [line["check"] for line in kept["doctor"]] == ["versions", "open files"], "the cut line is no line"
    assert kept["measured"][OPTIMIZED]["samples_per_s"] == 400.0
    logs = {"doctor", "language_bert-baseline", "language_bert-optimized"}
    assert texts.keys() == {"verdicts.json", "system.json", "versions.json"} | {f"logs/{n}.txt" for n in logs}
    assert "common.doctor.rate_probe says so" in texts["logs/language_bert-baseline.txt"]
    assert "says so, in .../y" in texts["logs/doctor.txt"]
    assert json.loads(texts["system.json"])["host_memory_capacity"]
    assert json.loads(texts["versions.json"])["torch"]
    assert "3 min at most: 68 s for the doctor's checks, 51 s for each of 2" in done.stderr
    assert list(lines) == ["doctor", BASELINE, OPTIMIZED]


def test_an_interruption_keeps_what_was_measured(tmp_path, machine):
    _, rates = machine
    rates[OPTIMIZED] = KeyboardInterrupt()
    done, texts, lines = accept(tmp_path)
    assert done.returncode == EXIT_INTERRUPTED and "interrupted: not all was measured" in done.stdout
    kept = json.loads(texts["verdicts.json"])
    assert list(lines) == ["doctor", BASELINE] and not kept["is_whole"] and not kept["is_accepted"]
    assert kept["measured"].keys() == {BASELINE}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--share", "1.2"], "--share"),
        (["--share", "nan"], "--share"),
        (["--minutes", "0"], "--minutes"),
        (["--minutes", "nan"], "--minutes"),
        (["--minutes", "0.5"], "--minutes 0.5: 3 s for each of 4 configurations"),
        (["--seconds", "0"], "--seconds"),
        (["--out", "node.zip"], "node.zip"),
        (["--out", "README.md/node.tar.gz"], "README.md"),
        (["--nproc", "0"], "--nproc"),
        (["--size", "full"], "ttt accept --size mini"),  # without a GPU
    ],
)
def test_a_wrong_option_is_refused_in_one_line_before_anything_starts(options, word, machine, monkeypatch):
    monkeypatch.setattr(hardware, "count_gpus", lambda: 0)
    assert word in one_line(ttt_here("accept", "--size", "mini", *options), EXIT_USAGE)


def test_an_archive_never_replaces_another(tmp_path, machine):
    out = tmp_path / "node.tar.gz"
    out.write_text("earlier")
    assert "node.tar.gz" in one_line(ttt_here("accept", "--size", "mini", "--out", out), EXIT_USAGE)
    assert out.read_text() == "earlier"


@pytest.mark.parametrize(
    ("name", "benchmark", "configuration", "source"),
    [
        ("8xA100-SXM4-80GB", "language_bert", "mosaic", "MosaicML v2.1"),
        ("8xA100-SXM4-80GB", "language_bert", "optimized", "predicted"),
        ("8xA100-SXM4-80GB", "image_classification", "baseline", "MosaicML v2.0"),
        ("8xH100-80GB-HBM3", "image_classification", "optimized", "predicted"),
        ("8xH100-80GB-HBM3", "language_bert", "baseline", "predicted"),
        ("8xA100-SXM4-40GB", "language_bert", "optimized", None),
        ("8xB200", "language_bert", "optimized", None),
    ],
)
def test_the_rate_of_a_gpu_is_that_of_a_published_recipe_else_a_prediction(
    name, benchmark, configuration, source, tmp_path, monkeypatch
):
    monkeypatch.setattr(system, "hardware_name", lambda: name)
    expected = verdicts.expect_rate(load_config(benchmark, configuration), 8, tmp_path)
    assert (expected is None) == (source is None)
    if expected is not None:
        assert source in expected.source and (expected.error > 1) == (source == "predicted")
        half = verdicts.expect_rate(load_config(benchmark, configuration, num_ranks=4), 4, tmp_path)
        assert half.samples_per_s == pytest.approx(expected.samples_per_s / 2)


def test_a_bench_of_the_same_batch_comes_before_the_published_rate_and_a_faster_record_before_both(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(system, "hardware_name", lambda: "8xA100-SXM4-80GB")
    monkeypatch.setattr(hardware, "count_gpus", lambda: 8)
    config = load_config("language_bert", "optimized")
    folder = tmp_path / "throughput/8xA100-SXM4-80GB"
    folder.mkdir(parents=True)
    rate = {"configuration": "optimized", "shape": "512 tokens", "samples_per_s": 250.0}
    bench = {"benchmark": "language_bert", "size": "full", "batch_size": 448, "rates": [rate]}
    (folder / "language_bert_0.json").write_text(json.dumps(bench))
    assert "throughput" not in verdicts.expect_rate(config, 8, tmp_path).source, "another batch"
    (folder / "language_bert_1.json").write_text(json.dumps(bench | {"batch_size": 56}))
    expected = verdicts.expect_rate(config, 8, tmp_path)
    assert expected.samples_per_s == 2000.0 and "language_bert_1.json" in expected.source
    for kept, expected in ((1900.0, 2000.0), (2100.0, 2100.0)):
        record.keep_speed(verdicts.name_speed(config, 8), kept)
        assert verdicts.expect_rate(config, 8, tmp_path).samples_per_s == expected


@pytest.mark.parametrize(("predicted_per_s", "optimized_per_s"), [(1500.0, 1500.0), (1100.0, 1000.0)])
def test_a_prediction_that_may_be_wrong_counts_for_no_published_recipe_and_only_if_it_demands_more(
    tmp_path, monkeypatch, predicted_per_s, optimized_per_s
):
    published = Expectation(samples_per_s=1000.0, source="")
    predicted = Expectation(samples_per_s=predicted_per_s, source="", error=1.2)
    monkeypatch.setattr(verdicts, "from_published", lambda *_: published)
    monkeypatch.setattr(verdicts, "from_model", lambda *_: predicted)
    for name, expected in {"baseline": 1000.0, "mosaic": 1000.0, "optimized": optimized_per_s}.items():
        config = load_config("language_bert", name)
        assert verdicts.expect_rate(config, 8, tmp_path).samples_per_s == expected
    least = 0.9 * predicted_per_s / 1.2
    for rate, state in ((1.01 * least, PASS), (0.99 * least, BELOW)):
        assert verdicts.judge_rate("x", figures(rate), predicted, 0.9, ()).state == state


def test_causes_seen_during_the_steps_come_first_and_those_without_a_part_in_speed_are_none():
    hot = {"reasons": 0x40}  # NVML: slowed down by its hardware's temperature
    checks = [*SOUND, BUSY, fault("all-reduce", "2 ranks received wrong sums", "NCCL_P2P_DISABLE=1")]
    causes = verdicts.find_causes(checks, figures(1.0, taken_cores=1.0, gpus=[{}, hot]))
    texts = [str(cause) for cause in causes]
    assert len(texts) == 4 and "1.0 of 2 cores meanwhile" in texts[0] and "rank 1: too hot" in texts[1]
    assert texts[2].startswith("all-reduce") and texts[3] == str(BUSY)


def test_a_part_prints_as_it_goes_and_is_ended_at_its_limit(tmp_path):
    printed = []
    code = "import time; print('begun', flush=True); time.sleep(60)"
    started = time.monotonic()
    trouble = devices.run_probes(["-c", code], 1, tmp_path, limit_s=3, report=printed.append)
    assert trouble.startswith("no answer within 3 s") and printed == ["begun"]
    assert time.monotonic() - started < 20
    code = "import sys; print('RuntimeError: broken', end=''); sys.exit(3)"
    trouble = devices.run_probes(["-c", code], 2, tmp_path, limit_s=30, report=printed.append)
    assert "RuntimeError: broken" in printed[-1], "a last line without a newline is a line"
    assert "ended with code 3: RuntimeError: broken" in trouble


@pytest.mark.on_demand
def test_two_ranks_are_measured_and_judged_by_real_processes(tmp_path):
    record.keep_speed(entry(BASELINE, 2), 1e9)
    done, texts, lines = accept(tmp_path, "--nproc", "2", "--seconds", "0.2", "--json")
    assert done.returncode == EXIT_FINDINGS, done.stderr
    assert [lines[name]["state"] for name in (BASELINE, OPTIMIZED)] == [BELOW, UNKNOWN]
    for rates in json.loads(texts["verdicts.json"])["measured"].values():
        assert len(rates["per_rank"]) == 2 and sum(rates["per_rank"]) == rates["samples_per_s"] > 1
    assert "versions" in texts["logs/doctor.txt"]
    assert "timing steps" in texts["logs/language_bert-baseline.txt"]


@pytest.mark.on_demand
def test_ctrl_c_ends_every_process_and_keeps_the_checks(tmp_path):
    out = tmp_path / "node.tar.gz"
    options = ["--size", "mini", "--quick", "--benchmarks", "bert", "--results", tmp_path, "--out", out]
    words = [sys.executable, "-m", "common.cli", "accept", *map(str, options)]
    with start(*words, env=os.environ | {"TMPDIR": str(tmp_path)}) as process:
        until(lambda: "language_bert baseline: " in process.stdout.readline())
        children = until(lambda: psutil.Process(process.pid).children(recursive=True))
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED and "interrupted: not all was measured" in printed
    assert not any(child.is_running() for child in children)
    texts, lines = read(out)
    assert list(lines) == ["doctor"] and json.loads(texts["verdicts.json"])["doctor"]
    assert list(tmp_path.glob("ttt-*")) == []


def test_figures_that_cannot_be_read_do_not_cost_the_archive(machine, tmp_path):
    folder = tmp_path / "results" / "throughput" / system.hardware_name()
    folder.mkdir(parents=True)
    (folder / "language_bert_0.json").write_text("{")
    done, _, lines = accept(tmp_path)
    assert "language_bert_0.json: no figures" in done.stdout and lines[BASELINE]["state"] == UNKNOWN
