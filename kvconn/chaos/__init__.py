"""Faults against live engines under load: what is injected, where every request is, and what came of it.

``book`` decides who is where, ``faults`` what happens next; ``fleet`` touches processes, ``run`` joins them.
"""
