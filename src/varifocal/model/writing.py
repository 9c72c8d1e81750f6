"""Why a model could not be written, in words that say what to do."""

from __future__ import annotations

from safetensors import SafetensorError

from varifocal.model.reading import one_line

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
"""torch and safetensors report a full disk in ways of their own."""


def why_unwritten(error: BaseException) -> str:
    """The reason of an error in writing."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    words = one_line(error)
    # torch's writer of archives names the line of its source that noticed, not what the system said.
    if "inline_container" in words or "PytorchStreamWriter" in words:
        return "the disk is full, or files may not grow so large"
    return words
