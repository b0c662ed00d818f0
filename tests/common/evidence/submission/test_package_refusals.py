"""`ttt package`: refusals in one line, and nothing written by halves."""

import json
import os
from pathlib import Path

import pytest

from tests.common.evidence.submission.packages import (
    RESNET,
    accuracy_as_text,
    mistaken,
    names,
    package,
    refused,
)

HOME = "/".join(("", "home", "jane", "run"))  # the rules of the house want no such path in a file


def four(folder):
    (folder / "result_4.txt").unlink()


def six(folder):
    (folder / "result_5.txt").write_text((folder / "result_4.txt").read_text().replace("1004", "1005"))


def link(folder):
    four(folder)
    (folder / "result_4.txt").symlink_to("/etc/hostname")


def linked_folder(folder):
    moved = folder.parent.parent.parent / "elsewhere"
    folder.rename(moved)
    folder.symlink_to(moved)


def directory(folder):
    four(folder)
    (folder / "result_4.txt").mkdir()


def pipe(folder):
    four(folder)
    os.mkfifo(folder / "result_4.txt")


def scaling(folder):
    (folder / "scaling.json").write_text('{"scaling_factor": 0.5}')


def odd_name(folder):
    (folder / "result_4.txt").rename(folder / "result_ 4\n.txt")


def binary(folder):
    (folder / "result_3.txt").write_bytes(b"\0\xff" * 100)


def two_missed(folder):
    for index in (0, 1):
        path = folder / f"result_{index}.txt"
        path.write_text(path.read_text().replace('"status": "success"', '"status": "aborted"'))


def another_org(folder):
    for path in folder.iterdir():
        path.write_text(path.read_text().replace('"value": "Example"', '"value": "Other"'))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (four, "resnet: 4 runs, and resnet has exactly 5"),
        (six, "resnet: 6 runs, and resnet has exactly 5"),
        (link, "resnet/result_4.txt: is not one of the results"),
        (linked_folder, "is reached through a link"),
        (directory, "resnet/result_4.txt: is not one of the results"),
        (pipe, "resnet/result_4.txt: is not one of the results"),
        (scaling, "resnet/scaling.json: is not one of the results"),
        (odd_name, "result_ 4?.txt: is not one of the results"),
        (accuracy_as_text, "result_2.txt"),
        (binary, "result_3.txt: P0"),
        (two_missed, "resnet: 2 runs missed the target"),
        (another_org, "name the submitter 'Other', not 'Example'"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_run_set_that_cannot_be_published_is_refused(work, change, message):
    change(work / RESNET)
    refused(package(RESNET, "--out", "package"), message)
    assert not (work / "package").exists()


def secret(*parts):
    """Join at run time, so that no scanner takes this file for a leak."""
    return "".join(parts)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (secret("-----BEGIN RSA ", "PRIVATE KEY-----"), "private key"),
        (secret("AKIA", "ABCDEFGHIJKLMNOP"), "AWS access key"),
        (secret("aws_secret_access_key", " = ", "a1B2" * 10), "AWS secret key"),
        (secret("AIza", "x" * 35), "Google API key"),
        (secret("DefaultEndpointsProtocol;AccountKey", "=", "Ab1/" * 20), "Azure storage key"),
        (secret("hf", "_", "aB3" * 12), "Hugging Face token"),
        (secret("WANDB_API_KEY", "=", "0123456789" * 4), "Weights & Biases key"),
        (secret("gh", "p_", "aB3" * 12), "GitHub token"),
        (secret("github", "_pat_", "aB3" * 12), "GitHub token"),
        ("https://jane:hunter22@registry.example/simple", "URL with a login"),
        ("https://token123@github.com/x/y", "URL with a login"),
        ("/nfs/jane.doe@example.com/x", "e-mail address"),
        ("saved to " + HOME, "home folder"),
        ("C:\\Users\\jane", "home folder"),
        ("saved to /scratch/run", "absolute path"),
        ("rank 3 at 10.12.0.7", "IP address"),
        ("rank 3 at gpu-17.cluster", "host name"),
        ('{"hostname": "gpu17"}', "host name"),
        ("USER=jane", "user name"),
        ("SUBMISSION_PLATFORM_" + "PLACEHOLDER", "placeholder"),
        ("x" * 30_000, "line too long"),
    ],
    ids=lambda value: "",
)
def test_a_secret_in_a_log_is_named_by_line_and_kind_and_never_shown(work, text, kind):
    path = work / RESNET / "result_2.txt"
    before = path.read_text()
    path.write_text(before + f"note {text} end\n")
    done = package(RESNET, "--out", "package")
    refused(done, f"{RESNET}/result_2.txt:{before.count(chr(10)) + 1}: {kind}")
    assert text not in done.stdout and not (work / "package").exists()


def test_secrets_in_a_description_and_in_the_configuration_are_found(work):
    path = work / "systems/8xA100-optimized.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sw_notes": HOME}, indent=1))
    refused(package(RESNET, "--list"), "systems/8xA100-optimized.json:34: home folder")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"framework": ["PyTorch"]}, "framework: must be text, found list"),
        ({"host_networking": ""}, "host_networking: empty"),
        ({"cooling": "TBD"}, "cooling: holds a placeholder"),
        ({"division": "closed"}, "division is closed"),
        ({"status": "Preview"}, "status is Preview"),
        ({"submitter": "Other"}, "submitter is Other"),
        ({"system_name": "other"}, "other for 8xA100-optimized"),
    ],
)
def test_a_description_that_disagrees_is_refused(work, changes, message):
    path = work / "systems/8xA100-optimized.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(package(RESNET, "--list"), message)


def test_a_missing_description_names_the_command_that_makes_one(work):
    (work / "systems/8xA100-optimized.json").unlink()
    refused(package(RESNET, "--list"), "`ttt system --out 8xA100-optimized.json` makes one")


@pytest.mark.parametrize("kind", ["file", "folder", "dangling"])
def test_an_existing_output_stays(work, kind):
    out = work / "package"
    {"file": out.touch, "folder": out.mkdir, "dangling": lambda: out.symlink_to("nowhere")}[kind]()
    mistaken(package(RESNET, "--out", out), "never overwrites")
    assert out.is_symlink() or out.exists()


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
    mistaken(package(RESNET, *arguments), message)
    assert names(work) == before


@pytest.mark.parametrize("name", ["package", "package.tar.gz"])
def test_a_full_disk_leaves_nothing_behind(work, unjudged, monkeypatch, name):
    def full_disk(*arguments):
        raise OSError(28, "No space left on device")

    before = sorted(work.iterdir())
    monkeypatch.setattr("common.evidence.submission.package.os.replace", full_disk)
    mistaken(package(RESNET, "--out", name), "No space left on device")
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
