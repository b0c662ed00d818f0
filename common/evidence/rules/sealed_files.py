"""The files of a sealed set in memory, and the changes of them that the rules are tested with."""

import json
from collections.abc import Callable
from typing import Any

from common.evidence.records import TOKEN
from common.evidence.rules.rule import Lines, Mutation, chain, rewrite
from common.evidence.sealed.chain import PREVIOUS, digest, read_chain
from common.evidence.sealed.seal import RUNS, SEAL

Files = dict[str, Lines]  # the lines of runset.json, runs.jsonl and each result
FilesMutation = Callable[[Files], Files]


def bytes_of(lines: Lines) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def results_of(files: Files) -> list[str]:
    return [name for name in files if name.startswith("result_")]


def seal_of(files: Files) -> dict[str, Any]:
    return dict(json.loads("\n".join(files[SEAL])))


def rechain(lines: Lines) -> Lines:
    """Give each record of a log the hash of the bytes before it."""
    chained, block = Lines(), Lines()
    for line in lines:
        if TOKEN in line:
            line = rewrite(line, **{PREVIOUS: digest(bytes_of(block))})
            block = []
        block.append(line)
        chained.append(line)
    return chained


def state_in_head(lines: Lines, **facts: str) -> Lines:
    """Let comment lines at the start of a log state these facts, '' none."""
    names = tuple(f"# {name}: " for name in facts)
    stated = [f"# {name}: {fact}" for name, fact in facts.items() if fact]
    return [*stated, *(line for line in lines if not line.startswith(names))]


def seal_again(files: Files) -> Files:
    """Compute all hashes anew, as a forger can: of the seal, of the list, of each log."""
    files, previous = dict(files), digest(bytes_of(files[SEAL]))
    seal, events = previous, Lines()
    for line in files[RUNS]:
        event = json.loads(line) | {PREVIOUS: previous}
        name = event.get("result", "")
        if event.get("head") and name in files:
            event["head"] = read_chain(bytes_of(files[name])).head
        events.append(json.dumps(event))
        previous = digest(bytes_of(events[-1:]))
        if event["event"] == "started" and name in files:
            files[name] = rechain(state_in_head(files[name], seal=seal, started=previous))
    return files | {RUNS: events}


def edit_seal(change: Callable[[dict[str, Any]], dict[str, Any]]) -> FilesMutation:
    """Give the seal the fields that `change` makes of it, before all hashes are computed."""

    def mutate(files: Files) -> Files:
        seal = seal_of(files)
        return seal_again(files | {SEAL: [json.dumps(seal | change(seal))]})

    return mutate


def edit_list(change: Callable[[Lines], Lines]) -> FilesMutation:
    """Change the lines of the list, and compute all hashes anew."""
    return lambda files: seal_again(files | {RUNS: change(files[RUNS])})


def edit_event(line: str, **fields: object) -> str:
    return json.dumps(json.loads(line) | fields)


def edit_line(at: int, **fields: object) -> Mutation:
    def mutate(lines: Lines) -> Lines:
        edited = list(lines)
        edited[at] = edit_event(lines[at], **fields)
        return edited

    return mutate


def edit_last_log(change: Mutation, *, fits_list: bool = True) -> FilesMutation:
    """Change the last log of a set; with `fits_list` the last line of the list states its new head."""

    def mutate(files: Files) -> Files:
        name = results_of(files)[-1]
        lines = change(files[name])
        if not fits_list or RUNS not in files:
            return files | {name: lines}
        head = read_chain(bytes_of(lines)).head
        return files | {name: lines, RUNS: edit_line(-1, head=head)(files[RUNS])}

    return mutate


def unseal(files: Files) -> Files:
    """Leave the chained logs alone, without seal and list."""
    return {name: rechain(state_in_head(files[name], seal="", started="")) for name in results_of(files)}


def insert_note(lines: Lines) -> Lines:
    """Put a comment line between the last two records."""
    at = max(index for index, line in enumerate(lines) if TOKEN in line)
    return [*lines[:at], "# a note", *lines[at:]]


# Changes of a good sealed set, whose last run is named by the last two lines of the list.


def rechained(change: Mutation) -> Mutation:
    return chain(change, rechain)


def cut_last_hash(lines: Lines) -> Lines:
    at = lines[-1].index(f', "{PREVIOUS}"')
    return [*lines[:-1], lines[-1][:at] + "}}"]


decide_one_less = edit_seal(lambda seal: {"seeds": seal["seeds"][:-1], "num_runs": seal["num_runs"] - 1})


def swap_logs(files: Files, one: str, other: str) -> Files:
    return files | {one: files[other], other: files[one]}


def restart_last(files: Files) -> Files:
    """Let the last result be that of a second run, after one that missed the target."""
    time = json.loads(files[RUNS][-2])["time"]
    missed = [edit_event(files[RUNS][-2], seed=7), edit_event(files[RUNS][-1], outcome="missed", time=time)]
    one_more = edit_seal(
        lambda seal: {"seeds": [*seal["seeds"][:-1], 7, seal["seeds"][-1]]} | more_runs(seal)
    )
    return one_more(files | {RUNS: [*files[RUNS][:-2], *missed, *files[RUNS][-2:]]})


def more_runs(seal: dict[str, Any]) -> dict[str, object]:
    return {"num_runs": seal["num_runs"] + 1}


def forget_last(files: Files) -> Files:
    """Take the last run out of the list and out of the decisions; its log names neither."""
    name = results_of(files)[-1]
    unnamed = rechain(state_in_head(files[name], seal="", started=""))
    return decide_one_less(files | {name: unnamed, RUNS: files[RUNS][:-2]})


def lay_before_the_seal(files: Files) -> Files:
    """Let the last result be one that lay in the folder before it was sealed."""
    return edit_seal(lambda seal: {"unsealed": results_of(files)[-1:]})(forget_last(files))


def choose_derived_seeds(files: Files) -> Files:
    """Let the seeds be derived from a public value, which gives others."""
    seeds, time = seal_of(files)["seeds"], json.loads(files[RUNS][0])["time"]
    derived = json.dumps({"event": "derived", "time": time, "value": "1", "seeds": seeds})
    of_value = edit_seal(lambda seal: {"seeds": None, "beacon": "a public value"})
    return of_value(files | {RUNS: [derived, *files[RUNS]]})


def extend(files: Files) -> Files:
    """Decide the last run when the others have ended."""
    started = json.loads(files[RUNS][-2])
    extended = json.dumps({"event": "extended", "time": started["time"], "seeds": [started["seed"]]})
    return decide_one_less(files | {RUNS: [*files[RUNS][:-2], extended, *files[RUNS][-2:]]})


def end_early(lines: Lines) -> Lines:
    """Let the last run end at the time of its start."""
    return edit_line(-1, time=json.loads(lines[-2])["time"])(lines)
