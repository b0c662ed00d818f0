"""Write many long logs, to time `ttt check` on them: python make_logs.py FOLDER [LOGS] [LINES]."""

import json
import sys
from pathlib import Path

import conftest  # the good logs, from beside this file


def main(folder: str, num_logs: int = 1000, num_lines: int = 10_000) -> None:
    """Write sets of ten bert logs, each with records of throughput up to `num_lines`."""
    for number in range(num_logs // 10):
        name = f"8xA100.{number}"
        target = Path(folder, "results", f"{name}-optimized", "bert")
        target.mkdir(parents=True)
        for index in range(10):
            lines = conftest.good_log("bert", index=10 * number + index)
            lines = [line.replace("8xA100-optimized", f"{name}-optimized") for line in lines]
            start = next(i for i, line in enumerate(lines) if '"key": "block_stop"' in line)
            event = json.loads(lines[start].partition(" ")[2]) | {"key": "tracked_stats", "value": 1.5}
            filler = [":::MLLOG " + json.dumps(event)] * (num_lines - len(lines))
            (target / f"result_{index}.txt").write_text(
                "\n".join(lines[:start] + filler + lines[start:]) + "\n"
            )


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
