"""Forgeries of sealed sets, drawn by a seeded generator: kinds that a log alone cannot show.

Each function takes a generator and the files of an honest sealed set, and returns the files to submit. Half
of the forgers who change a log also recompute its hashes; only forgers of the list or of the seal recompute
the list.
"""

import json

from common.evidence.records import TOKEN
from common.evidence.rules.rule import chain, edit, record_of, retime
from common.evidence.rules.sealed_files import (
    edit_line,
    edit_list,
    edit_seal,
    rechain,
    results_of,
    seal_again,
    seal_of,
    swap_logs,
)
from common.evidence.sealed.chain import digest
from common.evidence.sealed.seal import RUNS, derive_seeds
from tests.common.evidence.forgeries import faster, lasts, other_seed, scale_times
from tests.common.evidence.sealed.sealed_sets import NO_HASH, bytes_of, numbered, seal_logs, start_of


def change_log(rng, files, change):
    """Change a log; half of the forgers compute its chain anew."""
    name = rng.choice(results_of(files))
    lines = change(files[name])
    return files | {name: rechain(lines) if rng.random() < 0.5 else lines}


def number_anew(files, removed):
    """Remove results, and close up the numbers of the others."""
    kept = [files[name] for name in results_of(files) if name not in removed]
    return {name: lines for name, lines in files.items() if name not in results_of(files)} | numbered(kept)


def with_miss(rng, files):
    """Return an honest sealed set that has one more run, which missed its target, and its name.

    It is not the last one.
    """
    logs = sorted((files[name] for name in results_of(files)), key=start_of)
    at = rng.randrange(len(logs) - 1)
    last = [record_of(line) for line in logs[at] if '"key": "eval_accuracy"' in line][-1]
    correct, total = round(last["metadata"]["correct"] * 0.9), last["metadata"]["total"]
    below = edit("eval_accuracy", at=-1, value=correct / total, correct=correct)
    missed = other_seed(rng, chain(below, edit("run_stop", status="aborted"))(logs[at]))
    later = start_of(logs[at + 1]) - start_of(logs[at])
    others = [retime(lines, lambda ms: ms + later) for lines in (missed, *logs[at + 1 :])]
    return seal_logs(numbered([*logs[: at + 1], *others])), f"result_{at + 1}.txt"


# Logs.


def every_figure_of_a_run_is_scaled(rng, files):
    """A run takes less time by all clocks and rates, so that its arithmetic fits."""
    factor = rng.uniform(0.6, 0.95)
    return change_log(
        rng,
        files,
        lambda lines: lasts(faster(scale_times(lines, factor), factor), lambda ms: round(ms * factor)),
    )


def something_is_appended(rng, files):
    """A comment, or a copy of the last record, follows the end of a log."""
    return change_log(rng, files, lambda lines: [*lines, rng.choice(["# checked", lines[-1]])])


def a_line_is_removed(rng, files):
    """A record, or a comment line before the first one, is removed."""

    def change(lines):
        first = next(index for index, line in enumerate(lines) if TOKEN in line)
        at = rng.choice([rng.randrange(2, first), rng.randrange(first, len(lines))])
        return lines[:at] + lines[at + 1 :]

    return change_log(rng, files, change)


# Runs.


def a_miss_is_removed(rng, files):
    """A run that missed is removed, and the numbers of those behind it are closed up."""
    sealed, missed = with_miss(rng, files)
    forged = number_anew(sealed, {missed})
    if rng.random() < 0.5:  # also from the list, whose other lines stay
        forged[RUNS] = [line for line in forged[RUNS] if json.loads(line)["result"] != missed]
    return forged


def the_last_run_is_dropped(rng, files):
    """The highest numbers are dropped, one or two; half of the forgers cut the list, too."""
    names = results_of(files)[-rng.randint(1, 2) :]
    files = {name: lines for name, lines in files.items() if name not in names}
    return files | {RUNS: files[RUNS][: -2 * len(names)]} if rng.random() < 0.5 else files


def runs_are_renumbered(rng, files):
    """Two results change their numbers."""
    return swap_logs(files, *rng.sample(results_of(files), 2))


def a_run_is_replaced(rng, files):
    """A run is thrown away and made again under its number, with a list that was continued."""
    name = rng.choice(results_of(files))
    seed, time = rng.randrange(2**31), json.loads(files[RUNS][-1])["time"]
    again = {"event": "started", "time": time, "result": name, "seed": seed, "previous": NO_HASH}
    events = [again, again | {"event": "ended", "outcome": "converged", "head": NO_HASH}]
    del events[1]["seed"]
    replaced = files | {
        name: edit("seed", value=seed)(files[name]),
        RUNS: [*files[RUNS], *map(json.dumps, events)],
    }
    return seal_again(replaced)


# Seeds.


def seeds_are_shopped(rng, files):
    """The seal, made anew for the purpose, states other seeds than those that ran, one or all."""
    num_seeds = len(seal_of(files)["seeds"])
    others = set(range(num_seeds)) if rng.random() < 0.5 else {rng.randrange(num_seeds)}

    def shop(seal):
        seeds = [rng.randrange(2**31) if n in others else seed for n, seed in enumerate(seal["seeds"])]
        return {"seeds": seeds}

    return edit_seal(shop)(files)


def runs_are_picked(rng, files):
    """More runs were decided than submitted, and later ones were started before others."""
    at = rng.randrange(len(results_of(files)))

    def decide_more(seal):
        seeds = [*seal["seeds"][:at], rng.randrange(2**31), *seal["seeds"][at:]]
        return {"seeds": seeds, "num_runs": len(seeds)}

    return edit_seal(decide_more)(files)


def the_public_value_gives_other_seeds(rng, files):
    """The seeds are said to come from a public value, which gives others, all or one."""
    sealed = edit_seal(lambda seal: {"seeds": None, "beacon": "a public value"})(files)
    value, num_runs = str(rng.randrange(10**9)), seal_of(files)["num_runs"]
    seeds = derive_seeds(digest(bytes_of(sealed["runset.json"])), value, num_runs)
    seeds[rng.randrange(num_runs)] ^= 1
    ran = seal_of(files)["seeds"]
    time = seal_of(files)["made"]
    event = {"event": "derived", "time": time, "value": value, "seeds": rng.choice([seeds, ran])}
    return seal_again(sealed | {RUNS: [json.dumps(event), *sealed[RUNS]]})


def the_order_is_swapped(rng, files):
    """Two runs change places in the list, which is computed anew."""
    one, other = sorted(rng.sample(range(len(files[RUNS]) // 2), 2))

    def swap(lines):
        pairs = [lines[at : at + 2] for at in range(0, len(lines), 2)]
        pairs[one], pairs[other] = pairs[other], pairs[one]
        return [line for pair in pairs for line in pair]

    return edit_list(swap)(files)


def another_machine_is_sealed(rng, files):
    """The seal states other software, threads or settings than those of the logs."""

    def change(seal):
        return rng.choice(
            [
                {"versions": seal["versions"].replace("torch 2", "torch 3")},
                {"threads": seal["threads"] + 1},
                {"code": "0123456789ab"},
                {"configuration": seal["configuration"] | {"target": 0.5}},
                {"data": "00ff"},
            ]
        )

    return edit_seal(change)(files)


def an_outcome_is_reworded(rng, files):
    """The list says that a run missed its target, which it reached."""
    return edit_list(edit_line(rng.randrange(1, len(files[RUNS]), 2), outcome="missed"))(files)


KINDS = {  # the rules that find it, at least one of these
    every_figure_of_a_run_is_scaled: {"C901", "C909"},
    something_is_appended: {"C901", "C909"},
    a_line_is_removed: {"C901", "C909"},
    a_miss_is_removed: {"C904", "C906"},
    the_last_run_is_dropped: {"C906", "C919"},  # with the end of the list only a warning
    runs_are_renumbered: {"C908"},
    a_run_is_replaced: {"C906"},
    seeds_are_shopped: {"C911"},
    runs_are_picked: {"C911"},
    the_public_value_gives_other_seeds: {"C912"},
    the_order_is_swapped: {"C911"},
    another_machine_is_sealed: {"C913"},
    an_outcome_is_reworded: {"C914"},
}


def scale_and_recompute(rng, files):
    """Scale a run as above, and compute every hash anew."""
    return seal_again(every_figure_of_a_run_is_scaled(rng, files))


def leave_out_and_recompute(rng, files):
    """Remove a miss as above, and seal the others as if they alone had been made."""
    sealed, missed = with_miss(rng, files)
    kept = number_anew(sealed, {missed})
    return seal_logs({name: kept[name] for name in results_of(kept)})


UNFOUND = (scale_and_recompute, leave_out_and_recompute)  # by a seal alone: what an anchor is for
