"""What ``memreclaim doctor --engine sglang`` says before a boot; the engine is not imported and nothing is changed."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from memreclaim.doctor import Finding, Level
from memreclaim.engines.sglang import drift, hooks, lines, plugin

if TYPE_CHECKING:
    from collections.abc import Mapping

GROUP = "sglang.srt.plugins"


def diagnose(environ: Mapping[str, str] | None = None, *, wanted: bool = True) -> list[Finding]:
    """Findings on the engine's version, its readers of ``wo_a``, and how our hooks get in.

    ``wanted``: the operator named this engine, so what keeps the feature off is bad, not merely off.
    """
    env = os.environ if environ is None else environ
    if drift.package_root() is None:
        return []
    line = lines.installed()
    bad = Level.BAD if wanted else Level.OFF
    if not line.supported:
        return [Finding("sglang readers", bad, problem) for problem in line.problems]
    return [
        Finding("sglang readers", Level.OK, f"{line.version}: {lines.verdict(line)[1]}"),
        _way_in(env, bad),
    ]


def _way_in(env: Mapping[str, str], bad: Level) -> Finding:
    name = "sglang plug-in"
    if not hooks.has_framework():
        return Finding(name, Level.OK, "no plug-in framework: start the engine with memreclaim launch -- COMMAND")
    found = [one for one in entry_points(group=GROUP) if one.value == f"{plugin.__name__}:register"]
    if not found:
        return Finding(name, bad, f"no entry point {GROUP}: install memreclaim with pip where sglang is installed")
    allowed = env.get("SGLANG_PLUGINS", "")
    if allowed and found[0].name not in [word.strip() for word in allowed.split(",")]:
        return Finding(name, bad, f"SGLANG_PLUGINS={allowed} leaves out {found[0].name}")
    switch = f"MEMRECLAIM={env.get('MEMRECLAIM', '(unset: off)')}, forward it to every node"
    return Finding(name, Level.OK, f"entry point {found[0].name} is found; {switch}")
