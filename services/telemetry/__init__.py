"""OpenTelemetry of node services: spans and metrics by OTLP, where the standard environment variables ask for it."""
