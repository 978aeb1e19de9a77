"""The world of tests that use jax in this process: 8 virtual CPU devices. And a limit on when tests may begin."""

import os
import sys
import time

import pytest

_DEVICES = "--xla_force_host_platform_device_count=8"

if "jax" in sys.modules and _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    raise RuntimeError(f"jax was imported before tests/conftest.py could set XLA_FLAGS={_DEVICES}")
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

_BEGAN = time.monotonic()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--start-within", type=float, metavar="SECONDS", help="skip each test that would begin later than this"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    limit = item.config.getoption("--start-within")
    if limit is not None and time.monotonic() - _BEGAN > limit:
        pytest.skip(f"the {limit:.0f} s in which tests may begin were over")
