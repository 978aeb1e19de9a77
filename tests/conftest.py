"""The world of tests that use jax in this process: 8 virtual CPU devices."""

import os
import sys

_DEVICES = "--xla_force_host_platform_device_count=8"

if "jax" in sys.modules and _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    raise RuntimeError(f"jax was imported before tests/conftest.py could set XLA_FLAGS={_DEVICES}")
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"
