"""The launches of a step: kernels and library calls by class, with the bytes that they move and their FLOPs.

A compiler's kernels move what Inductor counts: each buffer that a kernel reads or writes, once. A library
call, and each operator of an eager step, reads all its inputs and writes all its outputs once: caches may
save some of it, a library's work space adds to it. An operator counts as one launch; a library may take more.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

GIGA, TERA = 1e9, 1e12
MATRIX, CONVOLUTION, ATTENTION = "matrix products", "convolutions", "attention"
LIBRARY = (CONVOLUTION, MATRIX, ATTENTION)
BOOKKEEPING, OTHER, OPTIMIZER = "attention bookkeeping", "other", "optimizer"
COMBINED = "combined"  # kernels of any class in one launch; Inductor does not say which
OWN = "own"  # a kernel that a benchmark has written itself; outside of the step
CLASSES = {  # the first with a word in the name of one of a kernel's operators takes the kernel
    OPTIMIZER: ("fused_adam", "fused_sgd", "_foreach_", "_amp_", "lerp"),
    "normalisation": ("norm", "var_mean", "rsqrt"),
    "loss": (
        *("loss", "log_softmax", "logsumexp", "entropy", "sigmoid", "softplus", "log1p", "scatter", "gather"),
    ),
    "activation": ("gelu", "relu", "threshold", "tanh", "pool", "softmax"),
    BOOKKEEPING: ("cat", "attention", "attn", "masked_fill", "searchsorted"),
}
CASTS = {
    *("_to_copy", "convert_element_type", "clone", "copy_", "device_put"),
    *("view", "t", "transpose", "quantize", "detach"),
}
SCALED_PRODUCT = "_scaled_mm"  # of factors in 8 bits
OWN_ATTENTION = (  # the suite's operators
    *("attention", "attention_backward"),
    *("self_attention", "self_attention_backward"),
)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", SCALED_PRODUCT, "mv", "addmv", "dot")
NAMES = (*CLASSES, "casts", COMBINED, OTHER)


def classify(operators: Iterable[str]) -> str:
    """Return the class of a kernel that computes these operators, named as in aten."""
    names = set(operators)
    if not names:
        return COMBINED
    for name, words in CLASSES.items():
        if any(word in operator for operator in names for word in words):
            return name
    return "casts" if names <= CASTS else OTHER


def classify_library(operator: str) -> str:
    """Return the class of a library call, '' for an operator that is none."""
    if "attention" in operator or "attn" in operator:
        return ATTENTION
    if "conv" in operator and "convert" not in operator:
        return CONVOLUTION
    return MATRIX if operator.rstrip("_") in PRODUCTS else ""


class Launch(NamedTuple):
    """A kernel or a library call, with the bytes and the FLOPs of one launch."""

    name: str
    kind: str  # of LIBRARY or NAMES
    num_bytes: float = 0.0
    flops: float = 0.0


Tally = Counter[Launch]  # the number of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A compiled kernel: registers of a thread, bytes that it spills to memory (0: none).

    Of the compiled ways to launch it, the one that spills least, then takes fewest registers; of an own
    kernel's forms the one that spills most.
    """

    name: str
    kind: str
    registers: int
    spilled_bytes: int


def sum_classes(tally: Tally) -> dict[str, dict[str, float]]:
    """Return launches, gigabytes and TFLOPs of each class that was launched."""
    table: dict[str, dict[str, float]] = {}
    for kind in (*LIBRARY, *NAMES):
        if counts := [(launch, count) for launch, count in tally.items() if launch.kind == kind]:
            table[kind] = {
                "launches": sum(count for _, count in counts),
                "gb": round(sum(launch.num_bytes * count for launch, count in counts) / GIGA, 3),
                "tflop": round(sum(launch.flops * count for launch, count in counts) / TERA, 4),
            }
    return table


def list_largest(tally: Tally, most: int) -> list[dict[str, Any]]:
    """Return the kernels and operators, no library's, that move most bytes together."""
    counts: Counter[tuple[str, str]] = Counter()
    moved: dict[tuple[str, str], float] = defaultdict(float)
    for launch, count in tally.items():
        if launch.kind not in LIBRARY:
            counts[launch.name, launch.kind] += count
            moved[launch.name, launch.kind] += launch.num_bytes * count
    return [
        {"name": name, "class": kind, "launches": counts[name, kind], "gb": round(num_bytes / GIGA, 3)}
        for (name, kind), num_bytes in sorted(moved.items(), key=lambda item: -item[1])[:most]
    ]


KERNEL = re.compile(r"^(\w+) = async_compile\.\w+\('\w+', r?'''(.*?)'''", re.S | re.M)
OPERATORS = re.compile(r"Original ATen: \[(.*?)\]")


def read_code(source: str) -> tuple[Tally, frozenset[str]]:
    """Return the kernels that Inductor's code of a graph launches, and the operators that libraries compute.

    Raises ValueError for an unknown format.
    """
    kernels, last = {}, 0
    for kernel in KERNEL.finditer(source):
        size = re.search(r"'kernel_num_gb': ([\d.e+-]+)", kernel[2])
        operators = OPERATORS.findall(source[last : kernel.start()])
        last = kernel.end()
        if size is None or not operators:
            raise ValueError(f"{kernel[1]} states neither bytes nor operators")
        names = [name.strip().split(".")[1] for name in operators[-1].split(",") if "." in name]
        kernels[kernel[1]] = Launch(kernel[1], classify(names), float(size[1]) * GIGA)
    calls = KERNEL.sub("", source)
    launched = re.findall(r"\b(triton_\w+)\.run\(", calls)
    if unknown := set(launched) - kernels.keys():
        raise ValueError(f"no definition of {', '.join(sorted(unknown))}")
    library = re.findall(r"\bextern_kernels\.(\w+)\(", calls)
    library += re.findall(r"= torch\.ops\.\w+\.(\w+)\.\w+\(", calls)
    return Counter(kernels[name] for name in launched), frozenset(library)
