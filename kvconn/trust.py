"""Whom this engine trusts: the fleet's key, the networks peers may be in, how often one address may ask.

Rules
1. The key file is its owner's alone: a regular file of ours (or root's) that group and others cannot touch, of 32 bytes
   or more. What is wrong with it is a ConfigError that names the file, and never what is in it.
2. The secret itself is used for nothing. Each use has a key of its own, HKDF-SHA256 (RFC 5869) of the secret and the
   use's name, so that one of them says nothing of another.
   A file may have several secrets, a line each: the first is used, all are accepted, so that a fleet can change its
   key one engine at a time. Where one line is a secret each is, or empty; where none is, the file is one secret.
3. Without a key everything works, and one warning per process says what that means; ``require_auth`` makes it an error.
4. Addresses are compared as numbers: an IPv4 address that came over an IPv6 socket is that IPv4 address.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import stat
from dataclasses import dataclass

from kvconn.config import LIMITS, Network, NixlKvconn, network
from kvconn.errors import ConfigError

__all__ = ["Address", "FleetKey", "Trust", "load_trust", "numeric", "read_key", "warn_without_key"]

log = logging.getLogger("kvconn")
#: bytes of a secret, without white space at its ends
MIN_SECRET = 32
MAX_SECRET = 4096
#: secrets of one file, and a line that is one; a file without such a line is one secret of any bytes
MAX_SECRETS = 4
_SECRET = re.compile(rb"[!-~]{32,}")
HOW = "make one with `(umask 077; openssl rand -hex 32 > FILE)` and copy it to every engine of the fleet"
PATH = "kv_transfer_config.kv_connector_extra_config.kvconn"
_SALT = b"kvconn fleet key 1"
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,14}")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_warned = False


class FleetKey:
    """One secret that every engine of a fleet has, and ``others`` that are accepted beside it. ``accepted``: all of
    them, the one that is used first. ``fingerprint``: 8 hex digits, to compare two hosts' files by."""

    __slots__ = ("_prk", "accepted", "fingerprint")

    def __init__(self, secret: bytes, *others: bytes) -> None:
        self._prk = hmac.new(_SALT, secret, hashlib.sha256).digest()
        self.accepted: tuple[FleetKey, ...] = (self, *(FleetKey(other) for other in others))
        self.fingerprint = self.derive("fingerprint").hex()[:8]

    def derive(self, use: str) -> bytes:
        """32 bytes for this use and no other."""
        return hmac.new(self._prk, use.encode() + b"\x01", hashlib.sha256).digest()

    def __repr__(self) -> str:
        return f"FleetKey({' '.join(one.fingerprint for one in self.accepted)})"


@dataclass(frozen=True)
class Trust:
    """``key`` None: nothing is authenticated. ``allow`` None: peers may be anywhere.

    ``rate``: handshakes per second that one address is answered.
    """

    key: FleetKey | None = None
    allow: tuple[Network, ...] | None = None
    rate: float = LIMITS.handshake_rate

    def allows(self, address: Address) -> bool:
        """May a peer be at this address?"""
        return self.allow is None or any(address in one for one in self.allow)


def numeric(text: str) -> Address | None:
    """An address in its usual forms, or None: ``10.0.0.1``, ``fd00::1``, ``[fd00::1]``, ``fe80::1%eth0``.

    What stands behind ``%`` is an interface's name and nothing else: Python takes any text there, and ZMQ a grammar.
    """
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return None
    if isinstance(found, ipaddress.IPv4Address):
        return found
    if found.scope_id is not None and not _INTERFACE.fullmatch(found.scope_id):
        return None
    return found.ipv4_mapped or found


def load_trust(settings: NixlKvconn, path: str = PATH) -> Trust:
    """Read the key and the networks. Raises ConfigError with every problem found."""
    problems: list[str] = []
    key: FleetKey | None = None
    if settings.key_file is not None:
        try:
            key = read_key(settings.key_file)
        except ConfigError as err:
            problems += [f"{path}.key_file: {problem}" for problem in err.problems]
    elif settings.require_auth:
        problems.append(f"{path}.require_auth: expected a key_file beside it, got none; {HOW}")
    if problems:
        raise ConfigError(problems)
    allow = None if settings.allow is None else tuple(network(one) for one in settings.allow)
    return Trust(key, allow, float(settings.handshake_rate))


def read_key(file: str) -> FleetKey:
    """The fleet's key in this file. Raises ConfigError."""
    whole = _read(file)
    text = whole.strip()
    if not MIN_SECRET <= len(text) <= MAX_SECRET:
        raise ConfigError(f"{file}: expected {MIN_SECRET} to {MAX_SECRET} bytes, got {len(text)}; {HOW}")
    numbered = [(number, line.strip()) for number, line in enumerate(whole.split(b"\n"), 1)]
    lines = [line for _, line in numbered if _SECRET.fullmatch(line)]
    if not lines:
        return FleetKey(text)
    other = [number for number, line in numbered if line and not _SECRET.fullmatch(line)]
    if other:
        raise ConfigError(
            f"{file}: line {other[0]}: expected {MIN_SECRET} or more printable characters without white space, as "
            "another line has, got something else: a secret cut short or wrapped, or a comment? Mend it or take it out"
        )
    if len(lines) > MAX_SECRETS or len(set(lines)) < len(lines):
        raise ConfigError(f"{file}: expected at most {MAX_SECRETS} different secrets, a line each, got {len(lines)}")
    return FleetKey(*lines)


def _read(file: str) -> bytes:
    """What is in it, of the very file whose mode was looked at."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would wait for its writer
    except (OSError, ValueError) as err:  # ValueError: a path with a null byte
        what = err.strerror if isinstance(err, OSError) else str(err)
        hint = f"; {HOW}" if isinstance(err, OSError) and err.errno == errno.ENOENT else ""
        raise ConfigError(f"{file}: cannot be read: {what}{hint}") from None
    try:
        seen = os.fstat(fd)
        mode = stat.S_IMODE(seen.st_mode)
        if not stat.S_ISREG(seen.st_mode):
            raise ConfigError(f"{file}: expected a regular file, got {stat.filemode(seen.st_mode)}")
        if mode & 0o077:
            raise ConfigError(
                f"{file}: expected mode 0600 or 0400, got {mode:04o}: others can use the fleet's key; chmod 600 "
                "it, and make a new key if they could read it"
            )
        if seen.st_uid not in (os.getuid(), 0):
            raise ConfigError(f"{file}: expected a file of user {os.getuid()} or root, got one of user {seen.st_uid}")
        return os.read(fd, MAX_SECRET + 3)  # one byte too many is seen, also before a line's end
    except OSError as err:
        raise ConfigError(f"{file}: cannot be read: {err.strerror}") from None
    finally:
        os.close(fd)


def warn_without_key(trust: Trust) -> None:
    """Say once per process that nothing is authenticated, and to whom that opens this engine."""
    global _warned  # noqa: PLW0603 - one warning per process, however many connectors it has
    if trust.key is not None or _warned:
        return
    _warned = True
    where = "any address" if trust.allow is None else "the networks in kvconn.allow"
    log.warning(
        "NO FLEET KEY: peers are not authenticated. Whoever reaches a side channel can read and release KV, and "
        "whoever sends kv_transfer_params decides which host, at %s, a reader asks. Set kvconn.key_file on every "
        "engine (SECURITY.md)",
        where,
    )
