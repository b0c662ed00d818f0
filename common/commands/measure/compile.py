"""Compile the training step for a GPU that is not here, and count what it launches and moves.

Forward pass, loss, backward pass and optimizer of a configuration, and its evaluation, become kernels for an
A100 (sm_80) or an H100 (sm_90): registers, spills, launches, bytes by class, FLOPs of library calls, graph
breaks. No GPU is needed and nothing is timed. The figures go to results/compiled/. Times that a model of
GPUs gives for them are labelled "predicted"; --check-published compares it with published throughput.

examples:
  ttt inspect compile language_bert optimized --for sm_90
  ttt inspect compile image_classification optimized --for sm_80 --shape "176 px"
  ttt inspect compile image_classification baseline optimized+methods.blurpool=false --for sm_90
  ttt inspect compile --check-published
"""

import argparse
import json

from common.arguments import add_shared, list_benchmarks
from common.config.names import split_name
from common.config.schema import RunConfig
from common.errors import EXIT_OK, UserError
from common.measure.device_run import load
from common.repository import benchmark_module, configurations
from common.training.load import AUTO, PRECISIONS, read_config

ARCHITECTURES = {"sm_80": "A100", "sm_90": "H100, H200"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared(parser, "benchmark", nargs="?")
    add_shared(parser, "configurations")
    known = ", ".join(f"{name} ({gpus})" for name, gpus in ARCHITECTURES.items())
    parser.add_argument("--for", dest="architecture", metavar="ARCHITECTURE", help=f"one of: {known}")
    add_shared(parser, "--size", "--set")
    shape = "only this one, such as '176 px'; default: all that training sees"
    parser.add_argument("--shape", action="append", default=[], help=shape)
    add_shared(parser, "--batch-size")
    checked = "compare the model of GPUs with published throughput"
    parser.add_argument("--check-published", action="store_true", help=checked)
    add_shared(parser, "--json", "--results")


def main(args: argparse.Namespace) -> int:
    if args.check_published:
        if args.benchmark or args.architecture:
            raise UserError("--check-published compares all benchmarks and GPUs; name none")
        from common.measure.without_gpu import gpu_model

        rows = gpu_model.check_published()
        print(json.dumps(rows) if args.json else "\n".join(gpu_model.format_checks(rows)))
        return EXIT_OK
    if args.benchmark is None:
        raise UserError("which benchmark?", hint=f"ttt inspect compile BENCHMARK, one of {list_benchmarks()}")
    if args.architecture is None:
        raise UserError("which architecture?", hint=f"--for {' or --for '.join(ARCHITECTURES)}")
    benchmark_module(args.benchmark)  # answers an unknown name
    from common.measure.without_gpu.pretend import find_gpu

    find_gpu(args.architecture)  # before the next line, at which torch would warn that it misses Triton
    from common.measure.without_gpu import report

    names = args.configurations or configurations(args.benchmark)
    sizes = {"size": args.size, "batch_size": args.batch_size}
    full_names = ["+".join([name, *args.set]) for name in names]
    loaded = [(name, load_for_gpu(args.benchmark, name, **sizes)) for name in full_names]
    results = []
    for name, config in loaded:
        figures = report.compile_configuration(name, config, args.architecture, args.shape)
        path = report.keep(figures, args.results)
        results.append(figures)
        if not args.json:
            print(*report.format_figures(figures), f"-> {path}", sep="\n")
            print(*report.format_predictions(figures), sep="\n")
    if args.json:
        print(json.dumps(results))
    return EXIT_OK


def load_for_gpu(benchmark: str, name: str, *, size: str, batch_size: int | None) -> RunConfig:
    """Load a configuration as on a GPU: there a precision `auto` is bf16, whatever this processor has."""
    _, origins, _ = read_config(benchmark, name, size=size, settings=[])
    _, settings = split_name(benchmark, name, size=size)
    typed = dict(setting.split("=", 1) for setting in settings)
    is_auto = {key: origins[key,].endswith(AUTO) or typed.get(key) == "auto" for key in PRECISIONS}
    chosen = [f"+{key}=bf16" for key in PRECISIONS if is_auto[key]]
    return load(benchmark, "".join([name, *chosen]), size=size, batch_size=batch_size)
