"""The port's Triton kernels under the names of `accel_impl.ops`. Imported only where triton is installed.

Without a GPU they run in Triton's interpreter (TRITON_INTERPRET=1 before the import). Products are sums of products in
float32: the interpreter's tl.dot is wrong in bfloat16.
"""

from __future__ import annotations

from accel_impl.triton.attention import attend_decode
from accel_impl.triton.formats import decode_mxfp4
from accel_impl.triton.selection import choose_keys

__all__ = ["attend_decode", "choose_keys", "decode_mxfp4"]
