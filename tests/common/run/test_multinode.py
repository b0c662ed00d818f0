"""Several machines rehearsed on one: torchrun agents, and the Slurm script with a small srun in its place."""

import os
import re
import shutil
import sys
from pathlib import Path

import psutil
import pytest

from common.evidence.sealed.seal import read_sealed
from common.repository import ROOT
from tests.command import run, start
from tests.runs import free_port, reason_of_abort, records, until

PYTHON = [sys.executable, "-m"]
TINY = {
    "language_bert": (
        *("max_duration=20ba", "evaluate_every=10ba", "evaluate_from=10ba", "schedule.warmup=5ba"),
    ),
    "image_classification": (
        *("max_duration=8ba", "evaluate_every=4ba", "schedule.warmup=2ba", "global_batch_size=12"),
        *("methods.progressive_crops=false", "methods.scale_schedule=false"),
    ),
}
WITHIN_S = 400  # a quiet machine takes 25: seven processes import torch


pytestmark = pytest.mark.usefixtures("prepared_data")


@pytest.fixture
def environment(tmp_path):
    """The environment of a rank: `ttt` is this checkout's; it answers and notes the preflight at once."""
    wrapper = tmp_path / "ttt"
    wrapper.write_text(
        f"""#!{sys.executable}
import os, sys
if sys.argv[1] == "doctor":
    is_rank = "SLURM_STEP_NUM_TASKS" in os.environ
    open("{tmp_path}/doctor.txt", "a").write(f"{{sys.argv[1:]}} {{is_rank}}\\n")
    sys.exit(int(os.environ.get("FAULTS", "0")))
os.execv(sys.executable, [sys.executable, "-m", "common.cli", *sys.argv[1:]])
"""
    )
    wrapper.chmod(0o755)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "CONTAINER", "RUNS")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return kept | {"TTT": str(wrapper), "PYTHONPATH": str(ROOT)}


def arguments(benchmark):
    """Return the configuration and flags of a tiny run that reaches its target at its first evaluation."""
    return ["optimized", "--size", "mini", "--set", "target=0.001", *TINY[benchmark]]


@pytest.fixture
def folders(tmp_path):
    """The options for data, which lie outside the repository, and results."""
    shutil.copytree(ROOT / "data", tmp_path / "prepared", ignore=shutil.ignore_patterns("full*"))
    return ["--data", tmp_path / "prepared", "--results", tmp_path / "results"]


def check_results(folder, environment, num_runs):
    """Assert that so many runs on two ranks pass the audit; returns the first one's log."""
    paths = sorted((folder / "results").rglob("result_*.txt"))
    assert paths and not any(str(folder) in path.read_text() for path in paths)
    stated = [record["value"] for path in paths for record in records(path) if record["key"] == "num_ranks"]
    assert stated == [2] * num_runs
    checked = run(*PYTHON, "common.cli", "check", folder / "results", env=environment)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    return paths[0]


def ip(command):
    """Run a command of `ip`; returns whether it could."""
    return run("ip", *command.split(), timeout=10).returncode == 0


@pytest.fixture
def machines():
    """Two machines, as the address of each and the beginning of its commands.

    They are network namespaces joined by a pair of virtual cables where root, `ip` and the kernel allow them;
    else they share an address.
    """
    names = [f"ttt-{os.getpid()}-{machine}" for machine in range(2)]
    addresses = ["10.213.7.1", "10.213.7.2"]
    commands = [command for name in names for command in (f"netns add {name}", f"netns exec {name} true")]
    commands += [f"link add cable0 netns {names[0]} type veth peer cable1 netns {names[1]}"]
    for machine, name in enumerate(names):
        commands += [
            f"-n {name} address add {addresses[machine]}/30 dev cable{machine}",
            f"-n {name} link set lo up",
            f"-n {name} link set cable{machine} up",
        ]
    has_ip = os.geteuid() == 0 and shutil.which("ip") is not None
    if has_ip and all(map(ip, commands)):
        begin = "ip netns exec {} env GLOO_SOCKET_IFNAME=cable{}".format
        yield [(addresses[machine], begin(names[machine], machine).split()) for machine in range(2)]
    else:
        print("no network namespaces here")
        yield [("127.0.0.1", [])] * 2
    for name in names * has_ip:
        ip(f"netns delete {name}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "benchmark", [pytest.param("image_classification", marks=pytest.mark.on_demand), "language_bert"]
)
def test_two_torchrun_agents_make_one_log_that_passes_the_audit(
    machines, benchmark, tmp_path, environment, folders
):
    endpoint, agents = f"{machines[0][0]}:{free_port()}", []
    for machine, (address, begin) in enumerate(machines):
        options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=rehearsal"]
        options += [f"--rdzv-endpoint={endpoint}", f"--local-addr={address}"]
        options += [f"--rdzv-conf=is_host={'false' if machine else 'true'}", "--no-python"]
        script = [f"{benchmark}/run_and_time.sh", *arguments(benchmark), *folders, "--seed", "5"]
        command = [*begin, *PYTHON, "torch.distributed.run", *options, *script]
        agents.append(start(*command, env=environment))
    try:
        ended = [agent.communicate(timeout=WITHIN_S) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # torchrun passes it on; nothing to end after a whole run
    assert [agent.returncode for agent in agents] == [0, 0], ended
    assert sum(out.count("success") for out, _ in ended) == 1
    text = check_results(tmp_path, environment, 1).read_text()
    unverified = "# changed by unverified recipe: global_batch_size: 32 -> 12" in text
    assert unverified == (benchmark == "image_classification")


@pytest.mark.slow
def test_a_log_says_that_a_peer_on_another_machine_was_lost(tmp_path, environment):
    """Two launchers share nothing but the network, as on two machines."""
    folders = ("--results", tmp_path / "results", "--systems", tmp_path / "systems")
    command = [*PYTHON, "common.cli", "run", "language_bert", "optimized", "--size", "mini", *folders]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    first, second = (
        start(*command, env=environment | meeting | {"RANK": rank, "LOCAL_RANK": "0"}) for rank in "01"
    )
    try:
        until(
            lambda: any(
                '"block_start"' in path.read_text() for path in tmp_path.glob("results/*/bert/result_0.txt")
            )
        )
        (worker,) = [
            child
            for child in psutil.Process(second.pid).children(recursive=True)
            if "common.run.worker" in child.cmdline()
        ]
        worker.kill()
        _, errors = first.communicate(timeout=WITHIN_S)
        _, other_errors = second.communicate(timeout=WITHIN_S)
    finally:
        for launcher in (first, second):
            launcher.kill()
    (path,) = tmp_path.rglob("result_0.txt")
    assert "lost a peer, whose machine says why" in reason_of_abort(path) and "lost a peer" in errors
    assert "SIGKILL" in other_errors
    assert first.returncode == 1 and "Traceback" not in errors


SRUN = """#!/usr/bin/env python3
# A small srun: notes its arguments, starts a step's tasks with Slurm's variables, ends all when one fails.
import os, subprocess, sys, time
with open(os.environ["SRUN_CALLS"], "a") as calls:
    calls.write("\\x1f".join(sys.argv[1:]) + "\\n")
options = [word for word in sys.argv[1:] if word.startswith("--")]
command = sys.argv[1:]
while command[0].startswith("--"):
    command.pop(0)
if any(option.startswith("--container-image") for option in options) or command[0] == "apptainer":
    sys.exit(0)
given = dict(option[2:].partition("=")[::2] for option in options)
tasks = int(given.get("ntasks", os.environ["SLURM_NTASKS"]))
step = {"SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.1"}
started = [
    subprocess.Popen(command, env=os.environ | step | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0"})
    for rank in range(tasks)
]
while any(task.poll() is None for task in started):
    if "kill-on-bad-exit" in given and any(task.poll() for task in started):
        time.sleep(1)
        for task in started:
            task.terminate()
    time.sleep(0.05)
sys.exit(max(task.wait() for task in started))
"""


@pytest.fixture
def allocation(tmp_path, environment, folders):
    """The environment of a batch script on two machines with one task each, our srun first on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text(SRUN)
    (folder / "srun").chmod(0o755)
    return environment | {
        "PATH": f"{folder}:{environment['PATH']}",
        "SRUN_CALLS": str(tmp_path / "calls.txt"),
        "TTT_DATA": str(folders[1]),
        "OUTPUT": str(tmp_path),
        "INFINIBAND": str(tmp_path / "infiniband"),
        "SLURM_JOB_ID": str(free_port() % 10_000),  # which the port of the group is made of
        "SLURM_JOB_NODELIST": "127.0.0.1,127.0.0.1",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "0",  # as in a batch script
        "SLURM_LOCALID": "0",
    }


def sbatch(environment, *words):
    done = run("bash", "systems/run.sbatch", *words, env=environment, timeout=2 * WITHIN_S)
    calls = Path(environment["SRUN_CALLS"]).read_text().splitlines()
    return done, [call.split("\x1f") for call in calls]


@pytest.mark.slow
def test_one_allocation_checks_each_machine_and_then_makes_all_runs(tmp_path, allocation, folders):
    words = arguments("language_bert")
    done, calls = sbatch(allocation | {"RUNS": "2", "SIZE": "mini"}, "language_bert", *words)
    assert done.returncode == 0, done.stderr
    options = ["--benchmarks", "language_bert", "--size", "mini", *map(str, folders)]
    checked = ["doctor", *options]
    assert (tmp_path / "doctor.txt").read_text() == 2 * f"{checked} False\n"
    assert [call[:2] for call in calls] == 3 * [["--kill-on-bad-exit=1", "--cpu-bind=none"]]
    assert len(list((tmp_path / "systems").glob("*.json"))) == 1
    log = check_results(tmp_path, allocation, 2)
    sealed = read_sealed(log.parent)
    assert sealed.seal.num_runs == 2
    assert [event.event for _, event in sealed.events] == ["started", "ended"] * 2  # never extended
    again, _ = sbatch(allocation | {"RUNS": "2", "SIZE": "mini"}, "language_bert", *words)
    assert again.returncode == 0 and "2 of 2 runs are there" in again.stdout, again.stderr
    assert len(list(log.parent.glob("result_*.txt"))) == 2


def test_a_fault_of_a_machine_stops_before_anything_is_timed(tmp_path, allocation):
    words = arguments("language_bert")
    done, calls = sbatch(allocation | {"RUNS": "2", "FAULTS": "1"}, "language_bert", *words)
    assert done.returncode == 1 and len(calls) == 1 and not (tmp_path / "results").exists()


@pytest.mark.slow
def test_a_run_that_fails_leaves_the_others_of_the_allocation(allocation):
    done, calls = sbatch(
        allocation | {"RUNS": "2"}, "language_bert", "no-such-configuration", "--size", "mini"
    )
    assert done.returncode == 1 and len(calls) == 3
    assert "no-such-configuration" in done.stderr and "Traceback" not in done.stderr


def test_containers_get_repository_data_output_and_infiniband(allocation, tmp_path, folders):
    (tmp_path / "infiniband").mkdir()
    alone, words = "--ntasks=2 --ntasks-per-node=1", " ".join(map(str, folders))
    doctor = f"env -u SLURM_STEP_NUM_TASKS ttt doctor --benchmarks bert --size full {words}"
    run = f"ttt run bert {words} baseline --size full"
    places = [f"{place}:{place}" for place in (folders[1], tmp_path, tmp_path / "infiniband")]
    mounts = ",".join([f"{ROOT}:/suite", *places])
    pyxis = f"--container-image=registry#suite:1 --container-mounts={mounts} --container-workdir=/suite"
    apptainer = f"apptainer exec --nv --bind {mounts} --pwd /suite /images/suite.sif"
    for image, expected in (
        ("registry#suite:1", [f"{pyxis} {alone} {doctor}", f"{pyxis} {run}"]),
        ("/images/suite.sif", [f"{alone} {apptainer} {doctor}", f"{apptainer} {run}"]),
    ):
        done, calls = sbatch(allocation | {"CONTAINER": image, "TTT": "ttt"}, "bert", "baseline")
        assert done.returncode == 0, done.stderr
        assert [call[:2] for call in calls] == 2 * [["--kill-on-bad-exit=1", "--cpu-bind=none"]]
        assert [" ".join(call[2:]) for call in calls] == expected
        Path(allocation["SRUN_CALLS"]).unlink()


@pytest.mark.parametrize(
    ("words", "expected"),
    [([], "optimized --size mini"), (["baseline", "--size=full"], "baseline --size=full")],
)
def test_the_check_and_the_run_have_one_size(allocation, words, expected):
    image = {"CONTAINER": "/images/suite.sif", "SIZE": "mini"}
    done, (checked, timed) = sbatch(allocation | image, "bert", *words)
    assert done.returncode == 0 and " ".join(timed).endswith(f" {expected}"), done.stderr
    assert f"--size {expected[-4:]}" in " ".join(checked)


@pytest.mark.parametrize(
    ("words", "variables"),
    [([], {}), (["bert"], {"SLURM_NNODES": ""}), (["bert"], {"RUNS": "official"}), (["bert"], {"RUNS": "0"})],
)
def test_a_script_that_is_started_wrongly_says_how_it_is_used(allocation, words, variables):
    done = run("bash", "systems/run.sbatch", *words, env=allocation | variables)
    assert done.returncode == 2 and done.stderr.startswith("usage: ") and "BENCHMARK" in done.stderr


def test_the_image_is_pinned_and_keeps_its_torch():
    text = (ROOT / "Dockerfile").read_text()
    assert "ARG BASE=nvcr.io/nvidia/pytorch:26.05-py3\nFROM ${BASE}\n" in text
    assert "PIP_CONSTRAINT=" in text and ":latest" not in text


def test_an_allocation_has_all_memory_and_an_end():
    (line,) = re.findall(r"^#SBATCH (.*)$", (ROOT / "systems/run.sbatch").read_text(), re.MULTILINE)
    assert {"--exclusive", "--mem=0"} < set(line.split()) and re.search(r"--time=[0-9:]+", line)
