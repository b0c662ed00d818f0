"""Crafted files and archives: `ttt check` refuses each in one line, at once and in little memory."""

import bz2
import errno
import gzip
import io
import lzma
import os
import resource
import subprocess
import sys
import tarfile
import tempfile
import zlib

import numpy as np
import pytest

from common.evidence.log import MAX_BYTES, MAX_LINES, parse_log, read_log
from common.evidence.rules.sets import smallest_total
from common.evidence.submission import official
from common.repository import ROOT
from common.yaml_file import parse_head
from tests.command import ttt_here as ttt

MEMORY = 2**20 * 400  # of addresses, with numpy's and Python's own 250 MiB


def limited(*arguments, cwd, seconds=6):
    """Run `ttt` under limits of processor time (its start takes two or three seconds) and of memory."""

    def limit():
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))

    command = [sys.executable, "-m", "common.cli", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=cwd, env=environment, preexec_fn=limit, capture_output=True, text=True, timeout=300
    )


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


def flipped_xz():
    data = bytearray(lzma.compress(header("result_0.txt") + os.urandom(100_000)))
    data[50_000] ^= 1
    return bytes(data)


ARCHIVES = {
    "a long name of 3 GiB": (lambda: long_name(tarfile.GNUTYPE_LONGNAME), "header of more than"),
    "a PAX header of 3 GiB": (lambda: long_name(tarfile.XHDTYPE), "header of more than"),
    "chained long names": (lambda: chained(tarfile.GNUTYPE_LONGNAME), "headers without end"),
    "xz inside": (flipped_xz, "not a readable archive"),
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
def test_a_crafted_archive_is_refused_in_one_line(tmp_path, make, word):
    (tmp_path / "package.tar.gz").write_bytes(make())
    refused(limited("check", "package.tar.gz", cwd=tmp_path), "package.tar.gz", word)


def test_a_large_member_ends_the_reading_at_its_header(tmp_path):
    content = gzip.compress(header("weights.bin", 8 * 2**30)) + zeros(2**25)
    (tmp_path / "package.tar.gz").write_bytes(content)
    done = limited("check", "package.tar.gz", cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "A001 error" in done.stderr and "more than 2 GiB" in done.stderr


def test_a_changed_byte_that_only_the_checksum_knows_is_found(golden, tmp_path):
    golden.write(tmp_path / "results", golden.set())
    path = tmp_path / "package.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(tmp_path / "results", "results")
    plain = bytearray(gzip.decompress(path.read_bytes()))
    at = plain.index(b'"key": "seed", "value": 1000') + 24
    plain[at : at + 4] = b"2000"
    data = gzip.compress(bytes(plain))
    path.write_bytes(data[:-8] + bytes(b ^ 1 for b in data[-8:-4]) + data[-4:])
    refused(ttt("check", "--no-official", path), "package.tar.gz", "CRC")


def test_an_archive_without_a_log_is_named_with_its_refused_members(tmp_path):
    with tarfile.open(tmp_path / "package.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("../result_0.txt"), io.BytesIO())
    done = ttt("check", tmp_path / "package.tar.gz")
    first, last = done.stderr.splitlines()
    assert done.returncode == 2 and "A001 error" in first and "../result_0.txt" in first
    assert "no result_" in last and "package.tar.gz" in last and tempfile.gettempdir() + "/tmp" not in last


def test_a_sparse_file_of_200_gigabytes_reaches_no_checker(golden, tmp_path):
    folder = golden.write(tmp_path / "results", golden.set(num_logs=1))
    path = folder / "result_5.txt"
    path.touch()
    os.truncate(path, 200 * 2**30)
    done = limited("check", "results", cwd=tmp_path, seconds=10)
    assert done.returncode == 1 and done.stderr == ""
    lines = [line for line in done.stdout.splitlines() if "result_5" in line]
    assert len(lines) == 1 and "P001 error" in lines[0] and "larger than" in lines[0]


@pytest.mark.parametrize("line", [b"\n", b"#ab\n", b":::MLLOG \n"])
def test_a_flood_of_lines_is_one_problem(tmp_path, line):
    (tmp_path / "result_0.txt").write_bytes(line * (MAX_BYTES // len(line)))
    log = read_log(tmp_path / "result_0.txt")
    assert not log.is_readable
    assert [problem.text for problem in log.problems] == [f"more than {MAX_LINES:,} lines"]


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


def test_a_bomb_of_merge_keys_in_a_head_is_not_read(golden):
    bomb = ["a0: &a0 {x: 1}"]
    bomb += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 4)}]}}" for n in range(1, 26)]
    lines = golden.log()
    at = lines.index("# --- configuration") + 1
    lines[at:at] = [f"#   {line}" for line in bomb]
    settings = parse_log("\n".join(lines).encode(), "here").settings
    assert settings[0] == bomb[0] and parse_head(settings) is None


@pytest.mark.parametrize(
    ("code", "word"), [("bytearray(2**40)", "GiB of memory"), ("while True: pass", "processor time")]
)
def test_a_checker_that_takes_too_much_is_stopped_in_one_line(monkeypatch, code, word):
    monkeypatch.setitem(official.CHECKERS, "compliance", (code, "SUCCESS", "FAILED"))
    verdict = official._ask("compliance", "here", "2.0.0", timeout_s=1)
    assert verdict.verdict == "crashed" and verdict.refuses and word in verdict.detail
