"""The parts of `scripts/bench_serving.py`: one module for each question."""
