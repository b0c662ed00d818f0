"""Loss scaling, the hook `gradients`, and batch norm over micro-batches."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.measure.device_run import build
from common.training.distributed import running_statistics
from common.training.load import load_config
from common.training.method import Method
from common.training.step import use_one_host_thread

SCALE = 64.0
SHORT = ("global_batch_size=8", "data.train_crop_px=32")
TOLERANCE = 0.1  # of a norm: of half precision and 8 tiny images; seen: 0.033


class Recorder(Method):
    """Takes the gradients `num_more` times again and keeps their norms."""

    def __init__(self, num_more):
        super().__init__("recorder", self.Config())
        self.num_more, self.norms = num_more, []

    def gradients(self, model, progress, closure):
        for number in range(self.num_more + 1):
            if number:
                closure()
            parameters = list(model.parameters())
            self.norms.append(float(torch.nn.utils.get_total_norm([each.grad for each in parameters])))


def start(folder, precision, recorder, *settings):
    """Return a run that is ready for its first step, and a batch."""
    torch.manual_seed(0)
    sets = [*SHORT, f"precision={precision}", *settings]
    config = load_config("image_classification", "baseline", size="mini", settings=sets).config
    run = build(config, folder, warms_up=False)
    run.methods.append(recorder)
    run.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=precision == "fp16")
    run.log.close()
    return run, run.benchmark.noise(8, 32)


def weights(run):
    return torch.cat([each.detach().flatten() for each in run.model.parameters()])


@pytest.mark.parametrize("settings", [[], ["micro_batch_size=4"]])
def test_under_loss_scaling_methods_see_the_gradients_of_full_precision(tmp_path, settings):
    norms = {}
    for precision in ("fp32", "fp16"):
        recorder = Recorder(1)
        run, batch = start(tmp_path, precision, recorder, *settings)
        before = weights(run)
        run.train_step(batch, 100)
        assert not torch.equal(weights(run), before)
        norms[precision] = recorder.norms
    assert len(norms["fp16"]) == 2
    assert norms["fp16"] == pytest.approx(norms["fp32"], rel=TOLERANCE)


@pytest.mark.parametrize("overflowing", [0, 1])
def test_an_overflow_in_any_pass_skips_the_step_whatever_a_method_makes_of_it(tmp_path, overflowing):
    recorder = Recorder(1)
    run, batch = start(tmp_path, "fp16", recorder)
    forward_backward, calls = run.forward_backward, []

    def overflow(*arguments):
        loss = forward_backward(*arguments)
        if len(calls) == overflowing:
            next(run.model.parameters()).grad[0, 0, 0, 0] = torch.inf
        calls.append(loss)
        return loss

    run.forward_backward = overflow
    before = weights(run)
    run.train_step(batch, 100)
    assert len(calls) == 2 and torch.equal(weights(run), before)
    assert run.scaler.get_scale() == SCALE / 2
    run.train_step(batch, 101)
    assert not torch.equal(weights(run), before)


def test_micro_batches_move_batch_norms_statistics_once_as_ranks_do(tmp_path):
    run, batch = start(tmp_path, "fp32", Recorder(0), "micro_batch_size=2")
    statistics = running_statistics(run.model)
    before, ranks = [each.clone() for each in statistics], []
    for part in batch.parts(4):
        run.add_gradients(part, 0)
        ranks.append([each.clone() for each in statistics])
        torch._foreach_copy_(statistics, before)
    run.forward_backward(batch, 0)
    mean = [torch.stack(each).mean(0) for each in zip(*ranks, strict=True)]
    torch.testing.assert_close(statistics, mean)
    assert not torch.equal(statistics[0], before[0])


def test_gradients_of_micro_batches_are_cleared_in_one_operation(tmp_path):
    run, batch = start(tmp_path, "fp32", Recorder(0), "micro_batch_size=2")
    run.train_step(batch, 0)
    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), named=None):
            names.append(operation.name())
            return operation(*args, **named or {})

    with Names():
        run.clear_gradients()
    assert names == ["aten::_foreach_zero_"]  # a launch on a GPU, not one for each parameter
    assert not any(parameter.grad.any() for parameter in run.model.parameters())


@pytest.mark.parametrize(("device", "inside"), [("cuda", 1), ("cpu", 2)])
def test_the_host_has_its_threads_again_after_a_batch(device, inside):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError), use_one_host_thread(torch.device(device)):
            assert torch.get_num_threads() == inside
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
