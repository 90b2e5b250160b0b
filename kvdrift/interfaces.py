"""The classes that a user's selector, codec or policy derives from, and the classes and functions that it uses.

``from kvdrift import ScoringSelector`` imports these names from here, and still will if the modules that
define them change.
"""

from __future__ import annotations

from kvdrift.generator.attention.cache_rules import CacheRule
from kvdrift.generator.attention.holding import StoredBytes
from kvdrift.generator.attention.recording import PromptLayer, QueryChunk, Statistic
from kvdrift.generator.codecs.affine import GROUP_BYTES, channels_back, entries_back, packed_bytes
from kvdrift.generator.codecs.codec import Codec
from kvdrift.generator.selectors.parameters import at_least
from kvdrift.generator.selectors.policies.policy import Policy
from kvdrift.generator.selectors.policies.scores import ScoringPolicy
from kvdrift.generator.selectors.selector import ScoringSelector, Selector
from kvdrift.generator.selectors.snapkv import SnapKV, window_attention
from kvdrift.generator.selectors.tova import TOVA

__all__ = [
    "GROUP_BYTES",
    "TOVA",
    "CacheRule",
    "Codec",
    "Policy",
    "PromptLayer",
    "QueryChunk",
    "ScoringPolicy",
    "ScoringSelector",
    "Selector",
    "SnapKV",
    "Statistic",
    "StoredBytes",
    "at_least",
    "channels_back",
    "entries_back",
    "packed_bytes",
    "window_attention",
]
