"""Which hosts a `tool.http` step may talk to, and at which addresses.

Owns the rules' notation: `host` (the scheme's usual port), `host:8080`, `host:*`, `*.suffix` (hosts below suffix), IP addresses as
they are (`127.0.0.1:8080`, `[::1]:8080`). Pure but for `resolve`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from dataclasses import dataclass
from typing import Annotated

import msgspec

from hexrt.errors import BadRequest, TaskFailed, Unavailable

USUAL_PORT = {"http": 80, "https": 443}
NAT64 = ipaddress.ip_network("64:ff9b::/96")
RULE = re.compile(r"(?P<below>\*\.)?(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+)(:(?P<port>\d{1,5}|\*))?")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[ops."tool.http"]` of the config. What only `allow` lists by name must lie at public addresses."""

    allow: tuple[str, ...] = ()
    allow_private: tuple[str, ...] = ()  # names that may also lie at private, loopback and link-local addresses
    max_body_mib: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 32  # the most that a step may ask for


@dataclass(frozen=True, slots=True)
class Rule:
    host: str
    below: bool
    port: int | None  # None: the scheme's usual; 0: any

    def matches(self, scheme: str, host: str, port: int) -> bool:
        # `*.0.0.1` is no family of addresses: the numbers of an address end in nothing that they have in common.
        named = host.endswith("." + self.host) and literal(host) is None if self.below else host == self.host
        return named and (self.port == 0 or port == (self.port or USUAL_PORT[scheme]))


def parse_rule(text: str) -> Rule:
    """Raises Unavailable that names the rule."""
    found = RULE.fullmatch(text)
    if not found or (found["port"] not in (None, "*") and not 0 < int(found["port"]) < 65536):
        raise Unavailable(
            f'the config\'s [ops."tool.http"] has a rule that is none: {text!r}; write host, host:port, host:* or *.suffix'
        )
    port = None if found["port"] is None else 0 if found["port"] == "*" else int(found["port"])
    return Rule(found["host"].strip("[]").lower().rstrip("."), bool(found["below"]), port)


def literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """False for every address that leads into this machine or its network, wrapped in IPv6 or not."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is None and address in NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast


class Gate:
    """The rules of one step."""

    def __init__(self, settings: Settings, where: str) -> None:
        self._public = [parse_rule(rule) for rule in settings.allow]
        self._private = [parse_rule(rule) for rule in settings.allow_private]
        self._where = where

    def check(self, scheme: str, host: str, port: int) -> bool:
        """True if the host may lie at a private address. Raises Unavailable if it may not be asked at all."""
        if any(rule.matches(scheme, host, port) for rule in self._private):
            return True
        if any(rule.matches(scheme, host, port) for rule in self._public):
            return literal(host) is not None or host == "localhost"
        usual = port == USUAL_PORT[scheme]
        shown = f"[{host}]" if ":" in host else host
        raise Unavailable(
            f"{shown if usual else f'{shown}:{port}'} is not allowed: whoever runs hexrtd may list it under allow in"
            ' [ops."tool.http"] of the config',
            self._where,
        )

    async def resolve(self, scheme: str, host: str, port: int) -> list[str]:
        """The addresses to try, in order. They are what was checked: connect to them, not to the name.

        Raises Unavailable where the name is not allowed or leads where it may not, TaskFailed where it is unknown.
        """
        private = self.check(scheme, host, port)
        fixed = literal(host)
        if fixed is not None:
            return [str(fixed)]
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise TaskFailed(f"the name {host} is unknown here", self._where) from None
        addresses = list(dict.fromkeys(str(entry[4][0]).partition("%")[0] for entry in found))
        hidden = [a for a in addresses if not is_public(ipaddress.ip_address(a))]
        if hidden and not private:
            raise Unavailable(
                f"{host} lies at {hidden[0]}, an address of this machine or its network: whoever runs hexrtd may list it under"
                ' allow_private in [ops."tool.http"] of the config',
                self._where,
            )
        return addresses


def require_plain(text: str, where: str) -> None:
    """Raises BadRequest where a URL holds what parsers read differently."""
    if not text.isprintable() or "\\" in text or " " in text:
        raise BadRequest("has a blank, a backslash or a control character", where)
