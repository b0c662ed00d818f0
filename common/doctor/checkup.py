"""The checks of `ttt doctor` in a process of their own, for `ttt accept`.

`python -m common.doctor.checkup OUTPUT RESULTS SIZE NUM_RANKS EXTENT BENCHMARK...` writes a line of JSON for
each check when its answer is known. NUM_RANKS 0: one for each GPU. EXTENT: `quick`, or `whole`.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from common.doctor.checks import check_machine, load_configs


def main() -> None:
    """Make the checks; each is written and printed at once."""
    output, results, size, num_ranks, extent, *benchmarks = sys.argv[1:]
    configs, is_quick = load_configs(benchmarks, size), extent == "quick"
    lines = check_machine(
        configs, Path(results), size=size, num_ranks=int(num_ranks) or None, is_quick=is_quick
    )
    with Path(output).open("w") as stream:
        for line in lines:
            stream.write(json.dumps(asdict(line)) + "\n")
            stream.flush()
            print(f"{line.state:8} {line}", flush=True)


if __name__ == "__main__":
    main()
