"""`ttt system`: what it collects, what a person adds, what it says of descriptions that are wrong."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from common.cli import COMMANDS
from common.evidence.submission import official
from common.evidence.submission.leaks import leaks
from common.evidence.system import FIELDS, problems
from common.machine import hardware, system
from common.repository import NAME, ROOT
from tests.command import ttt_here as ttt
from tests.committed import tracked

READY = ROOT / "systems/8xA100-SXM4-80GB.json"


def one_line(done, code=2):
    assert done.returncode == code, done
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_it_is_a_command_with_examples():
    assert "system" in COMMANDS and "examples:" in ttt("system", "--help").stdout


def test_every_field_is_filled_and_nothing_private_is_collected(monkeypatch):
    monkeypatch.setenv("SECRET_OF_THIS_TEST", "a-value-from-the-environment")
    done = ttt("system")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert tuple(found) == FIELDS and problems(found) == []
    assert found["host_processor_vcpu_count"] == str(os.cpu_count())
    assert "a-value-from" not in done.stdout and list(leaks(done.stdout, is_log=True)) == []


def test_a_machine_without_tools_says_why_in_each_field(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(hardware, "cpu_info", dict)
    found = json.loads(ttt("system").stdout)
    assert problems(found) == []
    assert found["host_storage_type"] == "not collected: lsblk shows no disk"
    assert found["host_processor_caches"].startswith("not collected: ")


def test_a_persons_facts_win_and_the_written_file_passes_every_checker(tmp_path):
    facts, out = tmp_path / "facts.yaml", tmp_path / "my-machine-optimized.json"
    facts.write_text("cooling: liquid\nhost_processor_core_count: 64\nsystem_name: another\n")
    done = ttt("system", "--merge", READY, "--merge", facts, "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        "0 problems; official checkers: system description 2.0.0: SUCCESS, system description 2.1.0: SUCCESS"
        in done.stdout
    )
    found = json.loads(out.read_text())
    assert (found["cooling"], found["host_processor_core_count"]) == ("liquid", "64")
    assert found["accelerator_model_name"] == "NVIDIA A100-SXM4-80GB"
    assert found["system_name"] == out.stem


def test_an_existing_description_stays(tmp_path):
    out = tmp_path / "mine.json"
    out.write_text("a person's")
    assert "never overwritten" in one_line(ttt("system", "--out", out))
    assert out.read_text() == "a person's"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cooling: air\ncoolling: air\n", "facts.yaml:2: unknown field 'coolling'; did you mean cooling?"),
        ("cooling: air\ncooling: water\n", "facts.yaml:2: 'cooling' is written twice"),
        ("cooling: [air]\n", "cooling: must be text, found list"),
        ("cooling:\n", "cooling: must be text, found NoneType"),
        ("cooling: true\n", "cooling: must be text, found bool"),
        ("cooling: TODO\n", "cooling: holds a placeholder, 'TODO'"),
        ("submitter: <your company>\n", "submitter: holds a placeholder"),
        ("cooling: ''\n", "cooling: empty"),
        ("division: Open\n", "division: 'Open' is not one of: open; closed"),
        ("number_of_nodes: many\n", "number_of_nodes: 'many' is not a whole number from 1 on"),
        ("cooling: !!python/object:os.system air\n- x", "not YAML"),
        ("cooling: &a [x, x]\nhw_notes: *a\n", "facts.yaml:2: not YAML: aliases are not read"),
        ("cooling: " + "[" * 5000, "nested too deeply"),
        ("just text\n", "expected `key: value` lines"),
        ("cooling: air" + " " * 2**20, "more than 262,144 characters"),
    ],
)
def test_wrong_facts_are_one_line_with_the_place(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "facts.yaml").write_text(text)
    assert message in one_line(ttt("system", "--merge", "facts.yaml", "--out", "x.json"))
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--merge", "nowhere.yaml"], "nowhere.yaml: no such file"),
        (["--out", "no/folder/x.json"], "cannot write here"),
        (["--out", "x.txt"], "expected a file NAME.json"),
        (["--out", "a b.json"], "expected a file NAME.json"),
        (["--check", "x.json", "--out", "y.json"], "leave out --merge and --out"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in one_line(ttt("system", *arguments))
    assert list(tmp_path.iterdir()) == []


def test_the_committed_descriptions_are_complete():
    files = [path for path in tracked("systems") if path.suffix == ".json"]
    assert READY in files
    done = ttt("system", "--check", *files)
    assert done.returncode == 0, done.stdout


def accepted(path):
    return official.Verdict(path=path.name, ruleset="2.1.0", verdict="SUCCESS")


def ready(**changes):
    found = json.loads(READY.read_text()) | changes
    return json.dumps({name: value for name, value in found.items() if value != "drop"}).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[]", "not a JSON object"),
        (b"", "not JSON"),
        (ready()[:-40], "not JSON"),
        (b"\xef\xbb\xbf" + ready(), "byte order mark"),
        (b"\xff\xfe{}", "not UTF-8"),
        (b"[" * 100_000 + b"]" * 100_000, "more than 200 brackets"),
        (b'{"cooling": "' + b"x" * 2**20 + b'"}', "larger than 1 MiB"),
        (b'{"cooling": "air", "cooling": "water"}', "'cooling' is written twice"),
        (b'{"number_of_nodes": NaN}', "NaN is not JSON"),
        (b'{"number_of_nodes": ' + b"9" * 5000 + b"}", "limit"),
        (ready(number_of_nodes=10**400), "number_of_nodes: not a usable number"),
        (ready(accelerators_per_node=8), "accelerators_per_node: must be text, found int"),
        (ready(framework=["PyTorch"]), "framework: must be text, found list"),
        (ready(hw_notes=None), "hw_notes: must be text, found NoneType"),
        (ready(cooling=""), "cooling: empty"),
        (ready(cooling="not collected"), "cooling: say why"),
        (ready(cooling="drop"), "cooling: missing"),
        (ready(other_software_stack={"cuda": ""}), "other_software_stack: empty"),
        (ready(status="onprem"), "status: 'onprem' is not one of: Available on-premise"),
        (ready(system_name="SYSTEM_PLACEHOLDER"), "system_name: holds a placeholder"),
        (ready(system_name="x\x1b[31m"), "system_name: holds control characters"),
        (ready(system_name="other"), "system_name: 'other', but the file is x.json"),
        (ready(coolling="air"), "coolling: unknown field; did you mean cooling?"),
    ],
)
def test_a_hostile_description_is_a_finding(tmp_path, monkeypatch, data, message):
    monkeypatch.setattr(
        "common.evidence.submission.official.judge_description", lambda path, ruleset: accepted(path)
    )
    (tmp_path / "x.json").write_bytes(data)
    done = ttt("system", "--check", tmp_path / "x.json")
    assert (done.returncode, done.stderr) == (1, "")
    assert message in done.stdout and all(line.isprintable() for line in done.stdout.splitlines())


def test_what_is_no_file_is_a_finding(tmp_path):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "link.json").symlink_to(READY)
    os.mkfifo(tmp_path / "pipe.json")
    for path in (*tmp_path.iterdir(), tmp_path / "missing.json"):
        done = ttt("system", "--check", path)
        assert (done.returncode, done.stderr) == (1, ""), path


@pytest.mark.parametrize(
    ("data", "verdict"), [(ready(framework=None), "crashed"), (ready(cooling="drop"), "FAILED")]
)
def test_the_official_verdict_is_shown_as_its_own(tmp_path, data, verdict):
    (tmp_path / "8xA100-SXM4-80GB.json").write_bytes(data)
    done = ttt("system", "--check", tmp_path / "8xA100-SXM4-80GB.json")
    assert (done.returncode, done.stderr) == (1, "")
    assert f"official system description checker 2.0.0: {verdict}" in done.stdout


def fake_nvml(num_gpus, *, links):
    """Return NVML's module as it answers on A100s; what is not here raises as an old driver does."""

    class NVMLError(Exception):
        pass

    def link_state(handle, number):
        if number >= links:
            raise NVMLError
        return 1

    def unknown(*arguments):
        raise NVMLError

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_NVLINK_MAX_LINKS=18,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: num_gpus,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: "NVIDIA A100-SXM4-80GB",
        nvmlDeviceGetMaxPcieLinkGeneration=lambda handle: 4,
        nvmlDeviceGetMaxPcieLinkWidth=lambda handle: 16,
        nvmlDeviceGetMaxClockInfo=lambda handle, clock: {1: 1410, 2: 1593}[clock],
        nvmlDeviceGetMemoryBusWidth=unknown,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=80 * 2**30),
        nvmlDeviceGetNvLinkState=link_state,
        nvmlDeviceGetNvLinkVersion=lambda handle, number: 4,
        nvmlDeviceGetNvLinkRemoteDeviceType=lambda handle, number: 2,
        nvmlDeviceGetTopologyCommonAncestor=lambda a, b: 10 if a // 2 == b // 2 else 50,
        nvmlSystemGetDriverVersion=lambda: "535.104",
        nvmlSystemGetCudaDriverVersion=lambda: 12020,
    )


def test_gpus_are_described_through_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(8, links=12))
    found = json.loads(ttt("system").stdout)
    assert problems(found) == []
    assert (found["system_name"], found["accelerators_per_node"]) == ("8xA100-SXM4-80GB", "8")
    assert found["accelerator_host_interconnect"] == "PCIe Gen4 x16"
    assert found["accelerator_frequency"] == "up to 1410 MHz"
    assert found["accelerator_memory_capacity"] == "80 GiB"
    assert found["accelerator_memory_configuration"] == "not collected: the driver does not tell"
    assert found["accelerator_interconnect"] == "NVLink 3, 12 links each"
    assert found["accelerator_interconnect_topology"] == "all to all through NVSwitch"
    assert "NVIDIA driver 535.104, CUDA driver 12.2" in found["other_software_stack"]


def test_gpus_without_nvlink_say_how_they_reach_each_other(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(4, links=0))
    found = json.loads(ttt("system").stdout)
    assert found["accelerator_interconnect"] == "PCIe"
    topology = "through one PCIe switch, the links between NUMA nodes"
    assert found["accelerator_interconnect_topology"] == topology


def test_the_description_of_a_run_states_who_and_what_status():
    submission = SimpleNamespace(org="Example", status="onprem", hardware="mine")
    config = SimpleNamespace(size="mini", configuration="fast", submission=submission)
    found = system.describe(config)
    assert problems(found) == []
    assert (found["submitter"], found["system_name"]) == ("Example", "mine-mini-fast")
    assert (found["status"], found["hw_notes"][:9]) == ("Available on-premise", "size mini")


WRITER = """
import os, sys, time
from pathlib import Path
from common.machine import system

os.fsync = lambda descriptor: None
system.describe = lambda config, name: {"system_name": name, "notes": "x" * 100_000}
for number in range(100):
    while time.time() < float(sys.argv[2]) + number / 100:  # all at once
        pass
    system.write_description(None, Path(sys.argv[1], str(number)), "machine")
"""


def test_several_first_runs_at_once_write_one_description(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(time.time() + 2)]
    writers = [subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [(writer.communicate()[1], writer.returncode) for writer in writers] == [("", 0)] * 3
    for folder in tmp_path.iterdir():
        assert [path.name for path in folder.iterdir()] == ["machine.json"]
        assert json.loads((folder / "machine.json").read_text())["system_name"] == "machine"


def test_machines_of_one_model_have_names_of_their_own(tmp_path, monkeypatch):
    """Clones of one image differ by the random number, nodes that share a clone by the id of the system."""
    monkeypatch.setattr(hardware, "gpu_names", list)
    identifiers = [tmp_path / "one", tmp_path / "another", tmp_path / "none"]
    for path in identifiers[:2]:
        path.write_text(f"{path.name}\n")
    found = set()
    for clone in ("here", "there"):
        monkeypatch.setattr(system, "LOCAL", tmp_path / clone)
        for path in identifiers:
            monkeypatch.setattr(system, "MACHINE_ID", path)
            found.add(system.hardware_name())
            assert system.hardware_name() in found  # asked again, it is the same
    assert len(found) == 6 and len({name.rpartition("-")[0] for name in found}) == 1
    assert all(len(name) <= 40 and NAME.fullmatch(name) for name in found)


def test_gpus_are_named_by_their_model(monkeypatch):
    monkeypatch.setattr(hardware, "gpu_names", lambda: ["NVIDIA H200"] * 8)
    assert system.hardware_name() == "8xH200"


def test_processes_that_first_ask_at_once_get_one_name(tmp_path):
    code = (
        "import pathlib, sys; from common.machine import system;"
        "system.LOCAL = pathlib.Path(sys.argv[1]); print(system.random_number())"
    )
    command = [sys.executable, "-c", code, tmp_path / "new"]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    numbers = {process.communicate()[0].strip() for process in started}
    assert len(numbers) == 1 and len(numbers.pop()) == 32
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["random"]


def test_a_clone_that_cannot_be_written_has_a_name(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(system, "LOCAL", tmp_path / "file")
    assert NAME.fullmatch(system.machine_digest())
