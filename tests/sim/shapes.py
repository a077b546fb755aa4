"""What is simulated: how many ranks and engines, and what their connectors are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LEASE, READ, QUARANTINE, HANDSHAKE = 30.0, 20.0, 40.0, 10.0

#: what an engine's connector is made of: ``nixl``, a sibling that holds for so many polls (``held``: until told), a
#: bare one without facts, or a MultiConnector of these.
TREES: dict[str, Any] = {
    "alone": "nixl",
    "in Multi": ("nixl", "hold 1"),
    "behind a sibling": ("hold 0", "nixl"),
    "with a slow sibling": ("nixl", "held"),
    "with a bare sibling": ("bare 1", "nixl"),
    "nested": (("nixl", "hold 2"), "hold 1"),
    "nested deep": ("hold 0", (("nixl", "held"), "bare 2")),
}


@dataclass(frozen=True)
class Shape:
    """What is simulated. ``readers``: what a producer may be asked to wait for is at most so much."""

    pcp: int = 1
    producer: str = "alone"
    consumer: str = "alone"
    consumers: int = 1
    recompute: bool = False
    harsh: bool = True
    both: bool = False
    chunk: int = 8
    nixl: str | None = None  # module path and class of another NIXL connector: a mutant

    def transfer(self, serves: bool) -> dict[str, Any]:
        """An engine's kv_transfer_config."""
        role = "kv_producer" if serves else "kv_both" if self.both else "kv_consumer"
        tree = TREES[self.producer if serves else self.consumer]
        return self._child(tree, role, "recompute" if self.recompute and not serves else "fail")

    def _child(self, tree: Any, role: str, policy: str) -> dict[str, Any]:
        if tree == "nixl":
            limits = {"read": READ, "quarantine_age": QUARANTINE, "handshake": HANDSHAKE}
            extra = {"kv_lease_duration": LEASE, "kvconn": limits}
            module, _, name = (self.nixl or ":NixlConnector").partition(":")
            made = {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}
            return {
                **made,
                **({"kv_connector_module_path": module} if module else {}),
                "kv_load_failure_policy": policy,
            }
        if isinstance(tree, str):
            polls = None if tree == "held" else int(tree.split()[1])
            return {
                "kv_connector": "HoldingConnector",
                "kv_connector_module_path": "kvconn.testing.holding",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"polls": polls, "facts": not tree.startswith("bare")},
                "kv_load_failure_policy": policy,
            }
        children = [self._child(one, role, policy) for one in tree]
        return {
            "kv_connector": "MultiConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"connectors": children},
            "kv_load_failure_policy": policy,
        }
