"""transformers' Trainer with our batches, groups, metrics, validation, traces and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from varifocal.attention.gates import set_gate_warmth
from varifocal.data import Batches, TokenSplit
from varifocal.memory import peak_bytes
from varifocal.model.loss import IGNORED
from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.model.writing import WRITE_ERRORS, why_unwritten
from varifocal.results.checkpoint import CheckpointState
from varifocal.results.evaluation import Evaluation
from varifocal.results.metrics import MetricsEntry
from varifocal.training.averaging import WeightAverage
from varifocal.training.budget import TrainingClock, rate_factor
from varifocal.training.checkpoints import PREFIX, discard, remove_old, seal
from varifocal.training.config import TrainingConfig
from varifocal.training.divergence import DivergedError, where_it_diverges
from varifocal.training.evaluation import evaluate
from varifocal.training.gate_traces import append_gate_trace, gate_trace
from varifocal.training.interruption import StopRequest, stop_requests
from varifocal.training.metrics import Metrics
from varifocal.training.micro_batches import MicroBatches
from varifocal.training.parameter_groups import parameter_groups
from varifocal.training.processes import summed_over_processes
from varifocal.training.run_folder import RunFolder

WRITING = ".writing"
"""The folder below `checkpoints` in which Trainer writes; what lies in it is not a checkpoint yet."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is."""

    step: int
    steps: int | None
    """Of the whole run; for a budget in seconds, as it looks at present."""
    tokens: int
    loss: float | None = None
    """Nats a token, of this step."""
    tokens_per_second: float | None = None
    """Of this step."""
    seconds_left: float | None = None
    """Training time to come, at the mean speed so far."""
    validation_loss: float | None = None
    """The latest."""
    note: str | None = None
    """Something to tell, apart from numbers."""


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """Where training begins: at step 0, or after a checkpoint."""

    step: int = 0
    checkpoint: Path | None = None
    state: CheckpointState = field(default_factory=lambda: CheckpointState(step=0, seconds=0.0, peak_bytes=0))
    """Training time and most memory so far."""


class RunTrainer(Trainer):
    """A Trainer whose every step is recorded, and whose checkpoints are whole or not there."""

    optimizer: Any
    control: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: VarifocalForCausalLM,
        arguments: TrainingArguments,
        *,
        config: TrainingConfig,
        folder: RunFolder,
        batches: Batches,
        validation: TokenSplit,
        metrics: Metrics | None,
        beginning: Beginning,
        resident_before: int,
        say: Callable[[Progress], None],
    ) -> None:
        """`metrics` is None in all processes but the first; `resident_before` is what stood before the model did."""
        super().__init__(model=model, args=arguments)
        # It prints every log as a dict; progress is told by `say`.
        self.remove_callback(PrinterCallback)
        self.add_callback(Schedule(self))
        self.config, self.folder, self.batches, self.validation = config, folder, batches, validation
        self.metrics, self.beginning, self.say = metrics, beginning, say
        self.stop = StopRequest()
        self.resident_before = resident_before
        self.micro_batch = arguments.per_device_train_batch_size
        self.clock = TrainingClock(
            elapsed=beginning.state.seconds,
            processor=beginning.state.processor_seconds,
            waits_for_gpu=arguments.device.type == "cuda",
        )
        self.used = beginning.state.processor_seconds
        """Seconds of the budget; the mean over processes."""
        self.stopping = False
        self.latest: Evaluation | None = None
        self.unaveraged: Evaluation | None = None
        """Of the last step's own weights, where the mean of the last steps takes their place."""
        self.average = WeightAverage(model)
        if beginning.checkpoint is not None:
            self.average.load(beginning.checkpoint)
        self._logged_seconds = self.clock.elapsed
        self._step_inputs: list[dict[str, Tensor]] = []
        self._sums: dict[str, Tensor] = {}
        self._step_losses: dict[str, float] = {}

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.metrics is not None

    @property
    def tokens(self) -> int:
        """Tokens trained on so far."""
        step: int = self.state.global_step
        return step * self.config.optimization.tokens_per_step

    def train_run(self) -> None:
        """Train to the last step, or until somebody asks for the end."""
        checkpoint = self.beginning.checkpoint
        with stop_requests() as self.stop:
            self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))

    @property
    def share(self) -> float:
        """How much of the run is done."""
        wanted = self.config.optimization
        if wanted.seconds is not None:
            return self.used / wanted.seconds
        assert wanted.total_steps is not None
        return float(self.state.global_step / wanted.total_steps)

    @property
    def finished(self) -> bool:
        """Whether the budget is used up."""
        return self.share >= 1

    def add_to_average(self) -> None:
        """After a step of the last part of the run, take its weights into their mean."""
        wanted = self.config.optimization.average_share
        if wanted and self.share > 1 - wanted:
            self.average.add()

    @property
    def place(self) -> str:
        """How far the run is, in words."""
        wanted, step = self.config.optimization, self.state.global_step
        if wanted.seconds is None:
            return f"step {step} of {wanted.total_steps}"
        return f"step {step}, {self.used:.1f} of {wanted.seconds:g} processor seconds,"

    def count_time(self) -> None:
        """Read the clock after a step; with a budget in seconds all processes must agree on what is used."""
        self.clock.tick()
        self.used = self.clock.processor
        if self.config.optimization.seconds is not None and self.args.world_size > 1:
            own = torch.tensor(self.used, dtype=torch.float64, device=self.args.device)
            self.used = float(summed_over_processes(own)) / self.args.world_size

    def get_train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """This process's own micro-batches, from the step at which the run begins."""
        source = MicroBatches(self.batches, micro_batch=self.micro_batch, start_step=self.beginning.step)
        return DataLoader(source, batch_size=None)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW with a group for the mechanism parameters."""
        if self.optimizer is None:
            wanted = self.config.optimization
            groups = parameter_groups(
                self.model if model is None else model,
                learning_rate=wanted.learning_rate,
                weight_decay=wanted.weight_decay,
                mechanism_factor=wanted.gate_learning_rate,
            )
            self.optimizer = torch.optim.AdamW(
                groups, lr=wanted.learning_rate, betas=wanted.betas, eps=wanted.epsilon, fused=True
            )
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> torch.optim.lr_scheduler.LRScheduler:
        """As in Trainer; with a budget in seconds the learning rate follows the share of it that is used."""
        wanted = self.config.optimization
        if wanted.seconds is None:
            plain: torch.optim.lr_scheduler.LRScheduler = super().create_scheduler(num_training_steps, optimizer)
            return plain
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer if optimizer is None else optimizer,
                lambda step: rate_factor(wanted, step=step, share=self.share),
            )
            self._created_lr_scheduler = True
        made: torch.optim.lr_scheduler.LRScheduler = self.lr_scheduler
        return made

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not counted here: `varifocal info` knows better, and Trainer's count walks all modules at every step."""
        return 0

    def get_batch_samples(self, *arguments: Any, **options: Any) -> tuple[list[dict[str, Tensor]], Any]:
        """As in Trainer; the batches are kept until the step is known to be sound."""
        self._step_inputs, items = super().get_batch_samples(*arguments, **options)
        return self._step_inputs, items

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """As in Trainer; cross entropy and auxiliary losses are added up apart, as shares of the whole step's."""
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        share = (inputs["labels"] != IGNORED).sum() / num_items_in_batch
        self._add("loss", outputs["cross_entropy"])
        for name, one in (outputs["auxiliary_losses"] or {}).items():
            self._add(name, one * share)
        return (loss, outputs) if return_outputs else loss

    def _add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """As in Trainer; before the optimizer steps, the losses of all processes are added and everything is finite."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        names = sorted(self._sums)
        # A signal may reach one process only; all must stop after the same step, so requests are added up too.
        request = torch.tensor(float(self.stop.received), dtype=torch.float64, device=self.args.device)
        together = summed_over_processes(torch.stack([*(self._sums[name] for name in names), request]))
        values = together.tolist()
        # The last value is the request to stop, which has no name.
        self._step_losses = dict(zip(names, values, strict=False))
        self._sums = {}
        self.stopping = values[-1] > 0
        if not math.isfinite(float(norm)) or not all(map(math.isfinite, values)):
            raise self.diverged(float(norm))
        return norm

    def diverged(self, norm: float) -> DivergedError:
        """The step, the layer and the last good checkpoint, in one sentence."""
        step = self.state.global_step + 1
        inputs = [self._prepare_inputs(batch) for batch in self._step_inputs]
        place = where_it_diverges(self.accelerator.unwrap_model(self.model), inputs)
        last = self.last_checkpoint
        good = "there is no checkpoint yet" if last is None else f"the last good checkpoint is {last}"
        return DivergedError(
            f"training diverged at step {step} {place}: loss {self._step_losses['loss']:g}, gradient norm {norm:g}; "
            f"{good}; try a lower learning_rate, a longer warm-up or a smaller clip"
        )

    @property
    def last_checkpoint(self) -> Path | None:
        """The newest checkpoint of this run."""
        found = [path for path in self.folder.checkpoints.glob(f"{PREFIX}*") if path.is_dir()]
        return max(found, key=lambda path: int(path.name.removeprefix(PREFIX)), default=None)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Record a step; Trainer's own history would be written again with every checkpoint."""
        # Trainer also logs a summary when training ends; only steps carry a learning rate.
        if "learning_rate" not in logs:
            return
        self.clock.tick()
        elapsed, self._logged_seconds = self.clock.elapsed - self._logged_seconds, self.clock.elapsed
        wanted, step = self.config.optimization, self.state.global_step
        losses = dict(self._step_losses)
        loss = losses.pop("loss")
        speed = wanted.tokens_per_step / elapsed
        if self.metrics is not None:
            self.metrics.write(
                MetricsEntry(
                    step=step,
                    tokens=self.tokens,
                    loss=loss,
                    learning_rate=logs["learning_rate"],
                    gradient_norm=float(logs["grad_norm"]),
                    tokens_per_second=speed,
                    seconds=self.clock.elapsed,
                    processor_seconds=self.clock.processor,
                    auxiliary=losses,
                )
            )
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs | losses)
        self.tell(loss=loss, tokens_per_second=speed)

    def tell(self, **news: Any) -> None:
        """Tell how far the run is."""
        step, share, steps = self.state.global_step, self.share, self.config.optimization.total_steps
        left = self.clock.elapsed * (1 / share - 1) if share else None
        if steps is None and share:
            steps = round(step / share)
        latest = None if self.latest is None else self.latest.loss
        self.say(
            Progress(step=step, steps=steps, tokens=self.tokens, seconds_left=left, validation_loss=latest, **news)
        )

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """The loss on the validation split, and what the gates do there."""
        wanted = self.config.validation
        model = self.accelerator.unwrap_model(self.model)
        if self.finished and self.average.steps:
            self.unaveraged = self.measure(model)
            self.average.install()
        self.latest = self.measure(model)
        if self.metrics is not None:
            if wanted.trace_rows:
                rows = self.validation.rows(length=self.config.optimization.length)
                trace = gate_trace(model, rows, wanted.trace_rows)
                if trace:
                    append_gate_trace(self.folder.gates, self.state.global_step, trace)
            self.metrics.write(
                MetricsEntry(
                    step=self.state.global_step,
                    tokens=self.tokens,
                    processor_seconds=self.clock.processor,
                    validation_loss=self.latest.loss,
                    bits_per_byte=self.latest.bits_per_byte,
                    accuracy=self.latest.accuracy,
                )
            )
        self.tell()
        self.clock.start()
        return {"eval_loss": self.latest.loss}

    def measure(self, model: Any) -> Evaluation:
        """The loss of the present weights on the validation split; at the end perhaps on more of it."""
        wanted = self.config.validation
        tokens = wanted.last_tokens if self.finished and wanted.last_tokens is not None else wanted.tokens
        return evaluate(
            model,
            self.validation,
            length=self.config.optimization.length,
            batch_size=self.micro_batch,
            most_tokens=tokens or None,
        )

    def peak_bytes(self) -> int:
        """Most memory of this process above what stood before the model, or most of the GPU's."""
        if self.args.device.type == "cuda":
            now = torch.cuda.max_memory_allocated(self.args.device)
        else:
            now = max(0, peak_bytes() - self.resident_before)
        return max(now, self.beginning.state.peak_bytes)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Let Trainer write aside; then seal, rename, and remove the old ones."""
        step, folder = self.state.global_step, self.folder.checkpoints
        try:
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if self.first:
                state = CheckpointState(
                    step=step,
                    seconds=self.clock.elapsed,
                    processor_seconds=self.used,
                    peak_bytes=self.peak_bytes(),
                )
                self.average.save(folder / WRITING / f"checkpoint-{step}")
                seal(folder / WRITING / f"checkpoint-{step}", folder / f"{PREFIX}{step}", state)
                remove_old(folder, keep=max(1, self.config.checkpoints.keep))
            self.accelerator.wait_for_everyone()
        except WRITE_ERRORS as error:
            discard(folder / WRITING)
            raise self.unwritable(f"the checkpoint of step {step}", error) from error
        self.clock.start()

    def unwritable(self, what: str, error: Exception) -> ValueError:
        """What could not be written, why, and from where the run can go on, in one sentence."""
        last = self.last_checkpoint
        good = "from the beginning" if last is None else f"from {last}"
        return ValueError(
            f"{what} cannot be written to {self.folder.path}: {why_unwritten(error)}; make room, and --resume "
            f"goes on {good}"
        )


class Schedule(TrainerCallback):
    """When to log (always), validate, save and stop; and when gates are let go."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        self.trainer.clock.start()
        return control

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        # Before the schedule moves on: the next learning rate may follow from the time.
        self.trainer.count_time()
        return control

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        held = self.trainer.config.optimization.gate_warmup_steps
        # At the start, at the release, and where a resumed run begins; in between the warmth does not change.
        if held and (state.global_step in (0, held, self.trainer.beginning.step)):
            set_gate_warmth(self.trainer.model, 0.0 if state.global_step < held else 1.0)
        return control

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        config, step = self.trainer.config, state.global_step
        last = self.trainer.finished
        self.trainer.add_to_average()
        control.should_log = True
        control.should_evaluate = last or step % config.validation.every == 0
        # After the last step the model itself is saved; a checkpoint would serve nobody.
        control.should_save = not last and (step % config.checkpoints.every == 0 or self.trainer.stopping)
        control.should_training_stop = last or self.trainer.stopping
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        # Trainer asks once more when the loop is over; the last step has done it all.
        control.should_log = control.should_evaluate = control.should_save = False
        return control
