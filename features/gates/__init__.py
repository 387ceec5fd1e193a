"""The gates before model servers: who may ask, and when (docs/design/turns.md section 13)."""
