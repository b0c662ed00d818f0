"""Another number of devices than the recipe's: the global batch is kept, or a person decides."""

import pytest

from common.errors import UserError
from common.training import batch_check
from common.training.load import load_config


def compared(benchmark, num_ranks, *settings, size="full"):
    return batch_check.mark_unverified(
        load_config(benchmark, "optimized", size=size, settings=list(settings)), num_ranks
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_fewer_gpus_accumulate_and_batch_norm_sees_what_the_recipe_says(num_ranks):
    loaded = compared("image_classification", num_ranks)
    assert loaded.config.global_batch_size == 2048 and batch_check.unverified(loaded) == []
    assert batch_check.statistics_sizes(loaded, num_ranks) == [256]
    batch_check.check_asked(loaded, num_ranks)


@pytest.mark.parametrize(("num_ranks", "sizes"), [(3, "227, 228"), (16, "128"), (1000, "2, 3")])
def test_a_number_that_changes_batch_norm_needs_a_decision_that_the_log_repeats(num_ranks, sizes):
    difference = f"unverified recipe: samples that batch norm averages over: 256 -> {sizes}"
    loaded = compared("image_classification", num_ranks)
    assert batch_check.unverified(loaded) == loaded.changes[-1:] == [difference]
    with pytest.raises(UserError, match="unverified recipe") as met:
        batch_check.check_asked(loaded, num_ranks)
    decision = met.value.hint.split()[1]
    decided = compared("image_classification", num_ranks, decision)
    batch_check.check_asked(decided, num_ranks)
    assert batch_check.unverified(decided) == [difference]


@pytest.mark.parametrize("num_ranks", [1, 3, 8, 448])
def test_a_model_without_batch_norm_computes_the_same_on_any_number(num_ranks):
    assert batch_check.unverified(compared("language_bert", num_ranks)) == []


def test_another_global_batch_is_an_unverified_recipe():
    loaded = compared("language_bert", 8, "global_batch_size=896")
    assert batch_check.unverified(loaded) == ["unverified recipe: global_batch_size: 448 -> 896"]
    batch_check.check_asked(loaded, 8)


def test_size_mini_prescribes_no_number_of_ranks():
    assert batch_check.unverified(compared("image_classification", 2, size="mini")) == []
