"""A pretended GPU: torch and Triton compile for it, tensors claim to lie on it, and nothing is computed.

A kernel can be compiled for a GPU that is not there, but torch asks a driver long before it compiles. So
inside of `pretend` five things are replaced, and put back afterwards:

- the driver: `torch.cuda` answers with the properties of `Gpu`;
- tensors: those of FakeTensorMode have shapes and no values. Python sees them on "cuda:0"; the C++ of
  autograd sees "cpu", since it would start a thread for each device of the driver and take its streams.
  Their dispatch keys are CUDA's, so that autocast decides as on a GPU;
- autocast: its kernels would ask C++ for the device, so its lists of operators are registered again here;
- `Module.to`, which cannot exchange fake parameters;
- Triton's driver and launcher: its own ptxas makes the cubins, only their loading is left out.

All of it reaches into internals of torch and Triton, and compile_for.py into Inductor's. It works with torch
2.11.0 (triton 3.6.0) and torch 2.15.0 (triton 3.9.0), on machines without a GPU.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._pytree import tree_map

from common.errors import UserError

Compiled = Callable[[str, list[bytes]], None]  # a kernel's name, and a cubin for each way to launch it
DEVICE = torch.device("cuda", 0)
HOST, META = torch.device("cpu"), torch.device("meta")
# Autocast's own lists, source: aten/src/ATen/autocast_mode.h; its kernels would ask C++ for the device.
IN_16_BITS = (
    "conv1d conv2d conv3d convolution linear matmul mm mv bmm addmm addbmm baddbmm einsum prelu "
    "scaled_dot_product_attention"
)
IN_FLOAT32 = (
    "layer_norm group_norm softmax.int log_softmax.int nll_loss nll_loss_nd cross_entropy_loss mse_loss "
    "binary_cross_entropy_with_logits norm.Scalar exp log pow.Tensor_Scalar cumsum rsqrt reciprocal softplus"
)
CUDNN_VERSION = 91900  # of the wheels of torch 2.15; torch asks for it to choose a kernel of attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """The properties by which Inductor decides, under the names that torch gives them; sizes in bytes."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    shared_memory_per_multiprocessor: int
    shared_memory_per_block_optin: int
    L2_cache_size: int
    total_memory: int = 80 * 2**30
    shared_memory_per_block: int = 49152
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    max_threads_per_block: int = 1024
    warp_size: int = 32
    clock_rate: int = 1_410_000  # kHz
    memory_clock_rate: int = 1_593_000
    memory_bus_width: int = 5120
    gcnArchName: str = ""
    is_integrated: bool = False


GPUS = {  # by the name of the architecture; source: CUDA C++ Programming Guide, compute capabilities
    "sm_80": Gpu(
        name="NVIDIA A100-SXM4-80GB",
        major=8,
        minor=0,
        multi_processor_count=108,
        shared_memory_per_multiprocessor=164 * 1024,
        shared_memory_per_block_optin=163 * 1024,
        L2_cache_size=40 * 2**20,
    ),
    "sm_90": Gpu(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        multi_processor_count=132,
        shared_memory_per_multiprocessor=228 * 1024,
        shared_memory_per_block_optin=227 * 1024,
        L2_cache_size=50 * 2**20,
        clock_rate=1_980_000,
        memory_clock_rate=2_619_000,
    ),
}


def find_gpu(architecture: str) -> Gpu:
    """Return the GPU of an architecture. Raises UserError for one that is not listed, or without Triton."""
    if architecture not in GPUS:
        hint = f"known: {', '.join(f'{name} ({gpu.name})' for name, gpu in GPUS.items())}"
        raise UserError(f"unknown architecture '{architecture}'", where="--for", hint=hint)
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise UserError("Triton is not installed", hint="pip install triton, or torch for Linux") from error
    return GPUS[architecture]


@contextmanager
def pretend(gpu: Gpu, compiled: Compiled) -> Iterator[FakeTensorMode]:
    """Make torch, Inductor and Triton see `gpu` inside the block; yields the mode of its tensors."""
    import torch._dynamo.trace_rules as rules
    import torch._inductor.compile_fx
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    rules.get_torch_obj_rule_map()  # these tables are made once, of the functions that are replaced below
    TorchInGraphFunctionVariable._get_handlers()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with ExitStack() as stack:
        for target, name, value in (*replace_driver(gpu), *replace_tensors()):
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        handlers = {torch.ops.prim.device.default: answer_device}
        stack.enter_context(mock.patch.dict(fake_tensor._DISPATCH_META_HANDLERS, handlers))
        stack.enter_context(replace_autocast())
        stack.enter_context(replace_triton(gpu, compiled))
        yield mode
    torch._dynamo.reset()


def answer_always(value: Any) -> Callable[..., Any]:
    return lambda *args, **named: value


def replace_driver(gpu: Gpu) -> Iterator[tuple[Any, str, Any]]:
    """Yield the functions that ask a driver: their module, their name, and their replacement."""
    cuda = torch.cuda
    answers = {
        "is_available": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "get_device_capability": (gpu.major, gpu.minor),
        "get_device_properties": gpu,
        "_get_device_properties": gpu,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "is_current_stream_capturing": False,
        "current_stream": SimpleNamespace(cuda_stream=0),
    }
    for name, value in answers.items():
        yield cuda, name, answer_always(value)
    yield cuda.random, "_lazy_init", answer_always(None)
    yield cuda.graphs, "_cuda_isCurrentStreamCapturing", answer_always(False)
    yield cuda.amp.common, "amp_definitely_not_available", answer_always(False)
    yield torch.accelerator, "is_available", answer_always(False)  # Dynamo would ask it for a stream
    yield torch.backends.cudnn, "version", answer_always(CUDNN_VERSION)
    yield torch._C, "_conv_determine_backend_memory_format", choose_layout


@contextmanager
def replace_triton(gpu: Gpu, compiled: Compiled) -> Iterator[None]:
    """Make Triton compile for `gpu`, and pass its cubins to `compiled` instead of loading them."""
    import torch._inductor.runtime.triton_helpers as helpers
    from torch._inductor import config
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from torch._inductor.utils import get_gpu_type
    from torch.utils._triton import has_triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver as active
    from triton.runtime.jit import JITFunction, MockTensor

    launch = JITFunction.run
    initialize = joint_graph.lazy_init  # of patterns, which asks for tensors with values

    answers = {
        "is_active": True,
        "get_current_target": GPUTarget("cuda", gpu.major * 10 + gpu.minor, gpu.warp_size),
        "get_current_device": 0,
        "set_current_device": None,
        "get_current_stream": 0,
        "get_active_torch_device": DEVICE,
        "get_device_interface": torch.cuda,
        "get_benchmarker": None,
        "map_python_to_cpp_type": "int",
    }
    driver = SimpleNamespace(**{name: answer_always(answer) for name, answer in answers.items()})

    def keep(tuner: CachingAutotuner, *args: Any, **named: Any) -> None:
        tuner._precompile_worker()  # type: ignore[no-untyped-call]
        tuner.launchers = [answer_always(None)]
        compiled(tuner.fn.__name__, [result.kernel.asm["cubin"] for result in tuner.compile_results])

    def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool = False, **named: Any) -> None:
        kernel.device_caches.clear()  # of another GPU
        types = [MockTensor.wrap_dtype(value.dtype) if isinstance(value, Tensor) else value for value in args]
        made = launch(kernel, *types, grid=grid, warmup=True, **named)
        compiled(kernel.fn.__name__, [made.asm["cubin"]])

    settings: dict[str, Any] = {"compile_threads": 1, "fx_graph_cache": False, "benchmark_kernel": True}
    settings |= {"joint_graph_constant_folding": False, "triton.descriptive_names": "original_aten"}
    settings["shape_padding"] = False  # of matrix products: on a GPU their times decide it
    launchers = ("use_static_cuda_launcher", "use_static_triton_launcher")  # of torch 2.11, of 2.15
    settings |= {name: False for name in launchers if hasattr(config, name)}
    before = active._active
    active.set_active(driver)
    answered_once = get_gpu_type, has_triton
    for function in answered_once:
        function.cache_clear()
    try:
        with (
            config.patch(settings),
            mock.patch.object(helpers, "set_driver_to_gpu", answer_always(None)),
            mock.patch.object(CachingAutotuner, "precompile", keep),
            mock.patch.object(JITFunction, "run", compile_only),
            mock.patch.object(joint_graph, "lazy_init", lambda device=None: initialize(HOST)),
        ):
            yield
    finally:
        for function in answered_once:
            function.cache_clear()
        active._active = before


def choose_layout(images: Tensor, weight: Tensor, backend: Any) -> torch.memory_format:
    is_last = any(suggest_memory_format(tensor) == torch.channels_last for tensor in (images, weight))
    return torch.channels_last if is_last else torch.contiguous_format


def answer_device(args: Any) -> torch.device:
    return META if args[0].fake_mode.in_kernel_invocation else HOST


def replace_tensors() -> Iterator[tuple[Any, str, Any]]:
    """Yield the replacements by which a fake tensor lies on `DEVICE` for Python and on the host for C++."""
    new, dispatch = FakeTensor.__new__, vars(FakeTensor)["__torch_dispatch__"].__func__

    def on_device(
        cls: Any, mode: Any = None, elem: Any = None, device: Any = None, *rest: Any, **named: Any
    ) -> Any:
        rest_named = {name: value for name, value in named.items() if not name.endswith("device")}
        return new(cls, mode, elem, DEVICE, *rest, **rest_named)

    def dispatch_to_host(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return answer_device(args)
        return dispatch(cls, func, types, args, kwargs or {})

    keys = FunctionalTensor._extra_dispatch_keys.add(torch._C.DispatchKey.AutocastCUDA)
    yield FakeTensor, "__new__", staticmethod(on_device)
    yield fake_tensor, "init_gpu_context", answer_always(None)
    yield FakeTensor, "is_cuda", property(answer_always(True))
    yield FakeTensor, "__torch_dispatch__", classmethod(dispatch_to_host)
    yield FunctionalTensor, "_extra_dispatch_keys", keys
    yield nn.Module, "to", convert_module
    yield Tensor, "pin_memory", lambda tensor, *args: tensor


@contextmanager
def replace_autocast() -> Iterator[None]:
    """Cast the arguments of operators as autocast does on a GPU."""
    key = torch._C.DispatchKey.AutocastCUDA
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def register(name: str, dtype_of: Callable[[], torch.dtype]) -> None:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet), overload or "default")

        def kernel(*args: Any, **named: Any) -> Any:
            dtype = dtype_of()

            def cast(value: Any) -> Any:
                is_number = isinstance(value, Tensor) and value.is_floating_point()
                return value.to(dtype) if is_number and value.dtype != torch.float64 else value

            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
                return operator(*tree_map(cast, args), **tree_map(cast, named))

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it takes the place of another
            library.impl(name, kernel, key.name, allow_override=True)

    for name in IN_16_BITS.split():
        register(name, lambda: torch.get_autocast_dtype("cuda"))
    for name in IN_FLOAT32.split():
        register(name, lambda: torch.float32)
    try:
        yield
    finally:
        library._destroy()


def convert_module(module: nn.Module, *args: Any, **named: Any) -> nn.Module:
    """Stand in for `Module.to`, which cannot exchange fake parameters: change their layout only."""
    layout, known = named.get("memory_format"), dict[int, nn.Parameter]()
    for part in module.modules() if layout is not None else ():
        for name, value in part._parameters.items():
            if value is not None and value.ndim == 4:
                converted = nn.Parameter(value.detach().to(memory_format=layout))
                part._parameters[name] = known.setdefault(id(value), converted)
    return module
