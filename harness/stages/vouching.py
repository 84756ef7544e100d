"""What can vouch for a parameter that the checkpoint does not explain. Knows audits as facts; no limits, no tensors."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from harness.stages.orders import layerless, template


class Reference:
    """What can vouch for a parameter: the reference's audit (none if it shows no weights), the port's own layers."""

    def __init__(self, audit: Mapping[str, Any] | None, port: Sequence[Mapping[str, Any]]) -> None:
        weights: Sequence[Mapping[str, Any]] = audit["weights"] if audit else ()
        self._by_name = {w["name"]: w for w in weights}
        self._by_source = {w["source"]: w for w in weights if w["source"] and w["match"] == "named"}
        self.partial: Mapping[str, Any] = audit["partial"] if audit else {}
        self.vouched: list[str] = []
        self._peers: dict[str, Counter[str]] = defaultdict(Counter)
        for w in port:
            if w["match"] == "content" and not w["unmatched"]:
                self._peers[template(w["name"])][layerless(w["order"])] += 1

    def odd_one_out(self, weight: Mapping[str, Any]) -> bool:
        """Say whether most layers of the port put this parameter together in one way, and this layer in another."""
        peers = self._peers[template(weight["name"])]
        usual, count = peers.most_common(1)[0] if peers else ("", 0)
        return count >= 2 and 2 * count > peers.total() and layerless(weight["order"]) != usual

    def usual(self, weight: Mapping[str, Any]) -> str:
        """Return how most layers of the port put this parameter together, without the layer's number."""
        peers = self._peers[template(weight["name"])]
        return peers.most_common(1)[0][0] if peers else ""

    def of(self, weight: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the reference's parameter of the same name, else the one of the same checkpoint tensor."""
        return self._by_name.get(weight["name"]) or (
            self._by_source.get(weight["source"]) if weight["source"] else None
        )

    def vouches(self, weight: Mapping[str, Any]) -> bool:
        """Say whether the reference holds the very same values where the checkpoint explains neither.

        A loader may compute with what it reads; both sides are then equal to each other, and that is noted.
        """
        other = self._by_name.get(weight["name"])
        digest = weight["digests"].get(weight["dtype"])
        same = other is not None and digest is not None and other["digests"].get(weight["dtype"]) == digest
        if same and weight["name"] not in self.vouched:
            self.vouched.append(weight["name"])
        return same
