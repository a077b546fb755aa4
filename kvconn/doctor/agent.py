"""One NIXL agent in a child: can it be made at all, which UCX is it, which transports does that find?

Rules
1. The list of transports is asked of the very libucp that nixl loaded, through its C interface; if that fails, the
   agent's own answer stands and the list is empty.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path
from typing import Any, Final

import msgspec

from kvconn.doctor.children import Ending, begin, decoded, explain, run_child, say_result
from kvconn.doctor.findings import Finding, fail, ok, warn

__all__ = ["AgentFacts", "child", "gather", "judge"]

LIMIT: Final = 45.0
#: ucp_params: which fields are given (features), and the features NIXL asks for (RMA, active messages).
_FIELD_FEATURES: Final = 1
_FEATURES: Final = 2 | 64
_PARAMS_WORDS: Final = 64


class AgentFacts(msgspec.Struct, frozen=True):
    """``transports`` as ``tcp/eth0``; ``trouble`` when no agent could be made."""

    ucx: str = ""
    loaded_from: str = ""
    transports: tuple[str, ...] = ()
    trouble: str = ""


def gather() -> AgentFacts:
    return facts_of(run_child(["agent"], LIMIT))


def facts_of(ending: Ending) -> AgentFacts:
    found = decoded(ending, AgentFacts)
    return found if found is not None else AgentFacts(trouble=explain(ending))


def child() -> None:
    """In the child: an agent, then a look at the UCX it loaded. The first result counts if the look kills us."""
    from kvconn.transport.nixl import NixlTransport

    begin("make a NIXL agent with UCX")
    transport = NixlTransport(progress="poll")
    say_result(AgentFacts())
    begin("ask UCX for its transports")
    found = re.search(r"/\S*libucp\S*", Path("/proc/self/maps").read_text())
    if found is not None:
        say_result(_ask(found[0]))
    begin("close the agent")
    transport.close()


def _ask(library: str) -> AgentFacts:
    ucp = ctypes.CDLL(library)
    ucp.ucp_get_version_string.restype = ctypes.c_char_p
    version: bytes = ucp.ucp_get_version_string()
    return AgentFacts(version.decode(errors="replace"), library, _resources(ucp))


def _resources(ucp: Any) -> tuple[str, ...]:
    """Transports and devices of a context like NIXL's."""
    major, minor, patch = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    ucp.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(patch))
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    if ucp.ucp_config_read(None, None, ctypes.byref(config)) != 0:
        return ()
    params = (ctypes.c_uint64 * _PARAMS_WORDS)(_FIELD_FEATURES, _FEATURES)
    if ucp.ucp_init_version(major, minor, ctypes.byref(params), config, ctypes.byref(context)) != 0:
        return ()
    libc = ctypes.CDLL(None)
    libc.fdopen.restype = ctypes.c_void_p
    with open(os.memfd_create("ucx"), "rb") as file:
        stream = ctypes.c_void_p(libc.fdopen(os.dup(file.fileno()), b"w"))
        ucp.ucp_context_print_info(context, stream)
        libc.fclose(stream)
        file.seek(0)
        text = file.read(1 << 20).decode(errors="replace")
    return resources(text)


def resources(text: str) -> tuple[str, ...]:
    """``tcp/lo`` and the like out of UCX's description of a context."""
    return tuple(re.findall(r"^#\s+resource \d+\s*:.*\s(\S+/\S+)\s*$", text, re.MULTILINE))


def judge(facts: AgentFacts) -> list[Finding]:
    if facts.trouble:
        return [
            fail(
                "no NIXL agent can be made here",
                f"An engine could not start its connector. The child that tried: {facts.trouble}",
                "see the findings about versions, UCX_TLS and UCX_NET_DEVICES; UCX_LOG_LEVEL=info says more",
            )
        ]
    if not facts.ucx:
        return [
            warn(
                "a NIXL agent can be made, but UCX could not be asked for its transports",
                "The measured read below is all that is known of them.",
                "nothing, if the read below is fine",
            )
        ]
    return [
        ok(
            f"a NIXL agent can be made; UCX {facts.ucx} finds {', '.join(facts.transports) or 'no transport'}",
            f"loaded from {facts.loaded_from}",
        )
    ]
