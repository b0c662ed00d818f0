"""An NVML that answers as a test wants."""

import inspect
from types import SimpleNamespace

import pynvml
import pytest


def refuse(*_):
    """Answer as a driver that does not support a query."""
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture
def nvml(monkeypatch):
    """Return a function that lets NVML show some GPUs and give `answers`: name -> value, or function."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = [name for name, _ in inspect.getmembers(pynvml, inspect.isfunction) if name.startswith("nvml")]

    def install(num_gpus, model="NVIDIA H200", **answers):
        answers |= {
            "Init": None,
            "DeviceGetCount": num_gpus,
            "DeviceGetHandleByIndex": lambda index: index,
            "DeviceGetName": model,
        }
        for name in names:
            answer = answers.get(name.removeprefix("nvml"), refuse)
            monkeypatch.setattr(pynvml, name, answer if callable(answer) else lambda *_, value=answer: value)

    return install


@pytest.fixture
def sick(nvml):
    """Return a function that makes GPU 2 of four answer other than healthy ones do."""

    def install(num_gpus=4, *, xids=(), **changes):
        usual = {"ecc": 0, "rows": (0, 0, 0, 0), "reasons": 1, "used": 2**28}
        registered, pending = [], list(xids)

        def answer(name):
            return lambda gpu, *_: (usual | changes if gpu == 2 else usual)[name]

        nvml(
            num_gpus,
            DeviceGetUUID=lambda gpu: f"GPU-{gpu}f-7",
            DeviceGetTotalEccErrors=answer("ecc"),
            DeviceGetRemappedRows=answer("rows"),
            DeviceGetCurrentClocksThrottleReasons=answer("reasons"),
            DeviceGetMemoryInfo=lambda gpu: SimpleNamespace(used=answer("used")(gpu)),
            EventSetCreate="events",
            DeviceRegisterEvents=lambda gpu, *_: registered.append(gpu),
            EventSetWait_v2=lambda *_: SimpleNamespace(eventData=pending.pop()) if pending else refuse(),
            EventSetFree=None,
        )
        return registered

    return install
