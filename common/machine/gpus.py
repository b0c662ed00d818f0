"""Reads the health of the GPUs from NVML, the library beneath nvidia-smi: errors, slow-downs, other users."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pynvml

from common.machine import hardware, torch_build
from common.machine.hardware import ask_nvml
from common.machine.line import Line, fault, judge, ok, warning

BUSY_BYTES = 2**30  # of memory in use, above which a GPU is shared
KERNEL_LOG = Path("/dev/kmsg")
XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)[^)]*\): (\d+)")  # with MIG, instances follow the bus
HARDWARE_XIDS = (48, 63, 64, 74, 79, 92, 94, 95, 109, 119, 120, 140)  # not those of a faulty program
CHECK = "GPU health"
NVML_TOO_WARM = pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
NVML_CLOCKS_SET = pynvml.nvmlClocksThrottleReasonApplicationsClocksSetting
UNTRUSTED = "check cooling and power; times measured now are worth nothing"
SLOW_DOWNS = (  # NVML's bit -> what it means; idleness and the power limit are normal
    (pynvml.nvmlClocksThrottleReasonHwThermalSlowdown, fault, "too hot", UNTRUSTED),
    (pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown, fault, "braked by its power supply", UNTRUSTED),
    (pynvml.nvmlClocksThrottleReasonHwSlowdown, fault, "slowed down by its hardware", UNTRUSTED),
    (NVML_TOO_WARM, warning, "slowed down by its temperature", "check cooling"),
    (NVML_CLOCKS_SET, warning, "its clocks are set below the highest", "nvidia-smi -rac"),
)


def visible_gpus(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Map a name to the NVML handle of each GPU that a run may use: CUDA_VISIBLE_DEVICES, else all."""
    handles = {str(number): handle for number, handle in enumerate(hardware.gpus())}
    names = hardware.requested_gpus(environment)
    if names is None or not handles:
        return {f"GPU {number}": handle for number, handle in handles.items()}
    visible = {}
    for wanted in names:
        handle = handles.get(wanted)
        if wanted.startswith("GPU-"):  # CUDA takes the beginning of a UUID
            uuids = {str(ask_nvml(pynvml.nvmlDeviceGetUUID, one)): one for one in handles.values()}
            handle = next((one for uuid, one in uuids.items() if uuid.startswith(wanted)), None)
        elif wanted.startswith("MIG-"):
            handle = ask_nvml(pynvml.nvmlDeviceGetHandleByUUID, wanted)
        if handle is None:
            break  # CUDA ignores what follows a name that it does not know
        visible[f"GPU {wanted}"] = handle
    return visible


def check_presence(size: str, environment: Mapping[str, str] = os.environ) -> Line:
    """Check that the requested GPUs exist, and that torch reaches them."""
    visible = visible_gpus(environment)
    check, there = "GPUs", len(visible)
    names, allocated = hardware.requested_gpus(environment), environment.get("SLURM_GPUS_ON_NODE", "")
    source, num_wanted = "CUDA_VISIBLE_DEVICES", len(names or ())
    if names is None and allocated.isdecimal():
        source, num_wanted = "SLURM_GPUS_ON_NODE", int(allocated)
    if num_wanted > there:
        advice = "nvidia-smi shows what the driver sees; a reboot brings back a GPU that fell off its bus"
        return fault(check, f"{source} asks for {num_wanted}, {there} are there", advice, there=there)
    if there == 0 and size == "full":
        advice = "size full needs GPUs; --size mini is made for processors"
        return fault(check, "none, but size full is asked for", advice, there=0)
    if there == 0:
        return ok(check, "none: a processor trains", there=0)
    reached = there
    if torch_build.has_torch():
        import torch

        reached = torch.cuda.device_count()
    if reached < there:
        text, is_fault = f"{there} there, torch reaches {reached}", size == "full"  # a CPU trains the other
        advice = f"{torch_build.install_line(torch_build.driver_cuda())}, or install a newer driver"
        return judge(check, text, advice, is_fault=is_fault, is_warning=True, there=there)
    models = Counter(map(pynvml.nvmlDeviceGetName, visible.values()))
    return ok(check, hardware.counted(models), there=there)


def check_health() -> list[Line]:
    """Check each visible GPU; one line for all that are well."""
    handles = visible_gpus()
    lines = [line for name, handle in handles.items() for line in find_problems(name, handle)]
    if handles and not lines:
        what = "no uncorrected memory error, nothing slowed down, no memory in use"
        lines.append(ok(CHECK, f"{what}, as far as the driver says"))
    return lines


def find_problems(name: str, handle: Any) -> Iterator[Line]:
    """Yield the faults of one GPU; a query that its driver does not support is skipped."""
    uncorrected, volatile = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    if count := ask_nvml(pynvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, volatile):
        text = f"{name}: {count} uncorrected memory errors (ECC) since the driver started"
        yield fault(CHECK, text, "reset the GPU or reboot; replace it if they come back", gpu=name)
    _, _, is_pending, has_failed = ask_nvml(pynvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, False, False)
    if has_failed:
        yield fault(CHECK, f"{name}: a memory row could not be remapped", "replace the GPU", gpu=name)
    elif is_pending:
        yield warning(CHECK, f"{name}: a memory row waits for remapping", "reset the GPU or reboot", gpu=name)
    yield from find_slow_downs(name, ask_nvml(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0)
    memory = ask_nvml(pynvml.nvmlDeviceGetMemoryInfo, handle)
    if memory is not None and getattr(memory, "used", 0) > BUSY_BYTES:
        text = f"{name}: {memory.used / 2**30:.1f} GiB of its memory are in use"
        yield warning(CHECK, text, "nvidia-smi names the processes; a run would share the GPU", gpu=name)


def find_slow_downs(name: str, reasons: int) -> list[Line]:
    """Return the worst reason for which a GPU runs below its clock, from NVML's bits; nothing without one."""
    for bit, report, what, advice in SLOW_DOWNS:
        if reasons & bit:
            return [report(CHECK, f"{name}: {what}", advice, gpu=name, reasons=reasons)]
    return []


def kernel_xids(log: Path = KERNEL_LOG) -> Line:
    """Look for hardware errors that the driver reports (Xid) in the kernel's log."""
    check = "Xid errors"
    try:
        text = read_kernel_log(log)
    except OSError as error:
        return ok(check, f"{log} is not readable here ({error.strerror}); the driver is asked instead")
    errors = [(bus, int(number)) for bus, number in XID.findall(text) if int(number) in HARDWARE_XIDS]
    if not errors:
        return ok(check, "none of the hardware in the kernel's log, which keeps the newest messages")
    bus, number = errors[-1]
    what = f"{len(errors)} in the kernel's log, the last Xid {number} of GPU {bus}"
    return warning(check, what, "reboot; if they come back, give the log of the kernel to the vendor")


def read_kernel_log(path: Path) -> str:
    """Read the kernel's ring buffer; each read of its device returns one message."""
    text, file = b"", os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with suppress(BlockingIOError):  # the end
            while True:
                with suppress(BrokenPipeError):  # newer messages replaced this one; the next read goes on
                    if not (message := os.read(file, 2**16)):
                        break
                    text += message
    finally:
        os.close(file)
    return text.decode(errors="replace")


@contextmanager
def watch_xids() -> Iterator[list[Line]]:
    """Collect Xid errors while the block runs; the list gets its one line when the block ends."""
    lines: list[Line] = []
    handles = visible_gpus()
    events = ask_nvml(pynvml.nvmlEventSetCreate) if handles else None
    if events is None:
        yield lines
        return
    for handle in handles.values():
        ask_nvml(pynvml.nvmlDeviceRegisterEvents, handle, pynvml.nvmlEventTypeXidCriticalError, events)
    yield lines
    numbers = set()
    while (event := ask_nvml(pynvml.nvmlEventSetWait_v2, events, 0)) is not None:  # raises when none is left
        numbers.add(event.eventData)
    pynvml.nvmlEventSetFree(events)
    text = f"Xid {', '.join(map(str, sorted(numbers)))}" if numbers else "none"
    advice = "see the NVIDIA Xid catalogue; reboot"
    lines.append(judge("Xid errors now", f"{text} during these checks", advice, is_fault=bool(numbers)))
