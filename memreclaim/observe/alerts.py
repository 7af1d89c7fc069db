"""Alert rules: what an operator is told, in which words, and how it is decided.

One rule per alert; ``memreclaim alerts export`` writes them as a Prometheus rule file. Each has a firing and a silent
case in ``dashboards/rules_test.yml`` and a heading in ``dashboards/runbook.md``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

RUNBOOK: Final = "https://github.com/memreclaim/memreclaim/blob/main/dashboards/runbook.md"
_FREE = 'memreclaim_device_memory_bytes{kind="free",source="cuda"}'
_AVAILABLE = 'memreclaim_device_memory_bytes{kind="available",source="meminfo"}'
_TOTAL = 'memreclaim_device_memory_bytes{kind="total",source="meminfo"}'
_EXPECTED = "max by (model_name) (max_over_time(memreclaim_ranks_expected[1h]))"
_RECLAIMED = 'memreclaim_layers{status="reclaimed"}'
_AUDITED = "memreclaim_last_audit_timestamp_seconds"
_MEAN = (
    "(sum without (path) (rate(memreclaim_kernel_duration_seconds_sum[30m]))"
    " / sum without (path) (rate(memreclaim_kernel_duration_seconds_count[30m])))"
)
_STOCK = 'sum without (path) (memreclaim_kernel_baseline_seconds{path="stock",rows%s})'
_DECODING, _PREFILL = _STOCK % '!=">192"', _STOCK % '=">192"'
_ON_GPU = 'and on (job, instance) memreclaim_build_info{compute_capability!="none"}'
_DAMAGED = "{{ if $labels.layer }}{{ $labels.layer }}{{ else }}a twin (rebuilt since){{ end }}"
_RANK = "{{ $labels.model_name }} rank TP{{ $labels.tp_rank }} ({{ $labels.instance }})"


@dataclass(frozen=True)
class Alert:
    """One rule."""

    name: str
    """Without the prefix ``Memreclaim``."""
    severity: str
    hold: str
    """How long the expression must be true first."""
    expression: str
    summary: str
    """Fixed words, so that notifications group."""
    description: str
    """Words with labels and the value."""

    @property
    def full_name(self) -> str:
        """As Alertmanager shows it."""
        return f"Memreclaim{self.name}"


ALERTS: Final = (
    Alert(
        "LayerMismatch",
        "warning",
        "0m",
        "memreclaim_layer_mismatched_elements > 0 and memreclaim_layer_reclaimed == 0",
        "A layer has no exact fp8 twin and stays in bf16",
        f"{_RANK}: {{{{ $labels.layer }}}} differs in {{{{ $value }}}} elements. "
        "Answers are right; less memory is given back.",
    ),
    Alert(
        "ReclaimedLayerMismatch",
        "critical",
        "0m",
        "(memreclaim_layer_mismatched_elements > 0 and memreclaim_layer_reclaimed == 1)\n"
        'or sum without (trigger) (increase(memreclaim_operations_total{operation="audit",result="mismatch"}[1h])) > 0',
        "An audit found that a served twin changed in memory",
        f"{_RANK}: {_DAMAGED} is not the bytes that were proven. Answers since the last clean audit are in doubt.",
    ),
    Alert(
        "TargetDown",
        "critical",
        "1m",
        'up{job=~"memreclaim.*"} == 0',
        "A memreclaim service does not answer Prometheus",
        "{{ $labels.job }} at {{ $labels.instance }} has not been scraped for a minute.",
    ),
    Alert(
        "RanksMissing",
        "critical",
        "1m",
        f"{_EXPECTED}\n  - (count by (model_name) (memreclaim_build_info) or 0 * {_EXPECTED}) > 0",
        "Fewer ranks report than the engine runs",
        "{{ $labels.model_name }}: {{ $value }} ranks do not report.",
    ),
    Alert(
        "RanksDiverged",
        "warning",
        "2m",
        "count by (model_name) (count by (model_name, version) (memreclaim_build_info)) > 1\n"
        f"or max by (model_name, pp_rank) ({_RECLAIMED}) - min by (model_name, pp_rank) ({_RECLAIMED}) > 0\n"
        'or count by (model_name) (memreclaim_state{state="off"} == 1)'
        ' and on (model_name) count by (model_name) (memreclaim_state{state="off"} == 0)',
        "Ranks of one engine differ in version, mode or reclaimed layers",
        "{{ $labels.model_name }}: its ranks do not hold the same layers, or do not run the same memreclaim.",
    ),
    Alert(
        "PoolBelowExpected",
        "warning",
        "5m",
        'sum without (limited_by) (memreclaim_kv_pool_gained_tokens{limited_by="memory"})\n'
        "  * (sum without (pool) (memreclaim_kv_pool_bytes) / memreclaim_kv_pool_tokens)\n"
        "< 0.9 * sum without (component) (memreclaim_net_bytes)",
        "Freed bytes did not reach the KV pool",
        f"{_RANK}: the pool grew by {{{{ $value | humanize1024 }}}}B, less than 90 % of what was freed, "
        "and no pin explains it.",
    ),
    Alert(
        "AuditStale",
        "warning",
        "0m",
        f"(time() - {_AUDITED}) > (2 * memreclaim_audit_interval_seconds + 600)\n"
        f"and {_AUDITED} > 0 and memreclaim_audit_interval_seconds > 0",
        "Twins have not been audited in time",
        f"{_RANK}: the last clean audit was {{{{ $value | humanizeDuration }}}} ago.",
    ),
    Alert(
        "OperationErrors",
        "warning",
        "0m",
        'sum without (trigger) (increase(memreclaim_operations_total{result="error"}[15m])) > 0',
        "An operation failed",
        f"{_RANK}: {{{{ $labels.operation }}}} failed in the last 15 minutes.",
    ),
    Alert(
        "KernelSlow",
        "warning",
        "10m",
        f"({_MEAN} > 1.25 * {_DECODING} {_ON_GPU})\nor ({_MEAN} > 2 * {_PREFILL} {_ON_GPU})",
        "A twin's kernel is slower than the stock path was",
        f"{_RANK}: {{{{ $labels.rows }}}} rows take {{{{ $value | humanizeDuration }}}} from the twin.",
    ),
    Alert(
        "DeviceMemoryLow",
        "warning",
        "5m",
        f'({_FREE} < 268435456 unless on (job, instance) memreclaim_build_info{{device_name=~".*GB10.*"}})\n'
        f"or ({_AVAILABLE} < ignoring (kind) 0.02 * {_TOTAL})",
        "Device or machine memory is nearly used up",
        f"{_RANK}: {{{{ $value | humanize1024 }}}}B left ({{{{ $labels.source }}}}).",
    ),
    Alert(
        "TagRefused",
        "warning",
        "0m",
        "increase((sum without (operation) (memreclaim_tag_refusals_total))[15m:30s]) > 0",
        "A reader asked for the raw memory of a dropped weight",
        f"{_RANK}: a reader that memreclaim does not know met a tag and got an error.",
    ),
)
"""All rules, in the order of the runbook."""


def rules(runbook: str = RUNBOOK) -> str:
    """A Prometheus rule file."""
    lines = ["# Written by `memreclaim alerts export`; edit memreclaim/observe/alerts.py instead.", "groups:"]
    lines += ["  - name: memreclaim", "    rules:"]
    for alert in ALERTS:
        lines += [f"      - alert: {alert.full_name}", "        expr: |"]
        lines += [f"          {line}" for line in alert.expression.splitlines()]
        lines += [f"        for: {alert.hold}", "        labels:", f"          severity: {alert.severity}"]
        lines += ["        annotations:"]
        texts = {"summary": alert.summary, "description": alert.description}
        texts["runbook_url"] = f"{runbook}#{alert.full_name.lower()}"
        # A JSON string is a YAML string too.
        lines += [f"          {key}: {json.dumps(text)}" for key, text in texts.items()]
    return "\n".join(lines) + "\n"
