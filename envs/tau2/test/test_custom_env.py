"""The parts that episodes from outside do not show: databases that are copied late, and what a script understands."""

import asyncio
from contextlib import suppress

import pytest

pytest.importorskip("inspect_evals", reason="pip install -r requirements.txt")

import custom_env
from inspect_evals.tau2.airline.AirlineAgentTools import get_airline_tools
from inspect_evals.tau2.retail.tools import get_retail_tools
from inspect_evals.tau2.utils import get_pydantic_hash
from tau2_env import phone
from tau2_env.carrier import DOMAINS
from tau2_env.chat import TIMEOUT

from aenv import Environment, ToolError

DATABASES = {"airline": get_airline_tools, "retail": get_retail_tools}


def begin(domain, task):
    """The database of a new episode."""
    asyncio.run(custom_env.begin(task, domain))
    custom_env.current.episode.state.enter()
    return DATABASES[domain]().db


@pytest.mark.parametrize("domain", DATABASES)
def test_the_digest_is_the_benchmarks_whatever_was_changed(domain):
    untouched = begin(domain, "0").get_hash()
    for task in DOMAINS[domain].ids("base")[:20]:
        db = begin(domain, task)
        assert db.get_hash() == untouched == get_pydantic_hash(db)
        for step in custom_env.solution():
            if step["name"] != "send_message":
                state = custom_env.current.episode.state
                with suppress(ToolError):  # the benchmark's gold has calls that fail
                    asyncio.run(state.call("assistant", step["name"], step["arguments"]))
        assert db.get_hash() == get_pydantic_hash(db)
    assert begin(domain, "0").get_hash() == untouched


def test_a_model_fails_before_the_call_that_waits_for_it():
    assert Environment("tau2").timeout - TIMEOUT >= 15


def test_a_record_belongs_to_the_episode_that_takes_it():
    first, second = begin("airline", "0"), begin("airline", "0")
    user = first.users["emma_kim_9957"]
    user.membership = "gold" if user.membership != "gold" else "silver"
    assert first.users["emma_kim_9957"] is user
    assert first.users.get("nobody") is None
    assert second.users["emma_kim_9957"].membership != user.membership
    assert first.get_hash() != second.get_hash()


@pytest.mark.parametrize(
    ("message", "calls"),
    [
        ("Please toggle_data_saver_mode.", [("toggle_data_saver_mode", {})]),
        (
            "Turn off data saver. Then run a speed test.",
            [("toggle_data_saver_mode", {}), ("run_speed_test", {})],
        ),
        ("Set it to 4g_5g_preferred", [("set_network_mode_preference", {"mode": "4g_5g_preferred"})]),
        (
            "Grant the messaging app the SMS permission.",
            [("grant_app_permission", {"app_name": "messaging", "permission": "sms"})],
        ),
        ("Disconnect from your VPN", [("disconnect_vpn", {})]),
        ("What is your name?", []),
    ],
)
def test_what_a_script_is_asked_to_do(message, calls):
    assert phone.asked(message, DOMAINS["telecom"].user_tools) == [phone.Call(*call) for call in calls]
    assert phone.asked(message, DOMAINS["airline"].user_tools) == []
