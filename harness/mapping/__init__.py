"""From a port's own names and layouts to canonical taps: a mapping file, its small language, and proposals of one."""

from harness.mapping.apply import apply_mapping
from harness.mapping.file import Row, parse_mapping, read_mapping
from harness.mapping.propose import proposal_text, propose

__all__ = ["Row", "apply_mapping", "parse_mapping", "proposal_text", "propose", "read_mapping"]
