"""What NIXL raises, in words: whose fault it is and what to do.

NIXL's exceptions carry a status name and no more, have no common base and are told apart here by their class names, so
that nothing of NIXL is imported to know them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvconn.errors import TransportError

__all__ = ["connection_lost", "mapped", "some", "text", "unknown_peer", "without"]

#: class name in nixl -> whose fault it usually is and what to do.
_BLAME: Final = {
    "nixlRemoteDisconnectError": (
        "the connection to the peer failed: its process ended, the network between us broke, or it took away memory "
        "that we were reading. Look at the peer's log; a new handshake makes a new connection"
    ),
    "nixlNotFoundError": (
        "no memory registered there, or an agent that was removed. The side whose addresses these are is wrong: "
        "compare both engines' handshakes"
    ),
    "nixlMismatchError": "the blob is not NIXL agent metadata. The peer sent something else, or speaks another NIXL",
    "nixlInvalidParamError": (
        "NIXL calls a parameter invalid: a damaged blob, our own blob come back, or addresses of ours that are wrong"
    ),
    "nixlBackendError": (
        "the backend failed. Look for UCX lines on stderr; the usual causes are memory that cannot be registered and "
        "UCX_TLS without a transport that both sides have"
    ),
    "nixlNotSupportedError": "no backend of both agents can do this: compare `backends` on both engines",
}


def text(err: BaseException) -> str:
    """Class and text; NIXL's texts alone are bare status names."""
    return f"{type(err).__name__}: {err}"


def connection_lost(err: BaseException | None) -> bool:
    """Whether it says that the connection to the peer has failed."""
    return type(err).__name__ == "nixlRemoteDisconnectError"


def mapped(err: Exception, what: str, handle: int | None = None) -> TransportError:
    """A TransportError about ``what``; ``handle`` if parts of a read may be under way."""
    blame = _BLAME.get(type(err).__name__, "not a failure that we know of; a fault of ours or of NIXL")
    under_way = "" if handle is None else " Parts of it may be under way (F4)."
    return TransportError(f"{what}: {text(err)}. {blame}.{under_way}", handle=handle)


def without(what: str, err: Exception) -> TransportError:
    """``what`` could not be made because this process has no descriptor, thread or memory left."""
    return TransportError(
        f"{what}: {text(err)}. The system gives this process no more: look at its limits (open files, threads, memory)"
    )


def unknown_peer(what: str, peer: str) -> TransportError:
    """For an operation on a peer that is not known here."""
    return TransportError(f"{what}: no peer {peer!r} was added or it was removed; a fault of ours: handshake first")


def some(handles: Sequence[int], limit: int = 5) -> str:
    """The first few of many handles."""
    shown = ", ".join(map(str, handles[:limit]))
    return shown if len(handles) <= limit else f"{shown} and {len(handles) - limit} more"
