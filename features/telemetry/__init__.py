"""Telemetry: what agents have stored of their turns goes to an OTLP collector, and numbers of the swarm to Prometheus.

Source: docs/traces.md; docs/design/traces.md.
"""
