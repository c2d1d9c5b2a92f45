"""The contestants of scripts/bench_peers.py: one file each, run in its own environment (docs/peers.md)."""
