"""Where the pieces are worked on: processes here, or a cluster under Slurm or Ray, by datatrove's executors."""

from __future__ import annotations

import importlib.util
import inspect
import io
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stderr
from copy import deepcopy
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Literal

from datatrove.executor.local import LocalPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.utils.logging import setup_default_logger

ExecutorName = Literal["local", "slurm", "ray"]
EXECUTORS: tuple[ExecutorName, ...] = ("local", "slurm", "ray")
OWN = ("pipeline", "tasks", "workers", "logging_dir", "skip_completed", "depends", "depends_job_id")
"""Arguments of datatrove's executors that the preparation sets itself."""


class LocalExecutor(LocalPipelineExecutor):
    """datatrove's local executor: its tasks, logs, statistics and marks of completion, but processes of our own.

    datatrove's pool waits for ever when a worker is killed, and what it starts outlives a parent that is killed.
    """

    pipeline: list[Any]

    def run(self) -> None:
        ranks = self.get_incomplete_ranks()
        if not ranks:
            return
        self.save_executor_as_json()
        if self.workers == 1:
            pipeline = self.pipeline
            for rank in ranks:
                self.pipeline = deepcopy(pipeline)
                self._run_for_rank(rank)
            self.pipeline = pipeline
            return
        context = get_context("forkserver")
        # Imported once, in the process that the workers are copies of.
        context.set_forkserver_preload(["varifocal.data.tokenizing", "varifocal.data.reading"])
        with ProcessPoolExecutor(
            min(self.workers, len(ranks)), mp_context=context, initializer=end_with_parent
        ) as pool:
            waiting = [pool.submit(self._run_for_rank, rank) for rank in ranks]
            try:
                for finished in as_completed(waiting):
                    finished.result()
            except BrokenProcessPool as error:
                raise ValueError(
                    "a worker process was killed, perhaps for want of memory; run the same command again with fewer "
                    "--workers, it goes on where it stopped"
                ) from error
            finally:
                for future in waiting:
                    future.cancel()

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> Any:
        with quiet():
            return super()._run_for_rank(rank, local_rank, node_rank)


class SlurmExecutor(SlurmPipelineExecutor):
    """datatrove's Slurm executor, whose jobs run with this Python unless the options name an environment.

    datatrove's jobs call its commands by name, so they end at once where the environment is not activated.
    """

    env_command: str | None
    condaenv: str | None
    venv_path: str | None

    def get_launch_file_contents(self, sbatch_args: dict[str, Any], run_script: str) -> str:
        if not (self.env_command or self.condaenv or self.venv_path):
            words = run_script.split(" ")
            at = next(at for at, word in enumerate(words) if word in ("launch_pickled_pipeline", "merge_stats"))
            words[at : at + 1] = [shlex.quote(sys.executable), "-m", f"datatrove.tools.{words[at]}"]
            run_script = " ".join(words)
        return str(super().get_launch_file_contents(sbatch_args, run_script))


def end_with_parent() -> None:
    """End this worker as soon as the process that asked for it is gone, whatever it is doing.

    Not the parent that the system knows: that is the server which copies itself for every worker, and it lives as long
    as one of them does.
    """
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        # A pipe whose other end closes when that process ends, however it ends.
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def quiet() -> Iterator[None]:
    """datatrove logs to the terminal and to a file for each task; here only to the file."""
    with redirect_stderr(io.StringIO()):
        setup_default_logger()
        yield
    setup_default_logger()


def make_executor(
    name: ExecutorName,
    pipeline: list[Any],
    *,
    tasks: int,
    workers: int,
    state: Path,
    options: Mapping[str, Any],
) -> Any:
    """The executor of that name; `options` are further arguments of datatrove's class."""
    if name == "local":
        if options:
            raise ValueError(f"the local executor takes no options but --workers, got {', '.join(options)}")
        return LocalExecutor(pipeline, tasks=tasks, workers=workers, logging_dir=str(state))
    if name == "slurm":
        if shutil.which("sbatch") is None:
            raise ValueError("executor 'slurm' submits with sbatch, which is not here; run this on a login node")
        kind: type = SlurmExecutor
        required: tuple[str, ...] = ("time", "partition")
    elif name == "ray":
        if importlib.util.find_spec("ray") is None:
            raise ValueError("executor 'ray' needs the package ray; install it with: pip install ray")
        from datatrove.executor.ray import RayPipelineExecutor

        kind, required = RayPipelineExecutor, ()
    else:
        raise ValueError(f"unknown executor {name!r}; known are {', '.join(EXECUTORS)}")
    known = [option for option in inspect.signature(kind).parameters if option not in OWN]
    for option in options:
        if option not in known:
            raise ValueError(f"executor {name!r} has no option {option!r}; it has {', '.join(known)}")
    for option in required:
        if option not in options:
            raise ValueError(f"executor {name!r} needs {option}; add --executor-option {option}=...")
    return kind(pipeline, tasks=tasks, workers=workers, logging_dir=str(state), **options)
