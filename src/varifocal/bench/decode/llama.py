"""llama.cpp in a process of its own, perhaps of another interpreter: llama-cpp-python need not be installed here."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from varifocal.bench.decode.turn import Turn
from varifocal.retrofit.packaged import packaged_file

WORKER = Path(__file__).with_name("llama_worker.py")


class LlamaProcess:
    """Answers one line of JSON with another."""

    def __init__(self, name: str, source: str | Path, kind: str, *, python: str | None, folder: Path) -> None:
        if python is None and find_spec("llama_cpp") is None:
            raise ValueError(
                f"{name} needs llama-cpp-python: install it, or name an interpreter that has it with --llama-python"
            )
        file = packaged_file(str(source)) or Path(source)
        if file.suffix != ".gguf":
            raise ValueError(f"{name} reads GGUF, and {source} is no .gguf file; leave it out")
        self.name, self.file = name, folder / f"{kind}.gguf"
        rewrite(file, self.file, kind)
        self.process = subprocess.Popen(
            [python or sys.executable, str(WORKER), str(self.file), str(torch.get_num_threads())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.kept = 0

    def ask(self, **task: Any) -> dict[str, Any]:
        """The answer to a task; ValueError if the process ended instead."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self.process.stdout.readline()
        if not line:
            raise ValueError(f"{self.name} ended with code {self.process.wait()}; is llama-cpp-python installed there?")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def prepare(self, *, texts: int, context: int, room: int, prompt: bool) -> float | None:
        """Read a prompt: nothing else can fill this cache."""
        if texts != 1:
            raise ValueError(f"{self.name} decodes one text at a time, got {texts}; leave it out")
        self.kept = context
        return float(self.ask(do="prepare", context=context, room=room)["seconds"])

    def take_turn(self, tokens: int) -> Turn:
        answer = self.ask(do="decode", tokens=tokens)
        return Turn(answer["seconds"], answer["processor_seconds"])

    def bytes_read(self) -> int | None:
        """Weights as the file has them; keys and values in 32 bits, as the process is told to keep them."""
        sizes = self.ask(do="sizes")
        return self.file.stat().st_size + 2 * 4 * self.kept * int(sizes["numbers_a_token"])

    def forget(self) -> None:
        """The next context takes the place of this one."""

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


def rewrite(source: Path, out: Path, kind: str) -> None:
    """Write a GGUF file once more, with its matrices as another kind of numbers."""
    import gguf

    read = gguf.GGUFReader(source)
    architecture = str(read.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(out, architecture)
    skipped = ("general.architecture", "general.file_type", "general.quantization_version", "GGUF.")
    for name, field in read.fields.items():
        if not name.startswith(skipped):
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if array else None)
    wanted = gguf.GGMLQuantizationType[kind]
    for tensor in read.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if numbers.ndim == 2 and kind != "F32":
            writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
