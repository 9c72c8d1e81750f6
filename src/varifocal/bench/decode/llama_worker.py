"""Run as a script, by an interpreter that has llama-cpp-python: decodes as it is told by lines of JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    """Open the model of the first argument with the threads of the second, and answer each task of standard input."""
    import llama_cpp

    file, threads = sys.argv[1], int(sys.argv[2])
    model: Any = None
    last = 0
    for line in sys.stdin:
        task = json.loads(line)
        answer: dict[str, float] = {}
        if task["do"] == "prepare":
            del model
            model = llama_cpp.Llama(
                file,
                n_ctx=task["context"] + task["room"] + 8,
                n_threads=threads,
                n_threads_batch=threads,
                n_batch=512,
                type_k=llama_cpp.GGML_TYPE_F32,
                type_v=llama_cpp.GGML_TYPE_F32,
                flash_attn=True,
                verbose=False,
            )
            prompt = [(17 * place + 5) % 1000 + 100 for place in range(task["context"])]
            begin = time.perf_counter()
            model.eval(prompt)
            last = model.sample(temp=0.0)
            answer["seconds"] = time.perf_counter() - begin
        elif task["do"] == "decode":
            begin, worked = time.perf_counter(), time.process_time()
            for _ in range(task["tokens"]):
                model.eval([last])
                last = model.sample(temp=0.0)
            answer["seconds"] = time.perf_counter() - begin
            answer["processor_seconds"] = time.process_time() - worked
        else:
            read = model.metadata
            architecture = read["general.architecture"]
            heads = int(read[f"{architecture}.attention.head_count"])
            kept = int(read.get(f"{architecture}.attention.head_count_kv", heads))
            width = int(read[f"{architecture}.embedding_length"]) // heads
            answer["numbers_a_token"] = int(read[f"{architecture}.block_count"]) * kept * width
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
