"""The settings in the words of a command, as a person types them and as logs have them."""

import re
from collections.abc import Sequence

SETTING = re.compile(r"[A-Za-z_][\w.]*=.*", re.DOTALL)


def spread_settings(words: Sequence[str]) -> list[str]:
    """Return the words with a `--set` before every setting, where several stand after one."""
    spread: list[str] = []
    takes = goes_on = False  # `--set` stands before this word; or a setting of it
    for word in words:
        if goes_on and SETTING.fullmatch(word):
            spread += ["--set", word]
            continue
        spread.append(word)
        takes, goes_on = word == "--set", takes or word.startswith("--set=")
    return spread
