"""What operators see: metrics, logs, traces, drift, and errors of background tasks."""
