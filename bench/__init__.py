"""Measurements: ours, stock vLLM's connector on the same job, raw NIXL and the limit, alternating in one run.

``python -m bench --list`` names them; docs/performance.md says what they gave on which machine. Not part of the wheel.

Rules
1. What is compared is measured in the same run, in turns, so that a busy machine is busy for all. The result is a ratio
   with its spread, not a time.
2. Bookkeeping is CPU time of the thread that does it, which other processes lengthen little; moving bytes is wall time.
3. Nothing here asserts a time, and no test does.
"""
