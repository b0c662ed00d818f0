"""The checks of `ttt doctor` in the order in which a person wants their answers, the cheap ones first."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from common.config.schema import RunConfig
from common.doctor import devices, first_steps, recipe
from common.errors import UserError
from common.machine import gpus, host
from common.machine.hardware import count_gpus
from common.machine.line import Line, fault, warning
from common.machine.load import Meter, read_alone
from common.machine.preflight import cheap_checks, num_shards
from common.repository import ROOT

PROCESSES_ON_CPU = 2  # the fewest that exchange messages


def check_machine(
    configs: dict[str, dict[str, RunConfig]],
    results: Path,
    *,
    size: str,
    num_ranks: int | None = None,
    is_quick: bool = False,
) -> Iterator[Line]:
    """Yield the answer of every check; `configs` are the configurations of each benchmark, by name.

    `num_ranks` None: one for each GPU. With `is_quick` no process is started and nothing is trained.
    """
    most_shards = max(num_shards(config) for named in configs.values() for config in named.values())
    yield from cheap_checks(size, results, most_shards)
    if is_quick:
        return
    num_gpus = count_gpus()
    if num_gpus:
        yield gpus.kernel_xids()
    with gpus.watch_xids() as xid_lines:
        num_ranks = num_ranks or num_gpus or PROCESSES_ON_CPU
        yield from answer("devices", partial(devices.check_devices, num_ranks))
        for named in configs.values():
            yield from check_benchmark(named, results, num_gpus or 1)
    yield from xid_lines


def check_benchmark(named: dict[str, RunConfig], results: Path, num_devices: int) -> Iterator[Line]:
    """Yield the answers about one benchmark, of whose configurations `named` holds some by name."""
    config = next(iter(named.values()))
    benchmark = config.benchmark
    line, manifest = recipe.check_data(config, results)
    yield line
    if manifest is not None:
        yield host.read_rate(benchmark, ROOT / config.data.directory, manifest)  # type: ignore[attr-defined]
    yield from answer(f"kernels of {benchmark}", partial(recipe.check_kernels, config))
    if config.size != "mini":
        advice = f"ttt doctor --benchmarks {benchmark} compares at size mini"
        yield warning(f"first steps of {benchmark}", f"no band is known at size {config.size}", advice)
    for config in named.values():
        samples_per_s, meter = None, Meter()
        if config.size == "mini" and manifest is not None:
            check = f"first steps of {benchmark} {config.configuration}"
            for line in answer(check, partial(first_steps.check, check, config)):
                samples_per_s = line.values.get("samples_per_s")
                yield line
        yield recipe.check_minutes(config, results, samples_per_s, num_devices, read_alone(meter))


def answer(check: str, function: Callable[[], Iterable[Line]]) -> Iterable[Line]:
    """Return the lines of a check, or a fault with the error that ended it."""
    try:
        return function()
    except (UserError, OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
        first = (str(error).strip().splitlines() or [""])[0]
        advice = "`ttt run` would end the same way"
        return [fault(check, f"{type(error).__name__}: {first}".removeprefix("UserError: "), advice)]
