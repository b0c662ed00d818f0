"""`ttt doctor --describe`: facts that it collects, facts that a person adds, and wrong descriptions."""

import errno
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from pynvml import NVML_CLOCK_MEM, NVML_CLOCK_SM

from common.errors import UserError
from common.evidence.submission import official
from common.evidence.submission.leaks import leaks
from common.evidence.system import EXAMPLES, FIELDS, open_fields, problems
from common.machine import hardware, record, system
from common.repository import NAME, ROOT
from tests.command import one_line
from tests.command import ttt_here as ttt
from tests.committed import tracked
from tests.common.machine.conftest import refuse

READY = ROOT / "systems/8xA100-SXM4-80GB.json"


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


def test_a_persons_facts_win_and_the_written_file_passes_every_checker(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    facts, out = tmp_path / "facts.yaml", tmp_path / "my-machine-optimized.json"
    facts.write_text("cooling: liquid\nhost_processor_core_count: 64\nsystem_name: another\n")
    done = ttt("system", "--merge", READY, "--merge", facts, "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(out.read_text())
    assert (found["cooling"], found["host_processor_core_count"]) == ("liquid", "64")
    assert found["accelerator_model_name"] == "NVIDIA A100-SXM4-80GB"
    assert found["system_name"] == out.stem
    assert " 0 problems" not in done.stdout and f"{len(open_fields(found))} open fields" in done.stdout
    passed = [f"system description {ruleset}: SUCCESS" for ruleset in ("2.0.0", "2.1.0", "4.0.0", "5.0.0")]
    assert done.stdout.endswith(f"official checkers: {', '.join(passed)}\n")


def test_the_open_fields_are_listed_filled_in_and_then_no_problem_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = ttt("system", "--missing")
    assert (done.returncode, done.stderr) == (1, "")
    *lines, last = done.stdout.splitlines()
    collected = json.loads(ttt("system").stdout)
    assert {line.split(":")[0] for line in lines} == set(open_fields(collected))
    assert {"cooling", "host_memory_configuration", "submitter"} <= set(open_fields(collected))
    assert last.startswith(f"# {len(lines)} of 33 fields are open") and "--merge facts.yaml" in last
    Path("facts.yaml").write_text(done.stdout.replace("<such as air, or liquid>", "air"))
    partly = ttt("system", "--merge", "facts.yaml", "--out", "partly.json")
    assert partly.returncode == 0 and f" {len(lines) - 1} open fields" in partly.stdout
    assert json.loads(Path("partly.json").read_text()) == collected | {
        "cooling": "air",
        "system_name": "partly",
    }
    Path("facts.yaml").write_text(re.sub("<such as (.*)>", r"\1", done.stdout))
    done = ttt("system", "--missing", "--merge", "facts.yaml")
    assert (done.returncode, done.stdout) == (0, "# 0 of 33 fields are open\n")
    done = ttt("system", "--merge", "facts.yaml", "--out", "mine.json")
    assert done.returncode == 0 and "mine.json: 0 problems; official checkers" in done.stdout


@pytest.mark.parametrize(
    "value",
    [
        *("not collected: nobody looked", "Not collected", "unknown", "TBD", "<air>", "", " ", None, "-"),
        *("null", "tbc", "To Be Filled By O.E.M.", "to be filled in", "Default string"),
        *("unknown (see BIOS)", "not known yet"),
    ],
)
def test_what_says_nothing_is_an_open_field(tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    filled = {field: example.partition(";")[0] for field, example in EXAMPLES.items()}
    Path("x.json").write_text(json.dumps(filled | {"cooling": value, "system_name": "x"}))
    accepted = official.Verdict(path="x.json", ruleset="2.1.0", verdict="SUCCESS")
    monkeypatch.setattr(official, "judge_description", lambda path, ruleset: accepted)
    done = ttt("system", "--missing", "x.json")
    first, last = done.stdout.splitlines()
    assert done.returncode == 1 and first.startswith("cooling: <such as air")
    assert last == "# 1 of 33 fields are open; state them in x.json"
    checked = ttt("system", "--check", "x.json").stdout
    assert "1 open field (ttt doctor --describe --missing x.json)" in checked and " 0 problems" not in checked


@pytest.mark.parametrize("value", ["air", "none", "none: one node", "n/a", 8, {"cuda": "13.0"}])
def test_what_says_something_is_no_open_field(value):
    assert "cooling" not in open_fields({"cooling": value})


MERGE = ("--merge", "facts.yaml", "--out", "x.json")


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        (
            "cooling: air\ncoolling: air\n",
            MERGE,
            "facts.yaml:2: unknown field 'coolling'; did you mean cooling?",
        ),
        ("cooling: air\ncooling: water\n", MERGE, "facts.yaml:2: 'cooling' is written twice"),
        ("cooling: [air]\n", MERGE, "cooling: must be text, found list"),
        ("cooling: true\n", MERGE, "cooling: must be text, found bool"),
        ("cooling: !!python/object:os.system air\n- x", MERGE, "not YAML"),
        ("cooling: &a [x, x]\nhw_notes: *a\n", MERGE, "facts.yaml:2: not YAML: aliases"),
        ("cooling: " + "[" * 5000, MERGE, "nested too deeply"),
        ("just text\n", MERGE, "expected `key: value` lines"),
        ("cooling: air" + " " * 2**20, MERGE, "more than 262,144 characters"),
        ("", ("--merge", "nowhere.yaml"), "nowhere.yaml: no such file"),
        ("", ("--out", "no/folder/x.json"), "cannot write here"),
        ("", ("--out", "x.txt"), "expected a file NAME.json"),
        ("", ("--out", "a b.json"), "expected a file NAME.json"),
        ("", ("--out", "mine.json"), "never overwritten"),
        ("", ("--check", "x.json", "--out", "y.json"), "leave out --merge and --out"),
        ("", ("--missing", "x.json", "--merge", "facts.yaml"), "leave out --merge and --out"),
        ("", ("--missing", "--out", "y.json"), "leave out --merge and --out"),
        ("", ("--missing", "nowhere.json"), "nowhere.json: No such file"),
        ("", ("--missing", "mine.json"), "mine.json: not JSON"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value[:20],
)
def test_mistakes_are_one_line_with_the_place(tmp_path, monkeypatch, text, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "facts.yaml").write_text(text)
    (tmp_path / "mine.json").write_text("a person's")
    assert message in one_line(ttt("system", *arguments))
    assert {path.name for path in tmp_path.iterdir()} == {"facts.yaml", "mine.json"}
    assert (tmp_path / "mine.json").read_text() == "a person's"


def test_the_committed_descriptions_are_complete():
    files = [path for path in tracked("systems") if path.suffix == ".json"]
    assert READY in files
    done = ttt("system", "--check", *files)
    assert done.returncode == 0, done.stdout


def ready(**changes):
    """Return a description that is right, but for what is changed, or dropped."""
    fields = json.loads(READY.read_text()) | changes
    return json.dumps({name: value for name, value in fields.items() if value != "drop"}).encode()


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
        (b'{"number_of_nodes": ' + b"9" * 5000 + b"}", "x.json: a number has more than 4000 digits"),
        (ready(number_of_nodes=10**400), "number_of_nodes: not a usable number"),
        (ready(number_of_nodes="many"), "number_of_nodes: 'many' is not a whole number"),
        (ready(accelerators_per_node=8), "accelerators_per_node: must be text"),
        (ready(framework=["PyTorch"]), "framework: must be text"),
        (ready(hw_notes=None), "hw_notes: must be text"),
        (ready(cooling=""), "cooling: empty"),
        (ready(cooling="TODO"), "cooling: holds a placeholder"),
        (ready(submitter="<your company>"), "submitter: holds a placeholder"),
        (ready(cooling="not collected"), "cooling: say why"),
        (ready(cooling="drop"), "cooling: missing"),
        (ready(other_software_stack={"cuda": ""}), "other_software_stack: empty"),
        (ready(division="Open"), "division: 'Open' is not one of: open; closed"),
        (ready(status="onprem"), "status: 'onprem' is not one of: Available on-premise"),
        (ready(system_name="SYSTEM_PLACEHOLDER"), "system_name: holds a placeholder"),
        (ready(system_name="x\x1b[31m"), "system_name: holds control characters"),
        (ready(system_name="other"), "system_name: 'other', but the file is x.json"),
        (ready(coolling="air"), "coolling: unknown field; did you mean cooling?"),
    ],
)
def test_a_hostile_description_is_a_finding(tmp_path, monkeypatch, data, message):
    accepted = official.Verdict(path="x.json", ruleset="2.1.0", verdict="SUCCESS")
    monkeypatch.setattr(official, "judge_description", lambda path, ruleset: accepted)
    (tmp_path / "x.json").write_bytes(data)
    done = ttt("system", "--check", tmp_path / "x.json")
    assert (done.returncode, done.stderr) == (1, "")
    assert message in done.stdout and all(line.isprintable() for line in done.stdout.splitlines())


def test_what_is_no_file_is_a_finding(tmp_path):
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "link.json").symlink_to(READY)
    os.mkfifo(tmp_path / "pipe.json")
    for path in tmp_path.iterdir():
        done = ttt("system", "--check", path)
        assert (done.returncode, done.stderr) == (1, ""), path
    for option in ("--check", "--missing"):
        assert "missing.json: No such file" in one_line(ttt("system", option, tmp_path / "missing.json"))


@pytest.mark.parametrize(
    ("data", "verdict"), [(ready(framework=None), "crashed"), (ready(cooling="drop"), "FAILED")]
)
def test_the_official_verdict_is_shown_as_its_own(tmp_path, data, verdict):
    (tmp_path / "8xA100-SXM4-80GB.json").write_bytes(data)
    done = ttt("system", "--check", tmp_path / "8xA100-SXM4-80GB.json")
    assert (done.returncode, done.stderr) == (1, "")
    assert f"official system description checker 2.0.0: {verdict}" in done.stdout


@pytest.mark.parametrize(
    ("num_gpus", "num_links", "interconnect", "topology"),
    [
        (8, 12, "NVLink 3, 12 links each", "all to all through NVSwitch"),
        (4, 0, "PCIe", "through one PCIe switch, the links between NUMA nodes"),
        (1, 0, "none", "none: one accelerator"),
    ],
)
def test_gpus_are_described_through_nvml(nvml, num_gpus, num_links, interconnect, topology):
    nvml(
        num_gpus,
        "NVIDIA A100-SXM4-80GB",
        DeviceGetMaxPcieLinkGeneration=4,
        DeviceGetMaxPcieLinkWidth=16,
        DeviceGetMaxClockInfo=lambda gpu, clock: {NVML_CLOCK_SM: 1410, NVML_CLOCK_MEM: 1593}[clock],
        DeviceGetMemoryInfo=SimpleNamespace(total=80 * 2**30),
        DeviceGetNvLinkState=lambda gpu, number: 1 if number < num_links else refuse(),
        DeviceGetNvLinkVersion=4,
        DeviceGetNvLinkRemoteDeviceType=2,
        DeviceGetTopologyCommonAncestor=lambda a, b: 10 if a // 2 == b // 2 else 50,
        SystemGetDriverVersion="535.104",
        SystemGetCudaDriverVersion=12020,
    )
    fields = json.loads(ttt("system").stdout)
    assert problems(fields) == []
    names = (f"{num_gpus}xA100-SXM4-80GB", str(num_gpus))
    assert (fields["system_name"], fields["accelerators_per_node"]) == names
    assert fields["accelerator_host_interconnect"] == "PCIe Gen4 x16"
    assert fields["accelerator_frequency"] == "up to 1410 MHz"
    assert fields["accelerator_memory_capacity"] == "80 GiB"
    assert fields["accelerator_memory_configuration"] == "not collected: the driver does not tell"
    assert fields["accelerator_interconnect"] == interconnect
    assert fields["accelerator_interconnect_topology"] == topology
    assert "NVIDIA driver 535.104, CUDA driver 12.2" in fields["other_software_stack"]


@pytest.mark.parametrize(
    ("environment", "num_nodes"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 2),
        ({"WORLD_SIZE": "20", "LOCAL_WORLD_SIZE": "8"}, 3),  # the last machine has fewer
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "SLURM_STEP_NUM_TASKS": "4", "SLURM_NNODES": "4"}, 1),
        ({"WORLD_SIZE": "8"}, 1),
        ({"SLURM_STEP_NUM_TASKS": "16", "SLURM_NNODES": "2"}, 2),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_NNODES": "4", "SLURM_STEP_NUM_NODES": "1"}, 1),
        ({"SLURM_NTASKS": "16", "SLURM_NNODES": "2"}, 1),  # a batch script starts no rank elsewhere
    ],
    ids=str,
)
def test_nodes_are_counted_as_the_launcher_says(environment, num_nodes):
    assert hardware.count_nodes(environment) == num_nodes


@pytest.mark.parametrize("text", ["0", "x", "-1", ""])
def test_a_launchers_number_that_is_none_is_one_line(monkeypatch, text):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", text)
    assert "LOCAL_WORLD_SIZE" in one_line(ttt("system"))


def test_the_description_and_the_name_have_the_gpus_of_all_nodes(nvml, monkeypatch):
    for name, value in {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    nvml(8, "NVIDIA H200")
    fields = json.loads(ttt("system").stdout)
    assert (fields["number_of_nodes"], fields["accelerators_per_node"]) == ("2", "8")
    assert fields["host_networking_topology"].startswith("not collected")
    assert fields["system_name"] == "16xH200"  # what rule Y606 holds the two numbers to


def test_the_description_of_a_run_states_who_and_what_status():
    submission = SimpleNamespace(division="closed", org="Example", status="onprem", hardware="mine")
    config = SimpleNamespace(size="mini", configuration="fast", submission=submission)
    found = system.describe(config, system.system_id(config))
    assert problems(found) == []
    assert (found["submitter"], found["division"]) == ("Example", "closed")
    assert found["system_name"] == "mine-mini-fast"
    assert (found["status"], found["hw_notes"][:9]) == ("Available on-premise", "size mini")


WRITER = """
import os, sys, time
from pathlib import Path
from common.machine import system

os.fsync = lambda descriptor: None
system.describe = lambda config, name: {"system_name": name, "notes": "x" * 100_000}
numbers = set()
for number in range(100):
    while time.time() < float(sys.argv[2]) + number / 100:  # all at once
        pass
    system.LOCAL = Path(sys.argv[1], str(number))
    system.write_description(None, system.LOCAL, "machine")
    numbers.add(system.random_number())
print(*sorted(numbers))
"""


def test_several_first_runs_at_once_write_one_description_and_draw_one_number(tmp_path):
    command = [sys.executable, "-c", WRITER, str(tmp_path), str(time.time() + 2)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    writers = [subprocess.Popen(command, cwd=ROOT, text=True, **pipes) for _ in range(3)]
    ends = [(*writer.communicate(), writer.returncode) for writer in writers]
    assert [end[1:] for end in ends] == [("", 0)] * 3
    (numbers,) = {out.splitlines()[-1] for out, _, _ in ends}
    assert {len(number) for number in numbers.split()} == {32} and len(numbers.split()) == 100
    for folder in tmp_path.iterdir():
        assert {path.name for path in folder.iterdir()} == {"machine.json", "random"}
        assert json.loads((folder / "machine.json").read_text())["system_name"] == "machine"


@pytest.mark.parametrize("model", ["Intel Xeon Platinum 8480C", "AMD EPYC", "not collected: lost", 5])
def test_a_description_of_another_processor_is_a_warning(tmp_path, monkeypatch, capsys, model):
    monkeypatch.setattr(hardware, "processor_name", lambda: "Intel(R) Xeon(R) Processor")
    (tmp_path / "machine.json").write_text(json.dumps({"host_processor_model_name": model}))
    system.write_description(None, tmp_path, "machine")
    warning = capsys.readouterr().err
    assert ("it describes AMD EPYC, and this machine has Intel" in warning) == (model == "AMD EPYC")
    assert warning.count("\n") == (model == "AMD EPYC")


@pytest.mark.parametrize("content", ["", '{"submitter": "a', "[]", None])
def test_a_description_that_cannot_be_read_is_refused_before_a_run(tmp_path, content):
    path = tmp_path / "machine.json"
    path.mkdir() if content is None else path.write_text(content)
    with pytest.raises(UserError, match=r"machine\.json: not .*; mend it, or remove it"):
        system.write_description(None, tmp_path, "machine")


def test_machines_of_one_model_have_names_of_their_own(tmp_path, monkeypatch):
    """Clones of one image differ by the random number, nodes that share a clone by the id of the system."""
    monkeypatch.setattr(hardware, "gpu_names", list)
    identifiers = [tmp_path / "one", tmp_path / "another", tmp_path / "none"]
    for path in identifiers[:2]:
        path.write_text(f"{path.name}\n")
    found, records = set(), set()
    for clone in ("here", "there"):
        monkeypatch.setattr(system, "LOCAL", tmp_path / clone)
        for path in identifiers:
            monkeypatch.setattr(system, "MACHINE_ID", path)
            found.add(system.hardware_name())
            assert system.hardware_name() in found  # asked again, it is the same
            records.add(record.record_path().stem)
    assert records == found and len(found) == 6 and len({name.rpartition("-")[0] for name in found}) == 1
    assert all(len(name) <= 40 and NAME.fullmatch(name) for name in found)
    monkeypatch.setattr(system, "LOCAL", identifiers[0])  # which cannot be written
    assert NAME.fullmatch(system.machine_digest())


def test_the_storage_is_the_disk_of_the_data(tmp_path, monkeypatch):
    asked, usage = [], hardware.psutil.disk_usage
    monkeypatch.setenv("TTT_DATA", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(hardware.psutil, "disk_usage", lambda path: asked.append(path) or usage(path))
    assert ttt("system").returncode == 0 and asked == [str(tmp_path)]


def test_a_description_that_cannot_be_written_leaves_no_file(tmp_path, monkeypatch):
    def fill_the_disk(description):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(system, "as_json", fill_the_disk)
    assert "x.json: cannot write here (No space" in one_line(ttt("system", "--out", "x.json"))
    assert list(tmp_path.iterdir()) == []
