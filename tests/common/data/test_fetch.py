"""Downloads from a server that answers in parts, cuts connections, sends wrong bytes or has no such file."""

import hashlib
import random
import shutil
from types import SimpleNamespace

import pytest

from common.data import fetch
from common.errors import UserError
from tests.storage import serve

SIZES = {"one.txt": 3_000, "sub/two.bin": 5_000, "empty": 0}
TWO = "/files/sub/two.bin"


@pytest.fixture
def storage(monkeypatch):
    monkeypatch.setattr(fetch, "WAITS_S", (0.0, 0.0))
    monkeypatch.setattr(fetch, "CHUNK_BYTES", 512)
    draw = random.Random(0)
    with serve() as started:
        started.publish("set", {path: draw.randbytes(size) for path, size in SIZES.items()})
        yield started


def listed(storage, **published_bytes):
    files = fetch.read_list(storage.lists, "set")
    return fetch.ask_sizes([(file, file.name) for file in files], published_bytes)


def download(storage, folder):
    fetch.fetch(listed(storage), folder, finish=lambda directory: None)


def check_whole(storage, folder):
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["empty", "one.txt", "two.bin"]
    for path in SIZES:
        content = (folder / path.rpartition("/")[2]).read_bytes()
        assert content == storage.files[f"/files/{path}"] and len(content) == SIZES[path]


def test_a_list_says_address_size_and_md5_of_each_file(storage, tmp_path):
    files = listed(storage)
    assert [file.num_bytes for file in files] == list(SIZES.values())
    text = fetch.describe(files, tmp_path)
    for path, size in SIZES.items():
        md5 = hashlib.md5(storage.files[f"/files/{path}"]).hexdigest()
        assert f"{md5}  {size:>14,}  {storage.address}/files/{path}\n" in text
    assert text.endswith("0.0 MB, of which 0.0 MB are missing") and list(tmp_path.iterdir()) == []


def test_files_come_whole_and_once(storage, tmp_path):
    download(storage, tmp_path)
    check_whole(storage, tmp_path)
    num_requests = len(storage.requests)
    download(storage, tmp_path)
    assert {method for method, path, _ in storage.requests[num_requests:] if "/files/" in path} == {"HEAD"}


@pytest.mark.parametrize("resumes", [True, False], ids=["resumes", "sends the whole again"])
def test_a_connection_that_is_cut_goes_on_where_it_was_if_the_server_can(storage, tmp_path, resumes):
    storage.resumes, storage.cuts[TWO] = resumes, [1_500, 2_000] if resumes else [1_500]
    download(storage, tmp_path)
    check_whole(storage, tmp_path)
    assert storage.ranges(TWO) == [None, "bytes=1500-", *["bytes=3500-"] * resumes]


def test_after_attempts_in_vain_the_next_command_goes_on(storage, tmp_path):
    storage.cuts[TWO] = [1_500, 0, 0, 0]
    with pytest.raises(UserError, match=rf"{TWO}: 3 attempts .* at byte 1,500 of 5,000.*same command again"):
        download(storage, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.txt", "two.bin.part"]
    assert sum(fetch.bytes_left(file, tmp_path) for file in listed(storage)) == 3_500
    download(storage, tmp_path)
    check_whole(storage, tmp_path)
    assert storage.ranges("/files/one.txt") == [None] and storage.ranges(TWO)[-1] == "bytes=1500-"


def test_a_server_that_was_busy_is_asked_again(storage, tmp_path):
    storage.codes |= {"/metadata/set.uri": [503], "/metadata/set.md5": [502, 500], TWO: [503, 429]}
    files = listed(storage)
    storage.codes[TWO] += [503, 429]
    fetch.fetch(files, tmp_path, finish=lambda directory: None)
    check_whole(storage, tmp_path)
    storage.codes[TWO] = [503] * 3
    with pytest.raises(UserError, match=rf"{TWO}: 3 attempts in a row brought nothing \(HTTP 503\)"):
        listed(storage)


def test_of_wrong_bytes_nothing_is_kept(storage, tmp_path):
    wrong = bytearray(storage.files[TWO])
    wrong[4_000] ^= 1
    storage.sent[TWO] = bytes(wrong)
    digests = [hashlib.md5(content).hexdigest() for content in (wrong, storage.files[TWO])]
    message = r"two\.bin: 5,000 bytes with MD5 {}, expected 5,000 with {}; it is removed".format(*digests)
    with pytest.raises(UserError, match=message):
        download(storage, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["one.txt"]
    storage.sent.clear()
    download(storage, tmp_path)
    check_whole(storage, tmp_path)


def test_another_size_is_refused(storage, tmp_path):
    with pytest.raises(UserError, match=r"two\.bin: 5,000 bytes, expected 4,999"):
        listed(storage, **{"two.bin": 4_999})
    files = listed(storage)
    storage.sent[TWO] = storage.files[TWO] + b"more"
    with pytest.raises(UserError, match=r"two\.bin: the server has 5,004 bytes now, expected 5,000"):
        fetch.fetch(files, tmp_path, finish=lambda directory: None)
    assert not (tmp_path / "two.bin").exists()


def test_a_file_that_is_not_there_or_needs_a_login_is_named(storage, tmp_path):
    files = listed(storage)
    storage.codes[TWO] = [302]
    with pytest.raises(UserError, match=rf"{TWO}: HTTP 302 .*login"):
        fetch.fetch(files, tmp_path, finish=lambda directory: None)
    assert not any(path == "/login" for _, path, _ in storage.requests)
    del storage.files[TWO]
    for ask in (lambda: listed(storage), lambda: fetch.fetch(files, tmp_path, finish=lambda directory: None)):
        with pytest.raises(UserError, match=rf"{TWO}: HTTP 404"):
            ask()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("uri", b"<html> please log in", r"set\.uri: holds no address"),
        ("uri", b"file:///etc", r"set\.uri: holds no address"),
        ("md5", b"%s  a\nabc  b\n" % (b"0" * 32), r"set\.md5:2: expected a line of MD5 and path"),
    ],
)
def test_a_list_that_is_none_is_refused(storage, name, content, message):
    storage.files[f"/metadata/set.{name}"] = content
    with pytest.raises(UserError, match=message):
        fetch.read_list(storage.lists, "set")


def test_a_list_that_ends_early_is_refused(storage):
    storage.cuts["/metadata/set.md5"] = [20]
    with pytest.raises(UserError, match=r"set\.md5: 20 of \d+ bytes came"):
        fetch.read_list(storage.lists, "set")


@pytest.mark.parametrize("server", ["http://127.0.0.1:1/metadata", "http://[", "ftp://127.0.0.1", "here"])
def test_a_server_that_cannot_be_reached_is_one_line(server):
    with pytest.raises(UserError, match=r"cannot be reached \(.*another server|expected http"):
        fetch.read_list(server, "set")


@pytest.mark.parametrize("content", [b"mine", bytes(SIZES["sub/two.bin"])], ids=["shorter", "as long"])
def test_a_file_of_that_name_is_not_replaced(storage, tmp_path, content):
    (tmp_path / "two.bin").write_bytes(content)
    with pytest.raises(UserError, match=r"two\.bin: exists, but is not the file of http.*move it away"):
        download(storage, tmp_path)
    assert (tmp_path / "two.bin").read_bytes() == content


def test_a_full_disk_is_named_before_the_first_byte(storage, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=7_999))
    with pytest.raises(UserError, match=r"but the disk has 0\.00 GiB free; .*--to DIR"):
        download(storage, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_progress_has_rate_and_time_left():
    progress = fetch.ByteProgress(4 * 10**6)
    progress.num_bytes = 10**6
    assert progress.describe(20.0) == "1.0 of 4.0 MB, 0 MB/s, 1.0 min left"


def test_a_file_that_cannot_be_read_is_named(storage, tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    download(storage, tmp_path)
    monkeypatch.setattr(fetch, "md5_of", refuse)
    with pytest.raises(UserError, match=r"one\.txt: cannot be read \(Permission denied\)"):
        download(storage, tmp_path)
