"""Scale schedule: the published length, and a warm-up that stays."""

from common.methods.scale_schedule import scaled_duration


def test_durations_are_rounded_down() -> None:
    assert scaled_duration("90ep", 0.32) == "28ep"
    assert scaled_duration("8ep", 0.75) == "6ep"
    assert scaled_duration("1001ba", 0.5) == "500ba"
