"""Which free hosts the scale-up flow gives to whom, and what it tells of it. See also tests/control/test_keeper.py."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tasks.scaling import Enlargement, Growth, possible_orders, render_growth
from trainer import wire
from trainer.planning.capacity import host_order
from trainer.records import Recovered


def pool_view(free: tuple[str, ...], tenancies: list[wire.TenancyView], version: int = 7) -> wire.PoolView:
    return wire.PoolView(
        pool="p",
        version=version,
        time=100.0,
        offered=8,
        source="local",
        price_per_host_hour=None,
        free=free,
        hosts=(),
        tenancies=tuple(tenancies),
        hosts_per_slice=1,
    )


def tenancy(name: str, *hosts: str, most: int) -> wire.TenancyView:
    return wire.TenancyView(tenancy=name, run=f"/runs/{name}", since=1.0, min_hosts=1, max_hosts=most, hosts=hosts)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=4), st.integers(0, 6))
def test_after_its_orders_are_carried_out_there_is_nothing_left_to_order(
    claims: list[tuple[int, int]], num_free: int
) -> None:
    hosts = iter(f"host-{number}" for number in range(100))
    tenancies = [
        tenancy(f"t{index}", *(next(hosts) for _ in range(min(held, most))), most=most)
        for index, (held, most) in enumerate(claims)
    ]
    free = tuple(next(hosts) for _ in range(num_free))
    given_hosts = {order.tenancy: order.hosts for order in possible_orders(pool_view(free, tenancies))}
    assert len({order.key for order in possible_orders(pool_view(free, tenancies))}) == len(given_hosts)
    later = [each.model_copy(update={"hosts": each.hosts + given_hosts.get(each.tenancy, ())}) for each in tenancies]
    taken = {host for hosts in given_hosts.values() for host in hosts}
    rest = tuple(sorted(set(free) - taken, key=host_order))
    assert possible_orders(pool_view(rest, later, version=8)) == []


def test_the_key_of_an_order_is_that_of_the_sight_it_was_made_on() -> None:
    seen = pool_view(("host-1",), [tenancy("c1", "host-0", most=2)])
    assert [order.key for order in possible_orders(seen)] == ["c1@7"]
    assert possible_orders(seen) == possible_orders(seen)
    assert possible_orders(seen.model_copy(update={"version": 8}))[0].key == "c1@8"


def test_a_growth_is_itemised_from_the_change_of_capacity_on() -> None:
    enlargement = Enlargement(
        tenancy="c1", run_directory="/runs/night", hosts=("host-2", "host-3"), before=2, given=103.5
    )
    recovered = Recovered(
        time=112.0,
        monotonic=0.0,
        incarnation=2,
        cause="drained",
        planned=True,
        from_hosts=2,
        to_hosts=4,
        step=40,
        resumed_from=40,
        down_seconds=7.25,
        phases={"drain": 0.5, "compile": 4.0},
    )
    text = render_growth([Growth(enlargement=enlargement, recovered=recovered)], changed=100.0, began=103.0)
    assert "**night**: 2 → 4 hosts (host-2, host-3 joined)" in text
    for line in (
        "| the flow begins | 3.00 |",
        "| the hosts are the run's | 3.50 |",
        "| the last step before (training goes on until then) | 4.75 |",
        "| … drain, lasts | 0.50 |",
        "| … compile, lasts | 4.00 |",
        "| the first step on 4 hosts | 12.00 |",
        "Steps lost: 0. Down time: 7.25 s.",
    ):
        assert line in text.splitlines()
    unseen = render_growth([Growth(enlargement=enlargement, recovered=None)], changed=100.0, began=103.0)
    assert "| the first step on them | not seen |" in unseen
