"""Where the user's own code was, from a stack."""

from harness.errors import user_frame

TRACEBACK = """Traceback (most recent call last):
  File "/x/harness/worker.py", line 70, in answer
  File "/srv/port.py", line 95, in forward
  File "/x/lib/python3.11/site-packages/torch/nn/modules/linear.py", line 1, in forward
ValueError: no
"""
DUMP = """Thread 0x1 (most recent call first):
  File "/x/lib/python3.11/site-packages/torch/_ops.py", line 1 in __call__
  File "/srv/port.py", line 12 in wait
  File "/srv/port.py", line 90 in forward
"""


def test_the_innermost_own_line_of_a_stack_is_found():
    """A traceback ends with it, the dump of a hung thread begins with it; libraries and day0 itself are passed over."""
    assert user_frame(TRACEBACK) == "port.py line 95 in forward"
    assert user_frame(DUMP) == "port.py line 12 in wait"
    assert user_frame("") == ""
    assert user_frame('  File "/x/harness/worker.py", line 70, in answer') == ""
