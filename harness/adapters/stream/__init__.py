"""A model that is larger than memory: layer by layer from disk, through a bounded window, for many runs in one pass.

`shards` maps the files, `weights` turns stored tensors into a module's parameters, `folder` asks transformers how,
`window` holds what is in memory now, `walk` lets several forwards go along in one pass. Must not know stages or limits.
"""

from harness.adapters.stream.adapter import StreamedAdapter, open_window, streamed_module

__all__ = ["StreamedAdapter", "open_window", "streamed_module"]
