"""What a dry run counts, against a real forward pass."""

import pytest
import torch

from common.measure.dry_run import activation_bytes, describe_run, largest_shape
from common.repository import ROOT, benchmarks
from common.training.load import load_config
from common.training.step import Training
from tests.command import ttt
from tests.runs import make_benchmark


@pytest.mark.parametrize("benchmark", benchmarks())
def test_memory_counted_without_values_is_that_of_a_real_forward_pass(benchmark):
    made = make_benchmark(benchmark, "baseline", "global_batch_size=6", "micro_batch_size=null")
    training = Training(made.config, made, seed=0)
    training.build(from_scratch=True)
    batch, step = next(training.shapes())
    counted = activation_bytes(training, batch, step)

    parameters, saved = {id(each) for each in training.model.parameters()}, {}

    def keep(value):
        if id(value) not in parameters:
            saved[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        batch = training.prepare_batch(batch, training.progress(step))
        with training.autocast(made.config.precision):
            outputs = training.model(**batch.inputs)
        loss = training.loss(outputs, batch.targets)
    assert loss.isfinite() and counted == pytest.approx(sum(saved.values()), rel=0.01)
    assert counted > 1e5


@pytest.mark.parametrize(
    ("named", "read"), [("data/x", "data/x"), ("../x", f"{ROOT.parent}/x"), ("/tmp/x", "/tmp/x")]
)
def test_a_dry_run_shows_the_folder_that_is_read(named, read):
    settings = ["data.num_train_samples=640", f"data.directory={named}"]
    loaded = load_config("language_bert", "baseline", size="mini", settings=settings)
    described = describe_run(loaded, 1)
    assert f"\ndata: {{directory: {read}," in described
    assert "\n#   data: missing in " in described and "; run: ttt data prepare language_bert" in described


@pytest.mark.on_demand
@pytest.mark.parametrize(
    ("benchmark", "steps", "parameters"),
    [
        ("image_classification", "17,500 of 2048", "25,557,032"),
        ("language_bert", "6,000 of 448", "335,174,458"),
    ],
)
def test_a_dry_run_of_the_full_size_needs_no_data(benchmark, steps, parameters):
    done = ttt("run", benchmark, "optimized", "--size", "full", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert (
        f"#   steps: {steps} samples" in done.stdout
        and f"for {parameters} parameters (in GB: " in done.stdout
    )


@pytest.mark.parametrize("benchmark", benchmarks())
def test_the_largest_shape_keeps_the_most(benchmark):
    made = make_benchmark(benchmark, "optimized", "global_batch_size=4")
    training = Training(made.config, made, seed=0)
    training.build(from_scratch=True)
    counted = [activation_bytes(training, *shape) for shape in training.shapes()]
    assert activation_bytes(training, *largest_shape(training)) == max(counted)
