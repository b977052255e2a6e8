"""Rates, durations and sizes: what is read, what is refused, what reads back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from netsim.units import (
    UnitError,
    parse_bandwidth,
    parse_duration,
    parse_fraction,
    parse_size,
    show_bandwidth,
    show_duration,
    show_size,
)

finite = st.floats(min_value=0, allow_nan=False, allow_infinity=False)


@pytest.mark.parametrize(
    ("text", "bits_per_second"),
    [
        ("100Mbps", 100e6),
        ("100mbps", 100e6),
        ("1.5 Gbit/s", 1.5e9),
        ("500kbps", 500e3),
        ("500 Kb/s", 500e3),
        ("10 MB/s", 80e6),
        ("1MiB/s", 8 * 2**20),
        ("9600bps", 9600.0),
        ("1e3Mbps", 1e9),
        (" .5Gbps ", 5e8),
        ("2Tbit/s", 2e12),
        ("unlimited", math.inf),
        ("Unlimited", math.inf),
    ],
)
def test_bandwidth_is_read_as_people_write_it(text, bits_per_second) -> None:
    assert parse_bandwidth(text) == bits_per_second


def test_a_megabyte_per_second_is_eight_times_a_megabit_per_second() -> None:
    assert parse_bandwidth("1MB/s") == 8 * parse_bandwidth("1Mb/s")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("100", "did you mean '100Mbps'?"),
        ("100M", "did you mean '100Mb"),
        ("1e8", "did you mean '100Mbps'?"),
        ("100000", "did you mean '100kbps'?"),
        ("1e3", "did you mean '1000Mbps'?"),
        ("100mB", "did you mean '100MB/s', which is 800Mbps?"),
        ("100MB", "did you mean '100MB/s', which is 800Mbps?"),
        ("100MBps", "did you mean '100MB/s', which is 800Mbps?"),
        ("1.5GBps", "did you mean '1.5GB/s', which is 12Gbps?"),
        ("100 mb/s", "did you mean '100Mb/s'?"),
        ("100Mbit", "did you mean '100Mbit/s'?"),
        ("-5Mbps", "did you mean '5Mbps'?"),
        ("0Mbps", "more than zero"),
        ("1e-999Mbps", "more than zero"),
        ("nan", "expected '100Mbps'"),
        ("nanMbps", "expected '100Mbps'"),
        ("1e999Gbps", "a finite number"),
        ("1e308Gbps", "a finite number"),
        ("inf", "did you mean 'unlimited'?"),
        ("", "expected '100Mbps'"),
        ("fast", "expected '100Mbps'"),
        ("1,5Gbps", "expected '100Mbps'"),
        ("1_000Mbps", "expected '100Mbps'"),
        ("100Mbps 5", "expected '100Mbps'"),
        ("١٠Mbps", "expected '100Mbps'"),
    ],
)
def test_other_bandwidths_are_refused_with_the_nearest_writing(text, hint) -> None:
    with pytest.raises(UnitError) as refused:
        parse_bandwidth(text)

    assert repr(text) in str(refused.value)
    assert hint in str(refused.value)


@pytest.mark.parametrize("text", ["100MBps", "100mb/s", "100mB", "100MB", "100Mb", "100mB/s"])
def test_a_writing_between_bits_and_bytes_is_refused_naming_both(text) -> None:
    with pytest.raises(UnitError, match=r"\(bits\).*\(bytes\)"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20ms", 0.02),
        ("1.5 s", 1.5),
        ("300us", 0.0003),
        ("300µs", 0.0003),
        ("300μs", 0.0003),
        ("7ns", 7e-9),
        ("2min", 120.0),
        ("1h", 3600.0),
        ("0", 0.0),
        ("0ms", 0.0),
    ],
)
def test_durations_are_exact_decimals(text, seconds) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("20", "did you mean '20ms'?"),
        ("20MS", "did you mean '20ms'?"),
        ("1e2", "did you mean '100ms'?"),
        ("5m", "did you mean '5m"),
        ("-1s", "did you mean '1s'?"),
        ("soon", "expected '20ms'"),
        ("1e999s", "a finite number"),
    ],
)
def test_other_durations_are_refused(text, hint) -> None:
    with pytest.raises(UnitError) as refused:
        parse_duration(text)

    assert hint in str(refused.value)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("6GiB", 6 * 2**30),
        ("200 MB", 200_000_000),
        ("4096B", 4096),
        ("1.5KiB", 1536),
        ("12 bytes", 12),
        ("0", 0),
        ("0.1GiB", 107374182),
    ],
)
def test_sizes_are_bytes(text, nbytes) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["100", "100M", "100Mb", "100mB", "-1MB", "1e30GB", "nan", "GB"])
def test_other_sizes_are_refused(text) -> None:
    with pytest.raises(UnitError, match="6GiB"):
        parse_size(text)


def test_fractions_are_shares_or_percentages() -> None:
    assert [parse_fraction(x) for x in (0.01, "1%", "0.25", 0, 1, "0.1%")] == [
        0.01,
        0.01,
        0.25,
        0.0,
        1.0,
        0.001,
    ]
    for text in ("2", "-1%", "101%", "1 percent", "nan"):
        with pytest.raises(UnitError, match="'1%'"):
            parse_fraction(text)


def test_a_number_without_quotes_is_refused_as_a_text_is() -> None:
    with pytest.raises(UnitError, match="bandwidth 100 is not understood"):
        parse_bandwidth(100)  # type: ignore[arg-type]


def test_quantities_are_shown_as_people_write_them() -> None:
    assert [show_bandwidth(x) for x in (100e6, 1.5e9, 500e3, 9600.0, 40.5e6, math.inf)] == [
        "100Mbps",
        "1.5Gbps",
        "500kbps",
        "9.6kbps",
        "40.5Mbps",
        "unlimited",
    ]
    assert [show_duration(x) for x in (0.02, 1.5, 0.0003, 0.0, 7e-9)] == [
        "20ms",
        "1.5s",
        "300us",
        "0s",
        "7ns",
    ]
    sizes = (6 * 2**30, 200_000_000, 4096, 500, 1536, 0)
    assert [show_size(x) for x in sizes] == ["6GiB", "200MB", "4KiB", "500B", "1536B", "0B"]


def test_digits_round_what_is_shown() -> None:
    assert show_bandwidth(33333333.333, digits=3) == "33.3Mbps"
    assert show_duration(0.0123456, digits=2) == "12ms"
    assert show_duration(0.000237, digits=2) == "240us"
    assert show_size(123_456_789, digits=3) == "123MB"


def test_what_is_not_a_number_cannot_be_shown() -> None:
    with pytest.raises(ValueError, match="nan"):
        show_bandwidth(math.nan)
    with pytest.raises(ValueError, match="inf"):
        show_duration(math.inf)


@given(st.floats(min_value=0, exclude_min=True, allow_nan=False))
def test_every_bandwidth_reads_back_to_the_bit(bandwidth_bps) -> None:
    assert parse_bandwidth(show_bandwidth(bandwidth_bps)) == bandwidth_bps


@given(finite)
def test_every_duration_reads_back_to_the_bit(duration_s) -> None:
    assert parse_duration(show_duration(duration_s)) == duration_s


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_every_size_reads_back(nbytes) -> None:
    assert parse_size(show_size(nbytes)) == nbytes


@given(st.text(max_size=20))
def test_any_text_is_read_or_refused_by_name(text) -> None:
    for parse in (parse_bandwidth, parse_duration, parse_size, parse_fraction):
        try:
            value = parse(text)
        except UnitError:
            continue
        assert value >= 0


@given(
    st.integers(min_value=1, max_value=99999),
    st.sampled_from(["", "k", "M", "G", "T"]),
    st.sampled_from(["bps", "b/s", "bit/s", "B/s"]),
)
def test_only_a_capital_b_multiplies_by_eight(number, prefix, tail) -> None:
    scale = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}[prefix]

    assert parse_bandwidth(f"{number}{prefix}{tail}") == number * scale * (8 if "B" in tail else 1)
