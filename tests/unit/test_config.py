"""Settings: every field's type and range, the rules across fields, and the environment. Scenario h6."""

import dataclasses
import math

import pytest

import kvpush.config
from kvpush.config import Config, HoldPolicy
from kvpush.errors import ConfigurationError

SECONDS = {
    "handshake_timeout_s": 5.0,
    "handshake_backoff_min_s": 0.1,
    "handshake_backoff_max_s": 30.0,
    "heartbeat_interval_s": 1.0,
    "liveness_timeout_s": 5.0,
    "engine_ttl_s": 3600.0,
    "evict_grace_s": 30.0,
    "lease_s": 30.0,
    "receive_deadline_s": 120.0,
    "stall_timeout_s": 10.0,
    "hold_timeout_s": 60.0,
    "close_timeout_s": 2.0,
    "tombstone_ttl_s": 300.0,
    "tcp_user_timeout_s": 3.0,
    "poll_min_s": 0.00005,
    "poll_max_s": 0.001,
}
COUNTS = {
    "handshake_attempts": 3,
    "max_pending_pushes": 8192,
    "max_registrations": 65536,
    "max_registrations_per_engine": 16384,
    "max_registered_blocks": 1 << 24,
    "max_registered_blocks_per_engine": 1 << 20,
    "max_engines": 16384,
    "max_deferred_per_engine": 4096,
    "max_in_flight_bytes": 4 << 30,
    "max_write_bytes": 64 << 20,
    "coalesce_bytes": 1 << 20,
    "min_tile_bytes": 1024,
    "max_message_bytes": 8 << 20,
    "max_tombstones": 65536,
}
FLAGS = {"eager_handshake": False}
TEXTS = {"net_devices": "", "ucx_options": ""}
CHOICES = {"hold_policy": HoldPolicy.release}

BAD_SECONDS = [
    "5",
    "abc",
    "",
    b"5",
    True,
    False,
    None,
    0,
    0.0,
    -0.0,
    -1,
    -1e-9,
    math.nan,
    math.inf,
    -math.inf,
    1e300,
    [5],
]
BAD_COUNTS = ["5600", "abc", True, False, None, 0, -1, -4096, 1.0, 1.5, math.nan, math.inf, [1]]
BAD_FLAGS = ["true", "", 0, 1, None, 1.0]
BAD_TEXTS = [None, b"lo", 0, True, ["lo"]]
BAD_CHOICES = ["", "drop", "RELEASE", None, True, 1]

# low, high, and whether they may be equal
ORDERED = [
    ("heartbeat_interval_s", "liveness_timeout_s", False),
    ("handshake_backoff_min_s", "handshake_backoff_max_s", True),
    ("max_registrations_per_engine", "max_registrations", True),
    ("max_registered_blocks_per_engine", "max_registered_blocks", True),
    ("poll_min_s", "poll_max_s", True),
]


def bad(fields, values):
    return [pytest.param(name, value, id=f"{name}-{value!r}") for name in fields for value in values]


def assert_refused(name, value):
    with pytest.raises(ConfigurationError) as caught:
        Config(**{name: value})
    assert isinstance(caught.value, ValueError)
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


def test_defaults_are_these():
    config = Config()
    expected = SECONDS | COUNTS | FLAGS | TEXTS | CHOICES
    assert {field.name: getattr(config, field.name) for field in dataclasses.fields(config)} == expected


def test_every_field_is_covered_by_these_tables():
    assert {field.name for field in dataclasses.fields(Config)} == {*SECONDS, *COUNTS, *FLAGS, *TEXTS, *CHOICES}


@pytest.mark.parametrize(("name", "value"), bad(SECONDS, BAD_SECONDS))
def test_h6_seconds_are_refused(name, value):
    assert_refused(name, value)


@pytest.mark.parametrize(("name", "value"), bad(COUNTS, BAD_COUNTS))
def test_h6_counts_are_refused(name, value):
    assert_refused(name, value)


@pytest.mark.parametrize(("name", "value"), bad(FLAGS, BAD_FLAGS) + bad(TEXTS, BAD_TEXTS) + bad(CHOICES, BAD_CHOICES))
def test_h6_flags_texts_and_choices_are_refused(name, value):
    assert_refused(name, value)


@pytest.mark.parametrize("name", SECONDS)
def test_seconds_are_floats_whatever_number_was_given(name):
    value = getattr(Config(**_with_room_for(name)), name)
    assert type(value) is float


def _with_room_for(name):
    """Whole seconds in one field, with its neighbours moved out of the way."""
    room = {"heartbeat_interval_s": 0.01, "handshake_backoff_min_s": 0.01, "poll_min_s": 0.00001}
    room |= {"liveness_timeout_s": 100, "handshake_backoff_max_s": 100, "poll_max_s": 100}
    return room | {name: 7}


@pytest.mark.parametrize("name", [*COUNTS])
def test_counts_start_at_one(name):
    neighbour = {f"{name}_per_engine": 1} if f"{name}_per_engine" in COUNTS else {}
    assert getattr(Config(**{name: 1}, **neighbour), name) == 1


def test_ten_years_is_the_longest_time():
    assert Config(engine_ttl_s=10 * 365 * 86400.0).engine_ttl_s == 315_360_000.0
    assert_refused("engine_ttl_s", 10 * 365 * 86400.0 + 1)
    with pytest.raises(ConfigurationError, match="engine_ttl_s=1e[+]300 must be at most 315360000 seconds"):
        Config(engine_ttl_s=1e300)
    with pytest.raises(ConfigurationError, match="engine_ttl_s=inf must be above 0 and finite"):
        Config(engine_ttl_s=math.inf)


def test_hold_policy_may_be_named():
    assert Config(hold_policy="keep").hold_policy is HoldPolicy.keep


@pytest.mark.parametrize(("low", "high", "may_be_equal"), ORDERED)
def test_h6_rules_across_fields(low, high, may_be_equal):
    kind = int if low in COUNTS else float
    assert Config(**{low: kind(2), high: kind(3)})
    with pytest.raises(ConfigurationError) as caught:
        Config(**{low: kind(3), high: kind(2)})
    assert f"{low}={kind(3)!r}" in str(caught.value)
    assert f"{high}={kind(2)!r}" in str(caught.value)
    if may_be_equal:
        assert Config(**{low: kind(2), high: kind(2)})
    else:
        with pytest.raises(ConfigurationError, match=f"{low}=2.0 must be below {high}=2.0"):
            Config(**{low: kind(2), high: kind(2)})


def test_a_config_does_not_change():
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.lease_s = 1.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        Config(5.0)  # type: ignore[misc]  # by name only: thirty numbers in a row cannot be read
    assert config == Config()
    assert hash(config) == hash(Config())


def test_replace_checks_again():
    assert dataclasses.replace(Config(), lease_s=5).lease_s == 5.0
    with pytest.raises(ConfigurationError, match="lease_s=0"):
        dataclasses.replace(Config(), lease_s=0)


def test_from_env_reads_each_kind():
    environ = {
        "KVPUSH_ENGINE_TTL_S": "600",
        "KVPUSH_MAX_ENGINES": "12",
        "KVPUSH_EAGER_HANDSHAKE": " Yes ",
        "KVPUSH_NET_DEVICES": "lo",
        "KVPUSH_HOLD_POLICY": "keep",
        "PATH": "/bin",
        "kvpush_lease_s": "not ours",
    }
    expected = Config(
        engine_ttl_s=600, max_engines=12, eager_handshake=True, net_devices="lo", hold_policy=HoldPolicy.keep
    )
    assert Config.from_env(environ) == expected


@pytest.mark.parametrize("name", [*SECONDS, *COUNTS, *FLAGS, *TEXTS, *CHOICES])
def test_from_env_knows_every_field(name):
    default = getattr(Config(), name)
    assert Config.from_env({f"KVPUSH_{name.upper()}": str(default)}) == Config()


@pytest.mark.parametrize(("text", "value"), [("1", True), ("true", True), ("YES", True), ("0", False), ("no", False)])
def test_from_env_flags(text, value):
    assert Config.from_env({"KVPUSH_EAGER_HANDSHAKE": text}).eager_handshake is value


def test_from_env_without_variables_is_the_default():
    assert Config.from_env({}) == Config()


def test_from_env_reads_the_process_environment(monkeypatch):
    monkeypatch.setenv("KVPUSH_LEASE_S", "11")
    assert Config.from_env().lease_s == 11.0


def test_overrides_win_over_the_environment():
    environ = {"KVPUSH_LEASE_S": "11", "KVPUSH_MAX_ENGINES": "3"}
    config = Config.from_env(environ, lease_s=7)
    assert (config.lease_s, config.max_engines) == (7.0, 3)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("KVPUSH_LEASE_S", "thirty"),
        ("KVPUSH_LEASE_S", ""),
        ("KVPUSH_MAX_ENGINES", "1.5"),
        ("KVPUSH_MAX_ENGINES", "1e3"),
        ("KVPUSH_EAGER_HANDSHAKE", "maybe"),
        ("KVPUSH_HOLD_POLICY", "drop"),
        ("KVPUSH_LEASE_SECONDS", "30"),
        ("KVPUSH_", "30"),
    ],
)
def test_h6_from_env_refuses_and_names_the_variable(name, text):
    with pytest.raises(ConfigurationError) as caught:
        Config.from_env({name: text})
    assert f"{name}={text!r}" in str(caught.value)


@pytest.mark.parametrize(("name", "text"), [("lease_s", "nan"), ("lease_s", "-1"), ("max_engines", "0")])
def test_h6_from_env_checks_ranges_too(name, text):
    with pytest.raises(ConfigurationError, match=name):
        Config.from_env({f"KVPUSH_{name.upper()}": text})


def test_an_unknown_setting_names_the_known_ones():
    with pytest.raises(ConfigurationError, match="known: .*engine_ttl_s"):
        Config.from_env({"KVPUSH_TTL": "1"})


def test_the_readme_of_every_field_is_a_unit_or_a_count():
    """Units are in the names: whatever is seconds says so."""
    assert all(name.endswith("_s") for name in SECONDS)
    assert not any(name.endswith("_s") for name in (*COUNTS, *FLAGS, *TEXTS, *CHOICES))
    assert kvpush.config.__doc__
