"""The launches of a step: kernels and library calls by class, with the bytes that they move and their FLOPs.

A compiler's kernels move what Inductor counts: each buffer that a kernel reads or writes, once. A library
call, and each operator of an eager step, reads all its inputs and writes all its outputs once: caches may
save some of it, a library's work space adds to it. An operator counts as one launch; a library may take more.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

GIGA, TERA = 1e9, 1e12
MATRIX, CONVOLUTION, ATTENTION = "matrix products", "convolutions", "attention"
LIBRARY = (CONVOLUTION, MATRIX, ATTENTION)
BOOKKEEPING, OTHER, OPTIMIZER = "attention bookkeeping", "other", "optimizer"
OWN = "own"  # a kernel that a benchmark has written itself; outside of the step
CLASSES = (  # the first whose words are in the name of one of a kernel's operators takes the kernel
    (OPTIMIZER, ("fused_adam", "fused_sgd", "_foreach_", "_amp_", "lerp")),
    ("normalisation", ("norm", "var_mean", "rsqrt")),
    (
        "loss",
        ("loss", "log_softmax", "logsumexp", "entropy", "sigmoid", "softplus", "log1p", "scatter", "gather"),
    ),
    ("activation", ("gelu", "relu", "threshold", "tanh", "pool", "softmax")),
    (BOOKKEEPING, ("cat", "attention", "attn", "masked_fill", "searchsorted")),
)
CASTS = {
    "_to_copy",
    "convert_element_type",
    "clone",
    "copy_",
    "device_put",
    "view",
    "t",
    "transpose",
    "detach",
}
NAMES = (*(name for name, _ in CLASSES), "casts", OTHER)


def classify(operators: Iterable[str]) -> str:
    """Return the class of a kernel that computes these operators, named as in aten."""
    names = set(operators)
    for name, words in CLASSES:
        if any(word in operator for operator in names for word in words):
            return name
    return "casts" if names and names <= CASTS else OTHER


def classify_library(operator: str) -> str:
    """Return the class of a library call, '' for an operator that is none."""
    if "attention" in operator or "attn" in operator:
        return ATTENTION
    if "conv" in operator and "convert" not in operator:
        return CONVOLUTION
    return (
        MATRIX
        if operator.rstrip("_") in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "mv", "addmv", "dot")
        else ""
    )


@dataclass(slots=True)
class Launches:
    """The launches of one kernel with one cost: `num_bytes` and `flops` are those of all of them."""

    name: str
    kind: str  # of LIBRARY or NAMES
    count: float = 0
    num_bytes: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A compiled kernel: registers of a thread, bytes that it spills to memory (0: none).

    Of the ways to launch it that are compiled, the one that spills least and then has most registers.
    """

    name: str
    kind: str
    num_bytes: float  # of a launch
    registers: int
    spilled_bytes: int


@dataclass(slots=True)
class Tally:
    """Everything that was launched since the start."""

    launches: dict[tuple[str, str, float, float], Launches] = field(default_factory=dict)

    def add(
        self, name: str, kind: str, *, num_bytes: float = 0.0, flops: float = 0.0, count: float = 1
    ) -> None:
        """Count launches; bytes and FLOPs are those of one."""
        entry = self.launches.setdefault((name, kind, num_bytes, flops), Launches(name, kind))
        entry.count += count
        entry.num_bytes += count * num_bytes
        entry.flops += count * flops

    def of(self, kinds: Iterable[str]) -> list[Launches]:
        """Return the launches of some classes."""
        wanted = set(kinds)
        return [entry for entry in self.launches.values() if entry.kind in wanted]

    def by_class(self) -> dict[str, dict[str, float]]:
        """Return launches, gigabytes and TFLOPs of each class that was launched."""
        table: dict[str, dict[str, float]] = {}
        for kind in (*LIBRARY, *NAMES):
            if entries := self.of([kind]):
                table[kind] = {
                    "launches": sum(entry.count for entry in entries),
                    "gb": round(sum(entry.num_bytes for entry in entries) / GIGA, 3),
                    "tflop": round(sum(entry.flops for entry in entries) / TERA, 4),
                }
        return table

    def largest(self, count: int) -> list[dict[str, Any]]:
        """Return the kernels and operators, no library's, that move most bytes together."""
        moved: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for entry in self.of(NAMES):
            sums = moved[entry.name, entry.kind]
            sums[0], sums[1] = sums[0] + entry.count, sums[1] + entry.num_bytes
        ordered = sorted(moved.items(), key=lambda item: -item[1][1])[:count]
        return [
            {"name": name, "class": kind, "launches": sums[0], "gb": round(sums[1] / GIGA, 3)}
            for (name, kind), sums in ordered
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """The launches in Inductor's code of a graph: kernels by name, and the library calls in it.

    `kernels` holds (class, bytes of a launch, launches); `library` the names of operators.
    """

    kernels: Mapping[str, tuple[str, float, int]]
    library: frozenset[str]


KERNEL = re.compile(r"^(\w+) = async_compile\.\w+\('\w+', r?'''(.*?)'''", re.S | re.M)
OPERATORS = re.compile(r"Original ATen: \[(.*?)\]")


def read_code(source: str) -> Code:
    """Return what the source of a compiled graph launches. Raises ValueError for an unknown format."""
    sizes, kinds, last = {}, {}, 0
    for kernel in KERNEL.finditer(source):
        size = re.search(r"'kernel_num_gb': ([\d.e+-]+)", kernel[2])
        operators = OPERATORS.findall(source[last : kernel.start()])
        last = kernel.end()
        if size is None or not operators:
            raise ValueError(f"{kernel[1]} states neither bytes nor operators")
        names = [name.strip().split(".")[1] for name in operators[-1].split(",") if "." in name]
        sizes[kernel[1]], kinds[kernel[1]] = float(size[1]) * GIGA, classify(names)
    calls = KERNEL.sub("", source)
    launches = Counter(re.findall(r"\b(triton_\w+)\.run\(", calls))
    if unknown := launches.keys() - sizes.keys():
        raise ValueError(f"no definition of {', '.join(sorted(unknown))}")
    library = set(re.findall(r"\bextern_kernels\.(\w+)\(", calls))
    library |= {name for name, _ in re.findall(r"= torch\.ops\.\w+\.(\w+)\.(\w+)\(", calls)}
    return Code(
        kernels={name: (kinds[name], sizes[name], count) for name, count in launches.items()},
        library=frozenset(library),
    )
