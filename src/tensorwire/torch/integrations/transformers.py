"""Implements the Trainer of Hugging Face transformers on a tensorwire job.

It trains through an Accelerator, which is `accelerate.py`'s here.
"""

from __future__ import annotations

from typing import Any

from . import adapter

try:
    import transformers
except ImportError as error:
    raise adapter.unavailable("transformers") from error

from .accelerate import adopt


class TensorwireMixin:
    """A mixin that makes a Trainer train on a tensorwire job; it stands before the Trainer's class.

        class MyTrainer(TensorwireMixin, Seq2SeqTrainer): ...

    The arguments say `use_cpu=True`. The job is joined when the Trainer is made; random numbers
    stay as they are seeded.

    Raises:
        ValueError: `fp16=True`, or slices.
        UnavailableError: FSDP or DeepSpeed.
        RuntimeError: the Trainer sees other processes than the job has workers.
    """

    accelerator: Any
    model: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Adopts the accelerator that the Trainer makes."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        adopt(self.accelerator)

    def _load_from_checkpoint(self, *args: Any, **options: Any) -> None:
        with adapter.editing(self.accelerator.job, [self.model]):
            super()._load_from_checkpoint(*args, **options)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        with adapter.editing(self.accelerator.job, [self.model]):
            super()._load_best_model()  # type: ignore[misc]


class TensorwireTrainer(TensorwireMixin, transformers.Trainer):
    """A Trainer in place of `transformers.Trainer`; one line changes in a script.

        from tensorwire.torch.integrations.transformers import TensorwireTrainer as Trainer

    See `TensorwireMixin`.
    """
