"""What operators see: metrics, logs, latency samples, dashboards, alert rules. Loads nothing of Prometheus."""
