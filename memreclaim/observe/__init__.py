"""What operators see: metrics, logs, latency samples, dashboards and alert rules. Importing it loads nothing of Prometheus."""
