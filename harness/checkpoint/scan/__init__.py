"""A whole checkpoint read once: digests, stored codes, decoded values, what looks wrong. Must not know model code."""

from harness.checkpoint.scan.estimate import expected_seconds
from harness.checkpoint.scan.facts import content_facts
from harness.checkpoint.scan.shard import ShardScan
from harness.checkpoint.scan.stream import scan, scan_bytes
from harness.checkpoint.scan.suspicion import Suspicion, suspicions

__all__ = ["ShardScan", "Suspicion", "content_facts", "expected_seconds", "scan", "scan_bytes", "suspicions"]
