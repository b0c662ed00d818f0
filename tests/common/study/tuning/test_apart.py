"""Subjects of a race in processes of their own."""

import pytest

from common.errors import UserError
from common.study.tuning.apart import Apart

WITHIN_S = 60


class Steady:
    """Takes no time and says so."""

    def turn(self):
        return 0.5


class Fails(Steady):
    """Cannot take a turn."""

    def turn(self):
        raise UserError("too large")


def test_turns_are_taken_there_and_a_failure_is_told():
    apart = Apart(Steady)
    assert apart.turn() == 0.5
    apart.close()
    apart = Apart(Fails)
    with pytest.raises(UserError, match="too large"):
        apart.turn()
    apart.close()
    assert apart.process.exitcode == 0


def test_one_that_nobody_waits_for_any_more_ends_without_a_word(capfd):
    apart = Apart(Steady)
    apart.pipe.send("turn")
    assert apart.pipe.poll(WITHIN_S)  # its answer is never read, which resets the connection
    apart.close()
    assert apart.process.exitcode == 0 and capfd.readouterr().err == ""
