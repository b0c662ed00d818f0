"""Make one run with the code in the working folder, which may be of an older commit than this file.

`replay.py` starts it in a process of its own, with the path of an order (JSON). It uses only names that every
commit with `common/run/run_sets.py` defines.
"""

import json
import signal
import sys
from pathlib import Path

from common import repository
from common.config.schema import Loaded
from common.errors import EXIT_USAGE, UserError
from common.processes import raise_interrupt
from common.run import run_sets


def make_run(order: dict[str, object]) -> int:
    """Make the run that an order describes and write `directory`/result_0.txt; returns its exit code."""
    digest = repository.code_state().digest
    if order["code"] and digest != order["code"]:
        raise UserError(f"the code of its commit has the digest {digest}, but the log states {order['code']}")
    values, name = order["configuration"], str(order["name"])
    assert isinstance(values, dict)
    module = repository.benchmark_module(str(values["benchmark"]))
    config = module.Config.model_validate(values)  # older code has no repository.config_class
    run_set = vars(run_sets)["RunSet"](  # defined in one of several modules, by commit
        loaded=Loaded(config=config, origins={}, changes=[], source=config.configuration),
        directory=Path(str(order["directory"])),
        num_runs=1,
        seeds=(int(str(order["seed"])),),
        num_ranks=int(str(order["ranks"])),
        cell="replay",  # not a set of its own, which would be sealed
    )
    return run_sets.run_all([run_set], ["replay", name], fail_fast=True)


def main() -> int:
    signal.signal(signal.SIGTERM, raise_interrupt)
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        return make_run(order)
    except (UserError, ValueError, TypeError) as error:
        Path(order["fault"]).write_text(" ".join(str(error).split()), encoding="utf-8")
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
