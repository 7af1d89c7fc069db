"""The words for where a layer is in its life, and why it stayed there."""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    """Where a layer stands."""

    FOUND = "found"
    PROVEN = "proven"
    RECLAIMED = "reclaimed"
    KEPT = "kept"
    RESTORED = "restored"


class Reason(StrEnum):
    """Why a layer is kept in bf16."""

    MISMATCH = "mismatch"
    """The weight's bits are not those of any fp8 code at its block's scale."""
    NOT_FINITE = "not_finite"
    """The weight holds a NaN or an infinity."""
    DTYPE = "dtype"
    SHAPE = "shape"
    SHARED_STORAGE = "shared_storage"
    """Something else still holds the bf16 bytes, so dropping the weight would free nothing."""
    NOT_CONTIGUOUS = "not_contiguous"
    UNKNOWN_READER = "unknown_reader"
    """The engine reads the weight in a way that the adapter does not know."""
    AFTER_CAPTURE = "after_capture"
    """CUDA graphs already hold the weight's address."""
    RANKS_DISAGREE = "ranks_disagree"
    POLICY = "policy"
    """The settings ask to keep it."""
    NOTHING_TO_DO = "nothing_to_do"
    """The weight is fp8 already."""

    @property
    def is_mismatch(self) -> bool:
        """Whether it lies in the weight's values: the operator is told. Other reasons are policy."""
        return self in (Reason.MISMATCH, Reason.NOT_FINITE)


class Phase(StrEnum):
    """What the engine is doing when it calls."""

    DECODE = "decode"
    VERIFY = "verify"
    DRAFT = "draft"
    PREFILL = "prefill"
