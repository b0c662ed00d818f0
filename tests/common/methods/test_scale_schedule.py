"""Scale schedule: the published length, and a warm-up that stays."""

from common.methods.scale_schedule import scale_duration


def test_durations_are_rounded_down() -> None:
    assert scale_duration("90ep", 0.32) == "28ep"
    assert scale_duration("8ep", 0.75) == "6ep"
    assert scale_duration("90ep", 0.7) == "63ep"  # a product of 62.99999999999999
    assert scale_duration("1001ba", 0.5) == "500ba"
