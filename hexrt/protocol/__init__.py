"""What crosses a socket: `framing` (length-prefixed msgpack), `messages` (client and daemon), `host` (daemon and device hosts)."""
