"""The name and the description of the system that a run is timed on."""

import json
import os
import platform
import re
import secrets
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from common import files, repository
from common.config.schema import RunConfig
from common.errors import UserError
from common.evidence.system import (
    FIELDS,
    NOT_COLLECTED,
    STATUS,
    are_processors_others,
    processor_model,
    read_fields,
)
from common.machine import hardware
from common.repository import FOLDER, IS_INSTALLED, NAME, WORKSPACE, digest_text

FRAMEWORK = ("torch", "torchvision", "transformers", "tokenizers", "mlperf-logging")
NONE = "none"
STATE_HOME = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))
# Files about this machine alone; git ignores them.
LOCAL = STATE_HOME / "time-to-train" if IS_INSTALLED else WORKSPACE / ".machine"
MACHINE_ID = Path("/etc/machine-id")
PROCESSOR_LENGTH, DIGEST_LENGTH = 25, 6  # characters in a name


def hardware_name() -> str:
    """Return a short name of the hardware, such as `2cpu-EPYC-3fa09c` or `8xH100-80GB-HBM3`.

    Without GPUs the name is that of one machine: processors of one model differ by host, memory and
    neighbours. GPUs are named by model alone, those of all nodes of a run: jobs of a cluster, each on another
    node, are one set.
    """
    gpus = hardware.gpu_names()
    if gpus:
        return f"{len(gpus) * hardware.count_nodes()}x{short_name(gpus[0])}"
    model = short_name(hardware.processor_name())[:PROCESSOR_LENGTH].rstrip("-._")
    return f"{psutil.cpu_count()}cpu-{model}-{machine_digest()}"


def machine_digest() -> str:
    """Return a digest that differs between machines, and reveals nothing of them.

    A random number of this clone makes it unique where images of machines or containers share an id; the id
    of the system and its size distinguish the nodes that share a clone.
    """
    try:
        identifier = MACHINE_ID.read_text().strip()
    except OSError:  # as in a container
        identifier = ""
    memory = round(psutil.virtual_memory().total / 2**30)
    facts = [random_number(), identifier, hardware.processor_name(), str(psutil.cpu_count()), str(memory)]
    return digest_text("\n".join(facts), DIGEST_LENGTH)


def random_number() -> str:
    """Read the number that this clone drew at its first run; '' where it cannot be stored.

    Of several processes one makes the link, also on file systems without locks.
    """
    path = LOCAL / "random"
    try:
        if not path.exists():
            LOCAL.mkdir(parents=True, exist_ok=True)
            draft = LOCAL / f".random.{secrets.token_hex(8)}"
            draft.write_text(f"{secrets.token_hex(16)}\n")
            try:
                os.link(draft, path)
            except FileExistsError:  # another process was sooner
                pass
            finally:
                draft.unlink()
        return path.read_text().strip()
    except OSError:
        return ""


def short_name(model: str) -> str:
    """Shorten a model's name: `AMD EPYC 7513 32-Core Processor` -> `EPYC-7513`."""
    words = re.sub(r"\((R|TM)\)|@.*|\d+-Core", " ", model).split()
    dropped = {"AMD", "Intel", "NVIDIA", "CPU", "Processor", "Graphics"}
    name = "-".join(word for word in words if word not in dropped)
    return re.sub(r"[^A-Za-z0-9._-]", "", name)[:32] or "unknown"


def machine_id(config: RunConfig) -> str:
    named = config.submission.hardware
    return f"{hardware_name() if named == 'auto' else named}{'-mini' if config.size == 'mini' else ''}"


def system_id(config: RunConfig, cell: str = "") -> str:
    """Return `<hardware>[-mini]-<configuration>`, the name of the system and of its folder in results.

    The `cell` of a study stands for its configuration.
    """
    name = f"{machine_id(config)}-{cell or config.configuration}"
    pattern = FOLDER if cell else NAME
    if not pattern.fullmatch(name):
        raise UserError(f"system name '{name}' is not {pattern.pattern}", where="submission.hardware")
    return name


def versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages of FRAMEWORK; a laptop may lack torch."""
    numbers = {"python": platform.python_version()}
    for name in FRAMEWORK:
        try:
            numbers[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return numbers


def versions_line() -> str:
    return ", ".join(f"{name} {version}" for name, version in versions().items())


def version_of(module: str) -> dict[str, str]:
    """Return the version that a loaded module, a package around it or its installation states, if any."""
    package = module.partition(".")[0]
    while module:
        if version := getattr(sys.modules.get(module), "__version__", None):
            return {"version": str(version)}
        module = module.rpartition(".")[0]
    try:
        installed = metadata.distribution(package)
    except (metadata.PackageNotFoundError, ValueError):
        return {}
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    is_loaded = Path(file).is_relative_to(str(installed.locate_file("")))  # not a folder of the same name
    return {"version": installed.version} if is_loaded else {}


def operating_system() -> str:
    try:
        name = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:  # not Linux, or a bare one
        name = ""
    return ", ".join(part for part in (name, f"{platform.system()} {platform.release()}") if part)


def collect_description(name: str) -> dict[str, str]:
    """Describe this machine under a name; a field that cannot be collected says why."""
    software = versions() | hardware.driver()
    torch = software.get("torch")
    storage = files.existing_folder(repository.data_folder())
    known = hardware.host(storage) | hardware.accelerators()
    known |= {
        "submitter": hardware.PERSON,
        "division": "open",
        "status": STATUS["research"],
        "system_name": name,
        "hw_notes": NONE,
        "framework": f"PyTorch {torch}" if torch else f"{NOT_COLLECTED}PyTorch is not installed",
        "other_software_stack": ", ".join(f"{package} {version}" for package, version in software.items()),
        "operating_system": operating_system(),
        "sw_notes": NONE,
    }
    return {field: known[field] for field in FIELDS}


def describe(config: RunConfig, name: str) -> dict[str, Any]:
    """Describe this machine, under a name, for the runs of a configuration."""
    submission = config.submission
    stated = {
        "submitter": submission.org,
        "division": submission.division,
        "status": STATUS[submission.status],
    }
    notes = {"hw_notes": "size mini: a proxy, not a submission"} if config.size == "mini" else {}
    return collect_description(name) | stated | notes


def write_description(config: RunConfig, directory: Path, name: str) -> None:
    """Write `<name>.json` once; an existing one is a person's and stays as it is.

    One that names another processor than this machine's is shown in a warning. Raises UserError where it
    cannot be written, or the existing one cannot be read.
    """
    path = directory / f"{name}.json"
    with files.explain_os_error("cannot write system descriptions here", directory):
        files.write_once(path, lambda: as_json(describe(config, name)), f"writes {path.name}")
    stated = processor_model(read_fields(path, hint="mend it, or remove it and a new one is written"))
    if are_processors_others(stated, here := hardware.processor_name()):
        what = f"it describes {stated}, and this machine has {here}"
        hint = "give another machine another name: --set submission.hardware=NAME"
        print(f"warning: {repository.relative_path(path)}: {what}; {hint}", file=sys.stderr)


def as_json(description: dict[str, Any]) -> str:
    return json.dumps(description, indent=4) + "\n"
