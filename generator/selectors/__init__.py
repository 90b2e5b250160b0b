"""Selectors: which prompt entries stay, per layer and KV head. One file each, one scoring rule, its paper cited."""

from __future__ import annotations

from generator.selectors.full import Full
from generator.selectors.recent import Recent
from generator.selectors.selector import Selector
from generator.selectors.snapkv import SnapKV

SELECTORS: dict[str, type[Selector]] = {"full": Full, "recent": Recent, "snapkv": SnapKV}

__all__ = ["SELECTORS", "Full", "Recent", "Selector", "SnapKV"]
