"""The rows of systems/gpu_day.sh: commands of the suite, by stage. On a CPU all of them run at size mini."""

from collections.abc import Callable
from dataclasses import dataclass

from common.config import ROOT

MARK = "pytest.mark.gpu"
RESNET, BERT = "image_classification", "language_bert"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What rows depend on: number of GPUs, 0 on a CPU, and the memory of the first in GB."""

    num_gpus: int
    memory_gb: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One command in a process of its own. The words after `ttt`, or after `python -m` with `is_module`."""

    name: str
    words: tuple[str, ...]
    limit_s: int
    is_module: bool = False


def ttt(name: str, limit_s: int, *words: str) -> Row:
    """Return a row of the suite's command."""
    return Row(name=name, words=words, limit_s=limit_s)


def check(machine: Machine) -> list[Row]:
    """Versions, the doctor, and the tests that need a GPU, their warnings shown."""
    files = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text())
    options = ("-m", "gpu", "-W", "default", "-rs", "-p", "no:cacheprovider")
    tests = ("pytest", *options, *(str(path.relative_to(ROOT)) for path in files))
    return [
        ttt("doctor", 120, "doctor", "--quick", "--json"),
        Row(name="gpu tests", words=tests, limit_s=390, is_module=True),
    ]


def graphs(machine: Machine) -> list[Row]:
    """60 steps compiled and captured beside the same steps eagerly."""
    sizes = ("96", "176") if machine.num_gpus else ("56", "84")
    return [
        inspect(machine, RESNET, "graphs", compiled(machine, RESNET), 270, "--shapes", *sizes),
        inspect(machine, BERT, "graphs", compiled(machine, BERT), 250, *batch(machine, 56)),
    ]


def bert(machine: Machine) -> list[Row]:
    """Sequences a second at the published batch of a GPU, then in larger micro-batches as far as they fit."""
    names = ["baseline", "eager", "mosaic", compiled(machine, BERT)]
    rows = [bench(machine, BERT, name, 75, *batch(machine, 56)) for name in names]
    sizes = [size for size in (112, 224, 448) if size * 0.29 < machine.memory_gb] if machine.num_gpus else [8]
    whole = 448 if machine.num_gpus else 16
    return rows + [
        bench(
            machine,
            BERT,
            compiled(machine, BERT),
            90,
            *batch(machine, whole),
            "--micro-batch-size",
            str(size),
        )
        for size in sizes
    ]


def resnet(machine: Machine) -> list[Row]:
    """Images a second at the published batch of a GPU, then at a larger one."""
    names = ["baseline", "mosaic", compiled(machine, RESNET)]
    sizes = ("96", "176", "224") if machine.num_gpus else ("56",)
    rows = [bench(machine, RESNET, name, 130, *batch(machine, 256), "--shapes", *sizes) for name in names]
    larger = bench(
        machine, RESNET, compiled(machine, RESNET), 130, *batch(machine, 512), "--shapes", sizes[-1]
    )
    return [*rows, larger]


def variants(machine: Machine) -> list[Row]:
    """Each compiler option and each switch of a method alone, on the optimized configurations."""
    on_bert = ["compile_layers=false", "chunked_head=false", "low_precision_layernorm={}"]
    on_resnet = ["compile=false", "blurpool=false"]
    options = ["options.combo_kernels=true", "options.coordinate_descent_tuning=true"]
    if (
        machine.num_gpus
    ):  # fp8 leaves the only layer of size mini alone, and there is no compiler of its options
        on_bert += ["fp8={}", "compile_layers.mode=max-autotune-no-cudagraphs"]
        on_bert += [f"compile_layers.{option}" for option in options]
        on_resnet += ["compile.mode=default", *(f"compile.{option}" for option in options)]
    sizes = ("96",) if machine.num_gpus else ("56",)
    rows = [
        bench(machine, BERT, f"{compiled(machine, BERT)}+methods.{each}", 60, *batch(machine, 56))
        for each in on_bert
    ]
    return rows + [
        bench(
            machine,
            RESNET,
            f"{compiled(machine, RESNET)}+methods.{each}",
            60,
            *batch(machine, 256),
            "--shapes",
            *sizes,
        )
        for each in on_resnet
    ]


def trace(machine: Machine) -> list[Row]:
    """Time by class of kernel, idle share and time of the host."""
    sizes = ("96", "224") if machine.num_gpus else ("56",)
    return [
        inspect(machine, BERT, "kernels", compiled(machine, BERT), 120, *batch(machine, 56)),
        inspect(machine, BERT, "kernels", "baseline", 80, *batch(machine, 56)),
        inspect(
            machine,
            RESNET,
            "kernels",
            compiled(machine, RESNET),
            200,
            *batch(machine, 256),
            "--shapes",
            *sizes,
        ),
        inspect(machine, RESNET, "kernels", "baseline", 100, *batch(machine, 256), "--shapes", *sizes),
    ]


def train(machine: Machine) -> list[Row]:
    """Size mini of both trained to their targets here, and by two ranks where there are two GPUs."""
    rows = [ttt(f"{each} data", 120, "data", "prepare", each, "--size", "mini") for each in (RESNET, BERT)]
    for name in (RESNET, BERT):
        compiles = ("--set", f"methods.{method_of(name)}={{}}") if machine.num_gpus else ()
        rows += [training(name, "baseline"), training(name, "optimized", *compiles)]
        if machine.num_gpus > 1:
            rows += [training(name, "optimized", *compiles, "--nproc", str(ranks)) for ranks in (1, 2)]
    return rows


def forms(machine: Machine) -> list[Row]:
    """Seconds to compile every form, and of an evaluation of the full number of samples."""
    return [
        inspect(machine, BERT, "startup", compiled(machine, BERT), 270, *batch(machine, 56)),
        inspect(machine, RESNET, "startup", compiled(machine, RESNET), 270, *batch(machine, 256)),
    ]


STAGES: dict[str, Callable[[Machine], list[Row]]] = {
    function.__name__: function for function in (check, graphs, bert, resnet, variants, trace, train, forms)
}


def method_of(benchmark: str) -> str:
    """Return the method that compiles a benchmark's optimized configuration."""
    return "compile" if benchmark == RESNET else "compile_layers"


def compiled(machine: Machine, benchmark: str) -> str:
    """Return the optimized configuration; on a CPU traced as there, but run without a compiler."""
    return (
        "optimized"
        if machine.num_gpus
        else f"optimized+methods.{method_of(benchmark)}={{backend: aot_eager}}"
    )


def batch(machine: Machine, size: int) -> tuple[str, ...]:
    """Return the option of a batch, which size mini makes small."""
    return "--batch-size", str(size if machine.num_gpus else 16)


def size_of(machine: Machine) -> tuple[str, str]:
    """Return the option of the size."""
    return "--size", "full" if machine.num_gpus else "mini"


def bench(machine: Machine, benchmark: str, name: str, limit_s: int, *options: str) -> Row:
    """Return a row of `ttt bench`, alone in its process: what one configuration takes, no other lacks."""
    seconds = ("--seconds", "2" if machine.num_gpus else "0.2")
    words = ("bench", benchmark, name, *size_of(machine), *seconds, "--no-parts", "--json", *options)
    return Row(name=" ".join((name, *options)), words=words, limit_s=limit_s)


def inspect(machine: Machine, benchmark: str, part: str, name: str, limit_s: int, *options: str) -> Row:
    """Return a row of `ttt inspect`."""
    words = ("inspect", benchmark, name, part, *size_of(machine), "--json", *options)
    return Row(name=" ".join((benchmark, name, *options)), words=words, limit_s=limit_s)


def training(benchmark: str, name: str, *options: str) -> Row:
    """Return a row of `ttt run`."""
    words = ("run", benchmark, name, "--size", "mini", "--seed", "1", "--force", *options)
    return Row(name=" ".join((benchmark, name, *options)), words=words, limit_s=180)
