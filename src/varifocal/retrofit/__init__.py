"""Pretrained models: their sources and families, and how they get another attention but start as they were."""

from varifocal.retrofit.families import FAMILIES, load_pretrained
from varifocal.retrofit.retrofit import Retrofitted, retrofit

__all__ = ["FAMILIES", "Retrofitted", "load_pretrained", "retrofit"]
