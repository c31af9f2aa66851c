"""A lab of real hosts for tests: brought up once a session, always taken down."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lab_driver import Lab, lab_name, require_root


@pytest.fixture(scope="session")
def labs() -> Iterator[tuple[Lab, Lab]]:
    """Two labs, not up, and nothing left of them by a test run that was killed."""
    require_root()
    both = Lab(lab_name("t")), Lab(lab_name("u"))
    for lab in both:
        lab.down()
    yield both
    for lab in both:
        lab.down()


@pytest.fixture(scope="session")
def lab(labs: tuple[Lab, Lab]) -> Lab:
    """Three running hosts, n1 to n3. Who cuts or kills one mends it with `up()`."""
    labs[0].up()
    return labs[0]


@pytest.fixture
def spare_lab(labs: tuple[Lab, Lab]) -> Iterator[Lab]:
    """Another lab, not up, for tests that bring labs up and down themselves."""
    yield labs[1]
    labs[1].down()
