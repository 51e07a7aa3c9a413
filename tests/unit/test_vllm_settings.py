"""kv_connector_extra_config, checked when the engine starts, and the releases of vLLM that are known to work."""

import pytest

from kvpush import ConfigurationError
from kvpush.integrations.vllm.settings import Settings, default_listen
from kvpush.integrations.vllm.versions import check_version, minor_of


def settings(environ=(), **extra):
    return Settings.of(extra, default_listen="localhost:5600", environ=dict(environ))


def test_nothing_need_be_said():
    plain = settings()
    assert (plain.listen, plain.advertise, plain.model, plain.push_chunks) == ("localhost:5600", "", "", True)
    assert plain.config.lease_s == 30.0


def test_every_setting_of_the_library_has_its_own_name():
    assert settings(lease_s=7.0, hold_policy="keep").config.lease_s == 7.0
    assert settings(environ={"KVPUSH_LEASE_S": "8"}).config.lease_s == 8.0
    assert settings(environ={"KVPUSH_LEASE_S": "8"}, lease_s=9.0).config.lease_s == 9.0


@pytest.mark.parametrize(
    ("said", "backoff_max_s"),
    [
        ({}, 1.0),
        ({"handshake_backoff_min_s": 3.0}, 3.0),
        ({"handshake_backoff_max_s": 30.0}, 30.0),
        ({"environ": {"KVPUSH_HANDSHAKE_BACKOFF_MAX_S": "30"}}, 30.0),
    ],
)
def test_a_port_that_is_shut_is_tried_again_soon_unless_the_operator_says_otherwise(said, backoff_max_s):
    assert settings(**said).config.handshake_backoff_max_s == backoff_max_s


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"lease": 5}, "lease=5 is no setting"),
        ({"kv_lease_duration": 5}, "its counterpart is lease_s"),
        ({"lease_s": "soon"}, "lease_s='soon'"),
        ({"listen": 5600}, "listen=5600"),
        ({"push_chunks": "yes"}, "push_chunks='yes' must be true or false"),
        ({"eager_handshake": "yes"}, "eager_handshake='yes' must be true or false"),
    ],
)
def test_a_wrong_setting_is_named(extra, words):
    with pytest.raises(ConfigurationError, match=words):
        settings(**extra)


def test_ranks_take_the_ports_that_follow():
    assert [settings(listen="10.0.0.7:5600").listen_of_rank(rank) for rank in (0, 3)] == [
        ("10.0.0.7", 5600),
        ("10.0.0.7", 5603),
    ]
    assert settings(listen="[::1]:0").listen_of_rank(3) == ("::1", 0)


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ("localhost", "localhost:5600"),
        ("10.0.0.7", "10.0.0.7:5600"),
        ("fe80::1", "[fe80::1]:5600"),
        ("[fe80::1]", "[fe80::1]:5600"),
    ],
)
def test_the_hosts_of_vllm_become_addresses(host, text):
    assert default_listen(host, 5600) == text
    assert settings(listen=text).listen_of_rank(1) == (host.strip("[]"), 5601)


def test_every_rank_needs_a_port():
    settings(listen="10.0.0.7:65528").check_listen(8)
    settings(listen="10.0.0.7:0").check_listen(65536)
    with pytest.raises(ConfigurationError, match="listen='10.0.0.7:65528': each of 9 ranks .* up to 65536.* 65535"):
        settings(listen="10.0.0.7:65528").check_listen(9)


def test_a_wildcard_needs_a_host_to_tell_others():
    with pytest.raises(ConfigurationError, match="advertise"):
        settings(listen="0.0.0.0:5600").check_listen(1)
    settings(listen="0.0.0.0:5600", advertise="10.0.0.7").check_listen(1)
    settings(listen="0.0.0.0:5600", advertise="[fe80::1]").check_listen(1)
    settings(listen="0.0.0.0:0", advertise="10.0.0.7").check_listen(1)
    with pytest.raises(ConfigurationError, match="without a port"):
        settings(listen="0.0.0.0:5600", advertise="10.0.0.7:5600").check_listen(1)
    with pytest.raises(ConfigurationError, match="without a port"):
        settings(listen="0.0.0.0:5600", advertise="[fe80::1]:5600").check_listen(1)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1rc1", "0.32.9+cpu"])
def test_a_known_release_is_welcome(version):
    check_version(version, allow_untested=False)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "0.9.2", "unknown"])
def test_another_release_is_refused_by_name_unless_it_is_wanted(version):
    with pytest.raises(ConfigurationError, match=f"vllm {version}.*0.32.*allow_untested_vllm"):
        check_version(version, allow_untested=False)
    check_version(version, allow_untested=True)


def test_two_engines_share_the_minor_release():
    assert minor_of("0.32.1+cpu") == "0.32"
