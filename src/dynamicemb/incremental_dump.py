"""Incremental dumps of a model's dynamic tables, and their scores."""

from dynamicemb.checkpoint.delta import Delta, apply_delta, dump_delta
from dynamicemb.checkpoint.incremental import (
    get_score,
    incremental_dump,
    is_valid_score_threshold,
    set_score,
    track_removals,
)
from dynamicemb.checkpoint.publish import Published, publish

__all__ = [
    "Delta",
    "Published",
    "apply_delta",
    "dump_delta",
    "get_score",
    "incremental_dump",
    "is_valid_score_threshold",
    "publish",
    "set_score",
    "track_removals",
]
