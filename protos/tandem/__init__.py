"""The wire contract; `v1` holds generated code."""
