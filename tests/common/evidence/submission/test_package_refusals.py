"""`ttt export --to submission`: refusals in one line, and no partly written package."""

import json
import os
import re
from pathlib import Path

import pytest

from common.errors import UserError
from common.evidence.submission.package import put_in_place
from tests.command import one_line
from tests.common.evidence.submission.packages import (
    DESCRIPTION,
    RESNET,
    accuracy_as_text,
    names,
    package,
    refused,
)


def last(folder):
    """Return the place of the last result, which is removed."""
    path = folder / "result_4.txt"
    path.unlink()
    return path


def link_folder(folder):
    elsewhere = folder.parents[2] / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)


def add_run(folder):
    text = (folder / "result_4.txt").read_text()
    (folder / "result_5.txt").write_text(text.replace("1004", "1005"))


def replace(old, new, *numbers):
    """Return a function that replaces text in some results of a folder."""

    def change(folder):
        for path in (folder / f"result_{number}.txt" for number in numbers):
            path.write_text(path.read_text().replace(old, new))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (last, "resnet: 4 runs, and resnet has exactly 5"),
        (add_run, "resnet: 6 runs, and resnet has exactly 5"),
        (lambda folder: last(folder).symlink_to("/etc/hostname"), "result_4.txt: is not one of the results"),
        (lambda folder: last(folder).mkdir(), "result_4.txt: is not one of the results"),
        (lambda folder: os.mkfifo(last(folder)), "result_4.txt: is not one of the results"),
        (link_folder, "is reached through a link"),
        (lambda folder: (folder / "scaling.json").touch(), "resnet/scaling.json: is not one of the results"),
        (
            lambda folder: (folder / "result_4.txt").rename(folder / "result_ 4\n.txt"),
            "result_ 4?.txt: is not one of the results",
        ),
        (accuracy_as_text, "result_2.txt"),
        (lambda folder: (folder / "result_3.txt").write_bytes(b"\0\xff" * 100), "result_3.txt: P0"),
        (replace('"success"', '"aborted"', 0, 1), "resnet: the set has no score"),
        (
            replace('"value": "Example"', '"value": "Other"', *range(5)),
            "the submitter 'Other', not 'Example'",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_set_that_cannot_be_published_is_refused(work, change, message):
    change(work / RESNET)
    refused(done := package(RESNET, "--out", "package"), message)
    assert not (work / "package").exists()
    assert ("not one of" in done.stdout) == ("not one of" in message) and "of this suite" not in done.stdout


def test_secrets_in_a_log_are_named_by_line_and_kind_and_never_shown(work):
    path = work / RESNET / "result_2.txt"
    lines = path.read_text().splitlines()
    lines[1:1] = ["# note: MASTER_ADDR=dgx017.hpc.example.com, data in /projects/acme-secret/alice"]
    path.write_text("\n".join([*lines, "note https://jane:hunter22@registry.example/simple end"]))
    done = package(RESNET, "--out", "package")
    for place in (
        "2: host name (MAST...)",
        "2: absolute path (/pro...)",
        f"{len(lines) + 1}: URL with a login",
    ):
        refused(done, f"{RESNET}/result_2.txt:{place}")
    assert not {"hunter22", "acme-secret", "dgx017"} & set(re.findall(r"[\w-]+", done.stdout))
    assert not (work / "package").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sw_notes": "/".join(("", "home", "jane", "run"))},
            "systems/8xA100-optimized.json:34: home folder",
        ),
        ({"framework": ["PyTorch"]}, "framework: must be text"),
        ({"cooling": "TBD"}, "cooling: holds a placeholder"),
        ({"division": "closed"}, "division is closed"),
        ({"status": "Preview"}, "status is Preview"),
        ({"submitter": "Other"}, "submitter is Other"),
        ({"system_name": "other"}, "other for 8xA100-optimized"),
        (None, "`ttt doctor --describe --out 8xA100-optimized.json` makes one"),
    ],
    ids=str,
)
def test_a_description_that_is_missing_or_disagrees_is_refused(work, changes, message):
    path = work / DESCRIPTION
    if changes is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=1))
    refused(package(RESNET, "--list"), message)


@pytest.mark.parametrize("kind", ["file", "folder", "dangling"])
def test_an_existing_output_stays(work, kind):
    out = work / "package"
    {"file": out.touch, "folder": out.mkdir, "dangling": lambda: out.symlink_to("nowhere")}[kind]()
    assert "never overwrites" in one_line(package(RESNET, "--out", out))
    assert out.is_symlink() or out.exists()


@pytest.mark.parametrize("is_folder", [True, False])
def test_an_output_that_appears_while_the_checkers_run_stays(tmp_path, is_folder):
    finished, out = tmp_path / "finished", tmp_path / "out"
    for path in (finished, out):
        path.mkdir() if is_folder else path.touch()
    with pytest.raises(UserError, match="never overwrites"):
        put_in_place(finished, out)
    assert finished.exists() and out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "/proc/package"], "cannot write here"),
        (["--out", "no/such/folder"], "its folder does not exist"),
        (["--out", "package.zip"], "name it NAME.tar.gz"),
        ([], "--out FOLDER_OR_TAR"),
        (["--list", "--out", "package"], "--out FOLDER_OR_TAR"),
        (["--list", "--submitter", "../Example"], "--submitter"),
        (["--list", "--submitter", ".hidden"], "--submitter"),
        (["--list", "--submitter", "a b"], "--submitter"),
        (["--list", "--implementation", "x/../y"], "--implementation"),
        (["nowhere", "--list"], "nowhere: no such file"),
    ],
    ids=" ".join,
)
def test_mistakes_are_one_line(work, unjudged, arguments, message):
    before = names(work)
    assert message in one_line(package(RESNET, *arguments))
    assert names(work) == before


@pytest.mark.parametrize("name", ["package", "package.tar.gz"])
def test_a_full_disk_leaves_nothing_behind(work, unjudged, monkeypatch, name):
    def full_disk(*arguments):
        raise OSError(28, "No space left on device")

    before = sorted(work.iterdir())
    monkeypatch.setattr("common.evidence.submission.package.os.replace", full_disk)
    assert "No space left on device" in one_line(package(RESNET, "--out", name))
    assert sorted(work.iterdir()) == before


def test_logs_of_another_suite_are_refused(published):
    paths = [published / "v2.0/8xA100_80GB-methods/resnet"]
    refused(package(*paths, "--list"), "result_0.txt: not a log of this suite")


def test_run_sets_that_were_timed_at_once_are_refused(golden, work):
    for index, lines in enumerate(golden.set("bert")):
        folder = work / "results/8xA100-optimized/bert"
        folder.mkdir(exist_ok=True)
        text = "\n".join(lines).replace("# benchmark: bert", "# benchmark: language_bert")
        (folder / f"result_{index}.txt").write_text(text + "\n")
    refused(package("results", "--list"), "The runs of two sets on one system follow each other")


def test_the_default_systems_folder_can_be_replaced(work, unjudged):
    Path("systems").rename("described")
    refused(package(RESNET, "--list"), "systems/8xA100-optimized.json")
    assert package(RESNET, "--systems", "described", "--list").returncode == 0
