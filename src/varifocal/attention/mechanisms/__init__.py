"""The attention mechanisms, one file each, and how to make one by name."""

from __future__ import annotations

from varifocal.attention.mechanisms.base import HeadShape, Mechanism, MechanismConfig, MechanismOutput
from varifocal.attention.mechanisms.registry import (
    MECHANISMS,
    config_from_options,
    make_mechanism,
    options_from_config,
    register,
)

__all__ = [
    "MECHANISMS",
    "HeadShape",
    "Mechanism",
    "MechanismConfig",
    "MechanismOutput",
    "config_from_options",
    "make_mechanism",
    "options_from_config",
    "register",
]
