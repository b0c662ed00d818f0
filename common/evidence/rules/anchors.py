"""N: replies of time-stamp authorities, and what they say of the order and the intervals of a set."""

from collections.abc import Callable, Iterator
from itertools import groupby

from common.evidence.rules.rule import Found, rule
from common.evidence.sealed.anchors import MAX_DELAY_MS, Anchored, Stamp
from common.evidence.sealed.seal import SEAL, Ended, Started
from common.repository import install_hint

RFC = "RFC 3161"
MAX_DRIFT = 5e-4  # of a clock: the largest rate that NTP corrects
SLACK_MS = 1_000  # for a disk that writes a record late, and a clock that NTP sets (T221)

# Changes to good replies.


def change_stamp(at: int, **fields: object) -> Callable[[Anchored], Anchored]:
    def change(good: Anchored) -> Anchored:
        stamps = list(good.stamps)
        stamps[at] = stamps[at]._replace(**fields)  # type: ignore[arg-type]
        return good._replace(stamps=tuple(stamps))

    return change


def delay_reply(at: int, ms: int) -> Callable[[Anchored], Anchored]:
    def change(good: Anchored) -> Anchored:
        reply = good.stamps[at].reply
        assert reply
        return change_stamp(at, reply=reply._replace(time_ms=reply.time_ms + ms))(good)

    return change


# The replies.


@rule("N901", "error", RFC, breaks=change_stamp(1, edit="line 27 of result_0.txt was changed"))
def stamps_are_of_these_bytes(anchored: Anchored) -> Iterator[Found]:
    """A time-stamp is of the very bytes that stand in the seal or the log."""
    return (place_of(anchored, stamp, stamp.edit) for stamp in anchored.stamps if stamp.edit)


@rule("N902", "error", RFC, breaks=change_stamp(1, fault="the signature is wrong"))
def stamps_are_signed(anchored: Anchored) -> Iterator[Found]:
    """A time-stamp can be read, and is signed by the authority that it names, below a root that was given."""
    return (place_of(anchored, stamp, stamp.fault) for stamp in anchored.stamps if stamp.fault)


# The times.


@rule("N903", "error", RFC, breaks=delay_reply(-1, 60_000))
def intervals_are_those_of_the_authority(anchored: Anchored) -> Iterator[Found]:
    """As much time passes between two records of a log as between their time-stamps."""
    prompt = [stamp for stamp in anchored.stamps if stamp.is_prompt and stamp.anchor.line]
    for _, stamps in groupby(sorted(prompt, key=name_of), key=name_of):
        if contradiction := find_contradiction(list(stamps)):
            one, other = sorted(contradiction, key=logged_ms)
            assert one.place and other.place and one.reply and other.reply
            logged_s = (logged_ms(other) - logged_ms(one)) / 1000
            stamped_s = (other.reply.time_ms - one.reply.time_ms) / 1000
            text = f"{logged_s:.1f} s from line {one.place.line} to {other.place.line}, by their time-stamps"
            yield Found(other.place.line, f"{text} {stamped_s:.0f} s", other.place.log)


def name_of(stamp: Stamp) -> str:
    return stamp.anchor.of


def logged_ms(stamp: Stamp) -> int:
    assert stamp.place and stamp.place.event
    return stamp.place.event.time_ms


def find_contradiction(stamps: list[Stamp]) -> tuple[Stamp, Stamp] | None:
    """Return two replies to a log whose bounds of the difference of the two clocks exclude each other.

    The authority's time of a record is the log's, plus the difference of the clocks, plus up to the delay of
    the reply, less the cut off part of a second. The bounds of all records overlap, apart from drift.
    """
    low = max(stamps, key=lambda stamp: stamp.earliest_ms() - logged_ms(stamp))
    high = min(stamps, key=lambda stamp: stamp.latest_ms() - logged_ms(stamp))
    apart_ms = low.earliest_ms() - logged_ms(low) - (high.latest_ms() - logged_ms(high))
    allowed_ms = SLACK_MS + MAX_DRIFT * abs(logged_ms(low) - logged_ms(high))
    if low.place and low.place.log and logged_ms(low) < logged_ms(high):  # more time in the log
        drift_ms = low.place.log.stopped("clock_drift_ms") or 0.0  # of a clock that was set forward: T208
        allowed_ms += max(0.0, drift_ms)
    return (low, high) if apart_ms > allowed_ms else None


@rule("N904", "error", RFC, breaks=delay_reply(0, 120_000))
def stamps_are_in_order(anchored: Anchored) -> Iterator[Found]:
    """The seal is stamped before the runs, and each run after those that ended before it began."""
    good = anchored.good()
    of_seal = [stamp for stamp in good if stamp.anchor.of == SEAL]
    of_runs = {name: list(run) for name, run in groupby(sorted(good, key=name_of), key=name_of)}
    of_runs.pop(SEAL, None)
    pairs = [(min(of_seal, key=Stamp.earliest_ms), run) for run in of_runs.values()] if of_seal else []
    last: Stamp | None = None  # of the runs that have ended
    for _, event in anchored.sealed.events if anchored.sealed else ():
        run = of_runs.get(event.result, []) if isinstance(event, Started | Ended) else []
        if last and run and isinstance(event, Started):
            pairs.append((last, run))
        elif run:
            last = max([last, *run] if last else run, key=Stamp.earliest_ms)
    for before, run in pairs:
        first = min(run, key=Stamp.latest_ms)
        if before.earliest_ms() > first.latest_ms():
            late_s = (before.earliest_ms() - first.latest_ms()) / 1000
            yield place_of(anchored, before, f"{before.place} {late_s:.1f} s or more after {first.place}")


# Replies that are missing: a warning, because whoever removes one can state a failure in its place.


@rule("N905", "warning", RFC, breaks=lambda good: good._replace(stamps=good.stamps[:-1]))
def every_place_is_stamped(anchored: Anchored) -> Iterator[Found]:
    """The seal, and the start, the evaluations and the end of every run have a time-stamp that came soon."""
    if not anchored.is_verified:
        return
    stamped = {stamp.anchor.where for stamp in anchored.stamps}
    prompt = {stamp.anchor.where for stamp in anchored.stamps if stamp.is_prompt}
    missing = [place for place in anchored.places if place.where not in stamped]
    late = [stamp for stamp in anchored.good() if stamp.anchor.where not in prompt]
    if missing:
        bare = sum(place.where not in anchored.explained for place in missing)
        text = f"{len(missing)} of {len(anchored.places)} have none, {bare} without a reason; the first: "
        text += str(missing[0])
        yield Found(0, text, path=anchored.path)
    if late:
        text = f"{len(late)} came more than {MAX_DELAY_MS / 1000:.0f} s late and bound no interval"
        yield Found(late[0].number, text, path=anchored.path)
    for line, fault in anchored.faults:
        yield Found(line, f"a line cannot be read: {fault}", path=anchored.path)


@rule("N906", "warning", RFC, breaks=lambda good: good._replace(is_verified=False))
def stamps_were_verified(anchored: Anchored) -> Iterator[Found]:
    """The time-stamps of a set were verified."""
    if not anchored.is_verified:
        yield Found(0, f"{anchored.path} is there; {install_hint('anchor')}", path=anchored.path)


def place_of(anchored: Anchored, stamp: Stamp, text: str) -> Found:
    return Found(stamp.number, text, path=anchored.path)
