"""`ttt data status`: what is prepared, verified, damaged or missing, and what to type next."""

import json
import shutil

import pytest

from common import repository
from common.data import manifest, shards, status
from common.repository import ROOT, benchmarks
from common.training.load import load_config
from language_bert.data import sources
from tests.command import ttt_here


def prepare(tmp_path, monkeypatch, size, *settings, benchmark="language_bert"):
    """Make a small prepared folder that configurations of a benchmark at a size would read."""
    config = load_config(benchmark, "baseline", size=size, settings=list(settings)).config
    monkeypatch.setattr(repository, "WORKSPACE", tmp_path)
    folder = tmp_path / config.data.directory
    folder.mkdir(parents=True)
    for name in sorted(config.prepared_files()):
        (folder / name).write_bytes(name.encode())
    manifest.write_manifest(folder, {"settings": config.prepared_with()})
    return folder


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    return prepare(tmp_path, monkeypatch, "mini")


def verify(folder, *settings):
    place = ("--size", "mini", "--set", f"data.directory={folder}", *settings)
    return ttt_here("data", "verify", "language_bert", *place)


def state(code=0):
    """Return the answer of `ttt data status` for BERT at size mini."""
    done = ttt_here("data", "status", "bert", "--json")
    assert done.returncode == code, done.stderr
    entries = json.loads(done.stdout)["data"]
    of_mini = (entry for entry in entries if entry["size"] == "mini")
    entry = next(entry for entry in of_mini if "baseline" in entry["configurations"])
    text = ttt_here("data", "status", "language_bert").stdout
    assert f"language_bert mini: {entry['state']}" in text and f"next: {entry['next']}" in text
    return entry


def test_from_missing_to_verified(prepared):
    unprepared = prepared.rename(prepared.with_name("elsewhere"))
    nothing = state()
    assert nothing["state"] == "missing" and nothing["fingerprint"] is None
    assert nothing["next"] == "ttt data prepare language_bert --size mini"
    unprepared.rename(prepared)
    fingerprint = manifest.read_manifest(prepared, hint="")["fingerprint"]
    unverified = state()
    assert unverified["state"] == "prepared" and unverified["fingerprint"] == fingerprint
    sizes = [path.stat().st_size for path in prepared.iterdir() if path.name != manifest.MANIFEST]
    assert unverified["num_bytes"] == sum(sizes)
    assert unverified["next"] == "ttt data verify language_bert --size mini"
    assert verify(prepared).returncode == 0
    verified = state()
    assert verified["state"] == "verified" and verified["verified"].endswith("Z")
    assert verified["next"] == "ttt run language_bert baseline --size mini"


@pytest.mark.parametrize("text", ["null", "5", "[1]", "{", "[" * 50_000])
def test_damaged_settings_of_a_stopped_preparation_are_none(text, tmp_path):
    (tmp_path / shards.SETTINGS).write_text(text)
    assert shards.read_settings(tmp_path) == {}


def test_a_record_counts_for_the_files_that_were_read_alone(prepared):
    assert verify(prepared).returncode == 0
    copy = shutil.copytree(prepared, prepared.with_name("copy"))
    assert status.read_record(copy) is None
    name = "train.index.npy"
    (prepared / name).write_bytes(b"x" * len(name))
    assert state()["state"] == "prepared"  # of the same size: nobody has read it since
    assert verify(prepared).returncode == 1
    damaged = state(code=1)
    assert damaged["state"] == "damaged" and "1 problems found by `ttt data verify`" in damaged["problems"][0]
    assert damaged["next"] == "ttt data prepare language_bert --size mini"


def test_a_verification_with_other_settings_finds_no_damage(prepared):
    done = verify(prepared, "data.num_evaluation_samples=7")
    assert done.returncode == 1 and "made with data.num_evaluation_samples" in done.stdout
    assert "intact, of other settings" in done.stdout and state()["state"] == "verified"


def test_data_of_another_text_are_used_with_the_setting_that_made_them(tmp_path, monkeypatch):
    prepare(tmp_path, monkeypatch, "full", "data.corpus=other")
    for word, command in (("prepared", "verify language_bert"), ("verified", "run language_bert baseline")):
        (entry,) = [entry for entry in status.read_report(["language_bert"]).data if entry.fingerprint]
        assert entry.state == word and entry.settings == {"data.corpus": "other"}
        assert entry.next.endswith(f"{command} --size full --set data.corpus=other")
        if word == "prepared":
            assert ttt_here(*entry.next.split()[1:]).returncode == 0


def test_whole_data_of_full_size_and_other_settings_are_no_damage(tmp_path, monkeypatch):
    prepare(tmp_path, monkeypatch, "full", "data.num_duplicates=1")
    for command in ("verify language_bert", "run language_bert baseline"):
        (entry,) = [entry for entry in status.read_report(["language_bert"]).data if entry.fingerprint]
        assert entry.state == "made with other settings" and not entry.problems
        assert entry.next.endswith(f"{command} --size full --set data.num_duplicates=1")
        first, *_, last = entry.describe().splitlines()
        assert first.startswith(f"language_bert full: made with other settings, {entry.directory}, ")
        assert first.endswith(" --set data.num_duplicates=1") and last.strip() == f"next: {entry.next}"
        done = ttt_here(*entry.next.split()[1:]) if "verify" in command else ttt_here("data", "status")
        assert done.returncode == 0


def test_images_that_were_encoded_again_are_used_with_the_size_that_made_them(tmp_path, monkeypatch):
    prepare(tmp_path, monkeypatch, "full", "data.encoded_px=320", benchmark="image_classification")
    (entry,) = [entry for entry in status.read_report(["image_classification"]).data if entry.fingerprint]
    assert entry.state == "prepared" and entry.next.endswith(" --set data.encoded_px=320")


def test_an_unfinished_preparation_is_begun_and_goes_on_with_its_settings(tmp_path, monkeypatch):
    folder = prepare(tmp_path, monkeypatch, "full", "data.num_duplicates=1")
    settings = manifest.read_manifest(folder, hint="")["facts"]["settings"]
    shutil.rmtree(folder)
    work = folder.with_name(".full.part")
    for name in ("data/train-00003.shard", "rows/train-00003-abc.npy", "rows/train-00004-abc.npy"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).touch()
    (work / shards.SETTINGS).write_text(json.dumps(settings))
    (entry,) = [entry for entry in status.read_report(["language_bert"]).data if entry.state == "begun"]
    text = "language_bert full: begun, 1 finished shards in .full.part; the same command goes on, "
    assert entry.describe().startswith(text)
    chosen = "--size full --set data.num_duplicates=1 --source DIR"
    assert entry.next == f"ttt data prepare language_bert {chosen}"


def test_mini_data_of_other_settings_are_prepared_anew_without_a_date(prepared):
    make_of_other_settings(prepared)
    assert verify(prepared, "data.num_train_samples=7").returncode == 0
    entry = state()
    assert entry["state"] == "made with other settings" and entry["verified"]
    assert "made with data.num_train_samples 7" in entry["problems"][0]
    assert entry["next"] == "ttt data prepare language_bert --size mini"
    text = ttt_here("data", "status", "language_bert").stdout
    assert "mini: made with other settings, " in text and entry["verified"] not in text


@pytest.mark.parametrize("content", ["", "{}", '{"fingerprint": 3}'])
def test_a_record_that_is_none_does_not_count(prepared, content):
    status.record_path(prepared).write_text(content)
    assert state()["state"] == "prepared"


def make_of_other_settings(folder):
    facts = manifest.read_manifest(folder, hint="")["facts"]
    facts["settings"]["data.num_train_samples"] = 7
    manifest.write_manifest(folder, facts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "vocab.txt").unlink(), "vocab.txt: missing"),
        (lambda folder: (folder / "vocab.txt").write_text("more than it was"), "vocab.txt: 16 bytes"),
        (lambda folder: (folder / "other").touch(), "other: not in the manifest"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "; remove the folder"),
    ],
)
def test_damage_that_the_manifest_names_and_sizes_show_is_named(prepared, change, message):
    change(prepared)
    (problem,) = state(code=1)["problems"]
    assert message in problem


def test_a_folder_beside_which_nothing_can_be_written_is_verified_without_a_record(prepared, monkeypatch):
    def refuse(path, text):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(status, "write_text", refuse)
    done = verify(prepared)
    assert done.returncode == 0 and "no record of this verification is left (Read-only" in done.stderr
    assert state()["state"] == "prepared"


RECORDS = ("eval_10k", "part-00000-of-00002", "part-00001-of-00002")
OTHER_PARTS = tuple(f"part-{number:05}-of-00003" for number in range(3))  # of another text
TABLES = ("train.parquet", "validation.parquet", "vocab.txt")
CHECKPOINT = ("model.ckpt-28252.index", "model.ckpt-28252.data-00000-of-00001")


@pytest.mark.parametrize(
    ("names", "missing", "setting"),
    [
        ((*RECORDS, *CHECKPOINT), [], " --set data.masked_fraction=0.15"),
        ((*TABLES, *CHECKPOINT), [], " --set data.corpus=other"),
        ((*RECORDS[1:], "eval.txt", "vocab.txt", *CHECKPOINT), [], ""),
        ((*OTHER_PARTS, "eval.txt", "vocab.txt", *CHECKPOINT), [], " --set data.corpus=other"),
        ((*OTHER_PARTS[1:], "eval.txt", "vocab.txt", *CHECKPOINT), ["part-00000-of-00003"], ""),
        ((*TABLES[:2], *CHECKPOINT), ["vocab.txt"], ""),
        (RECORDS[:2], [*CHECKPOINT, RECORDS[2]], ""),
        ((), [*CHECKPOINT, "vocab.txt", "eval.txt", *RECORDS[1:]], ""),
    ],
)
def test_what_a_source_of_bert_lacks_and_is_prepared_with_goes_by_its_form(
    names, missing, setting, tmp_path, monkeypatch
):
    monkeypatch.setattr(sources, "NUM_PARTS", 2)
    source = tmp_path / "a source"
    source.mkdir()
    for name in names:
        (source / name).touch()
    report = status.read_report(["language_bert"], source=source)
    assert sorted(report.sources[0].missing) == sorted(missing)
    prepare = f"ttt data prepare language_bert --size full{setting} --source '{source}'"
    fetch = f"ttt data fetch language_bert --to '{source}'"
    commands = {entry.next for entry in report.data if entry.size == "full"}
    assert prepare in commands if not missing else commands == {fetch}


def test_images_are_prepared_from_a_folder_and_not_fetched(tmp_path):
    report = status.read_report(["image_classification"], source=tmp_path)
    commands = [entry.next for entry in report.data if entry.size == "full"]
    assert commands and all(command.endswith("--source DIR") for command in commands)


def test_the_status_of_everything_has_each_benchmark_size_and_configuration():
    done = ttt_here("data", "status", "--json")
    assert done.returncode in (0, 1) and not done.stderr
    report = json.loads(done.stdout)
    sizes = {(entry["benchmark"], entry["size"]) for entry in report["data"]}
    assert sizes == {(name, size) for name in benchmarks() for size in ("full", "mini")}
    assert [entry["benchmark"] for entry in report["sources"]] == benchmarks()
    read_by = [name for entry in report["data"] for name in entry["configurations"]]
    assert set(read_by) >= {"baseline", "efficient"} and str(ROOT) not in done.stdout
    assert "--set data.directory" not in done.stdout  # --configuration says which folder


def test_a_copy_that_keeps_its_times_is_not_verified(prepared):
    assert verify(prepared).returncode == 0 and state()["state"] == "verified"
    shutil.copytree(prepared.rename(prepared.with_name("original")), prepared)  # keeps mtimes
    assert status.read_record(prepared) and state()["state"] == "prepared"
