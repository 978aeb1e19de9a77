"""Which free hosts go to which run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.planning.allotment import Claim, allot, whole_slices
from trainer.planning.capacity import host_order


@st.composite
def claims(draw: st.DrawFn) -> list[Claim]:
    made = []
    for index in range(draw(st.integers(0, 6))):
        least = draw(st.integers(1, 8))
        most = draw(st.integers(least, 12))
        made.append(Claim(tenancy=f"t{index}", held=draw(st.integers(0, most)), min_hosts=least, max_hosts=most))
    return made


free_hosts = st.sets(st.integers(0, 30)).map(lambda numbers: tuple(f"host-{number}" for number in numbers))


@given(free=free_hosts, claims=claims(), hosts_per_slice=st.integers(1, 4), growing=st.booleans())
def test_each_free_host_goes_to_one_tenancy_in_whole_slices_and_none_gets_more_than_it_may_hold(
    free: tuple[str, ...], claims: list[Claim], hosts_per_slice: int, growing: bool
) -> None:
    allotted = allot(free, claims, hosts_per_slice=hosts_per_slice, growing=growing)
    given_away = [host for hosts in allotted.values() for host in hosts]
    assert len(given_away) == len(set(given_away))
    assert set(given_away) <= set(free)
    by_tenancy = {claim.tenancy: claim for claim in claims}
    for tenancy, hosts in allotted.items():
        claim = by_tenancy[tenancy]
        assert claim.min_hosts <= claim.held + len(hosts) <= claim.max_hosts
        assert sum(len(part) for part in whole_slices(hosts, hosts_per_slice)) == len(hosts) > 0
        assert growing or claim.held < claim.min_hosts


@given(free=free_hosts, claims=claims(), hosts_per_slice=st.integers(1, 4))
def test_nothing_is_left_over_that_somebody_could_use(
    free: tuple[str, ...], claims: list[Claim], hosts_per_slice: int
) -> None:
    allotted = allot(free, claims, hosts_per_slice=hosts_per_slice, growing=True)
    rest = set(free) - {host for hosts in allotted.values() for host in hosts}
    left = len(whole_slices(sorted(rest, key=host_order), hosts_per_slice)) * hosts_per_slice
    for claim in claims:
        held = claim.held + len(allotted.get(claim.tenancy, ()))
        room = (min(left, claim.max_hosts - held) // hosts_per_slice) * hosts_per_slice
        assert room == 0 or held + room < claim.min_hosts


def test_the_first_in_line_gets_all_it_may_hold_and_the_lowest_hosts() -> None:
    line = [
        Claim(tenancy="trains", held=2, min_hosts=1, max_hosts=4),
        Claim(tenancy="waits", held=0, min_hosts=2, max_hosts=3),
        Claim(tenancy="too big", held=0, min_hosts=9, max_hosts=9),
        Claim(tenancy="last", held=0, min_hosts=1, max_hosts=9),
    ]
    free = ("host-10", "host-9", "host-2", "host-4")
    assert allot(free, line, hosts_per_slice=1, growing=False) == {
        "waits": ("host-2", "host-4", "host-9"),
        "last": ("host-10",),
    }
    assert allot(free, line, hosts_per_slice=1, growing=True) == {
        "trains": ("host-2", "host-4"),
        "waits": ("host-9", "host-10"),
    }
