"""A data set of Hugging Face's hub by its name, from a server that answers as the hub does."""

import hashlib
import json
import os
import sys
from pathlib import Path

import pytest

from common.data import hub
from common.data.manifest import read_manifest
from common.repository import ROOT
from tests.command import TTT, one_line, run
from tests.image_classification.data.test_sources import table_of, write_table, write_tables
from tests.image_classification.imagenet import settings_of
from tests.storage import serve

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_server(tmp_path):
    """Serve a data set as the hub does, with a test split."""
    source = tmp_path / "source"
    source.mkdir()
    write_tables(source)
    write_table(source / "data" / "test-00000.parquet", table_of([]))
    files = {path.relative_to(source).as_posix(): path.read_bytes() for path in source.rglob("*.parquet")}
    siblings = [{"rfilename": name} for name in files]
    tree = [{"type": "file", "path": name, "size": len(files[name]), "oid": SHA} for name in files]
    api, resolve = "/api/datasets/maker/imagenet", f"/datasets/maker/imagenet/resolve/{SHA}/"
    answers = {
        f"{api}/revision/main": {"id": "maker/imagenet", "sha": SHA, "siblings": siblings},
        f"{api}/tree/{SHA}": tree,
    }
    with serve() as storage:
        storage.files = {path: json.dumps(answer).encode() for path, answer in answers.items()}
        for name, content in files.items():
            storage.files[resolve + name] = content
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            storage.headers[resolve + name] = {"ETag": etag, "X-Repo-Commit": SHA}
        yield storage


def prepare_from_hub(name, directory, **environment):
    """Prepare from a data set of the hub in a process of its own; the library reads its settings once."""
    pytest.importorskip("huggingface_hub", reason="the extra hf downloads from the hub")
    sets = [part for setting in settings_of(directory) for part in ("--set", setting)]
    environment |= {"HF_HOME": str(directory.with_name("cache")), "HF_HUB_DISABLE_XET": "1"}
    command = (TTT, "data", "prepare", "image_classification", "--source", name, *sets)
    return run(*command, env=os.environ | environment)


def test_a_data_set_of_the_hub_is_taken_by_its_name(hub_server, tmp_path):
    endpoint = hub_server.address
    done = prepare_from_hub("maker/imagenet", tmp_path / "full", HF_ENDPOINT=endpoint)
    assert done.returncode == 0, done.stderr
    origin = {"form": "parquet", "hub": "maker/imagenet", "revision": SHA}
    assert read_manifest(tmp_path / "full", hint="")["source"] == origin
    sent = [path for _, path, _ in hub_server.requests if "/resolve/" in path]
    assert sent and not any("test-" in path for path in sent)
    done = prepare_from_hub("maker/imagnet", tmp_path / "other", HF_ENDPOINT=endpoint)
    assert "--source maker/imagnet: no such folder, and Hugging Face gives no" in one_line(done)


def test_without_a_network_a_name_is_one_line(tmp_path):
    done = prepare_from_hub("maker/imagenet", tmp_path / "full", HF_HUB_OFFLINE="1")
    assert "--source maker/imagenet: no such folder, and Hugging Face gives no" in one_line(done)


@pytest.mark.parametrize(
    "path", ["/data/imagenet", "../imagenet", "data/imagenet/2012", "common/imagenet", "x"]
)
def test_a_path_that_is_no_name_of_the_hub_is_never_looked_up(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert hub.find_source(Path(path)) == Path(path)


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/convert/parquet"])
def test_a_revision_of_the_hub_may_be_a_path(revision):
    match = hub.NAME.fullmatch(f"maker/imagenet@{revision}")
    assert (match["repo_id"], match["revision"]) == ("maker/imagenet", revision)
