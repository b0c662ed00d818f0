"""Compile the training step of a configuration for a GPU that is not there, and count its launches.

The step is the suite's own (`Training.train_step`): its model, methods, loss, backward pass and optimizer run
on tensors without values. Each piece that it compiles is lowered by Inductor once for each shape, every
Triton kernel becomes a cubin, and each of its calls in the step counts. What is not compiled counts by its
operators.

Left out are kernels that libraries choose (their FLOPs and bytes are counted instead), autotuning, CUDA
graphs, padding of matrix products (all need a GPU), and methods that act less often than every step.
"""

import copy
import io
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from common.errors import UserError, nearest
from common.measure.without_gpu.kernels import (
    ATTENTION,
    GIGA,
    OWN,
    Kernel,
    Launch,
    Tally,
    classify,
    classify_library,
    read_code,
)
from common.measure.without_gpu.pretend import DEVICE, HOST, Gpu, pretend
from common.training import step
from common.training.benchmark import Benchmark
from common.training.method import Batch
from common.training.probes import probes_of
from common.training.step import Training

BACKWARD_ATTENTION = 2.5  # times the forward's FLOPs: five matmuls instead of two
OWN_OPERATORS = "ttt"  # the namespace of operators that are Triton kernels of a benchmark
NOT_COUNTED = {
    *("_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("detach", "alias", "lift_fresh"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """The launches of a training step or an evaluation on a batch of one shape.

    `kernels` are those compiled for it; `num_graphs` counts forward and backward pass of each piece.
    """

    shape: str
    tally: Tally
    kernels: tuple[Kernel, ...]
    num_graphs: int


class Compiler(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Compiles code that runs for one GPU, and counts its launches; `open_compiler` makes one.

    As a dispatch mode it sees each operator on the pretended GPU. Inside of compiled code it counts library
    calls only: the kernels are known from the code.
    """

    def __init__(self, fake_mode: FakeTensorMode, cubins: Mapping[str, list[bytes]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake_mode, self.cubins = fake_mode, cubins  # of every kernel, by its name
        self.kernels: list[Kernel] = []
        self.own_forms = set[Any]()  # operators of the suite's Triton kernels, with their arguments' forms
        self.num_graphs = self.num_recompiles = 0
        self.tally: Tally | None = None  # None: nothing is counted now
        self.library: frozenset[str] | None = None  # operators that the compiled graph which runs calls

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Let Dynamo compile although a mode is active."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__.startswith("_fused_"):  # optimizers: no form without values
            self.count(func, args, kwargs, None)
            return None
        is_copy = func is torch.ops.aten._to_copy.default and kwargs.get("device") == DEVICE
        if is_copy and not isinstance(args[0], FakeTensor):
            copied: Any = self.fake_mode.from_tensor(args[0])  # a batch arrives from the host
            if args[0].dtype == torch.int32 and args[0].ndim == 1:  # offsets of packed sequences
                with unset_fake_temporarily():
                    copied.lengths = args[0].diff().tolist()
            return copied
        result = func(*args, **kwargs)
        if list_fakes((args, kwargs)):
            self.count(func, args, kwargs, result)
            if func.namespace == OWN_OPERATORS:
                self.compile_own(func, args, kwargs)
        return result

    def compile_own(self, func: Any, args: Any, kwargs: Any) -> None:
        """Launch the kernel of one of our operators, which compiles it, once for each form of arguments."""
        values = tree_leaves((args, kwargs))
        form = func, *((one.dtype, one.shape) if isinstance(one, Tensor) else one for one in values)
        if form not in self.own_forms:
            self.own_forms.add(form)
            OPDEFS[func._schema.name]._init_fn(*args, **kwargs)

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = func.overloadpacket.__name__
        kind = classify_library(name)
        if self.tally is None or (self.library is not None and not (kind or name in self.library)):
            return
        if func.is_view or func.namespace == "prim" or name in NOT_COUNTED:
            return
        num_bytes = count_moved_bytes(func, args, kwargs, result)
        flops = count_attention_flops(name, args) if kind == ATTENTION else 0.0
        if kind and kind != ATTENTION and func.overloadpacket in flop_registry:
            flops = float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
        count = 1
        if name == "convolution_backward":  # the gradients of image and weight each read that of the result
            count, num_bytes, flops = 2, (num_bytes + count_bytes(args[0])) / 2, flops / 2
        self.tally[Launch(name, kind or classify([name]), num_bytes, flops)] += count

    def compile_inner(self, graph: torch.fx.GraphModule, inputs: Any, **settings: Any) -> Callable[..., Any]:
        """Stand in for Inductor's `compile_fx_inner`; the returned function counts, and computes nothing."""
        from torch._inductor.compile_fx import compile_fx_inner

        def on_device(value: Any) -> Any:
            return DEVICE if value == HOST else value

        for node in graph.graph.nodes:  # autograd's C++ saw the host
            node.args, node.kwargs = tree_map(on_device, (node.args, node.kwargs))
        graph.recompile()
        plain = copy.deepcopy(graph)
        with redirect_stderr(io.StringIO()):  # it prints a path
            lowered: Any = compile_fx_inner(graph, inputs, **settings)
        kernels, library = read_code(lowered.source_code)
        self.num_graphs += 1
        self.kernels += [measure_kernel(one.name, one.kind, self.cubins[one.name]) for one in kernels]

        def run(values: list[Any]) -> Any:
            if self.tally is not None:
                self.tally.update(kernels)
            self.library = library
            try:
                return plain(*values)
            finally:
                self.library = None
                values.clear()

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def compile(self, shape: str, call: Callable[[], object]) -> Compiled:
        """Return the launches of a call. The first call compiles; the second one, which counts, must not."""
        num_graphs, num_kernels = self.num_graphs, len(self.kernels)
        call()
        num_compiled, tally = self.num_graphs, Counter[Launch]()
        self.tally = tally
        try:
            call()
        finally:
            self.tally = None
        if self.num_graphs != num_compiled:
            raise RuntimeError("the second call of a step compiled again")
        return Compiled(
            shape=shape,
            kernels=tuple(self.kernels[num_kernels:]),
            num_graphs=num_compiled - num_graphs,
            tally=tally,
        )

    def add_own_kernels(self, benchmark: Benchmark) -> None:
        """Compile the suite's own Triton kernels, also those that no step calls."""
        for pair in probes_of(benchmark).kernel_pairs():
            pair.kernel()
        names = [name for name in self.cubins if not name.startswith("triton_")]  # as Inductor names its own
        self.kernels += [measure_kernel(name, OWN, self.cubins[name], choose=max) for name in names]


def list_fakes(values: Any) -> list[Any]:
    return [value for value in tree_leaves(values) if isinstance(value, FakeTensor)]


def count_bytes(value: Tensor) -> int:
    sizes = [size for size, stride in zip(value.shape, value.stride(), strict=True) if stride]
    return value.element_size() * torch.Size(sizes).numel()


def count_moved_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return bytes read and written: arguments, new results, and arguments that are written to."""
    read, written = list_fakes((args, kwargs)), list_fakes(result)
    arguments = func._schema.arguments
    values = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    changed = [values.get(one.name) for one in arguments if one.alias_info and one.alias_info.is_write]
    known = {id(value) for value in read}
    new = [value for value in written if id(value) not in known]
    if func.overloadpacket.__name__ in ("fill_", "zero_", "copy_"):
        read = read[1:]
    return float(sum(count_bytes(value) for value in (*read, *new, *list_fakes(changed))))


def count_attention_flops(name: str, args: Sequence[Any]) -> float:
    """Return the FLOPs of the matmuls of attention; each of several packed sequences attends to itself.

    Shapes end in heads and size if packed, else are (batch, heads, tokens, size). Raises ValueError where the
    lengths of packed sequences are not known.
    """
    is_backward = "backward" in name
    query, key, *_ = args[1:] if is_backward else args
    if lengths := [value.lengths for value in args if hasattr(value, "lengths")]:
        pairs = sum(queries * keys for queries, keys in zip(lengths[0], lengths[-1], strict=True))
        flops = 4.0 * pairs * query.shape[-2] * query.shape[-1]
    elif query.ndim == 4:
        flops = 4.0 * query.numel() * key.shape[-2]
    else:
        raise ValueError("attention over sequences of unknown length")
    return float(BACKWARD_ATTENTION * flops if is_backward else flops)


@contextmanager
def open_compiler(gpu: Gpu) -> Iterator[Compiler]:
    """Pretend a GPU inside the block; what the suite computes there is compiled for it and counted."""
    from torch._inductor import compile_fx
    from torch._inductor.codegen.triton_combo_kernel import ComboKernel

    torch._dynamo.utils.counters.clear()
    cubins: dict[str, list[bytes]] = {}

    def keep(name: str, ways: list[bytes]) -> None:
        """Keep the ways to launch one of Inductor's kernels; of an own kernel, all its forms."""
        cubins[name] = ways if name.startswith("triton_") else [*cubins.get(name, []), *ways]

    with pretend(gpu, keep) as fake_mode:
        compiler = Compiler(fake_mode, cubins)

        compile_graph = partial(compile_fx.compile_fx, inner_compile=compiler.compile_inner)  # type: ignore[arg-type]
        to_device = step.to_device

        def make_fake(batch: Batch, device: torch.device) -> Batch:
            with fake_mode, compiler:
                return to_device(batch, device)

        with (
            mock.patch.object(compile_fx, "compile_fx", compile_graph),
            mock.patch.object(ComboKernel, "jit_line", state_bytes(ComboKernel.jit_line)),
            mock.patch.object(step, "to_device", make_fake),
            mock.patch.object(Training, "prepare_batch", on_host(Training.prepare_batch)),
            mock.patch.object(Batch, "parts", on_host(Batch.parts)),
            fake_mode,
            compiler,
        ):
            yield compiler


def state_bytes(jit_line: Callable[..., str]) -> Callable[..., str]:
    """Make the code of a combined kernel state the gigabytes of its parts, which torch 2.11 leaves out."""

    def write(kernel: Any, *args: Any, **named: Any) -> str:
        line = jit_line(kernel, *args, **named)
        if "kernel_num_gb" in line:
            return line
        num_bytes = sum(part.estimate_kernel_num_bytes() for part in kernel.sub_kernels)
        return line.replace("inductor_meta={", f"inductor_meta={{'kernel_num_gb': {num_bytes / GIGA}, ")

    return write


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function compute values, such as a loader's batch, inside a mode without values."""

    def compute(*args: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args)

    return compute


def measure_kernel(name: str, kind: str, cubins: Iterable[bytes], choose: Callable[..., Any] = min) -> Kernel:
    spilled, registers = choose(read_resources(cubin)[::-1] for cubin in set(cubins))
    return Kernel(name=name, kind=kind, registers=registers, spilled_bytes=spilled)


def read_resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of stack of a thread, as Triton's cuobjdump reads them."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (numbers,) = re.findall(r"REG:(\d+) STACK:(\d+)", usage)
    return int(numbers[0]), int(numbers[1])


def make_host_batches(benchmark: Benchmark) -> dict[str, Batch]:
    with unset_fake_temporarily(), mock.patch.object(type(benchmark), "device", HOST):
        return probes_of(benchmark).bench_batches(benchmark.num_rank_samples)


def compile_training(compiler: Compiler, run: Training, names: Sequence[str] = ()) -> Iterator[Compiled]:
    """Yield each shape of a built training as it is compiled, or those in `names`.

    Raises UserError for a shape that training does not have.
    """
    shares = probes_of(run.benchmark).shape_shares()
    batches = {shape: batch for shape, batch in make_host_batches(run.benchmark).items() if shape in shares}
    if unknown := [name for name in names if name not in batches]:
        raise UserError(f"no shape '{unknown[0]}' in training", hint=nearest(unknown[0], batches))
    last = run.plan.num_steps - 1
    for shape in names or batches:
        batch = batches[shape]
        yield compiler.compile(shape, lambda: run.train_step(batch, last))  # noqa: B023
    before = compiler.num_graphs
    run.train_step(batches[next(iter(names or batches))], last)  # a shape that was compiled before
    compiler.num_recompiles = compiler.num_graphs - before


def compile_evaluation(compiler: Compiler, run: Training) -> Compiled:
    """Return the launches of an evaluation of as many samples as a step has, in the largest shape."""
    shape, batch = list(make_host_batches(run.benchmark).items())[-1]

    @torch.no_grad()
    def evaluate() -> None:
        run.count_correct(run.evaluation_model(), batch)
        run.model.train()

    return compiler.compile(shape, evaluate)


def build_training(benchmark: Benchmark) -> Training:
    benchmark.num_targets = on_host(benchmark.num_targets)  # type: ignore[method-assign]
    run = Training(benchmark.config, benchmark, seed=0)
    run.build(from_scratch=True)
    run.replica = run.model
    return run


def count_graph_breaks() -> dict[str, int]:
    return dict(torch._dynamo.utils.counters["graph_break"])
