"""Checks that need real processes: the devices against each other, and the messages between their ranks."""

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from common.files import temporary_folder
from common.machine import gpus
from common.machine.line import Line, fault, judge, ok, warning
from common.machine.record import judge_speed
from common.processes import Processes
from common.repository import MODULE, WORKSPACE
from common.run.launch import describe_signal
from common.run.supervision import rank_environments, temporary_environment

TIMEOUT_S, POLL_S = 90, 0.2
NO_ANSWER = "no answer within"  # begins what `run_probes` says of a rank that hangs
SLOW_NCCL = 5e9  # bytes/s: less than any PCIe slot of a GPU
SLOW, TOO_SLOW = 0.95, 0.85  # of the median device: below, a device is a warning, a fault
UNITS = {"flops_per_s": (1e12, "TFLOP/s"), "bytes_per_s": (1e9, "GB/s")}
# The environment of a single rank, whatever launched this process.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}

Ranks = Sequence[dict[str, Any]]  # what each rank's probe measured


def check_devices(num_ranks: int) -> list[Line]:
    """Start ranks that measure their devices and exchange messages; returns the lines about both."""
    with temporary_folder() as folder:
        output = folder / "measured.json"
        arguments = [*MODULE, "common.doctor.probe", str(output)]
        trouble = run_probes(arguments, num_ranks, folder, limit_s=TIMEOUT_S)
        if trouble is not None:
            advice = "NCCL_DEBUG=INFO and TORCH_DISTRIBUTED_DEBUG=DETAIL say more"
            return [fault(f"{num_ranks} ranks" if num_ranks > 1 else "device", trouble, advice)]
        measured = json.loads(output.read_text())
    ranks: Ranks = measured["ranks"]
    return [
        check_rates("matrix product", ranks, "flops_per_s"),
        check_rates("device copy", ranks, "bytes_per_s"),
        *check_clocks(ranks),
        *check_products(ranks),
        judge_messages(measured, num_ranks),
    ]


def run_probes(
    arguments: Sequence[str],
    num_ranks: int,
    folder: Path,
    *,
    limit_s: float,
    report: Callable[[str], None] = lambda line: None,
) -> str | None:
    """Run `python ARGUMENTS` as each rank; returns why one of them failed, None where none has.

    Their temporary files lie in `folder`. `report` gets each line that they print, as it comes.
    """
    environments = [ALONE] if num_ranks == 1 else rank_environments(num_ranks, folder)
    environments = [environment | temporary_environment(folder) for environment in environments]
    lines, rest, end, deadline = list[str](), "", None, time.monotonic() + limit_s
    path = folder / "output.txt"
    with (
        path.open("w") as output,
        path.open(errors="replace") as printed,
        Processes(
            arguments, environments, cwd=WORKSPACE, stdout=output, stderr=subprocess.STDOUT
        ) as processes,
    ):
        while end is None and time.monotonic() < deadline:
            end = processes.wait(POLL_S)
            *whole, rest = (rest + printed.read()).split("\n")
            lines += filter(None, whole)
            for line in filter(None, whole):
                report(line)
    if rest:  # the last line of a rank that ended without a newline
        lines.append(rest)
        report(rest)
    if end is None:
        return f"{NO_ANSWER} {limit_s:.0f} s: a rank hangs, or needs longer"
    if end.code == 0:
        return None
    if end.code < 0:
        return f"rank {end.number} {describe_signal(-end.code)}"
    error = next((line for line in lines if "Error: " in line), (lines or ["without a word"])[-1])
    return f"rank {end.number} ended with code {end.code}: {error.removeprefix('common.errors.')}"


def check_rates(check: str, ranks: Ranks, key: str) -> Line:
    """Name the GPUs that are slower than the median one, else compare the sum with this machine's best.

    Ranks on the CPU share it, so only their sum counts; a single GPU has no other to compare with.
    """
    unit, name = UNITS[key]
    rates, device = [rank[key] for rank in ranks], ranks[0]["device"]
    text, values = " ".join(f"{rate / unit:.4g}" for rate in rates) + f" {name}", dict[str, Any]({key: rates})
    middle = statistics.median_high(rates)
    slow = {rank: rate / middle for rank, rate in enumerate(rates) if rate < SLOW * middle}
    if device == "cpu":
        text = f"{sum(rates) / unit:.4g} {name} of this processor's {len(rates)} ranks"
    elif len(rates) == 1:
        text += f"; one {device} has nothing to compare"
    elif slow:
        shares = [f"GPU of rank {rank} has {share:.0%} of the middle one" for rank, share in slow.items()]
        text = f"straggler: {', '.join(shares)} ({text})"
        advice = "leave it out with CUDA_VISIBLE_DEVICES, and check its cooling and power"
        report = fault if min(slow.values()) < TOO_SLOW else warning
        return report(check, text, f"every step waits for it: {advice}", stragglers=sorted(slow), **values)
    return judge_speed(ok(check, text, **values), f"{check} of {len(ranks)} x {device}", sum(rates))


def check_clocks(ranks: Ranks) -> list[Line]:
    """Return the clocks under load, or the reasons why some were low; no line where NVML has no clocks."""
    if not all("clock_mhz" in rank and "max_clock_mhz" in rank for rank in ranks):
        return []
    lines = [
        line
        for number, rank in enumerate(ranks)
        for line in gpus.find_slow_downs(f"GPU of rank {number}", rank.get("reasons", 0))
    ]
    clocks = " ".join(str(rank["clock_mhz"]) for rank in ranks)
    return lines or [ok("clocks under load", f"{clocks} MHz of {ranks[0]['max_clock_mhz']}")]


def check_products(ranks: Ranks) -> list[Line]:
    sums = [rank["checksum"] for rank in ranks]
    if len({rank["device"] for rank in ranks}) > 1 or len(set(sums)) == 1:
        return []
    usual = statistics.mode(sums)
    wrong = ", ".join(f"rank {number}" for number, value in enumerate(sums) if value != usual)
    advice = "a device that computes wrongly: take it out of service"
    return [fault("matrix product", f"{wrong} computed another product than the others", advice)]


def judge_messages(measured: dict[str, Any], num_ranks: int) -> Line:
    check = "all-reduce"
    if num_ranks == 1:
        return ok(check, "one rank exchanges nothing")
    if measured["num_wrong_ranks"]:
        advice = "NCCL_P2P_DISABLE=1 or NCCL_IB_DISABLE=1 shows which way messages are damaged"
        return fault(check, f"{measured['num_wrong_ranks']} ranks received wrong sums", advice)
    per_s, size, backend = (measured[key] for key in ("bus_bytes_per_s", "message_bytes", "backend"))
    return judge(
        check,
        f"{per_s / 1e9:.3g} GB/s bus bandwidth, {num_ranks} ranks, {backend}, {size >> 20} MiB",
        "NCCL_DEBUG=INFO says which way messages take; nvidia-smi topo -m shows the links",
        is_warning=backend == "nccl" and per_s < SLOW_NCCL,
        bus_bytes_per_s=per_s,
        num_ranks=num_ranks,
        backend=backend,
    )
