"""The optimizer, one step, warm-up and the questions of the loop and of the tools."""

import math
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from common.config.schema import Plan
from common.errors import UserError
from common.measure.device_run import build
from common.measure.dry_run import describe_run
from common.training.load import load_config
from common.training.optim import build_optimizer, build_schedule, schedule_factor
from common.training.ranks import RankInfo
from common.training.registry import build_methods
from image_classification.benchmark import Benchmark
from image_classification.data import resident
from image_classification.model import build_resnet
from image_classification.probes import Probes, predict_decoding_s
from tests.image_classification.loading import config_of


def benchmark(configuration: str, size: str) -> Benchmark:
    return Benchmark(config_of(configuration, size), seed=1)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("name", ["sgd", "decoupled_sgd"])
def test_sgd_equals_its_definition_over_a_schedule(name, nesterov):
    settings = [f"optimizer.name={name}", f"optimizer.nesterov={str(nesterov).lower()}"]
    config = config_of("optimized", "full", *settings)
    plan = Plan(
        num_steps=20, steps_per_epoch=5, num_epochs=4, warmup_steps=4, decay_steps=16, evaluation_steps=()
    )
    layer = nn.Linear(5, 3).double()
    optimizer = build_optimizer(layer, config.optimizer)
    set_rate = build_schedule(optimizer, config.schedule, plan)
    plain = [parameter.detach().clone() for parameter in layer.parameters()]
    buffers = [torch.zeros_like(parameter) for parameter in plain]
    for step in range(20):
        set_rate(step)
        factor = schedule_factor(step, config.schedule, plan)
        for parameter, value, buffer in zip(layer.parameters(), plain, buffers, strict=True):
            parameter.grad = torch.randn_like(parameter)
            decayed = parameter.grad + (5e-4 * value if name == "sgd" else 0)
            value *= 1 if name == "sgd" else 1 - factor * 5e-4
            buffer.mul_(0.875).add_(decayed)
            value -= 2.048 * factor * (decayed + 0.875 * buffer if nesterov else buffer)
        optimizer.step()
    for parameter, value in zip(layer.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["decoupled_sgd", "lars"])
def test_on_a_cpu_sgd_copies_no_gradient_of_channels_last_weights(name: str) -> None:
    config = config_of("baseline", "full", f"optimizer.name={name}").optimizer
    layers = [nn.Conv2d(4, 8, 3, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    layers[1].to(memory_format=torch.channels_last)
    gradient = torch.randn(8, 4, 3, 3)
    for layer in layers:
        optimizer = build_optimizer(layer, config)
        layer.weight.grad = torch.empty_like(layer.weight).copy_(gradient)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(2):
                optimizer.step()
        assert "aten::clone" not in {event.key for event in profile.key_averages()}
    torch.testing.assert_close(layers[1].weight, layers[0].weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("setting", ["optimizer.name=adamw", "optimizer.momentum=0.0"])
def test_nesterov_without_momentum_is_refused(setting: str) -> None:
    with pytest.raises(UserError, match="nesterov needs sgd, decoupled_sgd or lars with a momentum"):
        config_of("baseline", "full", setting, "optimizer.nesterov=true")


def test_correct_predictions_are_counted() -> None:
    outputs = torch.eye(4)
    right, counted = benchmark("baseline", "mini").count_correct(
        outputs, {"labels": torch.tensor([0, 1, 0, 0])}
    )
    assert (int(right), int(counted)) == (2, 4)


@pytest.mark.parametrize("configuration", ["baseline", "mosaic", "optimized", "optimized_short"])
def test_a_step_of_either_configuration_has_a_finite_loss_and_gradient(configuration: str) -> None:
    torch.manual_seed(0)
    settings = ["global_batch_size=4"]
    config = config_of(configuration, "mini", *settings)
    bench = Benchmark(config, seed=1)
    model, loss = bench.build_model(), bench.loss
    for method in build_methods(config):
        model, loss = method.model(model), method.loss(loss)
    batch = next(bench.synthetic_batches())
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(**batch.inputs)
    value = loss(outputs, batch.targets)
    value.backward()
    assert bool(value.isfinite())
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["sgd", "decoupled_sgd"])
def test_loss_scaling_skips_a_first_step_that_overflows_and_takes_the_next_one(name: str) -> None:
    config = benchmark("baseline", "full").config.optimizer.model_copy(update={"name": name})
    scaled, plain = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    plain.load_state_dict(scaled.state_dict())
    optimizer, scaler = build_optimizer(scaled, config), torch.amp.GradScaler("cpu", init_scale=4.0)
    for gradient in (math.inf, 1.0):
        scaler.scale(torch.zeros(()))  # starts it
        scaled.weight.grad = torch.full_like(scaled.weight, gradient * scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
    plain.weight.grad = torch.ones_like(plain.weight)
    build_optimizer(plain, config).step()
    torch.testing.assert_close(scaled.weight, plain.weight)


def test_an_evaluation_in_the_middle_of_an_epoch_has_a_fraction_of_it() -> None:
    found = benchmark("baseline", "mini")
    samples = found.config.steps_per_epoch * found.config.global_batch_size
    assert [found.epochs_finished(n * samples // 2) for n in (2, 7, 8)] == [1, 3.5, 4]
    assert [found.epoch_number(n * samples // 2) for n in (0, 2, 7, 8)] == [1, 1, 4, 4]
    assert samples == 44 * 32 and found.epoch_number(samples + 1) == 2  # without its incomplete batch


@pytest.mark.parametrize(("processors", "counts"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6])])
def test_no_more_workers_than_processors_are_tried(monkeypatch, processors: int, counts: list[int]) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: processors)
    tried = Probes(benchmark("baseline", "full")).equal_settings()  # has 16
    assert tried == [[f"data.num_workers={count}"] for count in counts]
    tried = Probes(benchmark("baseline", "mini")).equal_settings()  # has 1
    assert tried == [[f"data.num_workers={count}"] for count in counts[1:]]


def test_evaluation_compares_float32_logits_and_training_multiplies_in_16_bits():
    model, images = build_resnet("resnet18", 10), torch.randn(4, 3, 64, 64)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert model.train()(images).dtype == torch.bfloat16
        logits = model.eval()(images)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


def test_warm_up_runs_every_size_of_training_and_evaluation_largest_first(tmp_path):
    settings = ["evaluation_batch_size=50", "global_batch_size=4", "data.loader=resident"]
    config = config_of("optimized", "mini", *settings)
    run = build(config, tmp_path, warms_up=False)
    trained, evaluated = [], []
    add_gradients, count_correct = run.add_gradients, run.count_correct

    def train(batch, *args, **named):
        trained.append(batch.inputs["x"].shape[-1])
        return add_gradients(batch, *args, **named)

    def evaluate(model, batch):
        evaluated.append(batch.num_samples)
        return count_correct(model, batch)

    run.add_gradients, run.count_correct = train, evaluate
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.warm_up()
    run.log.close()
    assert trained == [84] * 3 + [56] * 3 and evaluated == [50, 10]
    assert run.model.training and torch.backends.cudnn.benchmark
    assert all(torch.equal(value, before[name]) for name, value in run.model.state_dict().items())


def test_the_resident_loader_crops_once_to_every_size_before_training(monkeypatch):
    sizes_px = []
    monkeypatch.setattr(
        "image_classification.benchmark.crop_resize", lambda *args, size_px, **named: sizes_px.append(size_px)
    )
    benchmark("optimized", "mini").prepare_loader()
    assert sorted(sizes_px) == [56, 84]


@pytest.mark.parametrize(("num_gib", "stored_px"), [(56, 256), (68, 320)])
def test_larger_pixels_are_stored_where_memory_holds_them(num_gib, stored_px, monkeypatch):
    """8 GPUs of `num_gib` GiB: 45.8 GiB of pixels and 14.5 GiB of training are 90 % of 67 GiB."""
    monkeypatch.setattr(resident, "total_bytes", lambda device, num_local: num_gib * 2**30)
    config = config_of("optimized", "full")
    ranks = [
        Benchmark(config, seed=0, rank_info=RankInfo(rank=rank, local_rank=rank, world_size=8))
        for rank in (0, 7)
    ]
    assert [rank.data.stored_px for rank in ranks] == [stored_px] * 2
    assert ranks[0].backends()["stored pixels"].name == f"{stored_px} px"
    first_epoch, line = Probes(ranks[0]).describe_loading()
    assert "threads decode 1,281,167 images" in first_epoch
    for decoder, name in (("nvjpeg", "nvJPEG"), ("dali", "DALI")):
        by_gpu = Benchmark(config_of("optimized", "full", f"data.decoder={decoder}"), seed=0)
        assert f"{name} decodes 1,281,167 images" in Probes(by_gpu).describe_loading()[0]
    assert line.startswith(f"stored pixels: {stored_px} px on this machine; 320 px where")
    assert "at least 67.0 GiB" in line
    by_hand = config_of("optimized", "full", "data.stored_px=304", "data.stored_px_if_it_fits=null")
    assert Benchmark(by_hand, seed=0).data.stored_px == 304


def test_ranks_share_the_memory_of_their_host_and_training_on_a_gpu_takes_none_of_it(monkeypatch):
    """A quarter of the images at 320 px is 91.6 GiB a rank, 366.5 GiB on a host of 375; 1 % is left free."""
    total = 375 * 2**30
    monkeypatch.setattr(resident.psutil, "virtual_memory", lambda: SimpleNamespace(total=total))
    monkeypatch.setattr(resident, "USABLE", 0.99)
    data, num_images = config_of("optimized", "full", "data.stored_on=host").data, 1_281_167 // 4

    def chosen(device, num_local):
        memory = resident.PixelMemory("host", torch.device(device), 256)
        return resident.choose_stored_px(num_images, data, memory, num_local=num_local)

    assert [chosen("cuda", num_local) for num_local in (1, 4, 8)] == [320, 320, 256]
    assert [chosen("cpu", num_local) for num_local in (1, 4)] == [320, 256]  # beside the training


def test_a_dry_run_of_ranks_divides_the_memory_of_the_host(monkeypatch):
    """366.5 GiB of all ranks together are more than 90 % of 380; those of one of two ranks are not."""
    monkeypatch.setattr(resident.psutil, "virtual_memory", lambda: SimpleNamespace(total=380 * 2**30))
    loaded = load_config("image_classification", "optimized", size="full", settings=["data.stored_on=host"])
    assert "stored pixels: 256 px" in describe_run(loaded, 2)


def test_settings_of_the_data_that_contradict_each_other_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"--set: data.stored_px: .*320.*set data.stored_px_if_it_fits=null"):
        config_of("optimized", "full", "data.stored_px=192")
    path = tmp_path / "own.yaml"
    path.write_text("extends: optimized\ndata: {stored_px: 192}\n")
    with pytest.raises(UserError, match="own.yaml:2: data.stored_px"):
        config_of(str(path), "full")
    path.write_text("extends: optimized\ndata: {stored_px: 192, stored_px_if_it_fits: 288}\n")
    assert config_of(str(path), "full").data.stored_px_if_it_fits == 288
    with pytest.raises(UserError, match="must be larger than stored_px"):
        config_of("optimized", "full", "data.stored_px_if_it_fits=256")
    with pytest.raises(UserError, match="alternates_flips needs a flip_probability"):
        config_of("baseline", "mini", "data.alternates_flips=true")


def test_the_first_epoch_is_predicted_from_cores_threads_and_pixels():
    data = config_of("optimized", "full").data
    on_64, on_128, on_192 = (predict_decoding_s(data, num_cores, 8) for num_cores in (64, 128, 192))
    assert on_64 == pytest.approx((36.03, 58.05), abs=0.01)  # 1,281,167 x 1.8 and 2.9 ms
    assert on_128 == pytest.approx([seconds / 2 for seconds in on_64]) and on_192 == on_128  # 8 x 16 threads
    smaller = config_of("optimized", "full", "data.encoded_px=300").data
    assert predict_decoding_s(smaller, 64, 8) == pytest.approx([0.64 * seconds for seconds in on_64])


def test_the_step_that_a_run_reports_is_that_of_its_first_size(tmp_path, monkeypatch):
    """Warm-up takes 84 pixels before 56, training starts at 56."""
    config = config_of("optimized", "mini", "global_batch_size=4")
    run = build(config, tmp_path, warms_up=False)
    monkeypatch.setattr(run, "warm_up_evaluation", lambda: None)

    def take(batch, *args, **named):
        time.sleep(0.2 if batch.inputs["x"].shape[-1] == 84 else 0)
        return torch.zeros(())

    monkeypatch.setattr(run, "add_gradients", take)
    run.warm_up()
    run.log.close()
    assert 0 < run.step_s < 0.2
