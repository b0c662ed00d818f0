"""Sealed sets as `ttt run` writes them: the seal, the list of runs, seeds of a public value."""

import json
import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from common.cli import dispatch
from common.errors import UserError
from common.evidence.audit import audit_paths
from common.evidence.log import RunSet
from common.evidence.rules.seals import find_other_seeds
from common.evidence.sealed.runs import Sealing
from common.evidence.sealed.seal import RUNS, SEAL, derive_seeds, read_sealed
from common.files import hold_lock
from common.run import launch, run_sets
from common.run.run_set import Ended
from common.run.sealing import seal
from tests.common.run import test_run_set
from tests.common.run.test_faulty_disks import fill
from tests.common.run.test_run_set import HARDWARE
from tests.common.run.test_set_folder import leave_result
from tests.runs import BERT, until

pytestmark = pytest.mark.usefixtures("prepared_data")
planned = partial(test_run_set.planned, "language_bert", runs="2")
NAMED = "drand quicknet, round 22000000"


def list_runs(run_set, outcome="failed", kept=True):
    """Seal a set, and write the lines of its runs and a result for each, without a training."""
    seal.seal_set(run_set)
    for number in range(run_set.num_done, run_set.num_runs):
        path = launch.reserve(run_set.directory, None, launch.compose_head(run_set, ["run"]))
        seal.start_run(run_set, number, path)
        if not kept:
            path.unlink()
        seal.end_run(run_set, path, Ended(1, outcome, "for a test"))


def command(results, *words):
    """Return the arguments of a run whose results and systems go to a folder."""
    where = ["--set", HARDWARE, "--results", str(results), "--systems", str(results)]
    return ["run", "language_bert", "baseline", "--size", "mini", *where, *words]


def refused(results, *words):
    """Return why a run is refused."""
    with pytest.raises(UserError) as told:
        dispatch(command(results, *words))
    return str(told.value)


def events(folder):
    return [json.loads(line) for line in (folder / RUNS).read_text().splitlines()]


def test_sets_that_run_in_one_folder_at_once_write_one_list(tmp_path):
    run_sets_at_once = [planned(tmp_path, runs="10") for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(list_runs, run_sets_at_once))
    folder = run_sets_at_once[0].directory
    sealed = read_sealed(folder)
    names = [event["result"] for event in events(folder) if event["event"] == "started"]
    assert sealed.faults == () and len(set(names)) == 30
    assert [event["event"] for event in events(folder)].count("extended") == 2
    assert len(seal.decided_seeds(sealed)) == 30
    assert {path.name for path in folder.iterdir()} == {SEAL, RUNS, *names}


def test_a_continued_set_takes_the_sealed_seeds_that_no_run_has_had(tmp_path):
    run_set = planned(tmp_path, runs="3")
    seal.seal_set(run_set)
    list_runs(replace(run_set, num_runs=1), kept=False)  # its clock had not started
    assert run_sets.find_missing_runs(planned(tmp_path, runs="3")).seeds == run_set.seeds
    list_runs(replace(run_set, num_runs=1), "lost", kept=False)
    again = run_sets.find_missing_runs(planned(tmp_path, runs="3"))
    assert again.seeds[:2] == run_set.seeds[1:] and again.seeds[2] not in run_set.seeds
    seal.seal_set(again)
    assert events(run_set.directory)[-1]["seeds"] == [again.seeds[2]]
    sealing = Sealing(RunSet(folder="", logs=()), read_sealed(run_set.directory))
    assert len(sealing.runs) == 2 and sealing.num_not_started == 3  # two starts of one seed of four


def other_seeds(folder):
    """Return the audit's findings on seeds that were not decided for their runs (C911)."""
    return list(find_other_seeds(Sealing(RunSet(folder="", logs=()), read_sealed(folder))))


def test_a_seed_that_a_run_has_had_is_refused_and_skipped_by_a_continued_set(tmp_path):
    run_set = planned(tmp_path, runs="1", seed=7)
    list_runs(run_set, kept=False)  # its clock had not started: the seed is free
    list_runs(run_set)
    before = (run_set.directory / RUNS).read_bytes()
    for runs in ("1", "2"):
        why = "seed 7 was run here as result_0.txt; leave --seed out, or add --continue"
        with pytest.raises(UserError, match=why):
            seal.seal_set(planned(tmp_path, runs=runs, seed=7))
    assert (run_set.directory / RUNS).read_bytes() == before
    (run_set.directory / "result_0.txt").unlink()
    list_runs(run_sets.find_missing_runs(planned(tmp_path, runs="2", seed=7), 7))
    seeds = [event["seed"] for event in events(run_set.directory) if event["event"] == "started"]
    assert seeds == [7, 7, 8, 9] and other_seeds(run_set.directory) == []


def start_untimed(run_set, records=""):
    """Leave the files of a launcher that is killed as its run begins."""
    path = launch.reserve(run_set.directory, None, launch.compose_head(run_set, ["run"]))
    seal.start_run(run_set, 0, path)
    path.write_text(path.read_text() + records)
    return path


def lock(run_set):
    with run_sets.lock_folders([run_set.directory]):
        pass


def test_a_run_whose_launcher_was_killed_before_its_clock_is_removed_and_listed(tmp_path, capsys):
    run_set = planned(tmp_path)
    seal.seal_set(run_set)
    path = start_untimed(run_set, ':::MLLOG {"key": "init_start"}\n')
    with hold_lock(path):  # its launcher lives
        lock(run_set)
    assert path.exists() and len(events(run_set.directory)) == 1
    lock(run_set)
    *_, ended = events(run_set.directory)
    assert (ended["outcome"], ended["head"], path.exists()) == ("killed", "", False)
    assert "result_0.txt: its launcher was killed" in capsys.readouterr().out
    continued = run_sets.find_missing_runs(planned(tmp_path))
    assert (continued.seeds, continued.num_more) == (run_set.seeds, 0)
    list_runs(continued)
    assert other_seeds(run_set.directory) == []
    (audited,) = audit_paths([run_set.directory])
    (warned,) = [one for one in audited.findings if one.rule == "C918"]
    assert "launcher of result_0.txt was killed before its clock" in warned.message


def test_no_result_is_removed_that_was_timed_or_that_the_list_ends(tmp_path):
    run_set = planned(tmp_path)
    seal.seal_set(run_set)
    timed = start_untimed(run_set, ':::MLLOG {"key": "run_start"}\n')
    cut = start_untimed(run_set)
    seal.end_run(run_set, cut, Ended(0, "converged"))
    (run_set.directory / "result_7.txt").write_text("a person's notes\n")
    before = (run_set.directory / RUNS).read_bytes()
    lock(run_set)
    assert timed.exists() and cut.exists() and (run_set.directory / "result_7.txt").exists()
    assert (run_set.directory / RUNS).read_bytes() == before


def test_a_head_whose_start_was_never_listed_is_removed(tmp_path):
    run_set = planned(tmp_path)
    launch.reserve(run_set.directory, None, launch.compose_head(run_set, ["run"]))
    launch.reserve(run_set.directory, None)
    lock(run_set)
    assert not list(run_set.directory.iterdir())


def test_seeds_that_are_asked_for_out_of_turn_are_decided_anew(tmp_path):
    run_set = planned(tmp_path, runs="4", seed=5)
    seal.seal_set(run_set)
    list_runs(planned(tmp_path, runs="2", seed=7))
    list_runs(run_sets.find_missing_runs(planned(tmp_path, runs="3")))
    seeds = [event["seed"] for event in events(run_set.directory) if event["event"] == "started"]
    assert seeds[:4] == [7, 8, 5, 6] and other_seeds(run_set.directory) == []


def test_results_that_lay_there_before_the_seal_are_named(tmp_path):
    run_set = planned(tmp_path)
    launch.reserve(run_set.directory, 4, launch.compose_head(run_set, ["run"]))
    list_runs(run_set)
    assert read_sealed(run_set.directory).seal.unsealed == ["result_4.txt"]


def test_a_seal_of_another_recipe_sends_the_runs_to_a_folder_of_their_own(tmp_path):
    run_set = planned(tmp_path)
    seal.seal_set(run_set)
    path = run_set.directory / SEAL
    path.write_text(path.read_text().replace(read_sealed(run_set.directory).seal.code, "0" * 12))
    other = planned(tmp_path)
    assert other.directory != run_set.directory and f"in {SEAL}" in other.why_apart


def test_a_torn_last_line_is_cut_off_and_damaged_files_are_refused(tmp_path):
    run_set = planned(tmp_path)
    list_runs(run_set)
    path, whole = run_set.directory / RUNS, (run_set.directory / RUNS).read_bytes()
    path.write_bytes(whole + whole[:50])
    seal.read_listed(run_set.directory)
    assert path.read_bytes() == whole
    for file, content in (
        (RUNS, whole.replace(b"for a test", b"for a task")),
        (RUNS, whole.replace(b"ended", b"bended")),
        (RUNS, whole[: whole.index(b"\n") + 1]),
        (RUNS, None),
        (SEAL, b"{}"),
        (SEAL, None),
    ):
        damaged, before = run_set.directory / file, (run_set.directory / file).read_bytes()
        damaged.write_bytes(content) if content is not None else damaged.unlink()
        with pytest.raises(UserError, match=file):
            seal.read_listed(run_set.directory)
        assert damaged.read_bytes() == content if content is not None else not damaged.exists()
        damaged.write_bytes(before)


def test_on_a_full_disk_the_list_stays_whole_and_no_result_is_left(mount_disk):
    disk = mount_disk("64k")
    run_set = planned(disk)
    seal.seal_set(run_set)
    path = launch.reserve(run_set.directory, None)
    fill(disk)
    with pytest.raises(UserError, match=r"cannot write results here \(No space"):
        seal.start_run(run_set, 0, path)
    assert not path.exists() and not (run_set.directory / RUNS).read_bytes()
    with pytest.raises(UserError, match="No space"):
        seal.seal_set(replace(run_set, directory=disk / "other" / "bert"))
    assert not (disk / "other" / "bert" / SEAL).exists()


def test_a_line_that_fits_in_part_is_taken_back(tmp_path):
    run_set = planned(tmp_path)
    list_runs(run_set)
    before, limits = (run_set.directory / RUNS).read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    path = launch.reserve(run_set.directory, None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write results here \(File too large"):
            seal.start_run(run_set, 0, path)
        with pytest.raises(UserError, match="File too large"):
            launch.reserve_disk_space(launch.reserve(run_set.directory, None))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (run_set.directory / RUNS).read_bytes() == before and not path.exists()


def test_a_public_value_gives_the_seeds_of_a_set_that_was_sealed_before(tmp_path, capsys):
    folder, three = planned(tmp_path).directory, partial(refused, tmp_path, "--runs", "3")
    assert "before the value is known, --seal" in three("--seed-from", "beacon:1f")
    assert dispatch(command(tmp_path, "--runs", "3", "--seal", NAMED)) == 0
    sealed = read_sealed(folder)
    assert sealed.digest in capsys.readouterr().out and sealed.seal.seeds is None
    assert "sealed already" in three("--seal", "another")
    assert "3 runs were sealed" in three("--seed-from", "beacon:1f", "--runs", "2")
    assert "no seal that waits" in three("--seed-from", "beacon:1f", "--set", HARDWARE, "target=0.012")
    assert f"come from a public value: {NAMED}" in three() and not (folder / RUNS).exists()

    run_set = seal.derive_run_set(planned(tmp_path, runs="3"), "1f", continues=False)
    assert run_set.seeds == tuple(derive_seeds(sealed.digest, "1f", 3))
    seal.seal_set(run_set)
    assert events(folder)[0]["value"] == "1f" and tuple(events(folder)[0]["seeds"]) == run_set.seeds
    assert "derived from another value, 1f" in three("--seed-from", "beacon:2f", "--continue")
    assert "--continue makes" in three("--seed-from", "beacon:1f") and len(events(folder)) == 1
    list_runs(replace(run_set, num_runs=1), "lost", kept=False)
    again = run_sets.find_missing_runs(seal.derive_run_set(planned(tmp_path, runs="3"), "1f", continues=True))
    expected = derive_seeds(sealed.digest, "1f", 4)
    assert list(again.seeds) == expected[1:]  # one more in the place of the run that failed
    for words in (
        ["--seed-from", "beacon:"],
        ["--seed-from", "1f"],
        ["--seed", "1", "--seed-from", "beacon:1"],
    ):
        assert "--seed-from" in three(*words)


def test_a_run_whose_result_is_removed_while_it_runs_is_listed_as_lost(tmp_path):
    run_set = planned(tmp_path, runs="1")
    seal.seal_set(run_set)
    path = start_untimed(run_set)
    path.unlink()
    seal.end_run(run_set, path, launch.close_log(path, 0, "", path.name))
    _, ended = events(run_set.directory)
    assert (ended["outcome"], ended["head"]) == ("lost", "") and "was removed while it ran" in ended["reason"]


def test_a_resumed_run_is_listed_with_the_result_from_which_it_goes_on(tmp_path):
    run_set = planned(tmp_path, runs="1")
    list_runs(run_set)
    checkpoint = run_set.directory / "result_0.safetensors"
    list_runs(replace(planned(tmp_path, runs="1"), seeds=run_set.seeds, checkpoint=checkpoint), "converged")
    first, _, again, ended = events(run_set.directory)
    assert (first["resumed"], again["resumed"]) == ("", "result_0.txt") and again["seed"] == first["seed"]
    assert (ended["result"], ended["outcome"]) == ("result_1.txt", "converged")
    sealed = read_sealed(run_set.directory)
    assert sealed.faults == () and seal.decided_seeds(sealed) == list(run_set.seeds)


def test_the_seed_of_a_run_is_free_for_no_other_after_a_resumption_that_failed_before_its_clock(tmp_path):
    run_set = planned(tmp_path, runs="1")
    list_runs(run_set)
    resumed = replace(run_set, checkpoint=run_set.directory / "result_0.safetensors")
    list_runs(resumed, "refused", kept=False)
    assert run_sets.find_missing_runs(planned(tmp_path, runs="1")).seeds[0] != run_set.seeds[0]


def test_a_set_of_another_recipe_is_sealed_apart_and_has_seeds_of_its_own(tmp_path, capsys):
    sealing = command(tmp_path, "--runs", "3", "--seal", NAMED)
    assert dispatch(sealing) == 0 == dispatch([*sealing, "--set", "target=0.012"])
    other = planned(tmp_path, "target=0.012", runs="3")
    assert "baseline+target=0.012" in other.system
    assert f"3 runs are sealed in {os.path.relpath(other.directory / SEAL)}" in capsys.readouterr().out
    sets = [seal.derive_run_set(one, "1f", continues=False) for one in (planned(tmp_path, runs="3"), other)]
    assert sets[0].directory != other.directory and not {*sets[0].seeds} & {*sets[1].seeds}
    for run_set in sets:
        seal.seal_set(run_set)
        sealed = read_sealed(run_set.directory)
        assert seal.decided_seeds(sealed) == derive_seeds(sealed.digest, "1f", 3) == list(run_set.seeds)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--index", "3"], "without --continue or --seal"),
        (["--continue"], "--seal begins a set"),
        (["--resume", "result_0.txt"], "--seal begins a set"),
    ],
)
def test_options_that_a_seal_cannot_keep_are_refused(tmp_path, words, why):
    assert why in refused(tmp_path, "--seal", NAMED, *words)
    assert not list(tmp_path.iterdir())


def test_a_set_is_sealed_on_no_machine_that_would_refuse_its_runs(mount_disk):
    disk = mount_disk("2m")
    assert "room for results" in refused(disk, "--seal", NAMED)
    assert not list(disk.rglob(SEAL))


@pytest.mark.parametrize(
    ("words", "is_locked"), [([], True), (["--continue"], True), (["--index", "3"], False)]
)
def test_two_sets_in_one_folder_wait_for_each_other(tmp_path, monkeypatch, words, is_locked):
    def hold(folders):
        raise UserError(f"holds {folders}")

    monkeypatch.setattr(run_sets, "lock_folders", hold)
    locked = [planned(tmp_path).directory] if is_locked else []
    assert refused(tmp_path, *words) == f"holds {locked}"


def test_a_folder_of_results_that_cannot_be_made_is_refused_with_fitting_advice(tmp_path):
    (tmp_path / "file").touch()
    why = refused(tmp_path / "file" / "results")
    assert "(Not a directory); choose another folder with --results" in why and "--force" not in why


def below_torchrun(monkeypatch, rank):
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))


def test_below_torchrun_each_start_makes_the_next_run_of_a_set_sealed_for_all(tmp_path, monkeypatch):
    below_torchrun(monkeypatch, 1)
    sealing = command(tmp_path, "--runs", "3", "--seal", NAMED)
    assert dispatch(sealing) == 0 and not list(tmp_path.iterdir())
    below_torchrun(monkeypatch, 0)
    assert dispatch(sealing) == 0
    run_set = planned(tmp_path, runs="3")
    sealed = read_sealed(run_set.directory)
    assert (sealed.seal.num_runs, sealed.seal.ranks) == (3, 2)
    for words in ([], ["--seed-from", "beacon:1f"]):
        assert "makes one run; with --continue each" in refused(tmp_path, "--runs", "3", *words)
    expected = derive_seeds(sealed.digest, "1f", 3)
    for number in range(3):
        derived = seal.derive_run_set(planned(tmp_path, runs="3"), "1f", continues=True)
        following = run_sets.find_missing_runs(derived)
        assert following.num_done == number and list(following.seeds[number:]) == expected[number:]
        assert [turn for _, turn in run_sets.list_turns([following])] == [number]
        seal.seal_set(following)
        lines = len(events(run_set.directory))
        path = leave_result(following, ('"num_ranks", "value": 1', '"num_ranks", "value": 2'))
        seal.start_run(following, number, path)
        seal.end_run(following, path, Ended(0, "converged"))
        assert events(run_set.directory)[lines]["seed"] == expected[number]
    assert [event["event"] for event in events(run_set.directory)] == ["derived", *["started", "ended"] * 3]
    last = command(tmp_path, "--runs", "3", "--seed-from", "beacon:1f", "--continue")
    for rank in (0, 1):  # Slurm kills a job of which one rank ends with another code
        below_torchrun(monkeypatch, rank)
        assert dispatch(last) == 0


@pytest.mark.slow
def test_a_set_with_killed_runs_and_a_killed_launcher_is_listed_and_audited(place, ttt):
    short = ("target=0.005", "max_duration=900ba", "evaluate_from=60ba")
    forced = place.arguments((*BERT, *short), "--force")
    launcher = place.start(*forced, "--runs", 3)
    place.until_logged('"block_start"')
    place.rank().send_signal(signal.SIGKILL)
    place.until_logged('"block_start"', 1)
    launcher.kill()
    until(lambda: not place.processes())
    launcher.communicate()
    done = ttt([*forced, "--runs", "2", "--continue"])
    assert done.returncode == 0, done.stderr
    (folder,) = place.results_folder.glob("*/bert")
    starts = [event for event in events(folder) if event["event"] == "started"]
    ends = {event["result"]: event["outcome"] for event in events(folder) if event["event"] == "ended"}
    sealed = read_sealed(folder)
    assert [event["seed"] for event in starts] == seal.decided_seeds(sealed) and len(starts) == 4
    assert sealed.faults == () and len(sealed.seal.seeds) == 3 and sealed.seal.machine
    expected = {"result_0.txt": "failed", "result_2.txt": "converged", "result_3.txt": "converged"}
    assert ends == expected and os.path.exists(folder / "result_1.txt")
    (audited,) = audit_paths([folder])
    assert {finding.rule for finding in audited.findings if finding.rule[0] == "C"} == {"C916", "C918"}
