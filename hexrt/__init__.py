"""hexrt runs AI-agent workflows on one machine: `hexrtd` is the daemon, this package its client and its parts."""

__version__ = "0.1.0"
