"""Scale schedule: the published length, and a warm-up that stays."""

from common.methods.scale_schedule import scale_duration
from common.training.load import load_config


def test_durations_are_rounded_down() -> None:
    assert scale_duration("90ep", 0.32) == "28ep"
    assert scale_duration("8ep", 0.75) == "6ep"
    assert scale_duration("90ep", 0.7) == "63ep"  # a product of 62.99999999999999
    assert scale_duration("1001ba", 0.5) == "500ba"


def test_milestones_shrink_with_the_training_and_the_warm_up_stays() -> None:
    settings = ["methods.scale_schedule={ratio: 0.5}"]
    config = load_config("language_bert", "baseline", size="full", settings=settings).config
    assert (config.max_duration, config.schedule.warmup) == ("1344000sp", "80ba")
    assert config.schedule.milestones[:3] == ["200ba", "300ba", "325ba"]
