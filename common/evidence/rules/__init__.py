"""The audit rules: one function each, its docstring the message, with the change of good logs that it finds.

Families: P parsing, K keys, T time, Q quality, S run sets, X between run sets, F runs left out, Y system
descriptions, R the chosen round, C chained logs and sealed sets, N time-stamps of another clock.
Severity `error` where no honest run set breaks the rule: of 449 published ones (3,305 logs of v2.0 to v4.0)
five do, two with two batch sizes in one set, two with a log that breaks off before its first evaluation or
its settings, and one with accuracies stamped after its run_stop. `warning` where some do, and
`strict`: error on logs of this suite, warning on others. A section is one of MLCommons' training_rules.adoc
(`rules`) or of its submission_rules.adoc; `logging` is the official checker (rulesets 2.0.0, 2.1.0); `house`
is our own promise.
"""

from common.evidence.rules import (
    anchors,
    arithmetic,
    copies,
    keys,
    quality,
    rounds,
    seals,
    sets,
    systems,
    timing,
)
from common.evidence.rules.rule import RULES, Found, Rule

__all__ = ["RULES", "Found", "Rule"]
__all__ += ["anchors", "arithmetic", "copies", "keys", "quality", "rounds", "seals", "sets", "systems"]
__all__ += ["timing"]
