"""Run sets that are ready to be packaged, and the outcomes of `ttt export --to submission`."""

import json
import re

from common.evidence.log import RunSet
from common.evidence.rules.rule import edit, edit_all, replace_record, rewrite, shift_from
from common.evidence.submission.material import Entry
from common.repository import ROOT
from tests.command import ttt_here as ttt

RESNET = "results/8xA100-optimized/resnet"
DESCRIPTION = "systems/8xA100-optimized.json"
READY = json.loads((ROOT / "systems/8xA100-SXM4-80GB.json").read_text())


def package(*arguments):
    return ttt("package", "--submitter", "Example", "--commit", "HEAD", *arguments)


def refused(done, message):
    """Assert findings, exit code 1, and no traceback."""
    assert (done.returncode, done.stderr) == (1, ""), done
    assert message in done.stdout, done.stdout
    assert done.stdout.splitlines()[-1].endswith("nothing was written")


def prepare(golden, root, *benchmarks, **kwargs):
    """Write full run sets as this suite logs them, and their system."""
    folders = {"resnet": "image_classification", "bert": "language_bert"}
    for benchmark in benchmarks:
        later = shift_from("cache_clear", 0, 360_000_000 * (benchmark == "bert"))
        logs = [
            [
                line.replace(f"# benchmark: {benchmark}", f"# benchmark: {folders[benchmark]}")
                .replace("# command: ttt run", "# command: ttt run x optimized --set optimizer.beta2=0.9")
                .replace(
                    "#   optimizer:", "#   precision: bf16\n#   model: {start: checkpoint}\n#   optimizer:"
                )
                for line in later(lines)
            ]
            for lines in golden.set(benchmark, **kwargs)
        ]
        golden.write(root / "results", logs)
    (root / "systems").mkdir()
    described = READY | {"system_name": "8xA100-optimized", "submitter": "Example"}
    (root / DESCRIPTION).write_text(json.dumps(described))
    return root


def entry_of(log):
    """Return the entry of a set of one log, whose place in a package does not matter."""
    return Entry(run_set=RunSet(folder="", logs=(log,)), implementation="")


def names(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def mini_sets():
    """Return the committed sets of five runs, and none that a developer's own runs have left."""
    return [ROOT / f"results/reference-2cpu-mini-{name}/resnet" for name in ("baseline", "optimized")]


def accuracy_as_text(folder):
    path = folder / "result_2.txt"
    found = r'("key": "eval_accuracy", "value": )([0-9.]+)'
    path.write_text(re.sub(found, r'\1"\2"', path.read_text()))


SGD = {  # of the closed ruleset, for resnet with sgd
    "sgd_opt_base_learning_rate": 2.048,
    "sgd_opt_end_learning_rate": 0.0001,
    "sgd_opt_learning_rate_decay_poly_power": 2,
    "sgd_opt_learning_rate_decay_steps": 20_000,
    "sgd_opt_weight_decay": 0.0001,
    "sgd_opt_momentum": 0.9,
    "model_bn_span": 256,
    "opt_learning_rate_warmup_epochs": 5,
}


def close(root, epochs=40):
    """Turn a prepared run set of resnet, of 20 epochs, into one of the closed division."""
    stated = replace_record(
        "opt_name", lambda line: [line, *(rewrite(line, key=k, value=SGD[k]) for k in SGD)]
    )
    for path in (root / RESNET).iterdir():
        lines = stated(edit("submission_division", value="closed")(path.read_text().splitlines()))
        for key in ("eval_accuracy", "eval_start", "eval_stop"):
            lines = edit_all(
                key, lambda record: {"epoch_num": record["metadata"]["epoch_num"] * epochs // 20}
            )(lines)
        path.write_text("\n".join(lines) + "\n")
    described = json.loads((root / DESCRIPTION).read_text()) | {"division": "closed"}
    (root / DESCRIPTION).write_text(json.dumps(described))
