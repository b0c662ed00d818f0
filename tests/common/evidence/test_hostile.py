"""Crafted files and archives: `ttt check` refuses each in one line, at once and in little memory."""

import bz2
import errno
import gzip
import io
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zlib
from contextlib import ExitStack

import numpy as np
import pytest

from common.evidence.log import MAX_BYTES, MAX_EVALUATIONS, MAX_LINES, parse_log
from common.evidence.records import TOKEN
from common.evidence.rules.sets import smallest_total
from common.evidence.submission import official
from common.repository import ROOT
from common.yaml_file import parse_head
from tests.command import run
from tests.command import ttt_here as ttt

SECONDS = 1  # of processor time beside what a good log takes
MEGABYTES = 200
MEASURE = """
import json, resource, subprocess, sys
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
seconds, megabytes = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
print(json.dumps([done.returncode, done.stdout, done.stderr, seconds, megabytes]))
"""


def measured(*arguments, cwd):
    """Run `ttt`; returns what it did, its seconds of processor time and its megabytes of memory.

    It is the child of a small process, because its peak memory starts at that of its parent.
    """
    command = [sys.executable, "-S", "-E", "-c", MEASURE, sys.executable, "-m", "common.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    code, out, err, seconds, megabytes = json.loads(run(*command, cwd=cwd, env=environment).stdout)
    print(f"{' '.join(map(str, arguments))}: {seconds:.2f} s, {megabytes:.0f} MB")
    return subprocess.CompletedProcess(arguments, code, out, err), seconds, megabytes


@pytest.fixture(scope="module")
def limited(golden, tmp_path_factory):
    """Return `ttt` that may take a second more than with a good log, and 200 MB."""
    good = golden.write(tmp_path_factory.mktemp("good"), [golden.log()])
    usual = {}

    def run_limited(verb, *arguments, cwd):
        if verb not in usual:
            usual[verb] = measured(verb, "result_0.txt", cwd=good)[1]
        done, seconds, megabytes = measured(verb, *arguments, cwd=cwd)
        assert seconds < usual[verb] + SECONDS and megabytes < MEGABYTES, (seconds, megabytes)
        assert "Traceback" not in done.stderr
        return done

    return run_limited


def refused(done, *words):
    """Assert one line and exit code 2."""
    assert (done.returncode, done.stdout) == (2, ""), done
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in words), line


def header(name, size=0, type=tarfile.REGTYPE, format=tarfile.GNU_FORMAT):
    member = tarfile.TarInfo(name)
    member.size, member.type = size, type
    return member.tobuf(format)


def zeros(size):
    """Return gzip of zeros, made once for all of its blocks."""
    block = 2**24
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*(packer.compress(bytes(block)) for _ in range(size // block)), packer.flush()])


def long_name(type):
    return gzip.compress(header("././@LongLink", 3 * 2**30, type)) + zeros(2**25)


def chained(type):
    one = header("././@LongLink", 2, type) + b"a\0".ljust(512, b"\0")
    return gzip.compress(one * 20_000 + header("a"))


def damaged_member():
    """Return a log whose packed bytes cannot be unpacked from the middle on."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    good = header("result_0.txt", 2**22) + random.Random(0).randbytes(2**21)
    return packer.compress(good) + packer.flush(zlib.Z_SYNC_FLUSH) + b"\xff" * 2**20


ARCHIVES = {
    "a damaged member": (damaged_member, "not a readable archive: Error -3"),
    "a long name of 3 GiB": (lambda: long_name(tarfile.GNUTYPE_LONGNAME), "header of more than"),
    "a PAX header of 3 GiB": (lambda: long_name(tarfile.XHDTYPE), "header of more than"),
    "chained long names": (lambda: chained(tarfile.GNUTYPE_LONGNAME), "headers without end"),
    "bzip2 inside": (lambda: bz2.compress(header("result_0.txt")), "not a readable archive"),
    "nothing": (lambda: b"", "not a readable archive"),
    "text": (lambda: b"not an archive", "not a readable archive"),
    "damaged gzip": (lambda: b"\x1f\x8b\x08\x00damaged", "not a readable archive"),
    "gigabytes behind the last member": (
        lambda: gzip.compress(header("a") + bytes(2**20)) + zeros(2**28),
        "bytes follow",
    ),
}


@pytest.mark.parametrize(("make", "word"), ARCHIVES.values(), ids=ARCHIVES)
def test_a_crafted_archive_is_refused_in_one_line(tmp_path, limited, make, word):
    (tmp_path / "package.tar.gz").write_bytes(make())
    refused(limited("check", "package.tar.gz", cwd=tmp_path), "package.tar.gz", word)


def test_a_large_member_ends_the_reading_at_its_header(tmp_path, limited):
    content = gzip.compress(header("weights.bin", 8 * 2**30)) + zeros(2**25)
    (tmp_path / "package.tar.gz").write_bytes(content)
    done = limited("check", "package.tar.gz", cwd=tmp_path)
    assert done.returncode == 2
    assert "A001 error" in done.stderr and "more than 2 GiB" in done.stderr


def test_a_changed_byte_that_only_the_checksum_knows_is_found(golden, tmp_path, limited):
    golden.write(tmp_path / "results", golden.set())
    path = tmp_path / "package.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(tmp_path / "results", "results")
    plain = bytearray(gzip.decompress(path.read_bytes()))
    at = plain.index(b'"key": "seed", "value": 1000') + 24
    plain[at : at + 4] = b"2000"
    data = gzip.compress(bytes(plain))
    path.write_bytes(data[:-8] + bytes(b ^ 1 for b in data[-8:-4]) + data[-4:])
    refused(limited("check", path, cwd=tmp_path), "package.tar.gz", "CRC")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_is_no_fault_of_an_archive(golden, tmp_path, monkeypatch, code):
    def write_a_part(source, target):
        target.write(source.read(5000))
        raise OSError(code, os.strerror(code))

    golden.write(tmp_path / "results", golden.set())
    with tarfile.open(tmp_path / "package.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "results", "results")
    monkeypatch.setattr(shutil, "copyfileobj", write_a_part)
    done = ttt("check", "--no-official", tmp_path / "package.tar.gz")
    refused(done, f"{tempfile.gettempdir()}: cannot unpack ({os.strerror(code)})", "TMPDIR")


def test_an_archive_without_a_log_is_named_with_its_refused_members(tmp_path, limited):
    with tarfile.open(tmp_path / "package.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../result_0.txt"), io.BytesIO())
    done = limited("check", "package.tar.gz", cwd=tmp_path)
    first, last = done.stderr.splitlines()
    assert done.returncode == 2 and "A001 error" in first and "../result_0.txt" in first
    assert "no result_" in last and "package.tar.gz" in last and tempfile.gettempdir() + "/tmp" not in last
    refused(limited("score", "package.tar.gz", cwd=tmp_path), "package.tar.gz", "no log but an archive")


def add_sparse(folder, lines):
    (folder / "result_5.txt").touch()
    os.truncate(folder / "result_5.txt", 200 * 2**30)


def add_flood(line):
    return lambda folder, lines: (folder / "result_5.txt").write_bytes(line * (MAX_BYTES // len(line)))


def add_accuracies(number, distance):
    """Return what adds a log with so many accuracies, `distance` apart."""

    def add(folder, lines):
        at = next(index for index, line in enumerate(lines) if '"eval_accuracy"' in line)
        event = json.loads(lines[at].removeprefix(TOKEN)) | {"metadata": {}}
        more = [TOKEN + json.dumps(event | {"value": 1 / 3 + distance * place}) for place in range(number)]
        (folder / "result_5.txt").write_text("\n".join([*lines[:at], *more, *lines[at:]]))

    return add


LOGS = {
    "200 GB on no disk": (add_sparse, "larger than 16 MiB"),
    "newlines": (add_flood(b"\n"), f"more than {MAX_LINES:,} lines"),
    "comments": (add_flood(b"#ab\n"), f"more than {MAX_LINES:,} lines"),
    "empty records": (add_flood(b":::MLLOG \n"), f"more than {MAX_LINES:,} lines"),
    "one accuracy very often": (add_accuracies(75_000, 0), f"more than {MAX_EVALUATIONS:,} evaluations"),
    "very many accuracies": (add_accuracies(75_000, 1e-6), f"more than {MAX_EVALUATIONS:,} evaluations"),
}


@pytest.mark.parametrize(("add", "word"), LOGS.values(), ids=LOGS)
def test_a_crafted_log_is_refused_in_one_line_and_reaches_no_checker(golden, tmp_path, limited, add, word):
    lines = golden.log("bert")
    add(tmp_path, lines)
    done = limited("check", ".", cwd=tmp_path)
    assert done.returncode == 1 and done.stderr == ""
    refusal, summary = done.stdout.splitlines()
    assert "result_5.txt: P001 error" in refusal and word in refusal
    assert "rules: 1 error, 0 warnings; official checkers: not run" in summary


def test_as_many_evaluations_as_a_log_may_have_are_judged_in_time(golden, tmp_path, limited):
    add_accuracies(MAX_EVALUATIONS - 100, 1e-6)(tmp_path, golden.log("bert"))
    done = limited("check", "--no-official", ".", cwd=tmp_path)
    assert done.returncode == 1 and "S409 error" in done.stdout and "P001" not in done.stdout
    add_sparse(tmp_path, [])
    done = limited("score", ".", cwd=tmp_path)
    assert done.returncode == 1 and "no score" in done.stdout and done.stderr == ""


def test_a_folder_deeper_than_a_path_may_be_long_is_refused(tmp_path, limited):
    with ExitStack() as stack:
        parent = os.open(tmp_path, os.O_RDONLY)
        for _ in range(20):
            stack.callback(os.close, parent)
            os.mkdir("d" * 250, dir_fd=parent)
            parent = os.open("d" * 250, os.O_RDONLY, dir_fd=parent)
        os.close(parent)
    for verb in ("check", "score"):
        refused(limited(verb, ".", cwd=tmp_path), "File name too long")


@pytest.mark.parametrize("name", ["a" * 300, "a" * 300 + ".tar.gz"])
def test_a_name_that_is_too_long_is_refused(tmp_path, name):
    for words in (("check", name), ("score", name), ("check", tmp_path, "--systems", name)):
        refused(ttt(*words), name[:200], "no such folder" if "--systems" in words else "File name too long")


def test_lines_end_as_the_parser_ends_them():
    assert parse_log(b"#\r\n" * MAX_LINES, "here").problems[0].text.startswith("no record")
    assert "lines" in parse_log(b"#\r" * (MAX_LINES + 1), "here").problems[0].text


def test_the_total_of_many_accuracies_is_found_by_few():
    assert smallest_total(np.arange(120_000) / 435_181) == 435_181
    assert smallest_total(np.linspace(0, 1e-9, 120_000)) == 100


def test_a_folder_that_cannot_be_listed_is_refused(golden, tmp_path, monkeypatch):
    golden.write(tmp_path, golden.set(num_logs=1))
    (tmp_path / "secret").mkdir()
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("secret"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    refused(ttt("check", "--no-official", tmp_path), "secret", "cannot be read")


def test_a_bomb_of_merge_keys_in_a_head_is_not_read(golden, tmp_path, limited):
    bomb = ["a0: &a0 {x: 1}"]
    bomb += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 4)}]}}" for n in range(1, 26)]
    lines = golden.log()
    at = lines.index("# --- configuration") + 1
    lines[at:at] = [f"#   {line}" for line in bomb]
    settings = parse_log("\n".join(lines).encode(), "here").settings
    assert settings[0] == bomb[0] and parse_head(settings) is None
    (tmp_path / "result_0.txt").write_text("\n".join(lines))
    for verb in ("check", "score"):
        assert limited(verb, "result_0.txt", cwd=tmp_path).returncode in (0, 1)


@pytest.mark.parametrize(
    ("code", "word"), [("bytearray(2**40)", "GiB of memory"), ("while True: pass", "processor time")]
)
def test_a_checker_that_takes_too_much_is_stopped_in_one_line(monkeypatch, code, word):
    monkeypatch.setitem(official.CHECKERS, "compliance", (code, "SUCCESS", "FAILED"))
    verdict = official._ask("compliance", "here", "2.0.0", timeout_s=1)
    assert verdict.verdict == "crashed" and verdict.refuses and word in verdict.detail
