"""What is simulated: how many ranks and engines, and what their connectors are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from kvconn.config import ParallelConfig

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


#: by KV heads: sizes of engines that can read one another; one head is a latent cache, of which TP ranks have copies
TOPOLOGIES: dict[int, dict[str, ParallelConfig]] = {
    1: {
        "one": ParallelConfig(),
        "tp 2": ParallelConfig(tp=2),
        "pp 2": ParallelConfig(pp=2),
        "tp 2 dcp 2": ParallelConfig(tp=2, dcp=2),
        "pcp 2 dcp 2": ParallelConfig(pcp=2, dcp=2, dcp_interleave=4),
    },
    2: {
        "one": ParallelConfig(),
        "tp 2": ParallelConfig(tp=2),
        "pp 2": ParallelConfig(pp=2),
        "pp 2 tp 2": ParallelConfig(pp=2, tp=2),
        "tp 4": ParallelConfig(tp=4),
    },
}
#: what is drawn: ranks cost time
LIKELY = {heads: ["one"] * (2 * len(sizes) - 2) + list(sizes)[1:] for heads, sizes in TOPOLOGIES.items()}


@dataclass(frozen=True)
class Shape:
    """What is simulated. ``pcp``: replicas of the producer. ``p`` and ``d``: names in :data:`TOPOLOGIES`, which all
    consumers have; ``heads`` of the model."""

    pcp: int = 1
    producer: str = "alone"
    consumer: str = "alone"
    consumers: int = 1
    recompute: bool = False
    harsh: bool = True
    both: bool = False
    chunk: int = 8
    nixl: str | None = None  # module path and class of another NIXL connector: a mutant
    heads: int = 1
    p: str = "one"
    d: str = "one"

    def parallel(self, serves: bool) -> ParallelConfig:
        """Sizes of a producer or a consumer. Ranks that share tokens by PCP have no replicas."""
        sizes = TOPOLOGIES[self.heads][self.p if serves else self.d]
        replicated = serves and sizes.dcp == 1
        return msgspec.structs.replace(sizes, pcp=self.pcp) if replicated else sizes

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
