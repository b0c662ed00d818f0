"""Good logs of either benchmark and size, as this suite writes them; the tests break them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from common.evidence.log import load
from common.evidence.system import FIELDS

START_MS = 1_700_000_000_000
FULL = {
    "resnet": {
        "target": 0.759,
        "train": 1281167,
        "eval": 50000,
        "total": 50000,
        "step": 4,
        "batches": 2500,
        "eval_ms": 2000,
    },
    "bert": {
        "target": 0.72,
        "train": 156725653,
        "eval": 10000,
        "total": 428235,
        "step": 24576,
        "batches": 12,
        "eval_ms": 9000,
    },
}
MINI = {"target": 0.9, "train": 1437, "eval": 360, "total": 360, "batches": 6, "eval_ms": 2000}
MINI_STEPS = {"resnet": 2, "bert": 2 * 1437}  # of epoch_num: epochs, samples
BATCH_SIZE = {"full": 2048, "mini": 479}
NUM_EVALUATIONS = 5
KINDS = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}  # end of a key -> event_type


class Lines(list):
    """The lines of a log; a call adds a record, some milliseconds after the one before."""

    clock = START_MS

    def __call__(self, key, value=None, after_ms=0, **metadata):
        self.clock += round(after_ms)
        kind = KINDS.get(key.rpartition("_")[2], "POINT_IN_TIME")
        event = {"namespace": "", "time_ms": self.clock, "event_type": kind, "key": key, "value": value}
        event["metadata"] = {"file": "mllog.py", "lineno": 1, **metadata}
        self.append(":::MLLOG " + json.dumps(event))


def good_log(benchmark="resnet", size="full", configuration="optimized", index=0, block_s=40.0):
    """Return the lines of run `index`: five blocks and evaluations, the last at the target."""
    facts = FULL[benchmark] if size == "full" else MINI | {"step": MINI_STEPS[benchmark]}
    is_optimized, batch_size = configuration == "optimized", BATCH_SIZE[size]
    record = Lines(
        [
            f"# benchmark: {benchmark}",
            f"# configuration: {configuration}",
            f"# size: {size}",
            "# command: ttt run",
            "# commit: 0123abc",
            "# versions: python 3.11, torch 2.11",
            "# --- configuration",
            f"#   name: {configuration}",
            f"#   global_batch_size: {batch_size}",
            f"#   max_duration: {NUM_EVALUATIONS * facts['batches']}ba",
            f"#   evaluate_every: {facts['batches']}ba",
            f"#   data: {{num_train_samples: {facts['train']}}}",
            "#   optimizer:",
            f"#     lr: {2.048 if is_optimized else 0.8}",
        ]
    )
    record.clock += index * 3_600_000 + is_optimized * 1_800_000
    record("cache_clear", True, how="drop_caches")
    record("init_start")
    for key, value in {
        "submission_benchmark": benchmark,
        "submission_division": "open",
        "submission_org": "Example",
        "submission_platform": f"8xA100{'-mini' if size == 'mini' else ''}-{configuration}",
        "submission_status": "research",
        "quality_target": facts["target"],
        "stop_at_target": True,
        "benchmark_size": size,
        "configuration_name": configuration,
        "seed": 1000 + index,
        "global_batch_size": batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_compression": "none",
        "device": "A100",
        "num_accelerators": 8,
        "num_ranks": 8,
        "num_threads": 4,
        "processor": "Intel(R) Xeon(R) Processor",
        "opt_name": "sgd",
        "opt_base_learning_rate": 2.048,
        "opt_weight_decay": 5e-5,
        "method": "blurpool",
        "train_samples": facts["train"],
        "eval_samples": facts["eval"],
    }.items():
        record(key, value)
    record("init_stop", after_ms=20_000)
    record("run_start")
    start, before, seconds = record.clock, 0, block_s + index
    record("dataset_fingerprint", "00ff00ff", after_ms=5)
    for block in range(NUM_EVALUATIONS):
        first = 1 + block * facts["step"]
        epoch = (block + 1) * facts["step"]
        samples = (block + 1) * facts["batches"] * batch_size
        record("block_start", after_ms=5, first_epoch_num=first, epoch_count=facts["step"])
        record("epoch_start", epoch_num=first)
        record("epoch_stop", after_ms=seconds * 1000, epoch_num=first)
        record("throughput", (samples - before) / seconds, epoch_num=epoch, samples=samples)
        record("machine_load", 0.0, cores=64, steal=0.0, threads=32, epoch_num=epoch)
        before = samples
        loss = 6.000123456789 - block - index / 100 - 0.001 * is_optimized
        record("train_loss", loss, epoch_num=epoch, samples=samples)
        record("block_stop", first_epoch_num=first)
        record("eval_start", epoch_num=epoch)
        record("eval_stop", after_ms=facts["eval_ms"], epoch_num=epoch)
        beyond = 0.02 - 0.05 * (NUM_EVALUATIONS - 1 - block)  # the target, which is crossed under way
        correct = int(facts["total"] * (facts["target"] + beyond)) + 1 + index
        metadata = {"epoch_num": epoch, "samples": samples, "correct": correct, "total": facts["total"]}
        record("eval_accuracy", correct / facts["total"], **metadata)
    ended = {"status": "success", "samples": samples, "duration_ms": record.clock - start}
    record("run_stop", **ended, clock_drift_ms=0)
    return list(record)


def good_set(benchmark="resnet", num_logs=None, **kwargs):
    num_logs = num_logs or {"resnet": 5, "bert": 10}[benchmark]
    return [good_log(benchmark, index=index, **kwargs) for index in range(num_logs)]


def of_another_suite(logs):
    """Return logs without the lines that only this suite writes."""
    ours = ("configuration_name", "benchmark_size", "quality_target", "# configuration: ")
    return [[line for line in lines if not any(text in line for text in ours)] for lines in logs]


def write_set(root, logs):
    """Write logs to root/<system>/<benchmark>/result_N.txt, named by the first; return the folder."""
    names = [json.loads(line[9:])["value"] for line in logs[0] if '"key": "submission_' in line]
    folder = Path(root, names[3], names[0])
    folder.mkdir(parents=True)
    for index, lines in enumerate(logs):
        (folder / f"result_{index}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def timeline(benchmark, evaluations, configuration="optimized", launch_s=0, first_block_s=6.0):
    """Return the lines of a run with these evaluations: (start s, stop s, samples, accuracy, metadata)."""
    lines = Lines()

    def record(key, value=None, at_s=0.0, **metadata):
        lines.clock = START_MS + round(launch_s * 1000) + round(at_s * 1000)
        lines(key, value, **metadata)

    record("submission_benchmark", benchmark)
    record("submission_division", "open")
    record("submission_org", "Example")
    record("submission_platform", f"8xA100-{configuration}")
    record("configuration_name", configuration)
    record("run_start")
    record("block_start", at_s=first_block_s, first_epoch_num=1, epoch_count=1)
    for begin, end, samples, accuracy, *metadata in evaluations:
        record("eval_start", at_s=begin)
        record("eval_stop", at_s=end)
        record("eval_accuracy", accuracy, at_s=end, samples=samples, **dict(*metadata))
    record("run_stop", at_s=end, status="success")
    return list(lines)


def good_description(size="full", configuration="optimized"):
    """Return a system description that agrees with the good logs."""
    values = {
        "submitter": "Example",
        "division": "open",
        "status": "Research, Development, or Internal (RDI)",
        "system_name": f"8xA100{'-mini' if size == 'mini' else ''}-{configuration}",
        "number_of_nodes": "1",
        "host_processors_per_node": "2",
        "accelerators_per_node": "8",
        "host_processor_model_name": "Intel Xeon Platinum 8480C Processor",
    }
    return {field: values.get(field, "as published") for field in FIELDS}


def write_description(folder, size="full", configuration="optimized"):
    """Write folder/<system>.json; return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    description = good_description(size, configuration)
    path = folder / f"{description['system_name']}.json"
    path.write_text(json.dumps(description))
    return path


@pytest.fixture(scope="session")
def golden():
    return SimpleNamespace(
        log=good_log,
        set=good_set,
        write=write_set,
        timeline=timeline,
        description=good_description,
        describe=write_description,
    )


@pytest.fixture(scope="session")
def both(tmp_path_factory):
    """A folder with results/<system>/resnet of size mini, of both configurations."""
    root = tmp_path_factory.mktemp("both")
    for configuration, block_s in (("baseline", 80.0), ("optimized", 40.0)):
        write_set(root / "results", good_set(size="mini", configuration=configuration, block_s=block_s))
    return root


@pytest.fixture(scope="session")
def two_sets(both):
    return load([both])


@pytest.fixture(scope="session")
def published():
    """The folder of published logs beside a development checkout; they are not part of this repository."""
    folder = Path(__file__).parents[4] / "shared" / "published_logs"
    if not folder.is_dir():
        pytest.skip("no published logs beside this checkout")
    return folder
