"""What operators see: metrics, logs, health, traces, drift."""
