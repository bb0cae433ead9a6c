"""Where does what stand in etcd? Every key of ours, below one prefix."""

from __future__ import annotations


class Keys:
    """Builds and takes apart the keys below `prefix`, which starts and ends with '/'."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.leader = f"{prefix}leader"
        self.timers = f"{prefix}timers/"
        self.assignments = f"{prefix}assignments/"
        self.drains = f"{prefix}drains/"
        self.epochs = f"{prefix}epochs/"
        self.incarnation = f"{prefix}cluster/incarnation"
        self.facts = f"{prefix}cluster/facts"
        self.doubt = f"{prefix}cluster/doubt"
        self.resumption = f"{prefix}cluster/resumption"
        self.lease_ms_max = f"{prefix}cluster/lease_ms_max"

    def timer(self, timer_id: str) -> str:
        return self.timers + timer_id

    def assignment(self, shard: int) -> str:
        return f"{self.assignments}{shard}"

    def drain(self, timer_id: str) -> str:
        return self.drains + timer_id

    def epoch(self, shard: int) -> str:
        return f"{self.epochs}{shard}"

    def split(self, key: str) -> tuple[str, str]:
        """Give the kind and the name: ("timers", "a-1f"), ("assignments", "17"), ("leader", "")."""
        kind, _, name = key.removeprefix(self.prefix).partition("/")
        return kind, name
