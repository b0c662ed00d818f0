"""The search for speed-ups on a model and a loader of one's own."""

from collections import UserDict, namedtuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from common.errors import UserError
from common.study.tuning.tune import Refused, Search
from common.study.tuning.tune_model import ModelBench, map_tensors, optimize, with_workers


def convolutional():
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    return model.extend([nn.Flatten(), nn.Linear(8, 5)])


def images(number=24):
    torch.manual_seed(3)
    return TensorDataset(torch.randn(number, 3, 16, 16), torch.randint(5, (number,)))


def dynamo_limits():
    config = torch._dynamo.config
    return config.recompile_limit, config.fail_on_recompile_limit_hit


def test_a_model_of_ones_own_is_tuned_and_keeps_its_weights():
    model, loader = convolutional(), DataLoader(images(), batch_size=8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn, limits = torch.random.get_rng_state(), dynamo_limits()
    tuned = optimize(model, loader, nn.CrossEntropyLoss(), torch.optim.AdamW, seconds=6)
    assert torch.equal(drawn, torch.random.get_rng_state()) and dynamo_limits() == limits
    assert tuned.model is model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    names = ("channels_last", "fused_optimizer", "loader_workers_2", "compile")
    assert all(name in tuned.report for name in names)
    losses = []
    for inputs, targets in tuned.loader:
        losses.append(nn.functional.cross_entropy(tuned.model(inputs), targets))
        losses[-1].backward()
        tuned.optimizer.step()
    assert len(losses) == len(tuned.loader) == 3


class Noisy(TensorDataset):
    """Augments at random."""

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return image + torch.randn(()), label


def compare_loader(data):
    """Compare a loader with one of two workers; the loader's own generator stays as it was."""
    generator = torch.Generator().manual_seed(5)
    loader = DataLoader(data, batch_size=4, shuffle=True, generator=generator)
    bench = ModelBench(
        model=convolutional(), loader=loader, loss=nn.CrossEntropyLoss(), make_optimizer=torch.optim.AdamW
    )
    before = generator.get_state()
    with torch.random.fork_rng():
        try:
            search = Search(bench, seconds=60, report=print)
            return search.compare(("loader_workers_2",), is_exact=True)
        finally:
            assert torch.equal(before, generator.get_state())


def test_a_loader_with_its_own_generator_is_compared_and_one_that_draws_at_random_is_not():
    assert compare_loader(images()) == "float64 same bits"
    with pytest.raises(Refused, match="draws at random"):
        compare_loader(Noisy(*images().tensors))


def test_more_workers_leave_the_other_settings_of_a_loader():
    more = with_workers(DataLoader(images(), num_workers=1, timeout=30, prefetch_factor=3), 2)
    assert (more.num_workers, more.timeout, more.prefetch_factor) == (2, 30, 3)


def test_a_loader_that_is_used_up_by_reading_is_refused():
    batches = (batch for batch in [(torch.ones(2, 3), torch.ones(2, 1))])
    with pytest.raises(UserError, match="only once"):
        optimize(nn.Linear(3, 1), batches, nn.MSELoss(), torch.optim.AdamW)


@pytest.mark.parametrize(
    ("batch", "error", "word"),
    [
        (None, UserError, "pairs"),
        ({"x": torch.ones(2, 3), "y": torch.zeros(2).long()}, UserError, "pairs"),
        ((torch.ones(2, 3), torch.zeros(2).long()), RuntimeError, "shapes"),
    ],
)
def test_a_model_that_the_batches_do_not_fit_is_an_error_before_the_search(batch, error, word):
    with pytest.raises(error, match=word):
        optimize(nn.Linear(4, 2), [batch] if batch else [], nn.CrossEntropyLoss(), torch.optim.AdamW)


def test_named_tuples_and_mappings_keep_their_names_on_the_way_to_the_device():
    pair = namedtuple("Pair", "left right")(torch.zeros(2), UserDict(ids=torch.zeros(3)))
    mapped = map_tensors(pair, lambda value: value + 1)
    assert mapped.left.sum() == 2 and mapped.right["ids"].sum() == 3
