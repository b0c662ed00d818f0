"""Begin work before its result is needed."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Built = TypeVar("Built")


def begin_ahead(begun: Iterable[Item], num_ahead: int) -> Iterator[Item]:
    """Yield the items of `begun` in order, each after the next `num_ahead` have been taken from it."""
    waiting: deque[Item] = deque()
    for item in begun:
        waiting.append(item)
        if len(waiting) > num_ahead:
            yield waiting.popleft()
    yield from waiting


def prefetch(build: Callable[[Item], Built], items: Iterable[Item]) -> Iterator[Built]:
    """Yield `build(item)` of every item while a second thread builds the next; its errors are raised here.

    Decoding and resizing in PIL release the interpreter lock and use one core. No torch operation belongs in
    `build`: it would start a second set of compute threads, and the training thread would wait for them.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="images") as pool:
        for pending in begin_ahead((pool.submit(build, item) for item in items), 1):
            yield pending.result()
