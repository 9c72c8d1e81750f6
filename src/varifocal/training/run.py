"""Config, data and model to a run directory."""

from __future__ import annotations

import datetime
import importlib.util
import math
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from varifocal.attention.mechanisms.registry import nearest
from varifocal.data import Batches, PreparedData, open_data
from varifocal.data.files import explained
from varifocal.environment import environment
from varifocal.memory import reset_peak, resident_bytes
from varifocal.model.reading import one_line, only_errors
from varifocal.model.writing import WRITE_ERRORS
from varifocal.results.run import RunEnvironment, RunSummary
from varifocal.threads import use_threads
from varifocal.training.checkpoints import discard, newest_whole, remove_old, remove_unfinished
from varifocal.training.config import MOST_TOTAL, DataSection, TrainingConfig
from varifocal.training.gate_traces import keep_gate_traces_until
from varifocal.training.interruption import StoppedError
from varifocal.training.metrics import Metrics, keep_metrics_until, require_tensorboard
from varifocal.training.processes import decided_by_first, restarted_by_torchrun, started_together
from varifocal.training.run_folder import RunFolder, locked
from varifocal.training.start import model_config, starting_model
from varifocal.training.trainer import WRITING, Beginning, Progress, RunTrainer


def train(
    config: TrainingConfig,
    out: str | Path,
    *,
    resume: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> RunSummary:
    """Train as the config says, into the run directory `out`.

    ValueError for whatever cannot be trained, DivergedError when the loss is no longer finite, StoppedError after a
    checkpoint when SIGTERM or Ctrl-C asked for the end. A finished run that is resumed returns its summary.

    Args:
        config: see `load_config`.
        out: a folder that does not exist or is empty, unless the run is resumed. Nothing is written elsewhere.
        resume: go on from the newest whole checkpoint, as if never interrupted. torchrun's own restarts always do.
        on_progress: called after every step, in the first process only.
    """
    require_packages(config)
    folder = RunFolder(Path(out))
    resume = resume or restarted_by_torchrun()
    use_threads(config.run.threads)
    with ExitStack() as stack:
        stack.enter_context(only_errors())
        stack.enter_context(explained(folder.path))
        # A config that cannot make a model fails here, before anything is written.
        model_config(config, None)
        arguments = training_arguments(config, folder)
        first = arguments.process_index == 0
        say = on_progress if first and on_progress is not None else (lambda progress: None)
        share = rows_of_process(config, arguments.world_size)

        def claim() -> None:
            folder.require_same(config) if resume else folder.require_new()
            if config.data.path is not None:
                model_config(config, open_data(config.data.path))
            stack.enter_context(locked(folder.path))

        decided_by_first(claim)
        if resume and folder.summary.is_file():
            return RunSummary.read(folder.summary)
        data = training_data(config.data, folder)
        resident_before = resident_bytes()
        reset_peak()
        model = starting_model(config, data)
        batches = Batches(
            data.split("train").rows(length=config.optimization.length, joined=config.data.joined),
            batch_size=share,
            seed=config.run.seed,
            epochs=None,
            rank=arguments.process_index,
            world_size=arguments.world_size,
        )
        # Too few validation tokens for a row would otherwise be found after the first steps.
        data.split("validation").rows(length=config.optimization.length)
        beginning = decided_by_first(lambda: begin(config, folder, data, resume=resume, say=say))
        if beginning.step:
            say(
                Progress(
                    step=beginning.step,
                    steps=config.optimization.total_steps,
                    tokens=beginning.step * config.optimization.tokens_per_step,
                    note=f"going on from step {beginning.step}",
                )
            )
        metrics = None
        if first:
            board = folder.tensorboard if config.run.tensorboard else None
            metrics = Metrics(folder.metrics, tensorboard=board, after_step=beginning.step)
            stack.callback(metrics.close)
        trainer = RunTrainer(
            model,
            arguments,
            config=config,
            folder=folder,
            batches=batches,
            validation=data.split("validation"),
            metrics=metrics,
            beginning=beginning,
            resident_before=resident_before,
            say=say,
        )
        trainer.train_run()
        if not trainer.finished:
            raise StoppedError(
                f"stopped at {trainer.place} as asked; the checkpoint {trainer.last_checkpoint} is written, "
                "--resume goes on from it"
            )
        return finish(config, folder, data, trainer)


def require_packages(config: TrainingConfig) -> None:
    """ValueError unless what the run needs is installed."""
    if importlib.util.find_spec("accelerate") is None:
        raise ValueError("training needs accelerate; install it with: pip install 'varifocal[training]'")
    if config.run.tensorboard:
        require_tensorboard()


def training_arguments(config: TrainingConfig, folder: RunFolder) -> TrainingArguments:
    """Trainer's arguments; those in the config's section [trainer] are laid over them."""
    wanted = config.optimization
    on_cpu = not torch.cuda.is_available()
    # Trainer wants a number of steps; a run with a budget in seconds ends long before.
    steps = MOST_TOTAL if wanted.total_steps is None else wanted.total_steps
    ours: dict[str, Any] = {
        "output_dir": str(folder.checkpoints / WRITING),
        "max_steps": steps,
        "learning_rate": wanted.learning_rate,
        "lr_scheduler_type": {"cosine": "cosine", "constant": "constant_with_warmup"}[wanted.schedule],
        "warmup_steps": wanted.warmup_steps or math.ceil(wanted.warmup_share * steps),
        "max_grad_norm": wanted.clip,
        "bf16": wanted.precision == "bfloat16",
        "gradient_checkpointing": wanted.gradient_checkpointing,
        "seed": config.run.seed,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "eval_strategy": "no",
        "save_strategy": "no",
        # Our batches begin at the right step by themselves.
        "ignore_data_skip": True,
        "remove_unused_columns": False,
    }
    given: dict[str, Any] = {
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": on_cpu,
        "ddp_backend": "gloo" if on_cpu and started_together() else None,
        "ddp_find_unused_parameters": False,
    }
    for sharded in ("fsdp", "deepspeed"):
        if wanted.average_share and config.trainer.get(sharded):
            raise ValueError(
                f"optimization.average_share averages whole weights, which trainer.{sharded} splits over processes; "
                "leave one of them out"
            )
    known = [one.name for one in fields(TrainingArguments)]
    for name in config.trainer:
        if name in ours or name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
            raise ValueError(f"trainer.{name} follows from the other sections; set it there")
        if name not in known:
            raise ValueError(f"trainer has no argument {name!r}{nearest(name, known)}; they are TrainingArguments'")
    try:
        arguments = TrainingArguments(**(ours | given | config.trainer))
    except (ValueError, TypeError, ImportError) as error:
        raise ValueError(f"transformers refuses these settings: {one_line(error)}") from error
    # One process trains on one device; several GPUs are several processes, started by torchrun.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    share = rows_of_process(config, arguments.world_size)
    arguments.per_device_train_batch_size = wanted.micro_batch or share
    arguments.gradient_accumulation_steps = share // arguments.per_device_train_batch_size
    return arguments


def rows_of_process(config: TrainingConfig, processes: int) -> int:
    """Rows of each process in a step."""
    wanted = config.optimization
    if wanted.batch % (processes * (wanted.micro_batch or 1)):
        at_once = f" times micro_batch {wanted.micro_batch}" if wanted.micro_batch else ""
        raise ValueError(
            f"optimization.batch must be a multiple of the {processes} processes{at_once}, got {wanted.batch}"
        )
    return wanted.batch // processes


def training_data(wanted: DataSection, folder: RunFolder) -> PreparedData:
    """The data set of a run, prepared in its folder if the config names a source."""
    if wanted.path is not None:
        return open_data(wanted.path)

    def make() -> None:
        from varifocal.data.prepare import Options, prepare

        assert wanted.source is not None
        options = Options(tokenizer=wanted.tokenizer, separator=wanted.separator, column=wanted.column)
        prepare(wanted.source, folder.data, options=options, workers=1)

    decided_by_first(make)
    return open_data(folder.data)


def begin(
    config: TrainingConfig,
    folder: RunFolder,
    data: PreparedData,
    *,
    resume: bool,
    say: Callable[[Progress], None],
) -> Beginning:
    """Write what the run is, or find where it stopped and forget what it recorded after that."""
    if not resume:
        folder.begin(config, RunEnvironment(**vars(environment()), data_fingerprint=data.fingerprint))
        return Beginning()
    folder.require_same_data(data.fingerprint)
    remove_unfinished(folder.checkpoints)

    def report(note: str) -> None:
        say(Progress(step=0, steps=config.optimization.total_steps, tokens=0, note=note))

    found = newest_whole(folder.checkpoints, on_damaged=report)
    step = 0 if found is None else found.step
    keep_metrics_until(folder.metrics, step)
    keep_gate_traces_until(folder.gates, step)
    if found is None:
        return Beginning()
    return Beginning(step=step, checkpoint=found.path, state=found.state)


def finish(config: TrainingConfig, folder: RunFolder, data: PreparedData, trainer: RunTrainer) -> RunSummary:
    """Save the model with its tokenizer, then the summary, which makes the run a finished one."""
    model, found = trainer.accelerator.unwrap_model(trainer.model), trainer.latest
    assert found is not None
    # Trainer switches the cache off for training.
    model.config.use_cache = True
    writing = folder.path / ".model"
    if trainer.first:
        shutil.rmtree(writing, ignore_errors=True)
    trainer.accelerator.wait_for_everyone()
    try:
        trainer.save_model(str(writing))
    except WRITE_ERRORS as error:
        shutil.rmtree(writing, ignore_errors=True)
        raise trainer.unwritable("the model", error) from error
    trainer.accelerator.wait_for_everyone()
    entry, mechanism = data.manifest.tokenizer, model.config.mechanism
    summary = RunSummary(
        mechanism=mechanism if isinstance(mechanism, str) else tuple(mechanism),
        preset=config.model.preset,
        seed=config.run.seed,
        parameters=sum(one.numel() for one in model.parameters()),
        steps=trainer.state.global_step,
        tokens=trainer.tokens,
        validation_loss=found.loss,
        bits_per_byte=found.bits_per_byte,
        validation_tokens=found.tokens,
        unaveraged_loss=None if trainer.unaveraged is None else trainer.unaveraged.loss,
        seconds=trainer.clock.elapsed,
        processor_seconds=trainer.clock.processor,
        tokens_per_second=trainer.tokens / trainer.clock.elapsed,
        peak_bytes=trainer.peak_bytes(),
        processes=trainer.args.world_size,
        data_fingerprint=data.fingerprint,
        tokenizer_fingerprint=entry.fingerprint,
        finished=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    if trainer.first:
        # A pickle, which nobody should need to load.
        (writing / "training_args.bin").unlink(missing_ok=True)
        shutil.copyfile(data.folder / entry.file, writing / "tokenizer.json")
        discard(folder.model)
        writing.rename(folder.model)
        remove_unfinished(folder.checkpoints)
        remove_old(folder.checkpoints, keep=config.checkpoints.keep)
        summary.write(folder.summary)
    trainer.accelerator.wait_for_everyone()
    return summary
