"""What holds for every test: tiny kernels wait without spinning, as they do under the command."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported
