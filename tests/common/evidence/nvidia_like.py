"""Large logs as NVIDIA writes them: thousands of records of statistics, whose values are JSON objects.

    python -m tests.common.evidence.nvidia_like FOLDER NUM_LOGS NUM_LINES

writes FOLDER/results/<system>/bert/result_N.txt in sets of ten. To time an audit and a score of them:

    time ttt check FOLDER --no-official; time ttt score FOLDER
"""

import json
import sys
from pathlib import Path

RUNS = 10  # of a set
START_MS = 1_682_641_165_571
STEP_MS = 120
NUM_EVALUATIONS = 20


def write_sets(folder, num_logs, num_lines):
    for number in range(num_logs):
        path = folder / "results" / f"eos_n{number // RUNS}" / "bert" / f"result_{number % RUNS}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines(number, num_lines)) + "\n")


def lines(number, num_lines):
    """Yield the lines of a run that reaches its target with the last of its evaluations."""
    facts = {
        "submission_benchmark": "bert",
        "submission_division": "closed",
        "submission_org": "Example",
        "submission_platform": f"eos_n{number // RUNS}",
        "submission_status": "onprem",
        "seed": 1000 + number,
        "global_batch_size": 3072,
        "gradient_accumulation_steps": 1,
        "opt_base_learning_rate": 0.002,
        "train_samples": 2_500_000,
        "eval_samples": 10_000,
    }
    start = START_MS + (number % RUNS) * 10_000_000 + number
    yield record(start, "cache_clear", True)
    yield record(start, "init_start", kind="INTERVAL_START")
    yield from (record(start, key, value) for key, value in facts.items())
    yield record(start + 40_000, "init_stop", kind="INTERVAL_END")
    yield record(start + 40_000, "run_start", kind="INTERVAL_START")
    now, num_steps = start + 40_000, num_lines - len(facts) - 5 - NUM_EVALUATIONS
    for step in range(num_steps):
        now += STEP_MS + (step * (number + 7)) % 5
        stats = {
            "train_loss": 7.0 - step / 2000 + number / 1e6,
            "throughput": 23_000.5 + step % 97,
            "mfu": 0.41,
        }
        yield record(now, "tracked_stats", stats, step=step, samples=3072 * (step + 1), lineno=1712)
        evaluation, rest = divmod((step + 1) * NUM_EVALUATIONS, num_steps)
        if rest < NUM_EVALUATIONS:
            accuracy = round(428_235 * (0.7205 - 0.01 * (NUM_EVALUATIONS - evaluation)) + number) / 428_235
            yield record(now + 1, "eval_accuracy", accuracy, epoch_num=3072 * (step + 1))
    yield record(now + 2, "run_stop", kind="INTERVAL_END", status="success")


def record(time_ms, key, value=None, kind="POINT_IN_TIME", **metadata):
    place = {"file": "/workspace/bert/run_pretraining.py", "lineno": 1263}
    fields = {"namespace": "", "time_ms": time_ms, "event_type": kind, "key": key, "value": value}
    return ":::MLLOG " + json.dumps(fields | {"metadata": place | metadata})


if __name__ == "__main__":
    write_sets(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
