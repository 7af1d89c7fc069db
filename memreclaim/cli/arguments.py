"""Argument types that refuse bad values with a usage error (exit code 2)."""

from __future__ import annotations

import argparse


def count(text: str) -> int:
    """A whole number of at least 1, in plain digits."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        message = f"{text!r} is not a whole number of at least 1"
        raise argparse.ArgumentTypeError(message)
    return int(text)
