"""The status page: one file, no outside assets, and a policy that lets the browser run nothing but it."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files
from typing import Final

HTML: Final = files("memreclaim.service").joinpath("page.html").read_text(encoding="utf-8")
"""Markup, style and script."""


def _hashes(tag: str) -> str:
    found = re.findall(f"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


POLICY: Final = (
    f"default-src 'none'; script-src {_hashes('script')}; style-src {_hashes('style')}; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Value of Content-Security-Policy."""
