"""How an application of a cluster is, in our words instead of Ray's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

STATES = {
    "NOT_STARTED": "has not started",
    "DEPLOYING": "is starting, or being updated",
    "RUNNING": "serves",
    "UNHEALTHY": "is not healthy",
    "DEPLOY_FAILED": "has failed",
    "DELETING": "is being taken off the cluster",
}
_REPLICAS = {
    "RUNNING": "ready",
    "STARTING": "starting",
    "UPDATING": "being updated",
    "RECOVERING": "being found again",
    "STOPPING": "draining",
    "STOPPED": "stopped",
    "PENDING_MIGRATION": "to be moved",
}
_PARTS = {"Replica": "replicas", "Front": "HTTP fronts"}
_ERROR = re.compile(r"^(?:[A-Za-z_][\w.]*(?:Error|Exception)|RuntimeError): (.+)$")
_UNSCHEDULED = re.compile(
    r"taken more than \d+s to be scheduled.*?each replica: (\{.*?\}).*?available: (\{.*?\})", re.DOTALL
)
_AMOUNT = re.compile(r"['\"](CPU|GPU)['\"]: ([\d.]+)")


@dataclass(frozen=True, slots=True)
class Standing:
    """An application, as Ray Serve reports it."""

    name: str
    state: str
    """Ray's name of it."""
    message: str = ""
    parts: Mapping[str, tuple[Mapping[str, int], str]] = field(default_factory=dict)
    """Deployment to how many of its replicas are in which state, and what Ray says of it."""

    @property
    def reason(self) -> str:
        """Why it does not serve, in one line; empty where it does."""
        if self.state == "RUNNING":
            return ""
        messages = [*(said for _, said in self.parts.values()), self.message]
        return next((words for message in messages if (words := reason_in(message))), "")

    def lines(self, address: str) -> list[str]:
        """State, reason and address, and a line for each part."""
        said = f": {self.reason}" if self.reason else ""
        lines = [f"{self.name} {STATES.get(self.state, f'is {self.state.lower()}')}{said}"]
        if address:
            lines.append(f"  address: {address}")
        return lines + [f"  {name}: {words}" for name, words in self.counts().items()]

    def counts(self) -> dict[str, str]:
        """Part to how many of it are in which state."""
        return {
            _PARTS.get(part, part): ", ".join(
                f"{number} {_REPLICAS.get(state, state.lower())}"
                for state, number in states.items()
                if number
            )
            or "none"
            for part, (states, _) in self.parts.items()
        }


def reason_in(message: str) -> str:
    """The part of a message of Ray that a user needs: the error at the end of a traceback, or what is waited for."""
    waits = _UNSCHEDULED.search(message)
    if waits is not None:
        return f"a replica waits for {_amounts(waits[1])}; {_amounts(waits[2])} of the cluster are free"
    found = [match[1] for line in message.splitlines() if (match := _ERROR.match(line.strip()))]
    if found:
        return found[-1]
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _amounts(words: str) -> str:
    """`{"CPU": 1.0}` as `1 core`."""
    found = {kind: float(number) for kind, number in _AMOUNT.findall(words)}
    amounts = {"core": found.get("CPU", 0.0)} | ({"GPU": found["GPU"]} if "GPU" in found else {})
    return " and ".join(f"{number:g} {name}{'' if number == 1 else 's'}" for name, number in amounts.items())
