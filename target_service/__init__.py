"""The target service: owns the paged KV cache and decides tokens."""
