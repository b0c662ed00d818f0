"""Scale schedule: the published length, and a warm-up that stays."""

from common.methods.scale_schedule import ScaleSchedule, scaled_duration
from common.training.load import load_config


def test_durations_are_rounded_down() -> None:
    assert scaled_duration("90ep", 0.32) == "28ep"
    assert scaled_duration("8ep", 0.75) == "6ep"
    assert scaled_duration("1001ba", 0.5) == "500ba"


def test_warm_up_keeps_its_length() -> None:
    config = load_config("image_classification", "baseline", size="full", settings=[]).config
    changed = ScaleSchedule("scale_schedule", ScaleSchedule.Config(ratio=0.32)).configure(config)
    assert (changed.plan().num_steps, changed.plan().warmup_steps) == (17_500, 5_000)
