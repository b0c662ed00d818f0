"""Machine code of FP8's kernel for Hopper, made without a GPU: no instruction reads what none has written.

NVIDIA's assembler made such code of an earlier form of the kernel, whose PTX was right.
"""

import re
import subprocess
from pathlib import Path

import pytest

from common.measure.without_gpu.compile_for import open_compiler
from common.measure.without_gpu.pretend import GPUS
from tests.runs import make_benchmark

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4}\*/\s+(?:@!?\w+\s+)?([\w.]+)\s+([^;]*?)\s*;")
REGISTER = re.compile(r"\bR(\d+)\b")
# Of PRMT: the upper half of the result is what it was, and is not used.
LOWER_HALF = re.compile(r"(R\d+), .*, 0x(?:7610|7632), \1\b.*")
STACK = 1  # the number of the register of the stack, which these kernels do not have


def list_unwritten(code):
    """Return the instructions of a program without loops that read a register before one has written it."""
    written, found = set(), []
    for name, operands in INSTRUCTION.findall(code):
        words = re.sub(r"^(?:!?U?P[T\d]+, )+", "", operands).split(", ")
        has_result = not name.startswith(("ST", "RED")) and "SETP" not in name
        sources = ", ".join(words[1:] if has_result else words)
        if name == "PRMT" and LOWER_HALF.fullmatch(operands):
            sources = ", ".join(words[1:-1])
        read = {int(number) for number in REGISTER.findall(sources)}
        if read - written or STACK in read:
            found.append(f"{name} {operands}")
        if has_result:  # of up to four registers
            written |= {int(first) + more for first in REGISTER.findall(words[0]) for more in range(4)}
    return found


def test_the_code_of_the_kernel_of_fp8_reads_only_what_it_has_written(tmp_path):
    triton = pytest.importorskip("triton")
    program = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with open_compiler(GPUS["sm_90"]) as compiler:
        compiler.add_own_kernels(make_benchmark("language_bert", "baseline"))
        binaries = compiler.cubins["quantize_kernel"]
    assert len(binaries) >= 3  # values, gradients, and those of GELU
    for binary in binaries:
        (tmp_path / "kernel.cubin").write_bytes(binary)
        command = [program, "-c", tmp_path / "kernel.cubin"]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert len(INSTRUCTION.findall(code)) > 500
        assert list_unwritten(code) == []
