"""What a kernel may use of each GPU for which kernels are compiled: the limits of its compute capability."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU of each compute capability that counts."""

    name: str
    model: str
    """As its driver names it."""
    capability: tuple[int, int]
    processors: int
    shared_memory: int
    """Bytes that one block may ask for."""
    shared_memory_of_processor: int
    """Bytes for all blocks of a multiprocessor, of which each takes 1,024 more than it asks for."""
    threads: int
    """Of a multiprocessor."""
    blocks: int
    """Of a multiprocessor, at most."""
    registers: int = 65536
    """Of a multiprocessor, 32 bits each."""

    @property
    def architecture(self) -> str:
        """Such as sm_80."""
        return f"sm_{self.number}"

    @property
    def number(self) -> int:
        """Such as 80."""
        return self.capability[0] * 10 + self.capability[1]


GPUS: dict[str, Gpu] = {
    gpu.architecture: gpu
    for gpu in (
        Gpu(
            name="A100", model="NVIDIA A100-SXM4-80GB", capability=(8, 0), processors=108, shared_memory=166_912,
            shared_memory_of_processor=167_936, threads=2048, blocks=32,
        ),
        Gpu(
            name="A10", model="NVIDIA A10", capability=(8, 6), processors=72, shared_memory=101_376,
            shared_memory_of_processor=102_400, threads=1536, blocks=16,
        ),
        Gpu(
            name="H100", model="NVIDIA H100 80GB HBM3", capability=(9, 0), processors=132, shared_memory=232_448,
            shared_memory_of_processor=233_472, threads=2048, blocks=32,
        ),
        Gpu(
            name="B200", model="NVIDIA B200", capability=(10, 0), processors=148, shared_memory=232_448,
            shared_memory_of_processor=233_472, threads=2048, blocks=32,
        ),
    )
}  # fmt: skip
"""By architecture. An L4 and a 4090 (sm_89) have the limits of an A10, as has a 3090 (sm_86)."""
