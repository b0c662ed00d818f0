"""Checks that need real processes: the devices against each other, and the messages between their ranks."""

import json
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.machine import gpus
from common.machine.line import OK, Line, fault, ok, warning
from common.machine.record import judge_speed
from common.processes import Exit, Processes
from common.repository import ROOT
from common.run.environments import rank_environments

TIMEOUT_S = 90
SLOW_NCCL = 5e9  # bytes/s: less than any PCIe slot of a GPU
SLOW, TOO_SLOW = 0.95, 0.85  # of the middle device, below which one is named, and below which it is a fault
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def check_devices(num_ranks: int) -> list[Line]:
    """Start ranks on this machine, let each measure its device and all of them exchange messages; judge."""
    check = f"{num_ranks} ranks" if num_ranks > 1 else "device"
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory) / "measured.json"
        if (trouble := start(num_ranks, output)) is not None:
            advice = "NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL say more"
            return [fault(check, trouble, advice)]
        measured = json.loads(output.read_text())
    found: Sequence[dict[str, Any]] = measured["ranks"]
    lines = [
        since_best(compared("matrix product", found, "flops_per_s", 1e12, "TFLOP/s"), "flops_per_s", found),
        since_best(compared("device copy", found, "bytes_per_s", 1e9, "GB/s"), "bytes_per_s", found),
        *clocks(found),
    ]
    if (wrong := differing(found)) is not None:
        lines.append(wrong)
    return [*lines, exchanged(measured, num_ranks)]


def start(num_ranks: int, output: Path) -> str | None:
    """Run the ranks to their end; returns what went wrong, None if nothing did."""
    environments = rank_environments(num_ranks, str(output.parent))
    if num_ranks == 1:
        environments = [ALONE]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        Processes(
            ["-m", "common.doctor.probe", str(output)],
            environments,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        ) as processes,
    ):
        ended = processes.wait(TIMEOUT_S)
        if ended is None:
            return f"no answer within {TIMEOUT_S} s: a rank hangs"
        if ended.code == 0:
            return None
        errors.seek(0)
        return f"rank {ended.number} ended {last_words(ended, errors.read())}"


def last_words(ended: Exit, errors: str) -> str:
    """Return what ended a rank: a signal, else the first error that one wrote."""
    if ended.code < 0:
        return f"by {signal.Signals(-ended.code).name}"
    lines = [line for line in errors.splitlines() if line]
    error = next((line for line in lines if "Error: " in line), (lines or ["without a word"])[-1])
    return f"with code {ended.code}: {error}"


def compared(check: str, found: Sequence[dict[str, Any]], key: str, unit: float, name: str) -> Line:
    """Compare the devices; those of processors share one machine, and one device has nothing to compare."""
    rates = [each[key] for each in found]
    shown = " ".join(f"{rate / unit:.4g}" for rate in rates)
    values, where = {key: rates}, found[0]["device"]
    if where == "cpu":
        return ok(check, f"{sum(rates) / unit:.4g} {name} of this processor's {len(rates)} ranks", **values)
    if len(rates) == 1:
        return ok(check, f"{shown} {name}; one {where} has nothing to compare", **values)
    middle = statistics.median_high(rates)
    slow = {rank: rate / middle for rank, rate in enumerate(rates) if rate < SLOW * middle}
    if not slow:
        return ok(check, f"{shown} {name}", **values)
    named = ", ".join(f"GPU of rank {rank} has {share:.0%} of the middle one" for rank, share in slow.items())
    judge = fault if min(slow.values()) < TOO_SLOW else warning
    advice = (
        "every step waits for it: leave it out with CUDA_VISIBLE_DEVICES, and check its cooling and power"
    )
    return judge(check, f"straggler: {named} ({shown} {name})", advice, stragglers=sorted(slow), **values)


def since_best(line: Line, key: str, found: Sequence[dict[str, Any]]) -> Line:
    """Compare what all devices do together with the best of this machine, unless a device is slow."""
    if line.state != OK:
        return line
    what = f"{line.check} of {len(found)} x {found[0]['device']}"
    return judge_speed(line, what, sum(each[key] for each in found))


def clocks(found: Sequence[dict[str, Any]]) -> list[Line]:
    """Return the clocks under load, and what held one back."""
    if not all("clock_mhz" in each and "max_clock_mhz" in each for each in found):
        return []
    check, shown = "clocks under load", " ".join(str(each["clock_mhz"]) for each in found)
    lines = [
        line
        for rank, each in enumerate(found)
        for line in gpus.find_slow_downs(f"GPU of rank {rank}", each.get("reasons", 0))
    ]
    return lines or [ok(check, f"{shown} MHz of {found[0]['max_clock_mhz']}")]


def differing(found: Sequence[dict[str, Any]]) -> Line | None:
    """Return a line if a device computed another product than its equals from the same numbers."""
    sums = [each["checksum"] for each in found]
    if len({each["device"] for each in found}) > 1 or len(set(sums)) == 1:
        return None
    usual = statistics.mode(sums)
    wrong = [f"rank {rank}" for rank, value in enumerate(sums) if value != usual]
    advice = "a device that computes wrongly: take it out of service"
    return fault("matrix product", f"{', '.join(wrong)} computed another product than the others", advice)


def exchanged(measured: dict[str, Any], num_ranks: int) -> Line:
    """Judge the messages between the ranks: right sums, and how fast."""
    check = "all-reduce"
    if num_ranks == 1:
        return ok(check, "one rank exchanges nothing")
    if measured["num_wrong_ranks"]:
        advice = "NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 shows which way messages are damaged"
        return fault(check, f"{measured['num_wrong_ranks']} ranks received wrong sums", advice)
    per_s, size = measured["bus_bytes_per_s"], measured["message_bytes"]
    found = (
        f"{per_s / 1e9:.3g} GB/s bus bandwidth, {num_ranks} ranks, {measured['backend']}, {size >> 20} MiB"
    )
    values = {"bus_bytes_per_s": per_s, "num_ranks": num_ranks, "backend": measured["backend"]}
    if measured["backend"] == "nccl" and per_s < SLOW_NCCL:
        advice = "NCCL_DEBUG=INFO says which way messages take; nvidia-smi topo -m shows the links"
        return warning(check, found, advice, **values)
    return ok(check, found, **values)
