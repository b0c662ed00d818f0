"""BERT's accuracy in two countings: the official one, and the one that the published runs stopped at.

The evaluation set of the reference has 428,235 masked tokens. MosaicML's loader put a label at position 0 of
each sample with fewer than 76 of them, 6,946 tokens more, which the model always got right. For its accuracy

    official = (mosaic x 435,181 - 6,946) / 428,235

and 0.7200 of 435,181 tokens is 0.7155 of the official ones.
"""

from common.evidence.log import Log, Point
from common.evidence.records import finite

OFFICIAL = 428_235
FREE = 6_946  # samples with fewer than 76 masked tokens
MOSAIC = OFFICIAL + FREE
COUNTINGS = {MOSAIC: "MosaicML's count", OFFICIAL: "the official count"}
MARK = f"{MOSAIC:,} masked tokens"  # in a label
NOTE = (
    f"{MARK}: MosaicML's published accuracies of BERT count {FREE:,} tokens that the official {OFFICIAL:,} "
    "do not have, which are always right: their 0.7200 is 0.7155 by the official count."
)
MAX_RESIDUE = 0.05  # tokens; the published accuracies, 32-bit floats, are within 0.013 of whole tokens
MIN_EVALUATIONS = 3  # by chance one accuracy fits a counting with probability 0.1


def convert(accuracy: float, counted: int, wanted: int) -> float:
    """Return an accuracy of `counted` tokens as one of `wanted`; both are keys of COUNTINGS."""
    if counted == wanted:
        return accuracy
    free = FREE if counted == OFFICIAL else -FREE
    return min(max((accuracy * counted + free) / wanted, 0.0), 1.0)


def counted_tokens(log: Log) -> int | None:
    """Return how many tokens the log's accuracies are divided by: as logged, else the counting that fits.

    An accuracy times its counting is a whole number of tokens; None if neither fits every evaluation.
    """
    totals = {finite(event.metadata.get("total")) for event in log.events("eval_accuracy")}
    total = totals.pop() if len(totals) == 1 else None
    if total is not None:
        return int(total)
    if len(log.curve) < MIN_EVALUATIONS:
        return None
    for counting in COUNTINGS:
        tokens = [point.accuracy * counting for point in log.curve]
        if all(abs(number - round(number)) <= MAX_RESIDUE for number in tokens):
            return counting
    return None


def curve(log: Log, wanted: int) -> tuple[Point, ...]:
    """Return the evaluations in the counting `wanted`; empty if the log's own counting is unknown."""
    counted = counted_tokens(log)
    if counted not in COUNTINGS:
        return ()
    return tuple(point._replace(accuracy=convert(point.accuracy, counted, wanted)) for point in log.curve)
