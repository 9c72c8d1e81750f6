"""A GPU that is not there: torch's inductor writes the Triton kernels for it, and hands their text to us.

The one place that reaches into private parts of torch, all of them of torch 2.13. Fake tensors carry the device;
nothing is computed here. Pretending cannot be undone: it takes a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from tests.gpu_check.gpus import Gpu

KNOWN_TORCH = "2.13"
BUILD = Path("build/gpu_check")


class Launcher(Protocol):
    """A kernel as the code that inductor writes around it calls it."""

    def run(self, *arguments: Any, **options: Any) -> None: ...


def pretend(gpu: Gpu, make_launcher: Callable[[str, str], Launcher]) -> None:
    """Make torch believe in the GPU. `make_launcher(name, text)` receives every Triton kernel that is written for it.

    `load_device()` comes before it, and before torch is imported.
    """
    import torch

    # Inductor asks which CUDA torch was built for, to see whether Triton knows it.
    torch.version.cuda = torch.version.cuda or "13.0"
    pretend_to_torch(gpu)
    pretend_to_triton(gpu)
    pretend_to_inductor(make_launcher)


def require_torch() -> None:
    """ImportError with one sentence if this torch is not the one whose private parts are known."""
    from importlib.metadata import version

    found = version("torch")
    if found.split(".")[:2] != KNOWN_TORCH.split("."):
        raise ImportError(
            f"the check of GPU kernels reaches into private parts of torch {KNOWN_TORCH}, got {found}; look through "
            "tests/gpu_check/pretended.py, then change the version there"
        )


def load_device() -> None:
    """Give a torch without CUDA a device, before it asks once and for all whether there is one."""
    require_torch()
    # Read when inductor is imported. What it kept of another process was written for a real device.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    found = find_spec("torch")
    assert found is not None
    assert found.origin is not None
    home = Path(found.origin).parent
    if (home / "lib/libtorch_cuda.so").exists():
        return
    ctypes.CDLL(str(home / "lib/libtorch_global_deps.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(home / "lib/libtorch_cpu.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(built_device(home)))


def built_device(home: Path) -> Path:
    """The library of device.cpp, compiled against the headers of torch in `home`."""
    source = Path(__file__).with_name("device.cpp")
    library = BUILD / f"device_{home.stat().st_ino}.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        BUILD.mkdir(parents=True, exist_ok=True)
        fresh = library.with_suffix(f".{os.getpid()}")
        compiler = os.environ.get("CXX", "g++")
        command = [compiler, "-shared", "-fPIC", "-std=c++20", f"-I{home}/include", str(source), "-o", str(fresh)]
        subprocess.run([*command, f"-L{home}/lib", "-lc10", "-ltorch_cpu"], check=True)
        # Another process may have been faster; whichever library stands there is whole.
        fresh.replace(library)
    return library.absolute()


class NoDevice:
    """The context in which a device is the current one."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def pretend_to_torch(gpu: Gpu) -> None:
    """torch.cuda, and what dynamo asks of it."""
    import torch
    from torch._dynamo import device_interface

    properties = SimpleNamespace(
        name=gpu.model, major=gpu.capability[0], minor=gpu.capability[1], multi_processor_count=gpu.processors,
        total_memory=24 << 30, warp_size=32, max_threads_per_multi_processor=gpu.threads, max_threads_per_block=1024,
        regs_per_multiprocessor=gpu.registers, shared_memory_per_block=49152,
        shared_memory_per_block_optin=gpu.shared_memory,
        shared_memory_per_multiprocessor=gpu.shared_memory_of_processor, L2_cache_size=40 << 20, is_integrated=0,
        is_multi_gpu_board=0, gcnArchName="", uuid="none", pci_bus_id=0, pci_device_id=0, pci_domain_id=0,
        clock_rate=1_400_000, memory_clock_rate=1_200_000, memory_bus_width=5120,
    )  # fmt: skip
    replace(
        torch.cuda, _DeviceGuard=NoDevice, _exchange_device=of(0), _lazy_init=of(None), _maybe_exchange_device=of(0),
        current_device=of(0), device=NoDevice, device_count=of(1), get_device_capability=of(gpu.capability),
        get_device_name=of(gpu.model), get_device_properties=of(properties),
        get_rng_state=lambda device="cuda": torch.get_rng_state(), init=of(None), is_available=of(True),
        is_bf16_supported=of(True), is_current_stream_capturing=of(False), is_initialized=of(True),
        mem_get_info=of((20 << 30, 24 << 30)), memory_allocated=of(0), set_device=of(None), set_rng_state=of(None),
        synchronize=of(None),
    )  # fmt: skip
    replace(
        torch._C, _cuda_exchangeDevice=of(0), _cuda_getCurrentRawStream=of(0), _cuda_getDevice=of(0),
        _cuda_getDeviceCount=of(1), _cuda_maybeExchangeDevice=of(0), _cuda_setDevice=of(None),
        _cuda_synchronize=of(None),
    )  # fmt: skip
    interface: Any = device_interface.CudaInterface
    answers: dict[str, Any] = {
        "current_device": 0, "device_count": 1, "get_compute_capability": gpu.number, "is_available": True,
        "get_device_properties": properties, "get_raw_stream": 0, "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
    }  # fmt: skip
    replace(interface, device=NoDevice, **{name: staticmethod(of(answer)) for name, answer in answers.items()})
    worker = {"current_device": 0, "set_device": None, "get_device_properties": properties}
    replace(interface.Worker, **{name: staticmethod(of(answer)) for name, answer in worker.items()})


def pretend_to_triton(gpu: Gpu) -> None:
    """The driver that triton asks for the target it compiles for."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    limits = {
        "max_shared_mem": gpu.shared_memory,
        "multiprocessor_count": gpu.processors,
        "warpSize": 32,
        "max_num_regs": gpu.registers,
    }
    driver = SimpleNamespace(
        get_current_target=of(GPUTarget("cuda", gpu.number, 32)),
        get_current_device=of(0),
        get_active_torch_device=of(torch.device("cuda", 0)),
        get_current_stream=of(0),
        get_device_interface=of(torch.cuda),
        is_active=of(True),
        map_python_to_cpp_type=of("int"),
        utils=SimpleNamespace(get_device_properties=of(limits)),
    )
    triton.runtime.driver.set_active(driver)


def pretend_to_inductor(make_launcher: Callable[[str, str], Launcher]) -> None:
    """What writes the kernels and the code around them."""
    import torch
    from torch._inductor import async_compile, config
    from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm

    def launcher(self: Any, kernel_name: str, source_code: str, device_str: str = "cuda") -> Launcher:
        return make_launcher(kernel_name, source_code)

    replace(async_compile.AsyncCompile, triton=launcher)
    # These trace patterns with real tensors of the device. None of them is about flex attention.
    replace(fuse_attention, _sfdp_init=of(None))
    replace(misc_patterns, _misc_patterns_init=of(None))
    replace(pad_mm, _pad_mm_init=of(None))
    # So does the folding of constants.
    config.joint_graph_constant_folding = False
    # The code around kernels does this in C++, which looks at memory that fake tensors do not have.
    replace(
        torch._C._dynamo.guards,
        _empty_strided_cuda=empty_on_device,
        _reinterpret_tensor=lambda tensor, size, stride, offset=0: torch.as_strided(
            tensor, size, stride, tensor.storage_offset() + offset
        ),
        assert_alignment=of(None),
        assert_size_stride=of(None),
        copy_if_misaligned=lambda tensor: tensor,
    )


def empty_on_device(size: Any, stride: Any, dtype: Any) -> Any:
    """A fake tensor, under a fake mode."""
    import torch

    return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")


def allocate_by(empty: Callable[[Any, Any, Any], Any]) -> None:
    """Let the code around kernels allocate by a function of size, stride and type."""
    import torch

    replace(torch._C._dynamo.guards, _empty_strided_cuda=empty)


def replace(holder: Any, **parts: Any) -> None:
    """Put other parts in the place of a module's or a class's own."""
    for name, part in parts.items():
        setattr(holder, name, part)


def of(answer: Any) -> Callable[..., Any]:
    """A function with one answer."""
    return lambda *_, **__: answer
