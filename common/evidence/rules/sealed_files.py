"""The files of a sealed set in memory, and the changes of them that the rules are tested with."""

import json
from collections.abc import Callable
from typing import Any

from common.evidence.records import TOKEN
from common.evidence.rules.rule import Lines, Mutation, rewrite
from common.evidence.sealed.chain import PREVIOUS, digest, read_chain
from common.evidence.sealed.seal import RUNS, SEAL

Files = dict[str, Lines]  # the lines of runset.json, runs.jsonl and each result
FilesMutation = Callable[[Files], Files]


def bytes_of(lines: Lines) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def results_of(files: Files) -> list[str]:
    return [name for name in files if name.startswith("result_")]


def rechain(lines: Lines) -> Lines:
    """Give each record of a log the hash of what stands before it."""
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
        seal = json.loads("\n".join(files[SEAL]))
        return seal_again(files | {SEAL: [json.dumps(seal | change(seal))]})

    return mutate


def edit_list(change: Callable[[Lines], Lines]) -> FilesMutation:
    """Change the lines of the list, and compute all hashes anew."""
    return lambda files: seal_again(files | {RUNS: change(files[RUNS])})


def edit_event(line: str, **fields: object) -> str:
    return json.dumps(json.loads(line) | fields)


def edit_last_log(change: Mutation, *, fits_list: bool = True) -> FilesMutation:
    """Change the last log of a set; with `fits_list` the last line of the list states its new head."""

    def mutate(files: Files) -> Files:
        name = results_of(files)[-1]
        lines = change(files[name])
        if not fits_list or RUNS not in files:
            return files | {name: lines}
        head = read_chain(bytes_of(lines)).head
        return files | {name: lines, RUNS: [*files[RUNS][:-1], edit_event(files[RUNS][-1], head=head)]}

    return mutate


def unseal(files: Files) -> Files:
    """Leave the chained logs alone, without seal and list."""
    return {name: rechain(state_in_head(files[name], seal="", started="")) for name in results_of(files)}


def insert_note(lines: Lines) -> Lines:
    """Put a comment line between the last two records."""
    at = max(index for index, line in enumerate(lines) if TOKEN in line)
    return [*lines[:at], "# a note", *lines[at:]]
